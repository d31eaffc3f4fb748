"""The function digest: what it must see, and what it must not mind."""

import copy
import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from qlora_rl import BaseMismatchError, FakeEngine, compare, fingerprint_base, load_base, prepare_base, verify_base
from qlora_rl.base.checkpoint import FINGERPRINT, open_base
from qlora_rl.base.fingerprint import fingerprint_stored
from qlora_rl.base.quant import exact_absmax
from qlora_rl.contracts import BaseFingerprint
from qlora_rl.errors import BaseIncompleteError


@pytest.fixture(scope="module")
def loaded(base):
    return load_base(base)


@pytest.mark.parametrize("quant", ["nf4", "fp4", "none"])
@pytest.mark.parametrize("double_quant", [True, False])
def test_the_stored_base_and_the_loaded_one_have_the_same_function(model_dir, quant, double_quant):
    base = prepare_base(model_dir, quant, double_quant=double_quant)
    stored, model = fingerprint_stored(base.path), fingerprint_base(load_base(base))
    assert compare(model, stored).state == "equal"
    assert stored.digest == model.digest
    written = BaseFingerprint.from_dict(json.loads((base.path / FINGERPRINT).read_text()))
    assert written == stored


def test_un_nested_scales_are_bitsandbytes_own_to_the_last_bit(loaded):
    import bitsandbytes.functional as functional

    for module in loaded.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is None:
            continue
        theirs = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
        assert torch.equal(exact_absmax(state), theirs.float().flatten())


def test_an_adapter_does_not_change_the_base(base, loaded):
    plain = fingerprint_base(loaded)
    adapted = get_peft_model(load_base(base), LoraConfig(target_modules="all-linear"))
    assert fingerprint_base(adapted) == plain


def test_other_ways_to_quantise_are_told_apart_and_named(model_dir, base):
    ours = fingerprint_stored(base.path)
    for expected, other in {
        "type": prepare_base(model_dir, "fp4"),
        "scales": prepare_base(model_dir, double_quant=False),
        "blocksize": prepare_base(model_dir, blocksize=128),
    }.items():
        diff = compare(ours, fingerprint_stored(other.path))
        assert expected in {entry.how for entry in diff.entries}, expected
        assert all("_proj" in name for name in diff.modules)
        assert diff.state == ("repairable" if expected == "scales" else "different")
    plain = compare(ours, fingerprint_stored(prepare_base(model_dir, "none").path))
    assert {entry.how for entry in plain.entries} == {"type"}
    assert len(plain.entries) == 14


def test_missing_and_unexpected_weights_are_listed(base):
    ours = fingerprint_stored(base.path)
    fewer = BaseFingerprint({n: leaf for n, leaf in ours.leaves.items() if "layers.1." not in n})
    assert {e.how for e in compare(ours, fewer).entries} == {"missing"}
    assert {e.how for e in compare(fewer, ours).entries} == {"unexpected"}
    assert compare(ours, ours).state == "equal"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_flip_that_changes_a_dequantised_value_is_named(base, loaded, data):
    """Flips one bit of one part of one weight of the model and looks for its name."""
    import bitsandbytes.functional as functional

    before = fingerprint_base(loaded)
    name = data.draw(st.sampled_from(sorted(before.leaves)))
    parameter = loaded.get_parameter(name)
    state = getattr(parameter, "quant_state", None)
    parts = {"values": parameter.data}
    if state is not None:
        parts |= {
            "absmax": state.absmax,
            "table": state.code,
            "absmax2": state.state2.absmax,
            "code2": state.state2.code,
        }

    def values():
        return (
            parameter.detach().float().clone() if state is None else functional.dequantize_4bit(parameter.data, state)
        )

    old = values()
    part = parts[data.draw(st.sampled_from(sorted(parts)))]
    raw = part.view(torch.uint8).flatten()
    position, bit = data.draw(st.integers(0, raw.numel() - 1)), 1 << data.draw(st.integers(0, 7))
    raw[position] ^= bit
    try:
        changed = not torch.equal(torch.nan_to_num(values()), torch.nan_to_num(old))
        diff = compare(before, fingerprint_base(loaded))
        if changed:
            assert diff.modules == [name]
    finally:
        raw[position] ^= bit
    assert fingerprint_base(loaded) == before


def test_any_single_bit_of_any_stored_tensor_fails_the_file_digest(base, tmp_path):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(base.path, broken)
    weights = broken / "model.safetensors"
    good = bytearray(weights.read_bytes())
    header = 8 + int.from_bytes(good[:8], "little")
    generator = random.Random(0)
    tensors = json.loads(good[8:header])
    tensors.pop("__metadata__", None)
    for entry in tensors.values():
        start, end = entry["data_offsets"]
        data = bytearray(good)
        data[header + generator.randrange(start, end)] ^= 1 << generator.randrange(8)
        weights.write_bytes(data)
        with pytest.raises(BaseIncompleteError, match=r"model\.safetensors"):
            open_base(broken)
    weights.write_bytes(good)
    open_base(broken)


def test_training_on_an_equal_base_is_admitted(base, loaded):
    base_check = verify_base(loaded, FakeEngine(load_base(base)))
    assert base_check.is_verified
    assert base_check.repaired == {}
    assert base_check.as_dict()["verified"] is True


def test_another_base_is_rejected_with_name_values_and_way_out(model_dir, loaded):
    engine = FakeEngine(load_base(prepare_base(model_dir, "fp4")))
    with pytest.raises(BaseMismatchError) as caught:
        verify_base(loaded, engine)
    text = str(caught.value)
    assert "model.layers.0.mlp.down_proj.weight: type differ (ours nf4, theirs fp4)" in text
    assert "and so do 13 more" in text
    assert "always NF4 with double quantisation" in text
    assert "allow_base_mismatch=True" in text
    assert caught.value.module == "model.layers.0.mlp.down_proj.weight"
    assert len(caught.value.reasons) == 14
    base_check = verify_base(loaded, engine, allow_base_mismatch=True)
    assert not base_check.is_verified
    assert base_check.as_dict()["differences"]


def test_where_vllm_holds_the_same_base_otherwise_the_advice_is_another_model(base, loaded):
    """As of StableLM and Apertus: both sides have loaded one directory already."""
    ours = fingerprint_base(loaded)

    class Held(FakeEngine):
        def describe_base(self):
            return BaseFingerprint(leaves, ours.facts)

    engine, norm = Held(loaded), "model.norm.weight"
    for change in ({"kind": "float32"}, {"shape": (1, 128)}, None):
        leaves = {name: leaf for name, leaf in ours.leaves.items() if name != norm}
        leaves |= {norm: replace(ours.leaves[norm], **change)} if change else {"model.norm.scale": ours.leaves[norm]}
        with pytest.raises(BaseMismatchError, match="models of this type"):
            verify_base(loaded, engine)
    leaves = ours.leaves | {norm: replace(ours.leaves[norm], values="0" * 32)}
    with pytest.raises(BaseMismatchError, match="one base"):
        verify_base(loaded, engine)
    engine.base = base.path
    with pytest.raises(
        BaseMismatchError, match=f"Both sides have loaded {base.path}.*or vLLM holds this weight in anoth"
    ):
        verify_base(loaded, engine)
    # Another model, and another dtype of all that is not 4-bit, are the base's doing.
    engine.base = None
    leaves = {name: leaf if leaf.scales else replace(leaf, kind="float16") for name, leaf in ours.leaves.items()}
    with pytest.raises(BaseMismatchError, match="one base"):
        verify_base(loaded, engine)


def test_one_changed_norm_is_enough(base, loaded):
    other = copy.deepcopy(load_base(base))
    with torch.no_grad():
        other.model.norm.weight[3] *= 1.01
    with pytest.raises(BaseMismatchError, match=r"model\.norm\.weight: values differ"):
        verify_base(loaded, FakeEngine(other))


def test_another_tokenizer_template_or_config_is_named(base, tmp_path):
    import shutil

    ours = fingerprint_stored(base.path)
    assert {"config", "tokenizer", "chat_template", "skip_modules"} <= set(ours.facts)
    other = tmp_path / "other"
    shutil.copytree(base.path, other)
    (other / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((other / "config.json").read_text())
    config["rms_norm_eps"] = 0.5
    (other / "config.json").write_text(json.dumps(config))
    diff = compare(ours, fingerprint_stored(other))
    assert [entry.how for entry in diff.entries] == ["chat_template", "config"]
    assert diff.state == "different"
