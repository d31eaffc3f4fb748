"""`iter_weights`: a bare model that is given these weights computes what the adapted one computes, which stays
untouched."""

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from kinds import ADAPTER, FULL_WEIGHTS, REJECTED, lora
from pair import trained
from peft import get_peft_model
from support import make_model, randomise
from transformers import AutoModelForCausalLM

from qlora_rl import AdapterRejectedError, DenseSync, SyncError, judge_adapter, load_base
from qlora_rl.adapter import merged_weights
from qlora_rl.adapter.merged_weights import iter_weights
from qlora_rl.base.checkpoint import adopt
from qlora_rl.base.fingerprint import base_parameters, fingerprint_base
from qlora_rl.base.quant import QuantSpec
from qlora_rl.base.writer import base_tensors

KINDS = {**FULL_WEIGHTS, **{name: ADAPTER[name] for name in ("plain", "patterns", "set-scale", "velora")}}
CHANGES_THE_BASE = {"pissa", "olora", "kasa", "OSF", "unfrozen", "bias", "bias-lora-only", "two-active", "BEFT"}
IDS = torch.tensor([[40, 41, 42, 43, 44, 45, 3, 4], [60, 9, 33, 12, 7, 41, 5, 21]])


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Two layers, head and embedding apart, float32."""
    directory = make_model(tmp_path_factory.mktemp("untied") / "model", tied=False)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def build(bare, kind, seed=0):
    """A PeftModel of a kind, with random values in all that is trained."""
    if kind.needs:
        pytest.importorskip(kind.needs, reason=f"PEFT asks for {kind.needs} here")
    return trained(bare, kind, seed, 0.05)


def copied(model):
    """Every tensor of the model, by name."""
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def assert_untouched(model, before):
    now = copied(model)
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], before[name]) for name in before)


@pytest.mark.parametrize("name", KINDS)
def test_a_bare_model_with_these_weights_computes_the_same(bare, name):
    model = build(bare, KINDS[name])
    before = copied(model)
    with torch.no_grad():
        wanted = model(IDS).logits.log_softmax(-1)
    dense = copy.deepcopy(bare)
    dense.load_state_dict({n: w.clone() for n, w in iter_weights(model)}, strict=True)
    with torch.no_grad():
        found = dense(IDS).logits.log_softmax(-1)
    assert float((found - wanted).abs().max()) < 1e-4
    assert_untouched(model, before)
    assert fingerprint_base(model).leaves == fingerprint_base(bare).leaves or name in CHANGES_THE_BASE


@pytest.mark.parametrize("name", [n for n, kind in REJECTED.items() if kind.is_built])
def test_what_is_rejected_gives_no_weights(bare, name):
    model = build(bare, REJECTED[name])
    with pytest.raises(AdapterRejectedError):
        next(iter_weights(model))


@pytest.mark.parametrize(
    "name",
    [  # by default some of them: all are wrapped by the same layers of PEFT's
        pytest.param(name, marks=() if name in ("dora", "LOHA", "LN_TUNING", "unfrozen", "plain") else pytest.mark.full)
        for name in KINDS
        if name != "ADAMSS"
    ],
)
def test_a_base_is_written_and_frozen_without_the_adapter(bare, name):
    model = build(bare, KINDS[name])
    written = {n: t.shape for n, t in base_tensors(model.get_base_model())}
    assert written == {n: t.shape for n, t in base_tensors(bare)}
    adapter = {id(p) for p in model.parameters()} - {id(p) for _, p in base_parameters(model.get_base_model())}
    trained = {id(p) for p in model.parameters() if p.requires_grad} & adapter
    adopt(model.get_base_model(), SimpleNamespace(spec=QuantSpec("none")))
    assert {id(p) for p in model.parameters() if p.requires_grad} == trained


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [lora(), lora(use_dora=True)], ids=["lora", "dora"])
def test_of_a_4_bit_base_every_weight_is_the_exact_one_rounded_once(base, config, dtype):
    from qlora_rl.base.bake import bake_base
    from qlora_rl.base.reader import StoredTensors

    model = get_peft_model(load_base(base), config)
    stored = StoredTensors(bake_base(base, "float32").path)
    plain = dict(iter_weights(model, dtype=dtype))  # B is zero
    assert plain.keys() == set(filter(stored.is_weight, stored))
    if not config.use_dora:
        assert all(torch.equal(weight, stored[name].to(dtype)) for name, weight in plain.items())
    randomise(model)
    before = copied(model)
    adapted = dict(iter_weights(model, dtype=dtype))
    assert_untouched(model, before)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    weight = stored["model.layers.0.self_attn.q_proj.weight"]
    weight = weight + 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    if config.use_dora:
        weight = weight * (layer.lora_magnitude_vector["default"].weight / weight.norm(dim=1))[:, None]
    there = adapted["model.layers.0.self_attn.q_proj.weight"]
    assert torch.allclose(there, weight.to(dtype), rtol=0 if dtype == torch.float32 else 2**-7, atol=1e-5)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_a_tied_head_with_an_adapter_on_one_side_only_is_rejected(base, target):
    model = get_peft_model(load_base(base), lora(target_modules=["q_proj", target]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    with pytest.raises(AdapterRejectedError, match="tie_word_embeddings"):
        list(iter_weights(model))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"modules_to_save": ["lm_head"]}, "reject"),
        ({"modules_to_save": ["embed_tokens"]}, "reject"),
        ({"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}, "full_weights"),
        ({"target_modules": ["q_proj", "lm_head"]}, "reject"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "reject"),
        ({"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, "full_weights"),
        ({"trainable_token_indices": [3, 4]}, "full_weights"),
        ({"bias": "all"}, "full_weights"),
        ({}, "adapter"),
    ],
)
def test_a_tied_head_that_is_trained_apart_is_rejected_before_the_first_step(model_dir, fields, kind):
    """By what is trained: at the start both sides are still equal. What is accepted is so after a step as well."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), lora(**fields))
    verdict = judge_adapter(model)
    assert verdict.kind == kind
    assert any("tie_word_embeddings" in reason for reason in verdict.reasons) == (kind == "reject")
    if kind != "reject":
        with torch.no_grad():
            for parameter in {p for p in model.parameters() if p.requires_grad}:
                parameter.add_(0.01 * torch.randn_like(parameter))
        assert "lm_head.weight" not in dict(iter_weights(model))


def test_a_tied_head_with_the_same_rows_trained_on_both_sides_is_sent_once(base):
    model = get_peft_model(load_base(base), lora(trainable_token_indices=[3, 4]))
    weights = dict(iter_weights(model))
    assert "lm_head.weight" not in weights
    assert "model.embed_tokens.weight" in weights


def test_no_weight_is_held_while_the_next_one_is_made(adapted, monkeypatch):
    true, made = merged_weights._with_lora, []

    def watched(*arguments):
        assert [ref for ref in made if ref() is not None] == []
        weight = true(*arguments)
        made.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(merged_weights, "_with_lora", watched)
    for _, weight in iter_weights(adapted, dtype=torch.bfloat16):
        del weight
    assert len(made) == 14


@pytest.mark.parametrize(("way", "threads"), [("stream", 4), ("directory", 2), ("http", 2)])
def test_weights_for_a_server_are_made_on_half_of_the_threads_and_the_others_come_back(bare, way, threads):
    class Engine:
        version = incarnation = 0

        def capabilities(self):
            return SimpleNamespace(adapter_dtype="float32", dense_way=way)

        def load_dense(self, weights, version):
            self.seen = {torch.get_num_threads() for _ in weights}
            raise SyncError("it broke off")

    engine, before = Engine(), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with pytest.raises(SyncError):
            DenseSync(build(bare, KINDS["plain"]), engine).push()
        assert (engine.seen, torch.get_num_threads()) == ({threads}, 4)
    finally:
        torch.set_num_threads(before)
