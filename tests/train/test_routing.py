"""The engine's choice of experts in the trainer: compared, and replayed. Without vLLM: what it chose is made up
here."""

import dataclasses
import functools
import json

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from support import MIXTURES, make_model, tiny_training
from trl import GRPOConfig
from trl.trainer.utils import add_fused_lm_head

from qlora_rl import FakeEngine, QLoRAGRPOTrainer, prepare_base
from qlora_rl.base.experts import mixtures_in
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError
from qlora_rl.train.metrics.routing import Routers
from qlora_rl.train.scoring.padding import remove_padding

LENGTHS = (7, 4, 9)
SHAPE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(params=MIXTURES)
def model(request):
    """A random float32 mixture with TRL's fused head."""
    torch.manual_seed(0)
    name, extra = MIXTURES[request.param]
    config = getattr(transformers, name)(**SHAPE | {"num_key_value_heads": 1, "head_dim": 32} | extra)
    found = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for router in _routers(found):
            router.weight.normal_()
    add_fused_lm_head(found)
    return found


def _routers(model):
    return [model.get_submodule(name).gate for name in mixtures_in(model)]


def _batch():
    """ids and mask [B, T]: prompts padded on the left, completions on the right."""
    ids_BT = torch.randint(1, 64, (len(LENGTHS), max(LENGTHS) + 2), generator=torch.Generator().manual_seed(1))
    mask_BT = torch.zeros_like(ids_BT)
    for row, length, start in zip(mask_BT, LENGTHS, (1, 2, 0), strict=True):
        row[start : start + length] = 1
    return ids_BT, mask_BT


def _score(model, ids_BT, mask_BT):
    labels_BT = ids_BT.masked_fill(mask_BT == 0, -100)
    labels_BT[:, :3] = -100
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    given = {"position_ids": positions_BT} if not hasattr(model, "qlora_micro_batches") else {}
    return model(
        input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT, fused_lm_head=True, use_cache=False, **given
    ).log_probs


def _heard(model):
    """What the experts of each layer are given, and the hooks that note it."""
    heard, handles = [], []
    for name in mixtures_in(model):
        experts = model.get_submodule(name).experts
        handles.append(experts.register_forward_pre_hook(lambda _, args: heard.append(args[1:3])))
    return heard, handles


def _own(model, ids_BT, mask_BT):
    """What the trainer's routers choose for each sequence, without its last token: [tokens, L, K]."""
    return [each.to(torch.int16) for each in _both(model, ids_BT, mask_BT)[0]]


def _both(model, ids_BT, mask_BT):
    """What the experts are given for each sequence, without its last token: choices and weights [tokens, L, K]."""
    heard, handles = _heard(model)
    with torch.no_grad():
        _score(model, ids_BT, mask_BT)
    for handle in handles:
        handle.remove()
    return [_by_sequence(torch.stack(parts, 1), mask_BT) for parts in zip(*heard, strict=True)]


def _by_sequence(laid, mask_BT):
    """Of [B·T, ...] or [N, ...] the tokens of each sequence, without its last."""
    if len(laid) == mask_BT.numel():
        laid = laid.unflatten(0, mask_BT.shape)[mask_BT.bool()]
    return [each[:-1] for each in laid.split(LENGTHS)]


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "one row"])
def test_its_own_choice_replayed_changes_no_bit(model, padded):
    ids_BT, mask_BT = _batch()
    assert padded or remove_padding(model) == ""
    before = _score(model, ids_BT, mask_BT)
    own = _own(model, ids_BT, mask_BT)
    routers = Routers(model, replays=True)
    with routers.given(mask_BT, own):
        assert torch.equal(_score(model, ids_BT, mask_BT), before)
    assert routers.agreement == 1.0
    assert torch.equal(_score(model, ids_BT, mask_BT), before)  # with nothing given


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "one row"])
@pytest.mark.parametrize("rows", [1, 2, 3], ids=lambda rows: f"{rows} at a time")
def test_experts_get_the_engines_choice_with_the_trainers_weights(model, padded, rows):
    ids_BT, mask_BT = _batch()
    assert padded or remove_padding(model) == ""
    own = _own(model, ids_BT, mask_BT)
    count = _routers(model)[0].num_experts
    theirs = [(each + 1) % count for each in own]  # of two neighbours one may be among them
    theirs[1] = None
    theirs[2][3] = -1
    routers, (heard, _) = Routers(model, replays=True), _heard(model)
    with routers.given(mask_BT, theirs):
        for part in torch.arange(len(ids_BT)).split(rows):
            _score(model, ids_BT[part], mask_BT[part])
    layers = len(mixtures_in(model))
    known = dict.fromkeys(range(layers), 0)
    for number, (chosen_NK, weights_NK) in enumerate(heard):
        layer, first = number % layers, number // layers * rows
        part = slice(first, first + rows)
        mask = mask_BT[part].bool()
        chosen, weights = (
            [row[kept] for row, kept in zip(x.unflatten(0, mask.shape), mask, strict=True)]
            if len(x) == mask.numel()
            else x.split(mask.sum(1).tolist())
            for x in (chosen_NK, weights_NK)
        )
        for each, weight, wanted in zip(chosen, weights, theirs[part], strict=True):
            if wanted is None:
                continue
            is_known = wanted[:, layer, 0] >= 0
            assert torch.equal(each[:-1][is_known].sort(1).values, wanted[is_known][:, layer].long().sort(1).values)
            known[layer] += int(is_known.sum())
            if getattr(_routers(model)[layer], "norm_topk_prob", True):
                assert torch.allclose(weight.sum(1), torch.ones(len(weight)))
            assert weight.requires_grad  # the router's probabilities still carry gradients to what it reads
    assert set(known.values()) == {6 + 8 - 1}
    assert routers.agreement < 1


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "one row"])
def test_the_engines_weights_are_replayed_to_the_bit_where_they_are_known_and_near(model, padded):
    ids_BT, mask_BT = _batch()
    assert padded or remove_padding(model) == ""
    chosen, weights = _both(model, ids_BT, mask_BT)
    theirs = [each * torch.tensor([1.02, 0.98]) for each in weights]
    theirs[1] = None
    theirs[2][3] = float("nan")
    theirs[2][4] *= 2  # another router
    # The engine's order of the experts of a token is another.
    given = [each.flip(-1).to(torch.int16) for each in chosen]
    flipped = [None if each is None else each.flip(-1) for each in theirs]
    theirs[1] = weights[1]
    theirs[2][3:5] = weights[2][3:5]
    routers = Routers(model, replays=True)
    with routers.given(mask_BT, given, flipped):
        replayed = _both(model, ids_BT, mask_BT)
    # Behind the first layer these two tokens have other hidden states than before, and so other weights of their own.
    theirs[2][3:5, 1:] = replayed[1][2][3:5, 1:]
    assert all(map(torch.equal, replayed[1], theirs))
    assert routers.agreement == 1.0
    assert 0.005 < routers.weight_diff_mean < routers.weight_diff_max
    assert routers.weights_rejected == 1 / 13  # of 6 and 7 tokens in each layer
    routers.forget()
    assert routers.weights_rejected is None


def test_replayed_weights_have_the_gradient_of_the_trainers_routers(model):
    """With its own weights as the engine's no bit of a gradient changes; with others the gradient is that of weights
    moved by a constant."""
    ids_BT, mask_BT = _batch()
    chosen, weights = _both(model, ids_BT, mask_BT)
    chosen = [each.to(torch.int16) for each in chosen]
    moved = [each * torch.tensor([1.02, 0.98]) for each in weights]
    held = [router.weight for router in _routers(model)]

    def gradients(of=None):
        routers = Routers(model, replays=True)
        model.zero_grad()
        with routers.given(mask_BT, chosen, of):
            logprobs_BT = _score(model, ids_BT, mask_BT)
        logprobs_BT.sum().backward()
        routers.close()
        return logprobs_BT.detach(), [weight.grad.clone() for weight in held]

    (plain, before), (same, replayed), (other, apart) = gradients(), gradients(weights), gradients(moved)
    assert torch.equal(plain, same)
    assert all(map(torch.equal, before, replayed))
    assert not torch.equal(plain, other)
    assert all(gradient.abs().max() > 0 for gradient in apart)

    # The same as a function: the trainer's weights plus what the engine's are further, held fixed.
    def shift(layer, _, __, out):
        rows = torch.zeros(ids_BT.shape).masked_scatter(mask_BT.bool(), torch.arange(sum(LENGTHS)).float()).long()
        laid = [torch.cat([each, torch.full_like(each[:1], float("nan"))]) for each in moved]
        wanted = torch.cat(laid)[:, layer][rows.flatten()]
        known = ~wanted.isnan() & mask_BT.flatten().bool()[:, None]
        if layer not in fixed:
            fixed[layer] = torch.where(known, wanted - out[1].detach(), 0.0)
        return out[0], out[1] + fixed[layer], out[2]

    fixed = {}
    handles = [r.register_forward_hook(functools.partial(shift, i)) for i, r in enumerate(_routers(model))]
    model.zero_grad()
    logprobs_BT = _score(model, ids_BT, mask_BT)
    logprobs_BT.sum().backward()
    for handle in handles:
        handle.remove()
    # Float32, and what is added and taken away again is rounded.
    assert torch.allclose(logprobs_BT, other, atol=1e-5)
    for router, gradient in zip(_routers(model), apart, strict=True):
        assert torch.allclose(router.weight.grad, gradient, rtol=1e-3, atol=1e-5)


def test_the_share_counts_experts_of_known_tokens(model):
    ids_BT, mask_BT = _batch()
    own = _own(model, ids_BT, mask_BT)
    theirs = [each.clone() for each in own]
    theirs[0][:] = -1
    # One of two experts of one token of one layer is another.
    count = _routers(model)[0].num_experts
    theirs[1][0, 0, 1] = next(i for i in range(count) if i not in own[1][0, 0].tolist())
    routers = Routers(model)
    before = _score(model, ids_BT, mask_BT)
    with routers.given(mask_BT, theirs):
        assert torch.equal(_score(model, ids_BT, mask_BT), before)  # compared alone
    choices = (3 + 8) * routers.layers * 2
    assert routers.agreement == (choices - 1) / choices
    routers.forget()
    assert routers.agreement is None
    routers.close()
    with routers.given(mask_BT, own):
        _score(model, ids_BT, mask_BT)
    assert routers.agreement is None


def test_checkpointing_computes_layers_again_with_the_same_experts(model):
    ids_BT, mask_BT = _batch()
    chosen, weights = _both(model, ids_BT, mask_BT)
    theirs = [each.flip(0).to(torch.int16) for each in chosen]
    gradients = []
    for checkpoints in (False, True):
        routers = Routers(model, replays=True)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        model.zero_grad()
        with routers.given(mask_BT, theirs, weights):
            logprobs_BT = _score(model, ids_BT, mask_BT)
        logprobs_BT.sum().backward()  # outside, as transformers does
        gradients.append(model.get_input_embeddings().weight.grad.clone())
        compared = routers.agreement
        routers.close()
    assert torch.equal(*gradients)
    assert compared < 1


class _Chooses(FakeEngine):
    """Says that every token has chosen the first two experts, and nothing of their weights."""

    def capabilities(self):
        return dataclasses.replace(super().capabilities(), gives_routing=True)

    def generate(self, prompts, sampling, **options):
        rollout = super().generate(prompts, sampling, **options)
        lengths = [len(prompt) + len(ids) - 1 for prompt, ids in zip(prompts, rollout.completion_ids, strict=True)]
        chosen = [torch.tensor([0, 1], dtype=torch.int16).expand(length, 2, 2) for length in lengths]
        return dataclasses.replace(rollout, routing=chosen)


def test_without_the_engines_weights_those_of_the_trainer_are_used_and_that_is_said_once(tmp_path, caplog):
    base = prepare_base(make_model(tmp_path / "olmoe", architecture="olmoe", tied=False), "none")
    model = transformers.AutoModelForCausalLM.from_pretrained(base.path)
    with (
        _Chooses(model) as engine,
        QLoRAGRPOTrainer(
            model=base,
            peft_config=LoraConfig(r=4, target_modules=["q_proj"]),
            rollout=engine,
            routing_replay=True,
            on_mismatch="warn",
            reward_funcs=lambda completions, **_: [float(len(c) % 3) for c in completions],
            train_dataset=Dataset.from_list([{"prompt": "1+1="}] * 4),
            args=GRPOConfig(**tiny_training(output_dir=str(tmp_path / "run"), num_generations=4, max_steps=2)),
        ) as trainer,
    ):
        trainer.train()
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all("routing_agreement" in step for step in steps)
    assert not any({"routing_weight_diff_mean", "routing_weights_rejected"} & step.keys() for step in steps)
    assert sum("without their weights" in record.message for record in caplog.records) == 1


def test_a_replay_that_cannot_be_is_an_error(tmp_path):
    rows = Dataset.from_list([{"prompt": "1+1="}] * 4)
    args = GRPOConfig(**tiny_training(output_dir=str(tmp_path / "run"), num_generations=4))
    arguments = {"reward_funcs": lambda completions, **_: [0.0] * len(completions), "train_dataset": rows, "args": args}
    for architecture, kind, said in (
        ("qwen2", ConfigConflictError, "the model has no experts"),
        ("olmoe", NotYetSupportedError, "does not say which experts it chose"),
    ):
        base = prepare_base(make_model(tmp_path / architecture, architecture=architecture, tied=False), "none")
        model = transformers.AutoModelForCausalLM.from_pretrained(base.path)
        with FakeEngine(model) as engine, pytest.raises(kind, match=f"routing_replay=True.*{said}"):
            QLoRAGRPOTrainer(
                model=base,
                peft_config=LoraConfig(r=4, target_modules=["q_proj"]),
                rollout=engine,
                routing_replay=True,
                existing_run="overwrite",
                **arguments,
            )
