"""An engine that gives no logprobs of what it samples: trained on without correction and alarm, and said so."""

import json
from dataclasses import replace

import pytest
import torch
from online_kinds import KINDS, by_place
from test_models import NF4, assert_same
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from qlora_rl import (
    ConfigConflictError,
    EngineUnsupportedError,
    FakeEngine,
    PolicyMismatchError,
    QLoRAAsyncGRPOTrainer,
    attach,
    load_base,
)


class Silent(FakeEngine):
    """Says that it gives no logprobs; `says` switches that, `leaves` makes of each rollout's logprobs what it
    returns."""

    says = True

    @staticmethod
    def leaves(rollout):
        return None

    def capabilities(self):
        return replace(super().capabilities(), **{"gives_logprobs": False} if self.says else {})

    def generate(self, *args, **kwargs):
        rollout = super().generate(*args, **kwargs)
        return replace(rollout, logprobs=self.leaves(rollout))


def none_for_each_token(rollout):
    return [[None] * len(ids) for ids in rollout.completion_ids]


@pytest.fixture
def silent(base):
    with Silent(load_base(base), max_model_length=64) as silent:
        yield silent


def lines(trainer, name):
    return [json.loads(line) for line in (trainer.run.path / name).read_text().splitlines()]


def check_untold(trainer, caplog, steps):
    """Trained, pushed with the canary's check, and nothing is said of a distance that nobody knows."""
    assert trainer.state.global_step == steps
    assert trainer.alarm is None
    assert not trainer.fidelity.history
    assert len([r for r in caplog.records if "gives no logprobs" in r.message]) == 1
    syncs, logged = lines(trainer, "sync.jsonl"), [row for row in trainer.state.log_history if "loss" in row]
    assert len(syncs) == steps
    assert syncs[0]["canary_difference"] is not None
    for row in (*logged, *lines(trainer, "metrics.jsonl")):
        assert not [name for name in row if "mismatch" in name or "sampling/" in name or "masked_share" in name]
        assert all(value == value for value in row.values()), row  # no NaN
    assert lines(trainer, "metrics.jsonl")[0]["rollout_tokens"] > 0


@pytest.mark.parametrize("leaves", [lambda rollout: None, none_for_each_token], ids=["none", "none_for_each_token"])
def test_it_trains_as_with_logprobs_and_without_the_correction(leaves, silent, make_trainer, config, tmp_path):
    silent.leaves = leaves

    def trained(name, **own):
        torch.manual_seed(0)
        fields = {"output_dir": str(tmp_path / name), "max_steps": 3, "num_iterations": 2, "seed": 3}
        trainer = make_trainer(args=config(**fields | own.pop("fields", {})), **own)
        trainer.train()
        return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}

    without = trained("without", rollout=silent)
    assert_same(without, trained("with", fields={"vllm_importance_sampling_correction": False}))


@pytest.mark.parametrize("kind", ["grpo", *KINDS])
def test_three_steps_are_trained_verified_and_recorded(kind, silent, make_trainer, config, make_online, caplog):
    own = make_trainer(args=config(max_steps=3), rollout=silent) if kind == "grpo" else None
    trainer = own or make_online(kind, {"max_steps": 3}, rollout=silent)
    trainer.train()
    check_untold(trainer, caplog, 3)


def test_overlapping_rollouts_do_so_and_say_that_staleness_is_not_corrected(silent, base, plain, lora, config, caplog):
    with QLoRAAsyncGRPOTrainer(
        model=base,
        reward_funcs=by_place,
        train_dataset=plain,
        peft_config=lora,
        rollout=silent,
        args=config(max_steps=3),
    ) as trainer:
        trainer.train()
        check_untold(trainer, caplog, 3)
    assert "trained on as if they were new" in caplog.text


def test_an_attached_trainer_does_so_and_gets_its_correction_back(model_dir, engine_in_flight, plain, lora, config):
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, quantization_config=NF4),
        processing_class=AutoTokenizer.from_pretrained(model_dir, padding_side="left"),
        reward_funcs=by_place,
        train_dataset=plain,
        peft_config=lora,
        args=config(max_steps=3),
    )
    engine_in_flight.drop_adapter()  # the model is that of both
    silent = Silent(engine_in_flight.model, max_model_length=64)
    with attach(trainer, rollout=silent) as held:
        trainer.train()
        assert held.alarm is None
        assert not held.fidelity.history
        assert not trainer.vllm_importance_sampling_correction
    silent.drop_adapter()
    assert trainer.vllm_importance_sampling_correction


@pytest.mark.parametrize(
    "fields",
    [
        {"vllm_importance_sampling_mode": "token_mask"},
        {"vllm_importance_sampling_clip_max": 1.5},
        {"vllm_importance_sampling_clip_min": 0.5},
    ],
    ids=str,
)
def test_a_correction_that_was_asked_for_is_rejected_before_training(fields, silent, make_trainer, config):
    (name,) = fields
    with pytest.raises(ConfigConflictError, match=f"{name}=.*gives no logprobs"):
        make_trainer(args=config(**fields), rollout=silent)
    make_trainer(args=config(**fields, vllm_importance_sampling_correction=False), rollout=silent)


def test_our_own_default_is_no_wish(silent, make_trainer, config):
    from qlora_rl.fidelity import CORRECTION

    make_trainer(args=config(**CORRECTION), rollout=silent).train()


def test_a_rollout_func_that_returns_logprobs_is_corrected_and_watched(silent, make_trainer, config):
    def roll(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        rollout = FakeEngine.generate(trainer.engine, ids, max_tokens=3, seed=0)
        return {"prompt_ids": ids, "completion_ids": rollout.completion_ids, "logprobs": rollout.logprobs}

    args = config(max_steps=1, vllm_importance_sampling_mode="token_mask")
    trainer = make_trainer(args=args, rollout=silent, rollout_func=roll)
    trainer.train()
    assert trainer.alarm.threshold is not None
    assert trainer.fidelity.last.tokens > 0
    assert "sampling/importance_sampling_ratio/mean" in trainer.state.log_history[0]


def test_a_run_goes_on_from_a_checkpoint(silent, make_trainer, config):
    make_trainer(args=config(max_steps=2, save_strategy="steps", save_steps=1), rollout=silent).train()
    trainer = make_trainer(
        args=config(max_steps=3, save_strategy="steps", save_steps=1), rollout=silent, existing_run="resume"
    )
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.alarm is None


def test_an_engine_that_cannot_score_either_trains_without_the_canary(
    silent, make_trainer, config, monkeypatch, caplog
):
    def score(*args, **kwargs):
        raise NotImplementedError

    monkeypatch.setattr(silent, "score", score)
    trainer = make_trainer(args=config(max_steps=2), rollout=silent, canary_every=0)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "nothing compares engine and policy" in caplog.text


def test_an_engine_that_has_not_said_so_is_told_how(silent, make_trainer, config):
    silent.says = False
    with pytest.raises(EngineUnsupportedError, match="gives_logprobs=False"):
        make_trainer(args=config(max_steps=1), rollout=silent).train()
    silent.leaves = none_for_each_token
    with pytest.raises(PolicyMismatchError, match="gives_logprobs=False"):
        make_trainer(args=config(max_steps=3), rollout=silent, existing_run="overwrite").train()
