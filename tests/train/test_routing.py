"""The engine's choice of experts in the trainer: compared, and replayed. Without vLLM: what it chose is made up here."""

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
from qlora_rl.train.scoring.padding import remove_padding
from qlora_rl.train.scoring.routing import Routers

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
    heard, handles = _heard(model)
    with torch.no_grad():
        _score(model, ids_BT, mask_BT)
    for handle in handles:
        handle.remove()
    chosen_NLK = torch.stack([chosen for chosen, _ in heard], 1)
    rows = chosen_NLK.unflatten(0, ids_BT.shape) if len(chosen_NLK) == ids_BT.numel() else None
    if rows is None:
        return [each[:-1].to(torch.int16) for each in chosen_NLK.split(LENGTHS)]
    return [row[mask.bool()][:-1].to(torch.int16) for row, mask in zip(rows, mask_BT, strict=True)]


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
    theirs = [each.flip(0) for each in _own(model, ids_BT, mask_BT)]
    gradients = []
    for checkpoints in (False, True):
        routers = Routers(model, replays=True)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        model.zero_grad()
        with routers.given(mask_BT, theirs):
            logprobs_BT = _score(model, ids_BT, mask_BT)
        logprobs_BT.sum().backward()  # outside, as transformers does
        gradients.append(model.get_input_embeddings().weight.grad.clone())
        compared = routers.agreement
        routers.close()
    assert torch.equal(*gradients)
    assert compared < 1


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
