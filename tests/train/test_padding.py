"""Micro-batches without padding: what the padded ones give, and no mask."""

import json
import math

import pytest
import torch
import transformers
from datasets import Dataset
from online_kinds import by_place
from peft import LoraConfig
from support import STEPS, tiny_training
from support import make_model as tiny_model
from trl import DPOConfig, KTOConfig, SFTConfig
from trl.trainer.utils import add_fused_lm_head

from qlora_rl import (
    ConfigConflictError,
    FakeEngine,
    QLoRADPOTrainer,
    QLoRAKTOTrainer,
    QLoRASFTTrainer,
    load_base,
    prepare_base,
)
from qlora_rl.base.attention import attend as attention
from qlora_rl.base.attention.choice import apply_attention
from qlora_rl.train.scoring.padding import apply_padding, make_row, micro_batches, remove_padding

WORDS, LONGEST = 97, 24
TINY = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "Gemma": {},
    "Gemma2": {"sliding_window": 32},
    "Gemma3Text": {"sliding_window": 32},
    "Mistral": {"sliding_window": 32},
    "Phi3": {},
    "Granite": {"logits_scaling": 4.0},
}


def make_model(kind="Llama", **fields):
    """A random float32 model with TRL's head, whose attention is not all but uniform."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**TINY | MODELS.get(kind, {}) | fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    apply_attention(model)
    add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy", "is_top1"))
    return model


def batch(seed=0):
    """Prompts padded on the left and completions on the right; one whole row, one completion that is masked."""
    ids = torch.randint(3, WORDS, (5, LONGEST), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, 20:], mask[2, :2], mask[2, 15:], mask[4, 8:] = 0, 0, 0, 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :8] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def group(seed=0):
    """Two prompts with three and two completions, not side by side, one of which is as long as another; and a prompt
    with one."""
    ids = torch.randint(3, WORDS, (6, LONGEST), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, (first, last) in enumerate([(0, 20), (2, 15), (0, 20), (2, 11), (0, 24), (4, 24)]):
        mask[row, :first] = mask[row, last:] = 0
    ids[2, :8], ids[4, :8], ids[3, :8] = ids[0, :8], ids[0, :8], ids[1, :8]
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :8] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step(model, given):
    model.zero_grad()
    found = model(**given, fused_lm_head=True)
    (found.loss + found.log_probs.square().sum() + found.entropy.sum()).backward()
    return found, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("given", [batch, group])
@pytest.mark.parametrize("kind", MODELS)
def test_a_row_gives_what_a_padded_batch_gives(kind, given, monkeypatch):
    model = make_model(kind)
    padded, padded_gradient = step(model, given())
    assert remove_padding(model) == ""
    monkeypatch.setattr(attention, "sdpa_mask", None)  # no mask is made at all
    found, gradient = step(model, given())
    # Float32 sums in another order: 1e-6 was seen.
    for name in ("loss", "log_probs", "entropy"):
        torch.testing.assert_close(getattr(found, name), getattr(padded, name), rtol=1e-5, atol=1e-5)
    assert torch.equal(found.label_mask, padded.label_mask)
    assert torch.equal(found.is_top1, padded.is_top1)
    assert (gradient - padded_gradient).norm() < 1e-5 * padded_gradient.norm()


def test_a_second_trainer_finds_the_model_as_the_first_did():
    model = make_model()
    padded, _ = step(model, batch())
    assert remove_padding(model) == ""
    add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
    torch.testing.assert_close(model(**batch(), fused_lm_head=True).log_probs, padded.log_probs, rtol=1e-5, atol=1e-5)
    assert remove_padding(model) == ""
    torch.testing.assert_close(model(**batch(), fused_lm_head=True).log_probs, padded.log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", [batch, group])
def test_recomputed_layers_attend_by_sequence_too(given):
    model = make_model()
    _, padded_gradient = step(model, given())
    remove_padding(model)
    model.train().gradient_checkpointing_enable()
    _, gradient = step(model, given())
    assert (gradient - padded_gradient).norm() < 1e-5 * padded_gradient.norm()


def test_a_sequence_sees_nothing_of_another():
    model, one, other = make_model(), batch(), batch()
    remove_padding(model)
    other["input_ids"][:3] = (other["input_ids"][:3] + 1) % WORDS
    found, changed = (model(**given, fused_lm_head=True).log_probs for given in (one, other))
    assert torch.equal(found[3:], changed[3:])
    assert not torch.equal(found[:3], changed[:3])


def test_a_prompt_of_several_completions_is_computed_once():
    row = make_row(group(), shares_prompts=True)
    # Of prompts of 8 and 6 tokens the last one goes with each completion, whose last token is left out.
    assert row.inputs["input_ids"].shape[1] == 7 + (12 + 12 + 16) + 5 + (7 + 3) + 19
    assert sorted(row.inputs["sequence_lengths"]) == [8, 12, 19, 19, 19, 23]
    places, sources = row.inputs["places"], row.inputs["sources"]
    assert torch.equal(sources[places], torch.arange(len(places)))
    ids, mask = group()["input_ids"], group()["attention_mask"].bool()
    whole = [each[kept][:-1].tolist() for each, kept in zip(ids, mask, strict=True)]
    parts = row.inputs["input_ids"][0, sources].split(row.inputs["sequence_lengths"])
    assert [part.tolist() for part in parts] == sorted(whole, key=len)
    positions = row.inputs["position_ids"][0, sources].split(row.inputs["sequence_lengths"])
    assert all(torch.equal(each, torch.arange(len(each))) for each in positions)
    assert make_row(group()).inputs["input_ids"].shape[1] == int(mask.sum())


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral"])
def test_a_mixture_computes_every_token_of_every_sequence(kind, monkeypatch):
    model, rows = make_model(kind), []
    assert remove_padding(model) == ""
    made = model.base_model.forward
    monkeypatch.setattr(
        model.base_model, "forward", lambda **inputs: rows.append(inputs["input_ids"].numel()) or made(**inputs)
    )
    model(**group(), fused_lm_head=True)
    assert rows == [int(group()["attention_mask"].sum())]


def test_prompts_that_are_few_of_all_tokens_are_not_shared():
    given = {name: values[[0, 2, 4]] for name, values in group().items()}
    given["labels"][:, 2:8] = given["input_ids"][:, 2:8]
    assert "sources" not in make_row(given, shares_prompts=True).inputs


def test_a_completion_of_which_nothing_is_scored_is_left_out():
    """`mask_truncated_completions`: TRL takes all of it for padding, and the prompt is all that is left."""
    model, given = make_model(), group()
    given["attention_mask"][2:5, 8:] = 0
    given["labels"][2:5, 8:] = -100
    padded, padded_gradient = step(model, given)
    row = make_row(given, shares_prompts=True)
    assert row is not None
    assert row.inputs["input_ids"].shape[1] == 20 + 13 + 20  # no prompt is left that two share
    given["labels"][2, 8] = given["input_ids"][2, 8]
    given["attention_mask"][2, 8] = 1
    padded, padded_gradient = step(model, given)
    assert make_row(given, shares_prompts=True).inputs["input_ids"].shape[1] == 7 + (12 + 1) + 12 + 19
    assert remove_padding(model) == ""
    found, gradient = step(model, given)
    torch.testing.assert_close(found.log_probs, padded.log_probs, rtol=1e-5, atol=1e-5)
    assert (gradient - padded_gradient).norm() < 1e-5 * padded_gradient.norm()


def test_a_batch_in_which_nothing_is_scored_still_has_a_gradient():
    model, given = make_model(), group()
    given["labels"][:] = -100
    assert remove_padding(model) == ""
    found, gradient = step(model, given)
    assert not found.log_probs.any()
    assert not gradient.any()


def test_many_short_sequences_without_a_common_prompt_stay_whole():
    ids = torch.arange(3, 27).view(3, 8)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    given["attention_mask"][0, 7:] = 0
    given["labels"][:, :2], given["labels"][0, 7:] = -100, -100
    row = make_row(given, shares_prompts=True)
    assert "sources" not in row.inputs
    assert row.inputs["input_ids"].numel() == 23


@pytest.mark.parametrize("kind", ["a layer", "a rate"])
def test_with_dropout_each_sequence_has_a_mask_of_its_own(kind):
    model = make_model()
    if kind == "a layer":
        model.lm_head.drop = torch.nn.Dropout(0.1)
    else:
        model.model.layers[0].self_attn.attention_dropout = 0.1
    assert apply_padding(model) == {
        "removed": True, "shares_prompts": False, "prompts_reason": "with dropout each sequence has a mask of its own",
    }  # fmt: skip


def test_a_model_that_takes_other_positions_shares_no_prompt(monkeypatch):
    """Its positions are those of the places in the row: right for whole sequences, which see only distances."""
    model = make_model(dtype=torch.bfloat16)
    rotary = type(model.model.rotary_emb)
    of_rotary = rotary.forward
    monkeypatch.setattr(
        rotary, "forward", lambda self, x, position_ids: of_rotary(self, x, torch.arange(x.shape[1])[None])
    )
    found = apply_padding(model)
    assert (found["removed"], found["shares_prompts"]) == (True, False)
    assert "hidden states" in found["prompts_reason"]


def test_a_batch_without_padding_is_a_row_where_prompts_are_shared():
    given = group()
    given = {name: values[[0, 2], :20] for name, values in given.items()}
    assert given["attention_mask"].all()
    assert make_row(given) is None
    assert make_row(given, shares_prompts=True).inputs["input_ids"].shape[1] == 7 + 2 * 12


@pytest.mark.parametrize("kind", ["Gemma2", "Mistral"])
def test_sequences_beyond_a_sliding_window_stay_padded(kind):
    model = make_model(kind, sliding_window=16)
    before = model(**batch(), fused_lm_head=True).log_probs
    assert remove_padding(model) == ""
    assert torch.equal(model(**batch(), fused_lm_head=True).log_probs, before)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_mask": torch.ones(5, LONGEST, dtype=torch.long)},  # nothing to take out
        {"attention_mask": torch.zeros(5, LONGEST, dtype=torch.long)},
        {"attention_mask": torch.tensor([[1, 0] * (LONGEST // 2)] * 5)},  # a sequence with holes
        {"labels": batch()["input_ids"]},  # padding is to be scored
        {"position_ids": torch.arange(LONGEST)[None]},
        {"inputs_embeds": torch.zeros(5, LONGEST, 32)},
        {"pixel_values": torch.zeros(1)},
    ],
    ids=lambda change: "-".join(change),
)
def test_what_cannot_be_a_row_stays_as_it_is(change):
    assert make_row(batch()) is not None
    assert make_row(batch() | change) is None


def test_a_batch_that_trl_has_packed_for_sft_attends_by_sequence():
    model, given = make_model(), batch()
    lengths = given["attention_mask"].sum(1)
    kept = given["attention_mask"].bool()
    ends = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32)
    packed = {
        "input_ids": given["input_ids"][kept][None],
        "labels": given["labels"][kept][None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths.tolist()])[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
    }
    padded, padded_gradient = step(model, given)
    remove_padding(model)
    found, gradient = step(model, packed)
    torch.testing.assert_close(found.loss, padded.loss, rtol=1e-5, atol=0)
    assert (gradient - padded_gradient).norm() < 1e-5 * padded_gradient.norm()


@pytest.mark.parametrize("length", [2, 33, attention._SHORT])
def test_short_sequences_have_their_gradients_from_float32(length, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    like = [(1, heads, 3 * length, 16) for heads in (4, 2, 2)]
    half = [torch.randn(shape, generator=generator).mul(2).bfloat16() for shape in like]
    weights = torch.randn(1, 3 * length, 4, 16, generator=generator)
    seen = []

    def backward(*given, **named):
        seen.append({part.dtype for part in given[:6]})
        return own(*given, **named)

    own = attention._FUSED_BACKWARD
    monkeypatch.setattr(attention, "_FUSED_BACKWARD", backward)

    def attend(dtype, short):
        monkeypatch.setattr(attention, "_SHORT", short)
        parts = [part.to(dtype).detach().requires_grad_() for part in half]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            found = attention._by_length(*parts, (length,) * 3, 0.5, True, 0.0)
        (found.float() * weights).sum().backward()
        return [found.detach().float(), *(part.grad.float() for part in parts)]

    exact, fused = attend(torch.float32, length), attend(torch.bfloat16, 0)
    assert not seen  # float32 needs none, and longer sequences are torch's
    lifted = attend(torch.bfloat16, length)
    assert seen == [{torch.float32}]
    assert torch.equal(lifted[0], fused[0])
    for one, ours, theirs in zip(exact, lifted, fused, strict=True):
        assert (ours - one).norm() <= (theirs - one).norm() + 2**-9 * one.norm()


def test_few_tokens_are_in_float32_at_once(monkeypatch):
    """The estimate of a step's memory does not know of them."""
    count, length = 20, attention._SHORT
    parts = [torch.randn(1, 2, count * length, 16, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    seen = []

    def backward(gradient, *given, **named):
        seen.append(len(gradient) * gradient.shape[2])
        return own(gradient, *given, **named)

    def gradients(at_once):
        monkeypatch.setattr(attention, "_LIFTED", at_once)
        found = attention._by_length(*parts, (length,) * count, None, False, 0.0)
        return torch.autograd.grad(found.float().square().sum(), parts)

    own = attention._FUSED_BACKWARD
    monkeypatch.setattr(attention, "_FUSED_BACKWARD", backward)
    sliced = gradients(attention._LIFTED)
    assert max(seen) <= attention._LIFTED
    assert sum(seen) == count * length
    assert all(map(torch.equal, sliced, gradients(count * length)))


@pytest.mark.parametrize("odd", ["dropout", "a head of its own size for values"])
def test_what_torchs_fused_attention_does_not_take_stays_torchs(odd, monkeypatch):
    monkeypatch.setattr(attention, "_Fused", None)
    sizes = (16, 16, 8 if odd != "dropout" else 16)
    parts = [torch.randn(1, 2, 12, size, dtype=torch.bfloat16).requires_grad_() for size in sizes]
    found = attention._by_length(*parts, (6, 6), None, False, 0.5 if odd == "dropout" else 0.0)
    assert found.shape == (1, 12, 2, sizes[2])
    found.float().sum().backward()
    assert all(part.grad.isfinite().all() for part in parts)


def test_eager_attention_is_a_wish():
    model = make_model(attn_implementation="eager")
    assert "'eager'" in remove_padding(model)
    assert model.config._attn_implementation == "eager"


def test_other_layers_than_attention_are_named():
    model = make_model("Lfm2", layer_types=["conv", "full_attention"])
    assert "['conv']" in remove_padding(model)


@pytest.mark.parametrize("fault", ["lost", "wrong"])
def test_a_model_that_gives_something_else_stays_padded(fault, monkeypatch):
    model = make_model()
    before = model(**batch(), fused_lm_head=True).log_probs
    if fault == "lost":
        layer = type(model.model.layers[0].self_attn)
        of_layer = layer.forward
        monkeypatch.setattr(
            layer, "forward", lambda self, *args, sequence_lengths=None, **kwargs: of_layer(self, *args, **kwargs)
        )
    else:
        alone = torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(
            attention, "scaled_dot_product_attention", lambda *args, is_causal, **kwargs: alone(*args, **kwargs)
        )
    assert {"lost": "does not hand", "wrong": "hidden states"}[fault] in remove_padding(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(**batch(), fused_lm_head=True).log_probs, before)


MIXED = Dataset.from_list([{"prompt": "+".join(str(n) for n in range(1, 2 + i % 5)) + "="} for i in range(40)])
FIELDS = {
    "max_completion_length": 12,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "seed": 5,
    "bf16": False,
}


def trained(make, directory, **arguments):
    """Adapter, losses and what the run says of its padding."""
    trainer = make(directory, **arguments)
    trainer.train()
    adapter = torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])
    log = [row for row in trainer.state.log_history if "loss" in row]
    return adapter, log, json.loads((trainer.run.path / "config.json").read_text())["padding"]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "beta": 0.1, "temperature": 0.7},
        {"num_iterations": 2, "mask_truncated_completions": True},
        {"vllm_importance_sampling_correction": False},
    ],
    ids=lambda fields: "-".join(map(str, fields)) or "default",
)
def test_steps_of_grpo_end_with_the_same_adapter(steps, fields, make_trainer, exact, config, tmp_path):
    base, engine = exact

    def make(directory, **arguments):
        args = config(output_dir=str(directory), **FIELDS | fields, max_steps=steps)
        return make_trainer(args=args, model=base, rollout=engine, train_dataset=MIXED, **arguments)

    adapter, log, padding = trained(make, tmp_path / "row")
    padded, padded_log, other = trained(make, tmp_path / "padded", remove_padding=False)
    assert padding == {"removed": True, "shares_prompts": True}
    assert other == {"removed": False, "reason": "remove_padding=False"}
    assert [row.get("completions/mean_length") for row in log] == [
        row.get("completions/mean_length") for row in padded_log
    ]
    assert any(row["loss"] for row in log)
    assert (adapter - padded).norm() < 1e-5 * padded.norm()


SENTENCES = Dataset.from_list([{"text": row["prompt"] + str(i)} for i, row in enumerate(MIXED)])
PAIRS = Dataset.from_list([row | {"chosen": str(i), "rejected": f"{i}+{i}"} for i, row in enumerate(MIXED)])


@pytest.mark.parametrize("steps", STEPS)
def test_steps_of_rloo_end_with_the_same_adapter(steps, make_online, exact, tmp_path):
    base, engine = exact

    def make(directory, **arguments):
        fields = FIELDS | {"output_dir": str(directory), "beta": 0.1, "max_steps": steps}
        return make_online("rloo", fields, model=base, rollout=engine, train_dataset=MIXED, **arguments)

    adapter, _, padding = trained(make, tmp_path / "row")
    padded, _, _ = trained(make, tmp_path / "padded", remove_padding=False)
    assert padding == {"removed": True, "shares_prompts": True}
    assert (adapter - padded).norm() < 1e-5 * padded.norm()


@pytest.fixture(scope="module")
def softcapped(tmp_path_factory):
    """A float32 base whose scores reach their bound: without it the losses are others."""
    root = tmp_path_factory.mktemp("softcapped")
    return prepare_base(tiny_model(root / "model", architecture="gemma2"), "none", compute_dtype="float32")


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo", "an object"])
def test_a_model_with_softcapped_attention_trains_as_with_eager(
    kind, softcapped, make_trainer, config, tmp_path, caplog
):
    """By default, and a model that transformers has loaded with SDPA; as a row, which eager is not."""

    def make(directory, **init):
        usual = {"output_dir": str(directory), "max_steps": 2, "learning_rate": 1e-3, "bf16": False}
        model, usual["model_init_kwargs"] = softcapped, init or None
        if kind == "an object" and not init:
            model, usual["model_init_kwargs"] = transformers.AutoModelForCausalLM.from_pretrained(softcapped.path), None
            assert model.config._attn_implementation == "sdpa"
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        given = {"model": model, "peft_config": lora}
        if kind == "grpo":
            with FakeEngine(load_base(softcapped, attn_implementation="eager"), max_model_length=64) as engine:
                return trained(
                    lambda _: make_trainer(args=config(**FIELDS | usual), rollout=engine, train_dataset=MIXED, **given),
                    0,
                )
        trainer, kind_of_config, rows = (
            (QLoRADPOTrainer, DPOConfig, PAIRS) if kind == "dpo" else (QLoRASFTTrainer, SFTConfig, SENTENCES)
        )
        args = kind_of_config(**tiny_training(**usual))
        return trained(lambda _: trainer(args=args, train_dataset=rows, **given), 0)

    adapter, log, padding = make(tmp_path / "ours")
    assert ("attn_logit_softcapping=2.0" in caplog.text) == (kind == "an object")
    wanted, wanted_log, other = make(tmp_path / "eager", attn_implementation="eager")
    assert padding == {"removed": True, "shares_prompts": True}
    assert not other["removed"]
    assert [row["loss"] for row in log] == pytest.approx([row["loss"] for row in wanted_log], rel=1e-4, abs=1e-5)
    assert (adapter - wanted).norm() < 1e-4 * wanted.norm()
    if kind == "sft":
        with pytest.raises(ConfigConflictError, match=r"attn_implementation='sdpa' with attn_logit_softcapping=2\.0"):
            make(tmp_path / "sdpa", attn_implementation="sdpa")
        with pytest.raises(ConfigConflictError, match="loading a base"):
            load_base(softcapped, attn_implementation="sdpa")


def test_a_reference_with_softcapped_attention_is_that_of_eager(softcapped, tmp_path):
    """Transformers loads it with SDPA. Before the first step it is the policy: the loss is ln 2."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(softcapped.path)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    args = DPOConfig(**tiny_training(output_dir=str(tmp_path / "run"), max_steps=1, bf16=False))
    with QLoRADPOTrainer(softcapped, reference, args, train_dataset=PAIRS, peft_config=lora) as trainer:
        trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("sft", {"gradient_checkpointing": True}),
        ("sft", {"loss_type": "dft"}),
        ("dpo", {}),
        ("dpo", {"loss_type": "ipo", "use_weighting": True}),
        ("kto", {}),
    ],
)
def test_steps_from_data_end_with_the_same_adapter(steps, kind, fields, exact, tmp_path):
    """Metrics too: TRL's of the batch as they come."""
    trainer, config, rows = {
        "sft": (QLoRASFTTrainer, SFTConfig, SENTENCES),
        "dpo": (QLoRADPOTrainer, DPOConfig, PAIRS),
        "kto": (QLoRAKTOTrainer, KTOConfig, PAIRS),
    }[kind]

    def make(directory, **arguments):
        usual = {
            "output_dir": str(directory),
            "max_steps": steps,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "bf16": False,
        }
        args = config(**tiny_training(**usual | fields))
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        return trainer(model=exact[0], args=args, train_dataset=rows, peft_config=lora, **arguments)

    adapter, log, padding = trained(make, tmp_path / "row")
    padded, padded_log, _ = trained(make, tmp_path / "padded", remove_padding=False)
    assert padding == {"removed": True, "shares_prompts": True}
    assert (adapter - padded).norm() < 1e-5 * padded.norm()
    for row, other in zip(log, padded_log, strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_a_run_goes_on_with_padding_and_without(make_trainer, config, tmp_path):
    for steps, remove in ((2, True), (4, False), (6, True)):
        args = config(
            output_dir=str(tmp_path / "run"),
            max_steps=steps,
            save_strategy="steps",
            save_steps=1,
            max_completion_length=8,
        )
        trainer = make_trainer(
            args=args, train_dataset=MIXED, reward_funcs=by_place, remove_padding=remove, existing_run="resume"
        )
        trainer.train()
        assert trainer.state.global_step == steps
        trainer.close()


@pytest.mark.parametrize("multiple", [None, 8])
def test_rows_that_trls_collator_packs_are_one_row_here_too(multiple):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=multiple)
    given = collator([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}])
    row = make_row(dict(given))
    assert row.inputs["sequence_lengths"][:2] == (3, 2)
    assert row.targets_1M[0, :5].tolist() == [6, 7, -100, 9, -100]


def test_a_collator_that_scores_the_first_token_of_a_packed_sequence_is_told_so():
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    given = collator([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}])
    given["labels"][0, 3] = 8
    with pytest.raises(ConfigConflictError, match="score the first token of a sequence"):
        make_row(dict(given))


def test_micro_batches_that_stay_padded_are_counted():
    model = make_model("Mistral")  # its window is 32 tokens
    assert remove_padding(model) == ""
    for longest in (24, 40, 24):
        ids = torch.randint(3, WORDS, (2, longest))
        mask = torch.ones_like(ids)
        mask[1, -4:] = 0
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), fused_lm_head=True)
    assert micro_batches(model) == {"without_padding": 2, "padded": 1}
