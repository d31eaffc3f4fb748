"""What an answer is worth. A reward function gets lists: completions, and a column of the data by its name."""

import json


def json_form(completions, answer, **columns):
    """1 for {"answer": 12} with the right number, less for a part of it."""
    texts = [completion[-1]["content"].strip() for completion in completions]
    return [score(text, right) for text, right in zip(texts, answer, strict=True)]


def score(text, right):
    """Of one answer."""
    try:
        said = json.loads(text)
    except ValueError:  # no JSON: it may look like it
        return 0.1 * ("{" in text) + 0.1 * ('"answer"' in text) + 0.1 * text.endswith("}")
    if not isinstance(said, dict) or set(said) != {"answer"}:
        return 0.1
    return 1.0 if str(said["answer"]).strip() == right else 0.5
