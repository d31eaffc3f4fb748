"""The small vision-language model that is made on the spot."""

import pytest
import torch

from qlora_rl import load_base, prepare_base
from qlora_rl.demo.picture_model import COLOURS, QUESTIONS, SHAPES, make_picture, make_picture_model

pytest.importorskip("torchvision", reason="set-up installs it where the package index has it")


def test_a_picture_is_the_same_for_the_same_seed_and_shows_every_shape_in_every_colour():
    assert make_picture(3).image.tobytes() == make_picture(3).image.tobytes()
    assert {(p.shape, p.colour) for p in map(make_picture, range(300))} == {(s, c) for s in SHAPES for c in COLOURS}
    assert {make_picture(number).image.size for number in range(5)} == {(56, 56)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_picture_model(tmp_path_factory.mktemp("pictures") / "model", pictures=32, steps=3, batch_size=8)


def test_it_is_a_qwen2_5_vl_whose_words_are_single_tokens_and_whose_base_can_be_prepared(model, tmp_path):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    for word in (*SHAPES, *COLOURS):
        assert len(processor.tokenizer(word)["input_ids"]) <= 2, word
    content = [{"type": "image"}, {"type": "text", "text": QUESTIONS["shape"]}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[text], images=[make_picture(0).image], return_tensors="pt")
    base = prepare_base(model, out=tmp_path / "base")
    logits = load_base(base)(**inputs).logits
    assert logits.shape == (1, inputs["input_ids"].shape[1], len(processor.tokenizer))
    assert torch.isfinite(logits).all()


def test_one_that_is_there_is_taken_and_what_else_is_there_stays(model):
    written = (model / "model.safetensors").stat().st_mtime_ns
    assert make_picture_model(model, pictures=32, steps=3, batch_size=8) == model
    assert (model / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(FileExistsError, match="contains other files"):
        make_picture_model(model, pictures=32, steps=4, batch_size=8)
