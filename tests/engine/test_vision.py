"""Prompts with images in real vLLM: the same base, the same numbers as the trainer's, and other tokens are never put in
the place of ours."""

import io
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoConfig, AutoProcessor
from vision import SERVED, make_vision_model, picture

from qlora_rl import (
    AdapterSync,
    Canary,
    CanaryError,
    EngineUnsupportedError,
    LocalEngine,
    SyncError,
    bake_base,
    compare,
    fingerprint_base,
    load_base,
    prepare_base,
    verify_base,
)
from qlora_rl.adapter.merged_weights import iter_weights
from qlora_rl.base.model_classes import attends_both_ways, image_tokens_of
from qlora_rl.engine.images import ImagePrompt
from qlora_rl.engine.options import check_both_ways, start_options
from qlora_rl.sync.in_place import InPlaceTransport
from qlora_rl.train.rollouts.engine_link import canary_image

pytest.importorskip("torchvision", reason="set-up installs it where the package index has it")
TOWERS = ("model.visual.", "model.vision_tower.")
OPTIONS = {"max_model_length": 128, "max_num_seqs": 8, "max_lora_rank": 8}
# Of a sum whose order differs.
EXACT = 2e-5


def asked(processor, images, text="what is it"):
    """A prompt with these images, and the inputs of the trainer's model."""
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    ids = inputs["input_ids"][0].tolist()
    return (ImagePrompt(ids, tuple(images)) if images else ids), inputs


@torch.no_grad()
def ours(model, inputs):
    """Logprobs of every token but the first."""
    inputs = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    logprobs = model(**inputs).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(1, inputs["input_ids"][0, 1:, None])[:, 0]


@pytest.fixture(scope="module", params=SERVED)
def base(request, tmp_path_factory):
    made = make_vision_model(tmp_path_factory.mktemp("vision") / request.param, request.param)
    return prepare_base(made, out=tmp_path_factory.mktemp("bases") / "base")


@pytest.fixture(scope="module")
def exact(base, tmp_path_factory):
    """Trainer and engine on the float32 form of the base."""
    baked = bake_base(base, "float32", out=tmp_path_factory.mktemp("baked") / "base")
    with LocalEngine(baked, **OPTIONS) as engine:
        yield engine, load_base(baked).eval(), AutoProcessor.from_pretrained(baked.path)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_both_sides_compute_the_same_logprobs(exact, count):
    engine, model, processor = exact
    prompt, inputs = asked(processor, [picture(i, 56 + 32 * i, 64) for i in range(count)])
    theirs = torch.tensor(engine.score([prompt])[0])
    assert (theirs - ours(model, inputs)).abs().max() < EXACT


def test_images_far_into_a_long_text_have_the_same_logprobs(exact):
    """Of layers with a sliding window, the text before an image is in part out of sight."""
    engine, model, processor = exact
    content = [
        {"type": "text", "text": "a long text " * 6}, {"type": "image", "image": picture(1)}, {"type": "text",
        "text": " and "},
        {"type": "image", "image": picture(2)}, {"type": "text", "text": "?"},
    ]  # fmt: skip
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt"
    )
    prompt = ImagePrompt(inputs["input_ids"][0].tolist(), (picture(1), picture(2)))
    assert len(prompt.ids) > (getattr(model.config.get_text_config(), "sliding_window", None) or 64)
    for _ in range(2):  # the second time from vLLM's cache of prefixes, where it has it
        assert (torch.tensor(engine.score([prompt])[0]) - ours(model, inputs)).abs().max() < EXACT
    ids = [*prompt.ids, *engine.generate([prompt], max_tokens=8, temperature=0).completion_ids[0]]
    grown = {
        n: torch.nn.functional.pad(v, (0, len(ids) - len(prompt.ids))) if v.shape == inputs["input_ids"].shape else v
        for n, v in inputs.items()
    }
    grown |= {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    assert (torch.tensor(engine.score([ImagePrompt(ids, prompt.images)])[0]) - ours(model, grown)).abs().max() < EXACT


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P", "CMYK", "turned"])
def test_pictures_of_other_modes_have_the_same_pixels_on_both_sides(exact, mode):
    """vLLM by itself puts white behind what is transparent, and turns a picture as its EXIF says."""
    engine, model, processor = exact
    image = picture(7, 56, 112)
    if mode == "turned":
        image.getexif()[0x0112] = 6
        held = io.BytesIO()
        image.save(held, "PNG", exif=image.getexif())
        image = Image.open(held)
    else:
        image = image.convert("L").convert(mode) if mode == "LA" else image.convert(mode)
        if mode.endswith("A"):
            image.putalpha(picture(8, 56, 112).convert("L"))
    prompt, inputs = asked(processor, [image])
    assert (torch.tensor(engine.score([prompt])[0]) - ours(model, inputs)).abs().max() < EXACT


def test_a_batch_of_prompts_with_and_without_images_is_not_mixed_up(exact):
    engine, model, processor = exact
    made = [
        asked(processor, images)
        for images in ([picture(1)], [], [picture(2, 88)], [picture(1), picture(2, 88)], [picture(1)])
    ]
    for row, (_, inputs) in zip(engine.score([prompt for prompt, _ in made]), made, strict=True):
        assert (torch.tensor(row) - ours(model, inputs)).abs().max() < EXACT


def test_sampled_tokens_depend_on_seed_and_image_and_none_stands_for_an_image(exact):
    engine, model, processor = exact
    prompt, _ = asked(processor, [picture(3)])
    first = engine.generate([prompt] * 6, max_tokens=40, seed=5)
    assert engine.generate([prompt] * 6, max_tokens=40, seed=5).completion_ids == first.completion_ids
    other, _ = asked(
        processor, [Image.new("RGB", (56, 56), "black")]
    )  # a tower that takes means sees no difference in noise
    assert engine.generate([other] * 6, max_tokens=40, seed=5).completion_ids != first.completion_ids
    never = set(image_tokens_of(model.config))
    assert never
    assert not never & {token for row in first.completion_ids for token in row}


def test_other_tokens_than_the_processor_makes_are_rejected(exact):
    engine, model, processor = exact
    prompt, _ = asked(processor, [picture(3)])
    image = model.config.image_token_id
    short = [token for i, token in enumerate(prompt.ids) if token != image or prompt.ids[i - 1] != image]
    with pytest.raises(EngineUnsupportedError, match="4 tokens of image 0"):
        engine.generate([ImagePrompt(short, prompt.images)])
    with pytest.raises(EngineUnsupportedError, match="5 image tokens"):
        engine.generate([ImagePrompt([*prompt.ids, image], prompt.images)])
    with pytest.raises(EngineUnsupportedError, match="image 1"):
        engine.generate([ImagePrompt(prompt.ids, prompt.images * 2)])
    with pytest.raises(EngineUnsupportedError, match="vLLM rejects the images"):
        engine.generate([ImagePrompt(prompt.ids, ("no image",))])
    assert len(engine.generate([prompt], max_tokens=2).completion_ids) == 1  # nothing was left behind


def test_an_adapter_of_the_tower_that_vllm_leaves_out_is_rejected_by_name(exact, tmp_path):
    """vLLM itself loads it and serves the bare base."""
    engine, _, _ = exact
    tower = LoraConfig(r=4, target_modules=r"model\.(visual|vision_tower)\..*\.(attn\.qkv|self_attn\.q_proj)")
    get_peft_model(load_base(engine.base), tower).save_pretrained(tmp_path)
    with pytest.raises(
        SyncError, match=r"no layer of the engine multiplies with (visual|vision_tower)\..*\.0\.\w*attn\.q"
    ):
        engine.load_adapter(tmp_path, 1)
    assert engine.version == 0


def test_full_weights_reach_the_tower_and_nothing_is_taken_from_a_stale_encoder_cache(exact):
    engine, model, processor = exact
    prompt, inputs = asked(processor, [picture(1)])
    bare = torch.tensor(engine.score([prompt])[0])
    assert compare(fingerprint_base(model), engine.describe_base()).state == "equal"
    everywhere = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(load_base(engine.base), everywhere).eval()
    tower = [p for n, p in adapted.named_parameters() if "lora_B" in n and any(part in n for part in TOWERS)]
    assert tower
    for version in (1, 2):
        with torch.no_grad():
            torch._foreach_mul_(tower, 4.0)  # of the tower alone: its output is what the cache keeps
        engine.load_dense(iter_weights(adapted, dtype=torch.float32), version)
        theirs = torch.tensor(engine.score([prompt])[0])
        assert (theirs - ours(adapted, inputs)).abs().max() < 1e-3  # the tower's numbers are large by now
        assert (theirs - bare).abs().max() > 0.01
        bare = theirs
    engine.drop_adapter()
    assert (torch.tensor(engine.score([prompt])[0]) - ours(model, inputs)).abs().max() < EXACT


def test_images_that_vllm_would_not_see_as_a_whole_are_rejected_before_it_starts(base):
    """Larger than the sliding window, vLLM attends causally in them without an error; split over two steps, on a CPU,
    in part."""
    config = AutoConfig.from_pretrained(base.path)
    assert attends_both_ways(base.path) is (config.model_type == "gemma3")
    if config.model_type != "gemma3":
        assert start_options(base, max_model_length=128, enable_chunked_prefill=True).arguments[
            "enable_chunked_prefill"
        ]
        return
    with pytest.raises(EngineUnsupportedError, match="enable_chunked_prefill=True"):
        start_options(base, max_model_length=128, enable_chunked_prefill=True)
    config.text_config.sliding_window = config.mm_tokens_per_image
    check_both_ways(config, {})
    config.text_config.sliding_window -= 1
    with pytest.raises(EngineUnsupportedError, match="mm_tokens_per_image=4 > sliding_window=3"):
        check_both_ways(config, {})


def test_a_limit_of_images_is_read_as_vllm_reads_it_and_leaves_the_tower_there(base):
    """Without any image vLLM loads no tower, and its base could not be verified."""
    for given, count, video in (
        (None, 8, 0),
        ({"image": 3}, 3, 0),
        ({"image": {"count": 2, "width": 56, "height": 56}, "video": 1}, 2, 1),
    ):
        start = start_options(base, max_model_length=128, limit_mm_per_prompt=given)
        assert (start.most_images, start.arguments["limit_mm_per_prompt"]["video"]) == (count, video)
    with pytest.raises(EngineUnsupportedError, match="vision tower"):
        start_options(base, max_model_length=128, limit_mm_per_prompt={"image": 0})


def test_the_4_bit_base_is_verified_with_its_tower(base):
    model = load_base(base).eval()
    processor = AutoProcessor.from_pretrained(base.path)
    with LocalEngine(base, **OPTIONS) as engine:
        theirs = engine.describe_base()
        assert compare(fingerprint_base(model), theirs).state == "equal"
        assert {leaf.kind for name, leaf in theirs.leaves.items() if name.startswith(TOWERS)} == {"bfloat16"}
        assert engine.capabilities().takes_images
        assert not engine.capabilities().takes_dense  # it holds codes
        for images in ([], [picture(5)]):
            prompt, inputs = asked(processor, images)
            difference = (torch.tensor(engine.score([prompt])[0]) - ours(model, inputs)).abs()
            assert difference.mean() < 0.02  # 16-bit rounding; measured 0.004 to 0.008, with images and without
        inner = engine.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
        with torch.no_grad():
            bias = next(
                each
                for name, each in inner.named_parameters()
                if name.endswith(("attn.qkv.bias", "attn.qkv_proj.bias"))
            )
            bias[3] += 1
        (entry,) = compare(theirs, engine.describe_base()).entries
        assert entry.name.startswith(TOWERS)
        assert entry.name.endswith((".0.attn.qkv.bias", ".0.self_attn.q_proj.bias"))


@pytest.mark.parametrize("blocksize", [64, 128])
def test_a_tower_in_4_bits_is_verified_and_computes_as_the_trainers(base, tmp_path, blocksize):
    made = make_vision_model(tmp_path / "model", json.loads((base.path / "config.json").read_text())["model_type"])
    packed = prepare_base(made, quantize_tower=True, blocksize=blocksize, out=tmp_path / "base")
    model, processor = load_base(packed).eval(), AutoProcessor.from_pretrained(packed.path)
    with LocalEngine(packed, **OPTIONS) as engine:
        theirs = engine.describe_base()
        assert compare(fingerprint_base(model), theirs).state == "equal"
        assert "nf4" in {leaf.kind for name, leaf in theirs.leaves.items() if name.startswith(TOWERS)}
        prompt, inputs = asked(processor, [picture(5)])
        difference = (torch.tensor(engine.score([prompt])[0]) - ours(model, inputs)).abs()
        assert difference.mean() < 0.02


def test_the_canary_scores_a_fixed_image_and_finds_a_stale_encoder_cache(base):
    """vLLM keeps what the tower makes of an image; what it keeps may be another tower's."""
    model = get_peft_model(
        load_base(base), LoraConfig(r=8, target_modules=r"model\.language_model\..*_proj", init_lora_weights=False)
    )
    with LocalEngine(base, **OPTIONS) as engine:
        verify_base(model, engine)
        canary = Canary(model, engine, image=canary_image(base))
        canary.calibrate()
        of_text, seen = canary.sequences[:2], canary.sequences[2:]
        assert [canary.image.begins(ids) for ids in (*of_text, *seen)] == [False, False, True]
        assert len(seen[0]) == len(canary.image.prompt.ids) + 8
        sync = AdapterSync(model, engine, InPlaceTransport(), canary)
        for _ in range(3):
            report = sync.push()
            assert report.canary_difference < 0.01
        runner = engine.llm.llm_engine.model_executor.driver_worker.model_runner
        assert runner.encoder_cache
        for name, held in runner.encoder_cache.items():
            runner.encoder_cache[name] = -held
        with pytest.raises(CanaryError, match=r"after an image .* in plain text they agree.*encoder cache"):
            sync.push()
        runner.encoder_cache.update({name: -held for name, held in runner.encoder_cache.items()})
        assert sync.push().canary_difference < 0.01
        sync.close()
