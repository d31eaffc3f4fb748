"""What an answer is worth. A reward function gets lists: completions, and a column of the data by its name."""

import re


def right_number(completions, answer, **columns):
    """1 where the last number of the answer is the right one, else 0."""
    texts = [completion[-1]["content"] for completion in completions]
    return [float(re.findall(r"\d+", text)[-1:] == [right]) for text, right in zip(texts, answer, strict=True)]
