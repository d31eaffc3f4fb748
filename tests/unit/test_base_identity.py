"""What a base is, and what it was made from: two digests. One source gives one base, on every machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import make_model, quantised_in_flight
from trained import make_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from qlora_rl import (
    BaseIncompleteError,
    BaseMismatchError,
    FakeEngine,
    export_run,
    judge_adapter,
    load_base,
    prepare_base,
    verify_base,
)
from qlora_rl.adapter.store import ORIGIN, write_origin
from qlora_rl.base import checkpoint, writer
from qlora_rl.base.checkpoint import MANIFEST, open_base
from qlora_rl.base.quant import QuantSpec, exact_absmax, quantize_linear
from qlora_rl.cpu_features import processor
from qlora_rl.inference.trained import open_trained

TESTS = Path(__file__).parent.parent


@pytest.fixture
def threads():
    """Sets the number of threads; the number before returns."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint with matrices so large that torch shares their sums among threads."""
    directory = make_model(tmp_path_factory.mktemp("wide") / "model", head_dim=384, kv_heads=4)
    file = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(t.shape, generator=generator) * 0.02 if t.ndim == 2 else t.float()
        for name, t in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return directory


def contents(base):
    return {f.name: f.read_bytes() for f in sorted(Path(base).rglob("*")) if f.is_file()}


def test_one_source_is_one_base_whatever_the_number_of_threads(wide, tmp_path, threads):
    made = []
    for count in (1, 2, 4):
        threads(count)
        made.append(prepare_base(wide, out=tmp_path / f"with-{count}"))
    first, *others = map(contents, made)
    assert "model.safetensors" in first
    for other in others:
        assert [name for name in first if other[name] != first[name]] == []
    assert len({base.identity for base in made}) == 1


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
def test_a_weight_is_quantised_alike_with_any_number_of_threads(quant, threads):
    """Of these matrices bitsandbytes' own averages differ."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2048, 2048), (4096, 2048), (2048, 3072), (1536, 4096)]
    for shape in shapes:
        weight = torch.randn(shape, generator=generator) * 0.02
        parts = []
        for count in (1, 2, 4):
            threads(count)
            parts.append(quantize_linear(weight, QuantSpec(quant)))
        for other in parts[1:]:
            assert [name for name in other if not torch.equal(other[name], parts[0][name])] == [], shape


_QUANTISE = """
import hashlib, numpy, torch
from qlora_rl.base.quant import QuantSpec, quantize_linear
torch.set_num_threads(1)
weight = torch.from_numpy(numpy.random.default_rng(0).standard_normal((1024, 1024), dtype="float32")) * 0.02
for dtype in (torch.float32, torch.bfloat16):
    for spec in (QuantSpec(), QuantSpec("fp4", blocksize=128), QuantSpec(double_quant=False)):
        for name, tensor in quantize_linear(weight.to(dtype), spec).items():
            print(dtype, spec.label, name, hashlib.sha256(tensor.numpy().tobytes()).hexdigest())
"""


def quantised_elsewhere(path=(), **environment):
    """What a process with another idea of its processor makes of some weights: a line for each tensor."""
    package = str(TESTS.parent)
    found = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), package]), **environment}
    done = subprocess.run(
        [sys.executable, "-c", _QUANTISE], env=found, capture_output=True, text=True, timeout=300, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) > 20
    return lines


def test_a_weight_is_quantised_alike_on_processors_of_other_widths():
    """Vectors of four numbers, as without AVX2 and on ARM; of eight; and what this processor has."""
    here = quantised_elsewhere()
    assert quantised_elsewhere(ATEN_CPU_CAPABILITY="default") == here
    if processor().architecture != "x86_64":
        pytest.skip("vectors of four are the same; tests/avx2 changes what bitsandbytes' library for x86 finds")
    assert quantised_elsewhere([TESTS / "avx2"]) == here


def test_scales_are_the_nearest_that_8_bits_give():
    import bitsandbytes.functional as functional

    weight = torch.randn(512, 1088, generator=torch.Generator().manual_seed(3)) * 0.02
    weight[:4] = 0.5  # blocks alike
    weight[4:8] = 0.0
    parts = quantize_linear(weight, QuantSpec())
    state = functional.QuantState.from_dict(
        {k.removeprefix("weight."): v for k, v in parts.items() if k != "weight"}, torch.device("cpu")
    )
    _, flat = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    table, inner = (
        state.state2.code.double(),
        state.state2.absmax.double().repeat_interleave(256)[: flat.absmax.numel()],
    )
    wanted = flat.absmax.double() - state.offset.double()
    nearest = (wanted[:, None] - table * inner[:, None]).abs().min(1).values
    # float32 rounds where two values are almost as near; half a step of such a tie is what it may cost.
    assert torch.allclose((exact_absmax(state).double() - flat.absmax.double()).abs(), nearest, rtol=0, atol=1e-8)
    assert float(state.offset) == pytest.approx(float(flat.absmax.double().mean()), abs=4e-9)


def test_a_constant_weight_has_scales_too():
    for value in (0.0, 0.25):
        parts = quantize_linear(torch.full((64, 64), value), QuantSpec())
        assert all(bool(torch.isfinite(t).all()) for t in parts.values() if t.is_floating_point())


def test_the_identity_is_of_the_result(base, apart, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(base.path, copy)
    (copy / MANIFEST).unlink()
    (copy / "fingerprint.json").unlink()
    again = prepare_base(copy, out=tmp_path / "base")  # made from a 4-bit checkpoint, not from the 16-bit one
    assert again.inputs != base.inputs
    assert again.identity == base.identity
    assert apart.identity != base.identity
    assert open_base(apart.path) == apart


def test_bases_made_of_one_source_and_different_all_the_same_are_told_apart(model_dir, base, tmp_path, monkeypatch):
    def by_another_version(weight, spec):
        parts = quantize_linear(weight, spec)
        parts["weight.absmax"][0] ^= 1
        return parts

    monkeypatch.setattr(writer, "quantize_linear", by_another_version)
    other = prepare_base(model_dir, out=tmp_path / "other")
    assert other.inputs == base.inputs
    assert other.identity != base.identity


@pytest.mark.parametrize("kind", ["checkpoint", "4-bit checkpoint", "object"])
def test_a_base_with_another_rule_for_skipped_modules_is_not_taken_from_the_cache(
    kind, model_dir, tmp_path, monkeypatch
):
    monkeypatch.setenv("QLORA_RL_CACHE", str(tmp_path / "cache"))
    skip = ["model.layers.1.mlp"]

    def prepare():
        if kind == "4-bit checkpoint":
            return prepare_base(part)
        if kind == "object":
            model = AutoModelForCausalLM.from_pretrained(part, dtype="auto")
            return prepare_base(model, tokenizer=AutoTokenizer.from_pretrained(part))
        return prepare_base(model_dir, skip_modules=skip)

    part = quantised_in_flight(model_dir, tmp_path / "part", "lm_head", *skip) if kind != "checkpoint" else None
    whole = quantised_in_flight(model_dir, tmp_path / "whole", "lm_head")
    with monkeypatch.context() as before:
        before.setattr(checkpoint, "_digest_inputs", without_rule)
        old, same = prepare(), [prepare_base(whole), prepare_base(model_dir)]
    assert prepare().path != old.path
    assert prepare().path == prepare().path
    assert [prepare_base(whole), prepare_base(model_dir)] == same  # those without skipped modules stay


def without_rule(source, spec, *others):
    """The digest of versions before the rule had a name."""
    return checkpoint.digest_parts(
        [str(checkpoint.FORMAT), source, json.dumps(spec.as_dict(), sort_keys=True), *others]
    )


@pytest.mark.parametrize("change", ["tokenizer", "chat_template", "eos_token", "eos_token_id", "config"])
def test_what_lies_beside_the_weights_is_of_the_identity(model_dir, base, tmp_path, change):
    copy = tmp_path / "model"
    shutil.copytree(model_dir, copy)
    if change == "chat_template":
        (copy / "chat_template.jinja").write_text("{{ messages }}")
    else:
        file = {
            "tokenizer": "tokenizer.json",
            "eos_token": "tokenizer_config.json",
            "eos_token_id": "generation_config.json",
        }
        file = copy / file.get(change, "config.json")
        content = json.loads(file.read_text())
        if change == "tokenizer":
            first, second, *_ = words = content["model"]["vocab"]
            words[first], words[second] = words[second], words[first]
        elif change == "eos_token":
            content["eos_token"] = "<pad>"
        elif change == "eos_token_id":
            content["eos_token_id"] = 0
        else:
            content["rms_norm_eps"] = 1e-3
        file.write_text(json.dumps(content))
    assert prepare_base(copy, out=tmp_path / "base").identity != base.identity


def test_sides_whose_scales_differ_are_told_what_helps(base, apart):
    """Preparing again would not: each side would make of its source what it has made already."""
    with pytest.raises(BaseMismatchError, match="scales differ") as caught:
        verify_base(load_base(base), FakeEngine(load_base(apart)))
    assert len(caught.value.reasons) == 1


def test_an_adapter_of_the_other_base_is_rejected_with_the_way_out(base, apart, adapted, tmp_path):
    adapted.save_pretrained(tmp_path)
    write_origin(tmp_path, base.identity)
    assert judge_adapter(tmp_path, base=base.path).kind == "adapter"
    verdict = judge_adapter(tmp_path, base=apart.path)
    assert verdict.kind == "reject"
    assert base.identity[:16] in verdict.reasons[0]
    assert apart.identity[:16] in verdict.reasons[0]
    assert "copy" in verdict.reasons[0]


def test_an_adapter_of_an_earlier_version_is_rejected_with_the_way_on(base, adapted, tmp_path):
    adapted.save_pretrained(tmp_path)
    (tmp_path / ORIGIN).write_text(json.dumps({"base_digest": "0" * 64}))
    verdict = judge_adapter(tmp_path, base=base.path)
    assert verdict.kind == "reject"
    assert "earlier version" in verdict.reasons[0]
    assert f"remove {ORIGIN}" in verdict.reasons[0]
    (tmp_path / ORIGIN).unlink()
    assert judge_adapter(tmp_path, base=base.path).kind == "adapter"


def test_a_run_is_opened_on_its_own_base_only(base, apart, tmp_path):
    run = make_run(base, tmp_path / "run")
    assert open_trained(run, base=base).base == base
    wanted = rf"identity {base.identity[:16]}.*{apart.identity[:16]}.*a copy of it"
    with pytest.raises(BaseMismatchError, match=wanted):
        open_trained(run, base=apart)
    with pytest.raises(BaseMismatchError, match=wanted):
        export_run(run, to="merged", out=tmp_path / "out", base=apart)


def test_a_run_of_an_earlier_version_is_said_to_be_one(base, tmp_path):
    run = make_run(base, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["base"]["digest"] = config["base"].pop("identity")
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(BaseMismatchError, match="earlier version"):
        open_trained(run)


def test_a_directory_of_an_earlier_version_is_rejected_with_the_reason(base, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(base.path, old)
    manifest = json.loads((old / MANIFEST).read_text())
    manifest["format"], manifest["digest"] = 2, manifest.pop("identity")
    (old / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BaseIncompleteError, match=r"format=2.*earlier version"):
        open_base(old)


def test_a_checkpoint_without_some_of_its_weights_is_no_source(model_dir, tmp_path):
    """transformers fills what is missing with random numbers, others each time."""
    copy = tmp_path / "model"
    shutil.copytree(model_dir, copy)
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseIncompleteError) as caught:
        prepare_base(copy, out=tmp_path / "base")
    assert "model.layers.0.mlp.down_proj.weight" in str(caught.value)
    assert "model.norm.weight" in str(caught.value)
    assert not (tmp_path / "base").exists()
