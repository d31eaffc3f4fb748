"""`ImagePrompt`: token ids with the images that some of them stand for; and what vLLM makes of it.

vLLM's own way with token ids expects one placeholder per image and puts as many tokens in its place as the image takes. The trainer's ids come out of
transformers' processor, which has done that already: vLLM 0.31 would do it once more, and sample from another prompt. Here vLLM's processor sees the
images with a prompt of its own making; its tokens for each image must be found in the trainer's ids, and the images are put there.

Private names of vLLM's, as in `compat`; nothing here runs at import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qlora_rl.errors import EngineUnsupportedError


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt for an engine whose `capabilities()` say `takes_images`.

    Attributes:
        ids: token ids, as the base's processor makes them: each image's tokens included.
        images: PIL images, in the order in which they stand in the prompt; at least one.
    """

    ids: Sequence[int]
    images: tuple[Any, ...]


Prompt = Sequence[int] | ImagePrompt


def token_ids(prompt: Prompt) -> list[int]:
    """The ids of a prompt."""
    return list(prompt.ids if isinstance(prompt, ImagePrompt) else prompt)


def followed_by(prompt: Prompt, completion: Sequence[int]) -> Prompt:
    """A prompt and its completion as one, to be scored."""
    ids = [*token_ids(prompt), *completion]
    return replace(prompt, ids=ids) if isinstance(prompt, ImagePrompt) else ids


def engine_inputs(llm: Any, prompts: Sequence[Prompt], salt: str) -> list[dict[str, Any]]:
    """What `LLMEngine.add_request` is given for B prompts; the same images are processed once.

    Args:
        llm: a `vllm.LLM`.
        prompts: as above.
        salt: of vLLM's prefix cache.

    Raises:
        EngineUnsupportedError: vLLM makes other tokens of an image than the prompt has.
    """
    rendered: dict[tuple[int, ...], Any] = {}
    found: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, ImagePrompt):
            found.append({"prompt_token_ids": list(prompt), "cache_salt": salt})
            continue
        key = tuple(map(id, prompt.images))
        if key not in rendered:
            rendered[key] = _rendered(llm, prompt.images)
        placed = _placed(rendered[key], list(prompt.ids), f"prompt {number}")
        found.append(placed | {"cache_salt": salt})
    return found


def _rendered(llm: Any, images: Sequence[Any]) -> Any:
    """vLLM's input for a text of nothing but these images."""
    renderer = llm.llm_engine.renderer
    text = renderer.get_mm_processor().dummy_inputs.get_dummy_text({"image": len(images)})
    prompt = {"prompt": text, "multi_modal_data": {"image": [_as_trainer(image) for image in images]}}
    try:
        return renderer.render_cmpl([prompt], renderer.default_cmpl_tok_params)[0]
    except Exception as error:
        raise EngineUnsupportedError(f"generating: vLLM rejects the images of a prompt: {error}") from error


def _as_trainer(image: Any) -> Any:
    """The pixels that transformers' processor takes: vLLM would put white behind transparent ones, and turn a picture as its EXIF says."""
    if not hasattr(image, "convert"):
        return image  # vLLM says what it is not
    from PIL import Image

    plain = image.convert("RGB")
    return Image.frombytes("RGB", plain.size, plain.tobytes())  # without what it knew besides


def _placed(rendered: Any, ids: list[int], which: str) -> dict[str, Any]:
    """The same images where their tokens stand in `ids`."""
    own, start = rendered["prompt_token_ids"], 0
    embedded: list[int] = []
    places: list[Any] = []
    for place in rendered["mm_placeholders"]["image"]:
        wanted = own[place.offset : place.offset + place.length]
        start = _find(wanted, ids, start)
        if start < 0:
            raise EngineUnsupportedError(
                f"generating: {which}: vLLM makes {place.length} tokens of image {len(places)}, and they are not in the prompt. The prompt's ids must "
                "come from the processor that is stored with the base (min_pixels, max_pixels and the like decide how many they are)."
            )
        is_embedded = [True] * len(wanted) if place.is_embed is None else place.is_embed.tolist()
        embedded += [token for token, held in zip(wanted, is_embedded, strict=True) if held]
        places.append(replace(place, offset=start))
        start += place.length
    tokens = set(embedded)
    if sum(token in tokens for token in ids) != len(embedded):
        raise EngineUnsupportedError(
            f"generating: {which} has {sum(token in tokens for token in ids)} image tokens, and its {len(places)} images make {len(embedded)}. The "
            "prompt's ids must come from the processor that is stored with the base."
        )
    return {**rendered, "prompt_token_ids": ids, "mm_placeholders": {"image": places}}


def _find(wanted: list[int], ids: list[int], start: int) -> int:
    """Where a row of tokens begins in `ids`, from `start` on; -1: nowhere."""
    size = len(wanted)
    return next((i for i in range(start, len(ids) - size + 1) if ids[i : i + size] == wanted), -1)
