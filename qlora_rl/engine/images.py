"""`ImagePrompt`: token ids with the images that some of them stand for; and what vLLM makes of it.

vLLM's own way with token ids expects one placeholder per image and puts as many tokens in its place as the image takes.
The trainer's ids come out of transformers' processor, which has done that already: vLLM 0.31 would do it once more, and
sample from another prompt. Here vLLM's processor sees the images with a prompt of its own making; its tokens for each
image must be found in the trainer's ids, and the images are put there.

Private names of vLLM's, as in `compat`; nothing here runs at import.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qlora_rl.engine.sampling import as_ids, several
from qlora_rl.errors import ConfigConflictError, EngineUnsupportedError
from qlora_rl.image_io import read_image


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


def as_prompts(rows: Sequence[Prompt]) -> list[Prompt]:
    """Prompts with plain integers as ids.

    Raises:
        ConfigConflictError: a prompt is text or messages, or they are one prompt instead of several.
    """
    rows = several(rows)
    plain = as_ids([row.ids if isinstance(row, ImagePrompt) else row for row in rows])
    return [
        replace(row, ids=ids) if isinstance(row, ImagePrompt) else ids for row, ids in zip(rows, plain, strict=True)
    ]


def encoded(tokenizer: Any, prompts: Sequence[str | Prompt]) -> list[Prompt]:
    """Prompts with token ids in the place of text.

    Raises:
        ConfigConflictError: they are one prompt instead of several, or messages.
    """
    return [tokenizer.encode(each) if isinstance(each, str) else each for each in several(prompts)]


def pack(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Prompts for JSON: `rows`, each ids or `{"ids", "images"}` with places in `images`, where each image stands once,
    as PNG in base64."""
    known: dict[int, int] = {}
    images: list[str] = []
    rows: list[Any] = []
    for prompt in prompts:
        if not isinstance(prompt, ImagePrompt):
            rows.append(prompt)
            continue
        for image in prompt.images:
            if id(image) not in known:  # of a group of completions all have the same
                known[id(image)] = len(images)
                images.append(base64.b64encode(_as_png(image)).decode())
        rows.append({"ids": list(prompt.ids), "images": [known[id(image)] for image in prompt.images]})
    return {"rows": rows, "images": images}


def unpack(rows: Sequence[Any], images: Any, most: int) -> list[Prompt]:
    """The prompts in what `pack` has made, from somebody who is not trusted; each image is decoded once, within
    `ImageLimits`.

    Args:
        rows: as above.
        images: as above; `None` for none.
        most: images of one prompt.

    Raises:
        ConfigConflictError: it is something else; says which prompt or image.
    """
    texts = images if isinstance(images, list) else []
    decoded: dict[int, Any] = {}

    def read(number: Any) -> Any:
        if type(number) is not int or not 0 <= number < len(texts):
            raise ConfigConflictError(f"asking the server: image {str(number)[:20]} of {len(texts)} is asked for.")
        if number not in decoded:
            try:
                decoded[number] = read_image(base64.b64decode(texts[number], validate=True))
            except (ValueError, TypeError) as error:
                raise ConfigConflictError(f"asking the server: image {number}: {error}.") from error
        return decoded[number]

    found: list[Prompt] = []
    for number, row in enumerate(rows):
        held = row.get("images") if isinstance(row, dict) else []
        ids = row.get("ids") if isinstance(row, dict) else row
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise ConfigConflictError("asking the server: a prompt is no list of token ids.")
        if not isinstance(held, list) or len(held) > most:
            raise ConfigConflictError(
                f"asking the server: prompt {number} has {len(held) if isinstance(held, list) else 'no list of'} "
                f"images; the server takes {most} a prompt."
            )
        found.append(ImagePrompt(ids, tuple(map(read, held))) if held else ids)
    return found


def engine_inputs(renderer: Any, prompts: Sequence[Prompt], salt: str, tower: str) -> list[dict[str, Any]]:
    """What vLLM's engines are given for B prompts; the same images are processed once, and all texts in one call.

    Args:
        renderer: of a vLLM engine; `None` where the engine renders texts itself, and there are no images.
        prompts: as above.
        salt: of vLLM's prefix cache.
        tower: part of the key of vLLM's encoder cache; another one where the vision tower may be another one.

    Raises:
        EngineUnsupportedError: vLLM makes other tokens of an image than the prompt has.
    """
    rendered: dict[tuple[int, ...], Any] = {}
    found: list[dict[str, Any]] = []
    texts: Any = [{"prompt_token_ids": list(p), "cache_salt": salt} for p in prompts if not isinstance(p, ImagePrompt)]
    if renderer is not None and texts:
        texts = renderer.render_cmpl(texts, renderer.default_cmpl_tok_params)
    texts = iter(texts)
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, ImagePrompt):
            found.append(next(texts))
            continue
        key = tuple(map(id, prompt.images))
        if key not in rendered:
            rendered[key] = _rendered(renderer, prompt.images)
        placed = _placed(rendered[key], list(prompt.ids), f"prompt {number}")
        hashes = {kind: [f"{each}-{tower}" for each in held] for kind, held in placed["mm_hashes"].items()}
        found.append(placed | {"mm_hashes": hashes, "cache_salt": salt})
    return found


def _rendered(renderer: Any, images: Sequence[Any]) -> Any:
    """vLLM's input for a text of nothing but these images."""
    text = renderer.get_mm_processor().dummy_inputs.get_dummy_text({"image": len(images)})
    prompt = {"prompt": text, "multi_modal_data": {"image": [_as_trainer(image) for image in images]}}
    try:
        return renderer.render_cmpl([prompt], renderer.default_cmpl_tok_params)[0]
    except Exception as error:
        raise EngineUnsupportedError(f"generating: vLLM rejects the images of a prompt: {error}") from error


def _as_trainer(image: Any) -> Any:
    """The pixels that transformers' processor takes: vLLM would put white behind transparent ones, and turn a picture
    as its EXIF says."""
    if not hasattr(image, "convert"):
        return image  # vLLM says what it is not
    from PIL import Image

    plain = image.convert("RGB")
    return Image.frombytes("RGB", plain.size, plain.tobytes())  # without what it knew besides


def _as_png(image: Any) -> bytes:
    """Its pixels as the trainer's processor takes them, unchanged."""
    if not hasattr(image, "convert"):
        raise ConfigConflictError(f"generating: an image is {type(image).__name__}, and no PIL image.")
    out = io.BytesIO()
    _as_trainer(image).save(out, "PNG", compress_level=1)
    return out.getvalue()


def _placed(rendered: Any, ids: list[int], which: str) -> dict[str, Any]:
    """The same images where their tokens stand in `ids`."""
    own, start = rendered["prompt_token_ids"], 0
    embedded: list[int] = []
    places: list[Any] = []
    for place in rendered["mm_placeholders"]["image"]:
        # Without what vLLM puts around an image: Gemma's line breaks are one token with those of the text before them.
        is_embedded = [True] * place.length if place.is_embed is None else place.is_embed.tolist()
        first, last = is_embedded.index(True), place.length - is_embedded[::-1].index(True)
        wanted, is_embedded = own[place.offset + first : place.offset + last], is_embedded[first:last]
        start = _find(wanted, ids, start)
        if start < 0:
            raise EngineUnsupportedError(
                f"generating: {which}: vLLM makes {len(wanted)} tokens of image {len(places)}, and they are not in the "
                "prompt. The prompt's ids must come from the processor that is stored with the base (min_pixels, "
                "max_pixels and the like decide how many they are)."
            )
        embedded += [token for token, held in zip(wanted, is_embedded, strict=True) if held]
        mask = None if place.is_embed is None else place.is_embed[first:last]
        places.append(replace(place, offset=start, length=len(wanted), is_embed=mask))
        start += len(wanted)
    tokens = set(embedded)
    if sum(token in tokens for token in ids) != len(embedded):
        raise EngineUnsupportedError(
            f"generating: {which} has {sum(token in tokens for token in ids)} image tokens, and its {len(places)} "
            f"images make {len(embedded)}. The prompt's ids must come from the processor that is stored with the base."
        )
    return {**rendered, "prompt_token_ids": ids, "mm_placeholders": {"image": places}}


def _find(wanted: list[int], ids: list[int], start: int) -> int:
    """Where a row of tokens begins in `ids`, from `start` on; -1: nowhere."""
    size = len(wanted)
    return next((i for i in range(start, len(ids) - size + 1) if ids[i : i + size] == wanted), -1)
