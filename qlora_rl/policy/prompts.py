"""A prompt as token ids: text as it is, messages by the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qlora_rl.errors import ConfigConflictError


def encode(tokenizer: Any, prompt: str | Sequence[Mapping[str, Any]], **template_kwargs: Any) -> list[int]:
    """Token ids of a prompt, as TRL makes them.

    Args:
        tokenizer: of the base.
        prompt: text, or messages.
        template_kwargs: further arguments of the chat template, such as `enable_thinking`.

    Raises:
        ConfigConflictError: messages, and the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt).input_ids)
    if not tokenizer.chat_template:
        raise ConfigConflictError(
            "reading a prompt: it consists of messages, and the base has no chat template. Pass text."
        )
    made = tokenizer.apply_chat_template(
        list(prompt), add_generation_prompt=True, tokenize=True, return_dict=True, **template_kwargs
    )
    return list(made["input_ids"])
