"""The vision tower in training: no gradients where nothing of it is trained, and left out where there is no image."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoProcessor
from vision import SERVED, make_vision_model, picture

from qlora_rl import load_base, prepare_base
from qlora_rl.train.setup.vision_tower import apply_tower

pytest.importorskip("torchvision", reason="set-up installs it where the package index has it")
LANGUAGE = r"model\.language_model\..*_proj"


@pytest.fixture(scope="module", params=SERVED)
def base(request, tmp_path_factory):
    made = make_vision_model(tmp_path_factory.mktemp("vision") / "model", request.param)
    return prepare_base(made, out=tmp_path_factory.mktemp("bases") / "base")


def adapted(base, targets=LANGUAGE):
    torch.manual_seed(0)
    model = get_peft_model(load_base(base), LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    model.train()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return model


def inputs(base, *images):
    processor = AutoProcessor.from_pretrained(base.path)
    asked = [{"role": "user", "content": [*[{"type": "image"}] * len(images), {"type": "text", "text": "1+1="}]}]
    text = processor.apply_chat_template(asked, add_generation_prompt=True)
    return processor(text=[text], images=list(images) or None, return_tensors="pt")


def gradients(model, given):
    model.zero_grad()
    model(**given, labels=given["input_ids"]).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def asks_for_gradients(model, given):
    """What the tower computes has a graph, as the first forward pass of `model` shows."""
    seen = []
    inner = model.get_base_model().model
    layers = inner.vision_tower.encoder.layers if hasattr(inner, "vision_tower") else inner.visual.blocks
    handle = layers[0].register_forward_hook(lambda *parts: seen.append(parts[-1].requires_grad))
    model(**given)
    handle.remove()
    return any(seen)


def test_a_frozen_tower_has_no_backward_pass_and_the_adapter_the_same_gradients(base):
    model, given = adapted(base), inputs(base, picture(0), picture(1, 84))
    before = gradients(model, given)
    if model.config.model_type not in ("qwen3_vl", "gemma3"):  # whose patches transformers lets alone
        assert asks_for_gradients(model, given)
    apply_tower(model.get_base_model())
    after = gradients(model, given)
    assert not asks_for_gradients(model, given)
    assert torch.is_grad_enabled()
    assert len(before) == len(after) > 10
    assert all(torch.equal(before[name], after[name]) for name in before)
    twin = copy.deepcopy(model)  # has hooks of its own
    assert not asks_for_gradients(twin, given)
    assert all(torch.equal(grad, after[name]) for name, grad in gradients(twin, given).items())


def test_a_tower_that_is_trained_keeps_its_backward_pass(base):
    model, given = (
        adapted(base, r"model\.(visual|vision_tower)\..*\.0\.(attn\.(qkv|proj)|self_attn\..*)"),
        inputs(base, picture(0)),
    )
    apply_tower(model.get_base_model())
    assert asks_for_gradients(model, given)
    assert any(grad.abs().max() > 0 for grad in gradients(model, given).values())


def test_gradients_are_on_again_after_an_error_in_the_tower(base):
    model, given = adapted(base), inputs(base, picture(0))
    apply_tower(model.get_base_model())
    given["pixel_values"] = given["pixel_values"][..., :-1]
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        model(**given)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        model(**inputs(base, picture(0)))
        assert not torch.is_grad_enabled()


def test_a_batch_without_images_is_one_of_text(base):
    model, given = adapted(base), inputs(base)
    apply_tower(model.get_base_model())
    alone = model(**given).logits
    empty = inputs(base, picture(0))
    given |= {name: empty[name][:0] for name in ("pixel_values", "image_grid_thw") if name in empty}
    assert torch.equal(model(**given).logits, alone)
