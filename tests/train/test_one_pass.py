"""The drawn tokens are scored once, with what TRL's two passes find."""

from dataclasses import replace

import pytest
import torch
from online_kinds import by_place
from support import randomise

from qlora_rl import QLoRAGRPOTrainer
from qlora_rl.train.one_pass import OnePass

# Versions count on, as both trainings have one engine.
NOT_COMPARED = ("seconds", "per_s", "time", "version", "threshold")


def offset(generate):
    """An engine whose probabilities differ from the trainer's, by less than the alarm minds."""

    def distorted(*args, **kwargs):
        rollout = generate(*args, **kwargs)
        logprobs = [[v + 5e-4 * ((i + j) % 3 - 1) for j, v in enumerate(row)] for i, row in enumerate(rollout.logprobs)]
        return replace(rollout, logprobs=logprobs)

    return distorted


def trained(make_trainer, args, seed=0):
    """Adapter, log and passes through the model of a training that begins with an adapter that does something."""
    trainer = make_trainer(args=args)
    torch.manual_seed(seed)
    randomise(trainer.model)
    passes = []
    trainer.model.get_base_model().model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    trainer.train()
    adapter = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    log = [
        {name: value for name, value in row.items() if not any(part in name for part in NOT_COMPARED)}
        for row in trainer.state.log_history
        if "loss" in row
    ]
    return adapter, log, passes


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.0002},
        {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.0002},
        {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_min": 0.9999},
        {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": None},
        {"gradient_accumulation_steps": 2, "beta": 0.1, "loss_type": "grpo", "temperature": 0.7},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "gradient_checkpointing": True},
        {"off_policy_mask_threshold": 0.5, "importance_sampling_level": "sequence", "loss_type": "grpo"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())) or "default",
)
def test_one_pass_trains_and_logs_what_two_do(fields, make_trainer, engine, config, monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "generate", offset(engine.generate))
    found = []
    for name, wanted in (("one", True), ("two", False)):
        if not wanted:
            monkeypatch.setattr(OnePass, "_scores_once", lambda _: False)
        args = config(
            output_dir=str(tmp_path / name), max_steps=2, learning_rate=1e-3, logging_steps=1, seed=3, **fields
        )
        found.append(trained(make_trainer, args))
    (one, one_log, one_passes), (two, two_log, two_passes) = found
    for name, value in two.items():
        # The same sums over other rows; Adam's first steps have the size of the learning rate, whatever the gradient.
        torch.testing.assert_close(one[name], value, rtol=0, atol=2e-5)
    assert [row.keys() for row in one_log] == [row.keys() for row in two_log]
    assert any("mismatch_kl" in name for name in one_log[0])
    assert 4e-4 < one_log[0]["sampling/sampling_logp_difference/max"] < 6e-4
    for ours, theirs in zip(one_log, two_log, strict=True):
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=2e-2, abs=2e-4), name
    trains = [p for p in two_passes if p]
    assert [p for p in one_passes if p] == trains
    without = 1 if "beta" in fields else 0  # the reference
    generations = 2 * args.gradient_accumulation_steps // args.steps_per_generation
    chunks = generations * args.steps_per_generation
    assert len(two_passes) - len(one_passes) == chunks
    assert len(one_passes) - len(trains) == without * chunks


@pytest.mark.parametrize("fields", [{"num_iterations": 2}, {"steps_per_generation": 2}], ids=str)
def test_a_batch_of_several_steps_is_scored_when_it_is_drawn(fields, make_trainer, config):
    trainer = make_trainer(args=config(max_steps=2, **fields))
    trainer.train()
    assert not trainer._scores_once()
    assert trainer.fidelity.last.tokens > 0
    assert "sampling/importance_sampling_ratio/mean" in trainer.state.log_history[0]


def test_a_loss_of_the_users_own_finds_what_trl_gives_it(base, engine, plain, config, lora):
    seen = []

    class Mine(QLoRAGRPOTrainer):
        def _compute_loss(self, model, inputs):
            seen.append({"old_per_token_logps", "importance_sampling_ratio"} <= inputs.keys())
            return super()._compute_loss(model, inputs)

    with Mine(
        model=base, reward_funcs=by_place, train_dataset=plain, peft_config=lora, rollout=engine, args=config()
    ) as trainer:
        trainer.train()
    assert seen == [True]


def test_an_evaluation_between_two_steps_is_measured_as_it_is_drawn(make_trainer, config, plain):
    args = config(max_steps=2, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    trainer = make_trainer(args=args, eval_dataset=plain.select(range(2)))
    trainer.train()
    assert len(trainer.fidelity.history) == 4
    assert any("eval_qlora_rl/mismatch_kl" in row for row in trainer.state.log_history)
