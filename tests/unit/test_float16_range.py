"""A base in float16 is one whose activations fit."""

import pytest
import torch
from support import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from qlora_rl import prepare_base
from qlora_rl.base.calibration.float16_range import check_float16
from qlora_rl.errors import UnsupportedQuantError


def enlarged(out, size):
    """A model with one hidden state that reaches `size`."""
    make_model(out, tied=False)
    model = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = size
    model.save_pretrained(out)
    return out


@pytest.mark.parametrize("quant", ["nf4", "none"])
def test_activations_that_float16_does_not_hold_are_rejected(tmp_path, quant):
    source = enlarged(tmp_path / "large", 1e5)
    with pytest.raises(UnsupportedQuantError, match=r"reach 9\.98e\+04 at model\.embed_tokens"):
        prepare_base(source, quant, compute_dtype="float16", out=tmp_path / "base")
    prepare_base(source, quant, out=tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(source)
    with pytest.raises(UnsupportedQuantError, match="Start from the 16-bit original"):
        check_float16(model, lambda: AutoTokenizer.from_pretrained(source), is_quantized=True)


def test_activations_near_the_end_of_float16_are_a_warning(tmp_path, caplog):
    prepare_base(enlarged(tmp_path / "near", 5e4), compute_dtype="float16", out=tmp_path / "one")
    assert "those of other texts may be infinite" in caplog.text
    caplog.clear()
    prepare_base(enlarged(tmp_path / "far", 1e4), compute_dtype="float16", out=tmp_path / "other")
    assert "float16" not in caplog.text


def test_a_model_that_does_not_take_the_text_is_prepared_unlooked_at(model_dir, caplog):
    check_float16(AutoModelForCausalLM.from_pretrained(model_dir), lambda: None, is_quantized=False)
    assert "was not looked at" in caplog.text
