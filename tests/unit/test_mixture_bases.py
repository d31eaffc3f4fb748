"""Mixtures of experts as bases, without an engine: stored names, and what is rejected."""

import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support import MIXTURES, make_model, randomise
from trained import make_run

from qlora_rl import bake_base, compare, fingerprint_base, iter_weights, judge_adapter, load_base, prepare_base
from qlora_rl.adapter.load import load_adapter
from qlora_rl.base.experts import ATTENTION, mix, naming_of
from qlora_rl.base.fingerprint import fingerprint_stored, linear_names
from qlora_rl.base.quant import dequantised_weight
from qlora_rl.base.reader import StoredTensors
from qlora_rl.errors import AdapterRejectedError, ConfigConflictError, NotYetSupportedError, UnsupportedQuantError
from qlora_rl.export.job import LIMIT, export_run
from qlora_rl.train.setup.processes import fit_for_sharding


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
    with pytest.raises(NotYetSupportedError, match=r"qwen2_moe is a mixture.*qwen3_moe"):
        prepare_base(tmp_path)
    transformers.Qwen3MoeConfig(num_experts=4, decoder_sparse_step=2).save_pretrained(tmp_path / "sparse")
    with pytest.raises(NotYetSupportedError, match="decoder_sparse_step=2"):
        prepare_base(tmp_path / "sparse")


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("olmoe", "hidden_act", "gelu"),
        ("olmoe", "rms_norm_eps", 1e-6),
        ("olmoe", "clip_qkv", 8.0),
        ("olmoe", "norm_topk_prob", True),
        ("qwen3_moe", "hidden_act", "gelu"),
        ("mixtral", "hidden_act", "gelu"),
        ("mixtral", "router_jitter_noise", 0.1),
    ],
)
def test_a_mixture_that_vllm_would_compute_otherwise_is_rejected_by_its_field(architecture, field, value, tmp_path):
    source = make_model(tmp_path / "model", architecture=architecture, tied=False)
    config = transformers.AutoConfig.from_pretrained(source)
    setattr(config, field, value)
    config.save_pretrained(source)
    with pytest.raises(NotYetSupportedError, match=f"{field}={value!r}"):
        prepare_base(source, out=tmp_path / "base")


def test_an_adapter_on_16_bit_experts_is_not_loaded_without_them(tmp_path):
    """On experts in 4 bits PEFT finds no place for it, and says nothing."""
    source = make_model(tmp_path / "model", architecture="qwen3_moe", tied=False)
    whole, coded = (
        prepare_base(source, out=tmp_path / "16"),
        prepare_base(source, quantize_experts=True, out=tmp_path / "4"),
    )
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(load_base(whole), LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    load_adapter(load_base(whole), tmp_path / "adapter")
    with pytest.raises(AdapterRejectedError, match=r"8 of its tensors have no place.*experts"):
        load_adapter(load_base(coded), tmp_path / "adapter")


def test_a_merged_export_is_the_policy_under_the_names_of_the_checkpoint(mixture, tmp_path):
    source, base = mixture
    run = make_run(base, tmp_path / "run", LoraConfig(r=8, lora_alpha=16, target_modules=list(ATTENTION)))
    done = export_run(run, "merged", out=tmp_path / "merged", prompts=6)
    assert done.distance.kl_mean < LIMIT
    assert sorted(StoredTensors(done.path)) == sorted(StoredTensors(source))
    alone = export_run(run, "adapter", out=tmp_path / "adapter", prompts=6)
    assert judge_adapter(alone.path, base=base.path)
    with pytest.raises(NotYetSupportedError, match="model_type="):
        export_run(run, "gguf", out=tmp_path / "gguf", prompts=6)


def test_adapters_on_experts_are_merged_too(mixture, tmp_path):
    """They cannot be synced, but a model that was trained without an engine can be exported."""
    _, base = mixture
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load_base(base), LoraConfig(r=4, target_modules="all-linear"))
    randomise(model)
    bare = load_base(base)
    merged = dict(iter_weights(model, dtype=torch.float32))
    before = dict(iter_weights(bare, dtype=torch.float32))
    assert merged.keys() == before.keys()
    changed = {name for name in merged if not torch.equal(merged[name], before[name])}
    assert {name.split(".")[-2] for name in changed} >= {"gate", "q_proj", *_expert_names(before)}


def _expert_names(weights):
    return {name.split(".")[-2] for name in weights if ".experts." in name}


@pytest.fixture(scope="module", params=sorted(set(MIXTURES) - {"qwen3_moe-dense"}))
def coded(request, tmp_path_factory):
    """A random mixture and its base with experts in NF4."""
    root = tmp_path_factory.mktemp(f"{request.param}-coded")
    source = make_model(root / "model", architecture=request.param, tied=False)
    return source, prepare_base(source, quantize_experts=True, out=root / "base")


def test_experts_in_4_bits_have_the_names_of_the_checkpoint(coded, tmp_path):
    source, base = coded
    before, stored = StoredTensors(source), StoredTensors(base.path)
    names = [name for name in stored if stored.is_weight(name)]
    assert sorted(names) == sorted(before)
    quantised = {name for name in names if stored.read_4bit(name) is not None}
    assert {name for name in names if ".experts." in name} < quantised
    assert not any(name.endswith(".gate.weight") for name in quantised)
    assert base.spec.label == "nf4-dq-64-experts"
    model = load_base(base)
    assert compare(fingerprint_base(model), fingerprint_stored(base.path)).state == "equal"
    again = prepare_base(model, out=tmp_path / "kept", tokenizer=transformers.AutoTokenizer.from_pretrained(source))
    assert again.identity == base.identity
    assert again.spec.quantize_experts


def test_experts_as_linears_are_transformers_own_function(coded):
    """Values and gradients, against transformers' class with the dequantised matrices."""
    _, base = coded
    model, plain = load_base(base).train(), load_base(bake_base(base)).train()
    experts, fused = model.model.layers[1].mlp.experts, plain.model.layers[1].mlp.experts
    assert type(experts) is not type(fused)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, model.config.hidden_size, generator=generator).to(torch.bfloat16)
    count = len(fused.down_proj)
    chosen = torch.stack(
        [torch.randperm(count - 1, generator=generator)[:2] for _ in range(12)]
    )  # the last is never chosen
    weights = torch.rand(12, 2, generator=generator).to(torch.bfloat16)
    outs, gradients = [], []
    for part in (experts, fused):
        given = x.clone().requires_grad_()
        out = part(given, chosen, weights)
        out.square().sum().backward()
        outs.append(out.detach())
        gradients.append(given.grad)
    assert torch.equal(*outs)
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2 * float(gradients[1].abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_experts_add_is_not_kept_and_has_the_bits_of_index_add(dtype):
    """Weights of the choice in either dtype, as the architectures have them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 16, generator=generator).to(torch.bfloat16).requires_grad_()
    weights = torch.rand(40, 2, generator=generator).to(dtype).requires_grad_()
    chosen = torch.rand(40, 3, generator=generator).topk(2).indices

    def added(x, chosen, weights, expert):
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            token, place = torch.where(chosen == number)
            out = out.index_add(0, token, (expert(number, x[token]) * weights[token, place, None]).to(out.dtype))
        return out

    found, kept = {}, []
    for way in (mix, added):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            out = way(x, chosen, weights, lambda number, rows: rows * (number + 2))
        found[way] = [out, *torch.autograd.grad((out.float() ** 2).sum(), (x, weights))]
        if way is mix:  # of each expert its output and its weights, which are multiplied with one another
            assert sum(t.numel() for t in kept if t.is_floating_point()) == 80 * (16 + 1)
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))
    with torch.inference_mode():
        assert torch.equal(mix(x, chosen, weights, lambda number, rows: rows * (number + 2)), found[mix][0])


def test_a_merged_export_of_experts_in_4_bits_has_the_names_of_the_checkpoint(coded, tmp_path):
    source, base = coded
    run = make_run(base, tmp_path / "run", LoraConfig(r=8, lora_alpha=16, target_modules=list(ATTENTION)))
    # A random router's choices are nearly ties, which rounding tips: 1.3e-3 was seen with the kernels of AVX2.
    done = export_run(run, "merged", out=tmp_path / "merged", prompts=6, max_kl=10 * LIMIT)
    assert done.distance.kl_mean < 10 * LIMIT
    assert sorted(StoredTensors(done.path)) == sorted(StoredTensors(source))


def test_an_adapter_on_4_bit_experts_is_where_it_was_asked_for_and_is_added_by_the_names_of_the_checkpoint(coded):
    source, base = coded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for experts in (r".*experts\.0\..*", r".*layers\.1\..*\.(w2|down_proj)", "all-linear"):
            model = get_peft_model(load_base(base), LoraConfig(r=4, target_modules=experts, init_lora_weights=False))
            adapted = [name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name]
            assert judge_adapter(model)
            if experts != "all-linear":
                assert all(re.fullmatch(experts, name) for name in adapted)
    naming = naming_of(model.get_base_model())
    linear = model.get_base_model().model.layers[1].mlp.experts.get_submodule(f"2.{naming.down}")
    wanted = dequantised_weight(linear.base_layer.weight).float() + linear.get_delta_weight("default").float()
    found = dict(iter_weights(model))
    assert sorted(found) == sorted(StoredTensors(source))
    merged = found[f"model.layers.1.{naming.block}.experts.2.{naming.down}.weight"]
    torch.testing.assert_close(merged, wanted.detach(), rtol=1e-5, atol=1e-6)


def test_experts_that_are_not_there_or_do_not_fit_are_named(tmp_path):
    with pytest.raises(ConfigConflictError, match="quantize_experts=True"):
        prepare_base(make_model(tmp_path / "dense"), quantize_experts=True, out=tmp_path / "base")
    source = make_model(tmp_path / "model", architecture="qwen3_moe-dense", tied=False)
    with pytest.raises(UnsupportedQuantError, match=r"in_features=48.*experts\.0\.down_proj.*quantize_experts=False"):
        prepare_base(source, quantize_experts=True, out=tmp_path / "other")


@pytest.mark.parametrize("sharding", ["fsdp2", "zero3"])
def test_experts_in_4_bits_are_not_sharded(coded, sharding, monkeypatch):
    """With ZeRO-3 each rank would wait for the others at another expert."""
    _, base = coded
    monkeypatch.setattr("qlora_rl.train.setup.processes.sharding_of", lambda args: sharding)
    with pytest.raises(NotYetSupportedError, match=f"experts in 4 bits under {sharding}"):
        fit_for_sharding(SimpleNamespace(base=base), SimpleNamespace())
