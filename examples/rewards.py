"""A reward function of one's own, for `use = "rewards.py:short"`."""


def short(completion_ids, at_most=8, **columns):
    """1 for a completion of few tokens, less for each further one."""
    return [min(1.0, at_most / len(ids)) if ids else 0.0 for ids in completion_ids]
