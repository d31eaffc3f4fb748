"""A small vision-language model that is trained on pictures of shapes on the spot: Qwen2.5-VL's architecture, in a
minute or two on two cores.

It is a real Qwen2.5-VL checkpoint with a real processor. It has learned to describe a picture, and to answer questions
about it in the right form, but mostly at random: what it sees and what it is asked for, GRPO has to connect.

Shape letters: B pictures of a batch, S positions.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qlora_rl.demo.chat_model import learn_tokenizer
from qlora_rl.demo.pretraining import Progress, autocast, descend, made_once

if TYPE_CHECKING:
    from PIL.Image import Image

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 230), "yellow": (235, 200, 40)}
QUESTIONS = {"shape": "Which shape is it?", "colour": "Which colour is it?"}
_DESCRIBE = "Describe the picture."
_SIDE = 56
_IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
# ChatML, as Qwen writes it; an image is three tokens here, the middle one of which the processor repeats.
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Picture:
    """One shape on a background.

    Attributes:
        image: RGB, 56 x 56 pixels.
        shape: one of `SHAPES`.
        colour: one of `COLOURS`.
    """

    image: Image
    shape: str
    colour: str


def make_picture(seed: int) -> Picture:
    """A shape in a colour, of any size and place, on a light background; the same for the same seed."""
    from PIL import Image, ImageDraw

    rng = random.Random(f"picture {seed}")
    shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
    shade = rng.randint(225, 255)
    image = Image.new("RGB", (_SIDE, _SIDE), (shade, shade, shade))
    radius = rng.randint(16, 24)
    x, y = (rng.randint(radius, _SIDE - 1 - radius) for _ in range(2))
    ink = tuple(max(0, min(255, part + rng.randint(-20, 20))) for part in COLOURS[colour])
    pen = ImageDraw.Draw(image)
    box = [x - radius, y - radius, x + radius, y + radius]
    if shape == "circle":
        pen.ellipse(box, fill=ink)
    elif shape == "square":
        pen.rectangle(box, fill=ink)
    elif shape == "triangle":
        pen.polygon([(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)], fill=ink)
    else:
        third = radius // 3
        pen.rectangle([x - third, y - radius, x + third, y + radius], fill=ink)
        pen.rectangle([x - radius, y - third, x + radius, y + third], fill=ink)
    return Picture(image, shape, colour)


def make_picture_model(
    out_dir: str | os.PathLike[str] | None = None,
    *,
    pictures: int = 2048,
    steps: int = 600,
    batch_size: int = 64,
    right: float = 0.2,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Return the directory of a bf16 checkpoint with its processor; one that is there already is not trained again.

    Args:
        out_dir: for a copy; by default the directory in the cache (`$QLORA_RL_CACHE`, else `~/.cache/qlora_rl`).
        pictures: to learn from, those of the seeds from 0 on.
        steps: of the training, with `batch_size` conversations each: three in four are descriptions, the others
            questions.
        right: share of questions that are answered by what the picture shows; the others by any shape or colour.
        seed: of weights and order. Equal arguments, torch, processor and thread count give equal weights.
        progress: called after every step as `progress(step, steps, loss)`.

    Raises:
        FileExistsError: `out_dir` holds something else.
    """
    recipe = {
        "version": 2, "pictures": pictures, "steps": steps, "batch_size": batch_size, "right": right, "seed": seed,
    }  # fmt: skip

    def make() -> tuple[Any, Any]:
        processor = _make_processor()
        model = _build_model(processor.tokenizer)
        _train(model, processor, pictures, steps, batch_size, right, seed, progress)
        return model, processor

    return made_once("pictures", recipe, out_dir, seed, make)


def _conversation(question: str, answer: str) -> list[dict[str, Any]]:
    asked = [{"type": "image"}, {"type": "text", "text": question}]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _make_processor() -> Any:
    import transformers as hf
    from jinja2 import Template

    words = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]
    talks = [_conversation(_DESCRIBE, each) for each in words]
    talks += [_conversation(QUESTIONS["shape"], each) for each in SHAPES]
    talks += [_conversation(QUESTIONS["colour"], each) for each in COLOURS]
    texts = [Template(_TEMPLATE).render(messages=talk) for talk in talks]
    return hf.Qwen2_5_VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=4 * _SIDE * _SIDE),
        tokenizer=learn_tokenizer(texts * 2, _TEMPLATE, special=_IMAGE),
        video_processor=hf.Qwen2VLVideoProcessor(),
        chat_template=_TEMPLATE,
    )


def _build_model(tokenizer: Any) -> Any:
    import transformers as hf

    start, pad, end, video = tokenizer.convert_tokens_to_ids(list(_IMAGE))
    width = 128
    return hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": 2 * width,
                "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
                "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
            },
            vision_config={
                "depth": 2, "hidden_size": width, "intermediate_size": 2 * width, "num_heads": 4,
                "out_hidden_size": width,
                "window_size": _SIDE, "fullatt_block_indexes": [0, 1],
            },
            image_token_id=pad, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
            tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip


def _train(
    model: Any,
    processor: Any,
    pictures: int,
    steps: int,
    batch_size: int,
    right: float,
    seed: int,
    progress: Progress | None,
) -> None:
    import torch

    seen = [make_picture(number) for number in range(pictures)]
    made = processor.image_processor(images=[each.image for each in seen], return_tensors="pt")
    grid = made["image_grid_thw"][:1]  # all pictures have one size
    pixels_B_S = made["pixel_values"].reshape(pictures, int(grid.prod()), -1)
    rng = random.Random(seed)
    held: dict[tuple[str, str], tuple[list[int], int]] = {}

    def loss_of_batch() -> torch.Tensor:
        chosen = rng.sample(range(pictures), batch_size)
        rows = []
        for number in chosen:
            talk = _say(seen[number], right, rng)
            if talk not in held:
                held[talk] = _encode(processor, seen[0].image, *talk)
            rows.append(held[talk])
        longest = max(len(ids) for ids, _ in rows)
        ids_B_S = torch.tensor(
            [ids + [model.config.text_config.pad_token_id] * (longest - len(ids)) for ids, _ in rows]
        )
        labels_B_S = torch.tensor([[-100] * own + ids[own:] + [-100] * (longest - len(ids)) for ids, own in rows])
        with autocast():
            return model(
                input_ids=ids_B_S,
                attention_mask=(ids_B_S != model.config.text_config.pad_token_id).long(),
                pixel_values=pixels_B_S[chosen].flatten(0, 1),
                image_grid_thw=grid.repeat(batch_size, 1),
                mm_token_type_ids=(ids_B_S == model.config.image_token_id).int(),
                labels=labels_B_S,
            ).loss

    descend(model, steps, loss_of_batch, progress)


def _say(picture: Picture, right: float, rng: random.Random) -> tuple[str, str]:
    """A question and its answer: a description is right, an answer seldom."""
    if rng.random() < 0.75:
        return _DESCRIBE, f"a {picture.colour} {picture.shape}"
    kind = rng.choice(list(QUESTIONS))
    if rng.random() < right:
        return QUESTIONS[kind], getattr(picture, kind)
    return QUESTIONS[kind], rng.choice(SHAPES if kind == "shape" else list(COLOURS))


def _encode(processor: Any, image: Image, question: str, answer: str) -> tuple[list[int], int]:
    """Token ids of a conversation, and how many of them are the prompt."""
    talk = _conversation(question, answer)
    texts = [
        processor.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True),
        processor.apply_chat_template(talk, tokenize=False),
    ]
    prompt, whole = (processor(text=[text], images=[image])["input_ids"][0] for text in texts)
    return list(whole), len(prompt)
