"""Nothing that PEFT can build is without a verdict, and every verdict is the one in the table (tests/kinds.py)."""

import functools
import importlib
import json
import warnings

import peft
import pytest
import torch
from kinds import ADAPTER, FULL_WEIGHTS, KINDS, lora
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from support import make_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

from qlora_rl import AdapterRejectedError, bake_base, export_adapter, judge_adapter
from qlora_rl.adapter import methods
from qlora_rl.adapter.export import read_adapter
from qlora_rl.adapter.inspected import shorten_lora
from qlora_rl.adapter.rules import judge_method
from qlora_rl.adapter.store import write_origin

BUILT = {name: kind for name, kind in KINDS.items() if kind.is_built}
# What a directory cannot hold: the state of a live model.
LIVE_ONLY = {
    "set-scale",
    "second-active",
    "two-active",
    "unfrozen",
    "merged",
    "disabled",
    "disabled-in-one-layer",
    "new-tokens",
}
LIVE_ONLY |= {"unknown-variant"}


# They train one side only of a head that the tiny Qwen2 ties.
ONE_SIDE = {"head", "embedding"}


@pytest.fixture(scope="module")
def untied_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("untied") / "model", tied=False)


@pytest.fixture(scope="module")
def build(model_dir, untied_dir):
    """A live model of a kind, with random values in everything that is trained."""

    def make(kind):
        if kind.needs:
            pytest.importorskip(kind.needs, reason=f"PEFT asks for {kind.needs} here")
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            directory = untied_dir if kind in [KINDS[name] for name in ONE_SIDE] else model_dir
            model = get_peft_model(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), kind.config())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        if kind.prepare:
            kind.prepare(model)
        return model.eval()

    return make


@pytest.mark.parametrize("name", BUILT)
def test_the_verdict_of_every_kind(build, name):
    """What is not plain LoRA is not exported either."""
    kind = KINDS[name]
    model = build(kind)
    verdict = judge_adapter(model)
    assert verdict.kind == kind.verdict, verdict.reasons
    assert bool(verdict.reasons) == (kind.verdict != "adapter")
    assert any(kind.word in reason for reason in verdict.reasons) or not kind.word
    if kind.verdict != "adapter":
        with pytest.raises(AdapterRejectedError):
            export_adapter(model)


def test_what_decides_is_said_first(model_dir):
    """A trained head alone goes as full weights; tied to the embedding no weights hold it."""
    tied = AutoModelForCausalLM.from_pretrained(model_dir)
    verdict = judge_adapter(get_peft_model(tied, lora(modules_to_save=["lm_head"])))
    assert verdict.kind == "reject"
    assert "ties its output head" in verdict.reasons[0]
    assert "sync='weights'" in verdict.reasons[1]


def test_every_method_in_pefts_registry_has_a_verdict_and_a_row():
    known = {str(kind.value) for kind in peft.PeftType}
    assert known - {"LORA"} == methods.CHANGES_WEIGHTS.keys() | methods.CHANGES_SOMETHING_ELSE.keys()
    assert not methods.CHANGES_WEIGHTS.keys() & methods.CHANGES_SOMETHING_ELSE.keys()
    assert known - {"LORA"} <= KINDS.keys()
    for method in known - {"LORA"}:
        ((kind, reason),) = judge_method(method)
        assert (kind, method in reason) == (KINDS[method].verdict, True)


def test_every_variant_of_lora_in_peft_has_a_verdict():
    variants = importlib.import_module("peft.tuners.lora.variants")
    base = importlib.import_module("peft.tuners.lora.layer").LoraVariant
    found = {
        name
        for name, value in vars(variants).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and not name.startswith("_")
    }
    on_linears = {name for name in found if "Conv" not in name}  # convolutions are no linears, whatever their variant
    assert on_linears == methods.PLAIN_VARIANTS.keys() | methods.WEIGHT_VARIANTS.keys() | methods.INPUT_VARIANTS.keys()


def test_every_switch_of_lora_config_is_in_the_table():
    """A field that PEFT adds shows up here, before it is taken for plain LoRA."""
    from dataclasses import fields

    harmless = {
        "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode",
        "fan_in_fan_out", "layers_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config",
        "corda_config",
        "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying", "arrow_config",
        "layer_replication",
    }  # fmt: skip
    used = {name for kind in KINDS.values() if kind.is_built and not kind.needs for name, value in _set_fields(kind)}
    assert {f.name for f in fields(peft.LoraConfig)} - harmless - used == set()


def _set_fields(kind):
    config = kind.config()
    if type(config) is not peft.LoraConfig:
        return []
    default = peft.LoraConfig()
    return [(n, v) for n, v in vars(config).items() if v != getattr(default, n) or n in {"use_rslora", "r"}]


def test_an_unknown_method_is_rejected():
    assert next(judge_method("TELEPATHY"))[0] == "reject"


@pytest.mark.parametrize("name", [n for n, k in FULL_WEIGHTS.items() if k.is_built and n in methods.CHANGES_WEIGHTS])
def test_a_method_that_changes_weights_is_affine_in_every_layer(build, name):
    """Some weight and bias give the same function: f(x) = f(I)^T x + f(0), and no bias where the layer has none."""
    model, seen = build(KINDS[name]), 0
    for layer in model.modules():
        if not isinstance(layer, BaseTunerLayer) or not isinstance(layer.get_base_layer(), torch.nn.Linear):
            continue
        size = layer.get_base_layer().in_features
        with torch.no_grad():
            bias_O = layer(torch.zeros(1, 1, size))[0, 0]
            weight_IO = layer(torch.eye(size)[None])[0] - bias_O
            x_TI = torch.randn(5, size)
            there = layer(x_TI[None])[0]
        assert torch.allclose(there, x_TI @ weight_IO + bias_O, atol=1e-3, rtol=1e-4)
        assert layer.get_base_layer().bias is not None or torch.equal(bias_O, torch.zeros_like(bias_O))
        seen += 1
    assert seen or name in ("LN_TUNING", "TRAINABLE_TOKENS")  # which change no linears


def test_lily_is_not_affine(build):
    """Why it is rejected although it looks like LoRA."""
    layer = build(KINDS["LILY"]).get_base_model().model.layers[0].self_attn.q_proj
    x_TI = torch.randn(5, layer.get_base_layer().in_features) * 10
    with torch.no_grad():
        bias_O = layer(torch.zeros(1, 1, x_TI.shape[1]))[0, 0]
        weight_IO = layer(torch.eye(x_TI.shape[1])[None])[0] - bias_O
        assert not torch.allclose(layer(x_TI[None])[0], x_TI @ weight_IO + bias_O, atol=1e-3, rtol=1e-3)


# Without its base a directory is judged by the same rules: one of each verdict, and those that get another one then.
STORED = [name for name in BUILT if name not in LIVE_ONLY]
ALONE = {"qalora-unused", "BEFT-homeless", "lora-bias-homeless", *ADAPTER}
ALONE |= {next(name for name in STORED if KINDS[name].verdict == verdict) for verdict in ("full_weights", "reject")}


@pytest.mark.parametrize(
    ("name", "with_base"),
    [
        *(pytest.param(name, True, id=f"{name}-with the base") for name in STORED),
        *(
            pytest.param(name, False, id=f"{name}-alone", marks=() if name in ALONE else pytest.mark.full)
            for name in STORED
        ),
    ],
)
def test_a_directory_gets_the_verdict_of_the_live_model(build, tmp_path, model_dir, name, with_base):
    live = build(KINDS[name])
    live.save_pretrained(tmp_path, save_embedding_layers=False)
    config = tmp_path / "adapter_config.json"
    if not with_base:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "someone/else"}))
    verdict = judge_adapter(tmp_path, base=model_dir if with_base else None)
    expected = KINDS[name].verdict
    if name == "qalora-unused" and not with_base:
        expected = "reject"  # it means something on GPTQ layers only: which these are, the file does not say
    if name == "BEFT-homeless" or (name == "lora-bias-homeless" and not with_base):
        expected = "full_weights"  # files do not say whether the layer has a bias
    assert verdict.kind == expected, verdict.reasons
    assert KINDS[name].word in " ".join(verdict.reasons) or expected != KINDS[name].verdict
    assert verdict.rank == judge_adapter(live).rank or expected != KINDS[name].verdict


@pytest.mark.parametrize("name", [n for n in ADAPTER if n not in LIVE_ONLY])
def test_a_directory_in_canonical_form_is_the_export_of_the_live_model(build, tmp_path, name):
    live = build(ADAPTER[name])
    live.save_pretrained(tmp_path, save_embedding_layers=False)
    read, exported = read_adapter(tmp_path), export_adapter(live)
    assert read.tensors.keys() == exported.tensors.keys()
    assert all(torch.equal(read.tensors[n], exported.tensors[n]) for n in read.tensors)
    assert read.rank == exported.rank


def test_a_converted_pissa_is_plain_lora(build, model_dir, tmp_path):
    """The way out that the reason names."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), lora(init_lora_weights="pissa")
    )
    model.peft_config["default"].init_lora_weights = True  # PEFT wants the untrained one saved as plain
    model.save_pretrained(tmp_path / "start")
    model.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    prompt = torch.tensor([[40, 41, 42, 43]])
    with torch.no_grad():
        before = model(prompt).logits
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    assert judge_adapter(tmp_path / "plain", base=model_dir).kind == "adapter"
    fresh = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), tmp_path / "plain"
    )
    assert judge_adapter(fresh).kind == "adapter"
    with torch.no_grad():
        assert torch.allclose(fresh(prompt).logits, before, atol=1e-4)


def test_an_adapter_for_another_base_is_rejected(build, base, tmp_path):
    live = build(ADAPTER["plain"])
    live.save_pretrained(tmp_path / "a")
    other = make_model(tmp_path / "wider", head_dim=64)
    verdict = judge_adapter(tmp_path / "a", base=other)
    assert verdict.kind == "reject"
    assert "has the shape" in verdict.reasons[0]
    assert "another base" in verdict.reasons[0]
    assert judge_adapter(tmp_path / "a", base=base.path).kind == "adapter"
    write_origin(tmp_path / "a", "0" * 64)  # same names, same shapes, other weights
    assert (
        "trained on the base with identity 0000000000000000" in judge_adapter(tmp_path / "a", base=base.path).reasons[0]
    )
    write_origin(tmp_path / "a", base.identity)
    assert judge_adapter(tmp_path / "a", base=base.path).kind == "adapter"


def test_an_adapter_on_its_own_base_baked_is_at_home(build, base, tmp_path):
    build(ADAPTER["plain"]).save_pretrained(tmp_path / "a")
    write_origin(tmp_path / "a", base.identity)
    assert judge_adapter(tmp_path / "a", base=bake_base(base, out=tmp_path / "baked").path).kind == "adapter"


def test_what_holds_no_adapter_is_said_to_hold_none(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter_config.json").write_text("{")
    for place, base, said in (
        (tmp_path / "nothing", None, "no such directory"),
        ("a" * 5000, None, "no such directory"),
        (tmp_path / "empty", None, r"adapter_config\.json"),
        (tmp_path / "adapter_config.json", None, "it is a file"),
        (tmp_path, tmp_path, r"no config\.json"),
    ):
        with pytest.raises(AdapterRejectedError, match=said):
            judge_adapter(place, base=base)
    assert "cannot be read by PEFT" in judge_adapter(tmp_path).reasons[0]


def test_a_directory_whose_weights_are_damaged_is_rejected(build, model_dir, tmp_path):
    build(ADAPTER["plain"]).save_pretrained(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    tensors = load_file(weights)
    some = next(n for n in tensors if "v_proj.lora_B" in n)
    for change, word in [
        (lambda t: t.pop(some), "v_proj"),
        (lambda t: t.update({some: t[some] * float("nan")}), "NaN"),
        (
            lambda t: t.update(
                {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": t[some].T.contiguous()}
            ),
            "layers.9",
        ),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(4, 4)}), "lm_head.weight"),
    ]:
        changed = dict(tensors)
        change(changed)
        save_file(changed, weights)
        verdict = judge_adapter(tmp_path, base=model_dir)
        assert verdict.kind != "adapter"
        assert word in " ".join(verdict.reasons)
    weights.write_bytes(weights.read_bytes()[:200])
    assert "is damaged" in judge_adapter(tmp_path).reasons[0]
    weights.unlink()
    torch.save(tensors, tmp_path / "adapter_model.bin")
    assert "pickled" in judge_adapter(tmp_path).reasons[0]


def test_judging_a_directory_holds_no_weight_of_the_base(build, base, tmp_path):
    from qlora_rl.adapter.directory import open_adapter

    build(ADAPTER["plain"]).save_pretrained(tmp_path)
    model = open_adapter(tmp_path, base.path).model
    assert all(p.is_meta for n, p in model.named_parameters() if "lora_" not in n)
    assert not any(p.is_meta for n, p in model.named_parameters() if "lora_" in n)


@pytest.mark.parametrize(("name", "code"), [("plain", 0), ("dora", 3), ("LILY", 4)])
def test_the_command_says_it_with_its_exit_code(build, tmp_path, capsys, name, code):
    from qlora_rl.cli import main

    build(KINDS[name]).save_pretrained(tmp_path / "run" / "adapter")
    assert main(["judge", str(tmp_path / "run" / "adapter"), "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], bool(found["reasons"])) == (KINDS[name].verdict, code != 0)
    assert main(["judge", str(tmp_path / "run")]) == code
    said = capsys.readouterr().out
    assert all(reason in said for reason in found["reasons"])
    assert main(["judge", str(tmp_path)]) == 1


# What a hostile reader found: each was taken for plain LoRA while the model computed something else.


def second_active_in_one_layer(model):
    model.add_adapter("second", lora(target_modules=["v_proj"]))
    model.set_adapter("second")
    model.get_base_model().model.layers[0].self_attn.q_proj.set_adapter(["default"])


def nothing_active(model):
    model.base_model.set_adapter([])


def reference_active_too(model):
    model.add_adapter("ref", lora())
    model.base_model.set_adapter(["default", "ref"])


def edited_config(model):
    model.peft_config["default"].modules_to_save = None


def hooked(model):
    model.get_base_model().model.layers[0].self_attn.q_proj.register_forward_hook(lambda m, i, o: o * 2)


def shortened(model):
    shorten_lora(model)


def wrapped_after_it_was_shortened(model):
    """As accelerate wraps a forward: name and module are those of what is in it."""
    shorten_lora(model)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    inner = layer.forward
    layer.forward = functools.wraps(inner)(lambda x: 2 * inner(x))


def with_the_forward_of_another_layer(model):
    shorten_lora(model)
    attention = model.get_base_model().model.layers[0].self_attn
    attention.q_proj.forward = attention.o_proj.forward


def another_forward(model):
    layer = model.get_base_model().model.layers[0].self_attn.q_proj.lora_A["default"]
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight).relu()


def nonlinear(model):
    model.get_base_model().model.layers[0].self_attn.q_proj.lora_dropout["default"] = torch.nn.ReLU()


def many_parts(model):
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.lora_A["default"] = torch.nn.Sequential(torch.nn.Linear(layer.in_features, 4, bias=False))


def strange_layer(model):
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.__class__ = type("OtherLinear", (type(layer),), {"__module__": "another.library"})


def replicated(model):
    model.peft_config["default"].layer_replication = [[0, 2], [0, 2]]


def infinite_scale(model):
    model.get_base_model().model.layers[0].self_attn.q_proj.scaling["default"] = float("inf")


def unknown_start(model):
    model.peft_config["default"].init_lora_weights = "milora"


def unknown_variant_with_a_known_name(model):
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.lora_variant["default"] = type("MiCALinearVariant", (), {})()


def base_of_the_other_is_cut(model):
    model.add_adapter("second", lora(init_lora_weights="pissa"))
    model.set_adapter("default")


@pytest.mark.parametrize(
    ("config", "change", "kind", "word"),
    [
        ({}, second_active_in_one_layer, "reject", "The active adapters at"),
        ({}, nothing_active, "reject", "No adapter is active"),
        ({}, reference_active_too, "full_weights", "Several adapters"),
        (
            {"modules_to_save": ["norm"]},
            edited_config,
            "full_weights",
            "trains a copy of model.layers.0.input_layernorm",
        ),
        ({}, hooked, "reject", "has a hook"),
        ({}, another_forward, "reject", "another forward"),
        ({}, shortened, "adapter", ""),
        ({}, wrapped_after_it_was_shortened, "reject", "another forward"),
        ({}, with_the_forward_of_another_layer, "reject", "another forward"),
        ({}, nonlinear, "reject", "ReLU where dropout should be"),
        ({}, many_parts, "reject", "Sequential"),
        ({}, strange_layer, "reject", "another.library.OtherLinear"),
        ({}, replicated, "reject", "layer_replication"),
        ({}, infinite_scale, "reject", "infinite values at model.layers.0.self_attn.q_proj"),
        ({}, unknown_start, "reject", "'milora' is an unknown initialisation"),
        ({}, unknown_variant_with_a_known_name, "reject", "is an unknown variant"),
        ({}, base_of_the_other_is_cut, "full_weights", "of adapter 'second'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_the_live_model_has_become_is_seen(build, config, change, kind, word):
    model = build(ADAPTER["plain"].__class__("", lambda: lora(**config), "adapter"))
    change(model)
    verdict = judge_adapter(model)
    assert verdict.kind == kind, verdict.reasons
    assert word in " ".join(verdict.reasons)


@pytest.mark.parametrize("name", ["model", "0", "weight", "lora_A", "q_proj", "base_layer"])
def test_an_adapters_name_hides_nothing(model_dir, name):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), lora(), adapter_name=name
    )
    assert judge_adapter(model).kind == "adapter"
    next(p for n, p in model.named_parameters() if "lora_A" in n).data[0, 0] = float("nan")
    assert "NaN" in judge_adapter(model).reasons[0]
    next(p for n, p in model.named_parameters() if "lora_A" in n).data[0, 0] = 0.0
    model.get_base_model().model.layers[0].input_layernorm.weight.requires_grad_(True)
    assert "of the base is trained as well" in judge_adapter(model).reasons[0]


def test_a_second_method_in_the_same_model_is_seen(model_dir):
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    get_peft_model(base, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    verdict = judge_adapter(get_peft_model(base, lora(target_modules=["v_proj"])))
    assert verdict.kind == "reject"
    assert "another method" in verdict.reasons[0]


def test_a_peft_model_inside_a_peft_model_is_rejected(model_dir):
    inner = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), lora(target_modules=["q_proj"])
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outer = get_peft_model(inner, lora(target_modules=["v_proj"]))
    assert "The base contains a PeftModel" in " ".join(judge_adapter(outer).reasons)


def test_a_model_that_peft_did_not_wrap_is_told_so(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.add_adapter(lora())
    assert "Pass a PeftModel" in judge_adapter(model).reasons[0]
    mixed = peft.PeftMixedModel(AutoModelForCausalLM.from_pretrained(model_dir), lora(task_type=None))
    assert judge_adapter(mixed).kind == "reject"


@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper])
def test_wrappers_of_torch_do_not_get_into_the_names(build, wrap):
    model = build(ADAPTER["plain"])
    wanted = export_adapter(model).tensors
    layers = model.get_base_model().model.layers
    layers[0] = wrap(layers[0])
    found = export_adapter(model).tensors
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], t) for n, t in wanted.items())


def test_a_layer_that_stands_in_two_places_is_exported_for_both(build):
    model = build(ADAPTER["plain"])
    layers = model.get_base_model().model.layers
    layers[1] = layers[0]
    found = export_adapter(model).tensors
    first = {n: t for n, t in found.items() if ".layers.0." in n}
    assert first
    assert all(torch.equal(found[n.replace(".layers.0.", ".layers.1.")], t) for n, t in first.items())


def test_the_head_is_found_whatever_it_is_called(model_dir):
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    base.to_words, base.lm_head = base.lm_head, torch.nn.Identity()
    base.get_output_embeddings = lambda: base.to_words
    model = get_peft_model(base, lora(target_modules=["q_proj", "to_words"]))
    assert "to_words is the output head" in " ".join(judge_adapter(model).reasons)


def test_x_lora_is_rejected_live(build, model_dir, tmp_path):
    build(ADAPTER["plain"]).save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    base.config.use_cache = False
    config = peft.XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=128, adapters={"one": str(tmp_path)}, enable_softmax=False
    )
    assert judge_adapter(get_peft_model(base, config)).kind == "reject"


def test_shadow_and_adaption_prompts_are_rejected_live(build, tmp_path):
    llama = AutoModelForCausalLM.from_pretrained(
        make_model(tmp_path / "llama", architecture="llama"), dtype=torch.float32
    )
    assert judge_adapter(get_peft_model(llama, KINDS["ADAPTION_PROMPT"].config())).kind == "reject"
    assert judge_adapter(build(KINDS["SHADOW"])).kind == "reject"


def test_a_run_keeps_what_the_live_layers_multiplied_with(build, model_dir, tmp_path):
    """`set_scale`, and patterns that overlap and are sorted by PEFT when it saves them."""
    from qlora_rl.train.run import RunDirectory

    overlapping = ADAPTER["plain"].__class__(
        "",
        lambda: lora(alpha_pattern={"q_proj": 3, "1.self_attn.q_proj": 90}, rank_pattern={"layers.0.mlp.up_proj": 7}),
        "adapter",
    )
    for i, kind in enumerate([ADAPTER["set-scale"], overlapping, ADAPTER["patterns"]]):
        live = build(kind)
        directory = RunDirectory(tmp_path / str(i)).save_adapter(live)
        read, wanted = read_adapter(directory), export_adapter(live)
        assert all(torch.allclose(read.tensors[n], t, rtol=1e-6) for n, t in wanted.tensors.items())
        again = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), directory
        )
        prompt = torch.tensor([[40, 41, 42]])
        with torch.no_grad():
            assert torch.allclose(again(prompt).logits, live(prompt).logits, atol=1e-5)


def test_a_scale_that_float16_cannot_hold_is_rejected(build):
    model = build(ADAPTER["plain"].__class__("", lambda: lora(lora_alpha=2_000_000), "adapter"))
    with pytest.raises(AdapterRejectedError, match="float16 at model"):
        export_adapter(model, dtype=torch.float16)


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "kind", "word"),
    [
        ({"use_telepathy": True}, "reject", "use_telepathy=True"),
        ({"init_lora_weights": "milora"}, "reject", "initialisation"),
        ({"use_qalora": True}, "reject", "base="),
        ({"fan_in_fan_out": True}, "reject", "base="),
        ({"enable_lora": None, "merge_weights": False}, "adapter", ""),
        ({"base_model_name_or_path": 5}, "adapter", ""),
        ({"base_model_name_or_path": "x" * 5000}, "adapter", ""),
        ({"base_model_name_or_path": None}, "adapter", ""),
        ({"base_model_name_or_path": ["a"]}, "adapter", ""),
    ],
    ids=["a newer PEFT", "unknown start", "qalora", "fan in", "old, off", "number", "long", "none", "list"],
)
def test_what_a_config_asks_for_is_not_left_out_in_silence(build, tmp_path, changes, kind, word):
    build(ADAPTER["plain"]).save_pretrained(tmp_path)
    edit(tmp_path / "adapter_config.json", **{"base_model_name_or_path": "someone/else"} | changes)
    verdict = judge_adapter(tmp_path)
    assert verdict.kind == kind, verdict
    assert word in " ".join(verdict.reasons)


@pytest.mark.parametrize("content", ["[]", "5", "null", "{", '{"base_identity": 5}'])
def test_damaged_notes_get_a_verdict(build, base, tmp_path, content):
    build(ADAPTER["plain"]).save_pretrained(tmp_path)
    (tmp_path / "qlora_adapter.json").write_text(content)
    verdict = judge_adapter(tmp_path, base=base.path)
    assert verdict.kind == "reject"
    assert "damaged" in verdict.reasons[0]


def test_no_code_of_the_base_is_run_and_nobody_is_asked(build, tmp_path, monkeypatch):
    build(ADAPTER["plain"]).save_pretrained(tmp_path / "adapter")
    base = tmp_path / "base"
    base.mkdir()
    marker = tmp_path / "ran"
    (base / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (base / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(base))
    assert judge_adapter(tmp_path / "adapter").kind == "reject"
    assert not marker.exists()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_matrices_of_another_kind_of_number_are_rejected(build, tmp_path, dtype):
    build(ADAPTER["plain"]).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({n: t.to(dtype) for n, t in load_file(file).items()}, file)
    assert judge_adapter(tmp_path).kind == "reject"
