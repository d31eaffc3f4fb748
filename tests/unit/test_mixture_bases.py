"""Mixtures of experts as bases, without an engine: stored names, and what is rejected."""

import pytest
import torch
import transformers
from support import MIXTURES, make_model

from qlora_rl import compare, fingerprint_base, load_base, prepare_base
from qlora_rl.base.fingerprint import fingerprint_stored, linear_names
from qlora_rl.base.stored import StoredTensors
from qlora_rl.errors import NotYetSupportedError


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request, tmp_path_factory):
    """A random mixture and its NF4 base."""
    root = tmp_path_factory.mktemp(request.param)
    source = make_model(root / "model", architecture=request.param, tied=False)
    return source, prepare_base(source, out=root / "base")


def test_a_base_has_the_names_and_the_16_bit_bytes_of_the_checkpoint(mixture):
    source, base = mixture
    before, stored = StoredTensors(source), StoredTensors(base.path)
    names = [name for name in stored if stored.is_weight(name)]
    assert sorted(names) == sorted(before)
    for name in names:
        quantised = stored.read_4bit(name) is not None
        assert quantised == (name.endswith("_proj.weight") and ".experts." not in name)
        assert quantised or torch.equal(stored[name], before[name])
    model = load_base(base)
    assert compare(fingerprint_base(model), fingerprint_stored(base.path)).state == "equal"
    assert not {"gate", "w1", "w2", "w3"} & set(linear_names(base.path))


def test_a_model_object_makes_the_same_base_as_its_directory(mixture, tmp_path):
    source, base = mixture
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    again = prepare_base(model, out=tmp_path / "base", tokenizer=tokenizer)
    assert compare(fingerprint_stored(base.path), fingerprint_stored(again.path)).state == "equal"
    loaded = prepare_base(load_base(base), out=tmp_path / "kept", tokenizer=tokenizer)
    assert compare(fingerprint_stored(base.path), fingerprint_stored(loaded.path)).state == "equal"


def test_another_kind_of_mixture_is_rejected_by_name(tmp_path):
    config = transformers.Qwen2MoeConfig(num_experts=4)
    config.save_pretrained(tmp_path)
    with pytest.raises(
        NotYetSupportedError, match=r"qwen2_moe is a mixture.*Use one of mixtral, olmoe, qwen3_moe, or a dense"
    ):
        prepare_base(tmp_path)
