"""A prompt as token ids: text as it is, messages by the chat template, images by the processor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qlora_rl.engine.images import ImagePrompt, Prompt
from qlora_rl.errors import ConfigConflictError

Messages = Sequence[Mapping[str, Any]]


def encode(tokenizer: Any, prompt: str | Messages, **template_kwargs: Any) -> Prompt:
    """Token ids of a prompt, as TRL makes them; with its images where there are some.

    Args:
        tokenizer: of the base; of a vision-language model its processor.
        prompt: text, or messages; an image is a part of a message (`with_images`).
        template_kwargs: further arguments of the chat template, such as `enable_thinking`.

    Raises:
        ConfigConflictError: messages, and the tokenizer has no chat template, or one that does not take them; or
            images, and the model takes none.
    """
    made = model_inputs(tokenizer, prompt, **template_kwargs)
    ids = made["input_ids"][0].tolist()
    images = () if isinstance(prompt, str) else tuple(images_in(prompt))
    return ImagePrompt(ids, images) if images else ids


def model_inputs(tokenizer: Any, prompt: str | Messages, **template_kwargs: Any) -> dict[str, Any]:
    """What the model is given for a prompt: `input_ids` [1, T] and, where there are images, what the processor makes of
    them; arguments as above."""
    if isinstance(prompt, str):
        is_processor = hasattr(tokenizer, "image_processor")
        return {
            "input_ids": tokenizer(**{"text": [prompt]} if is_processor else {"text": prompt}, return_tensors="pt")[
                "input_ids"
            ].reshape(1, -1)
        }
    if not tokenizer.chat_template:
        raise ConfigConflictError(
            "reading a prompt: it consists of messages, and the base has no chat template. Pass text."
        )
    if any(True for _ in images_in(prompt)) and not hasattr(tokenizer, "image_processor"):
        raise ConfigConflictError("reading a prompt: it has images, and the model takes none. Leave them out.")
    try:
        made = tokenizer.apply_chat_template(
            [list(prompt)],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **template_kwargs,
        )
    except Exception as error:  # jinja's, or whatever else a template comes to
        roles = ", ".join(str(message.get("role")) for message in prompt)
        raise ConfigConflictError(
            f"reading a prompt: the chat template does not take messages with the roles {roles}: "
            f"{type(error).__name__}: {error}. Leave out what it does not take, such as a system message."
        ) from error
    return {name: value for name, value in made.items() if name != "attention_mask"}


def with_images(prompt: Messages, images: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages with images as parts: at the places that are kept for them, or before the text of the first user
    message, as TRL does it.

    Raises:
        ConfigConflictError: there are more or fewer places than images.
    """
    rest, made = list(images), []
    is_text = not any(_parts(message) for message in prompt)
    for message in map(dict, prompt):
        content = message.get("content")
        if is_text and rest and message["role"] == "user":
            message["content"] = [
                *({"type": "image", "image": each} for each in rest),
                {"type": "text", "text": content},
            ]
            rest = []
        elif parts := _parts(message):
            message["content"] = [
                {"type": "image", "image": rest.pop(0)} if _is_place(part) and rest else dict(part) for part in parts
            ]
        made.append(message)
    places = sum(_is_place(part) for message in made for part in _parts(message))
    if rest or places:
        told = f"{len(rest)} images have no place" if rest else f"{places} places have no image"
        raise ConfigConflictError(
            f"reading a prompt: {told} in its messages, for {len(images)} images. Leave "
            f"{{'type': 'image'}} out of all messages, or put in one for each."
        )
    return made


def images_in(prompt: Messages) -> Iterator[Any]:
    """The images that are parts of messages, in their order."""
    for message in prompt:
        for part in _parts(message):
            if part.get("image") is not None:
                yield part["image"]


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Of a message that has parts; none of one that is text, or holds tool calls alone."""
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _is_place(part: Mapping[str, Any]) -> bool:
    return part["type"] == "image" and part.get("image") is None
