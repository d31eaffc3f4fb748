"""Baked bases: exactly the weights that the trainer multiplies with."""

import json

import pytest
import torch

from qlora_rl import BaseMismatchError, ConfigConflictError, FakeEngine, bake_base, load_base, prepare_base, verify_base
from qlora_rl.base.quant import dequantize_exactly, exact_absmax

PROMPT = torch.tensor([[40, 41, 42, 43, 44]])


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("blocksize", [64, 128])
def test_every_baked_weight_is_what_bitsandbytes_dequantises(model_dir, quant, double_quant, blocksize):
    import bitsandbytes.functional as functional

    base = prepare_base(model_dir, quant, double_quant=double_quant, blocksize=blocksize)
    model, baked = load_base(base), load_base(bake_base(base))
    for name, parameter in baked.named_parameters():
        held = model.get_parameter(name)
        state = getattr(held, "quant_state", None)
        expected = held if state is None else functional.dequantize_4bit(held.data, state).to(torch.bfloat16)
        assert torch.equal(parameter, expected), name
    assert torch.equal(model(PROMPT).logits, baked(PROMPT).logits)


def test_in_float32_no_product_is_rounded(base):
    model, baked = load_base(base), load_base(bake_base(base, "float32"))
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            exact = dequantize_exactly(
                module.weight.data, exact_absmax(state), state.code, state.blocksize, state.shape
            )
            assert torch.equal(baked.get_submodule(name).weight, exact)


def test_a_baked_base_names_its_parent_and_keeps_the_tokenizer(base, tmp_path):
    baked = bake_base(base, out=tmp_path / "baked")
    assert baked.parent == base.identity
    assert baked.path == tmp_path / "baked"
    assert bake_base(base).identity == baked.identity
    assert (baked.path / "tokenizer.json").read_bytes() == (base.path / "tokenizer.json").read_bytes()
    assert "quantization_config" not in json.loads((baked.path / "config.json").read_text())


def test_the_4_bit_trainer_is_admitted_to_the_baked_engine_and_to_no_other(model_dir, base):
    model = load_base(base)
    assert verify_base(model, FakeEngine(load_base(bake_base(base)))).is_verified
    assert verify_base(model, FakeEngine(load_base(bake_base(base, "float32")))).is_verified
    with pytest.raises(BaseMismatchError):
        verify_base(model, FakeEngine(load_base(prepare_base(model_dir, "none"))))
    with pytest.raises(BaseMismatchError):
        verify_base(model, FakeEngine(load_base(bake_base(prepare_base(model_dir, "fp4")))))


def test_what_is_not_4_bit_is_not_baked(model_dir):
    with pytest.raises(ConfigConflictError, match="is not 4-bit"):
        bake_base(prepare_base(model_dir, "none"))
