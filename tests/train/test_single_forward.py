"""The sampled tokens are scored once, with what TRL's two passes find."""

from dataclasses import replace

import pytest
import torch
from online_kinds import by_place
from support import randomise
from transformers import Qwen2Config, Qwen2ForCausalLM

from qlora_rl import QLoRAGRPOTrainer
from qlora_rl.train import single_forward
from qlora_rl.train.single_forward import SingleForward

# Versions count on, as both trainings have one engine.
NOT_COMPARED = ("seconds", "per_s", "time", "version", "threshold")


def offset(generate, by=lambda row, column: 5e-4 * ((row + column) % 3 - 1)):
    """An engine whose probabilities differ from the trainer's; by default less than the alarm minds."""

    def distorted(*args, **kwargs):
        rollout = generate(*args, **kwargs)
        logprobs = [[v + by(i, j) for j, v in enumerate(row)] for i, row in enumerate(rollout.logprobs)]
        return replace(rollout, logprobs=logprobs)

    return distorted


def trained(make_trainer, args, base, engine, seed=0):
    """Adapter, log and passes through the model of a training that begins with an adapter that does something."""
    # The canary's passes, which are without gradients, too, are not the training's.
    trainer = make_trainer(args=args, model=base, rollout=engine, canary_every=0)
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
def test_one_pass_trains_and_logs_what_two_do(fields, make_trainer, exact, config, monkeypatch, tmp_path):
    base, engine = exact
    monkeypatch.setattr(engine, "generate", offset(engine.generate))
    found = []
    for name, wanted in (("one", True), ("two", False)):
        if not wanted:
            monkeypatch.setattr(SingleForward, "_scores_once", lambda _: False)
        args = config(
            output_dir=str(tmp_path / name),
            max_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            seed=3,
            bf16=False,
            **fields,
        )
        found.append(trained(make_trainer, args, base, engine))
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


@pytest.mark.parametrize(
    ("mode", "low", "high"),
    [
        ("token_truncate", None, 1.1),
        ("token_mask", 0.9, None),
        ("sequence_truncate", None, 1.01),
        ("sequence_mask", None, 1.05),
    ],
)
def test_the_loss_reads_the_ratio_of_this_pass(
    mode, low, high, make_trainer, base, engine, config, monkeypatch, tmp_path
):
    """Plain gradient descent, in which a weight of the loss is a weight of the step; ratios that the bounds cut."""
    monkeypatch.setattr(
        engine, "generate", offset(engine.generate, lambda row, column: 0.1 * ((2 * row + column) % 5 - 2))
    )

    def moved(name):
        args = config(
            output_dir=str(tmp_path / name), max_steps=1, learning_rate=1.0, optim="sgd", max_grad_norm=0.0, seed=3,
            vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        )  # fmt: skip
        trainer = make_trainer(args=args, on_mismatch="warn", canary_every=0)
        torch.manual_seed(0)
        randomise(trainer.model)
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in trained]
        trainer.train()
        return torch.cat([(p.detach() - old).flatten() for p, old in zip(trained, before, strict=True)])

    one = moved("one")
    with monkeypatch.context() as patch:
        patch.setattr(SingleForward, "_scores_once", lambda _: False)
        two = moved("two")
    with monkeypatch.context() as patch:
        patch.setattr(single_forward, "importance_ratio", lambda logprobs_BT, *_, **__: torch.ones_like(logprobs_BT))
        without = moved("without")
    assert two.norm() > 0
    assert (one - two).norm() < 2e-3 * two.norm()
    assert (without - two).norm() > 2e-2 * two.norm()  # the first line would see it


@pytest.mark.parametrize("fields", [{"num_iterations": 2}, {"steps_per_generation": 2}], ids=str)
def test_a_batch_of_several_steps_is_scored_when_it_is_sampled(fields, make_trainer, config):
    trainer = make_trainer(args=config(max_steps=2, **fields))
    trainer.train()
    assert not trainer._scores_once()
    assert trainer.fidelity.last.tokens > 0
    assert "sampling/importance_sampling_ratio/mean" in trainer.state.log_history[0]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_with_dropout_the_ratio_is_that_of_two_masks_as_in_trl(dropout, make_trainer, config):
    """TRL's two passes have a mask each, so its ratio is not 1; one pass would make it so."""
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=["q_proj", "down_proj"])
    trainer = make_trainer(args=config(max_steps=2), peft_config=lora, canary_every=0)
    passes = []
    trainer.model.get_base_model().model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    trainer.train()
    scored = sum(not grad for grad in passes)
    assert trainer._scores_once() == (dropout == 0)
    assert bool(scored) == bool(dropout)


def test_a_rate_that_attention_hands_on_is_dropout_too():
    from qlora_rl.base.model_classes import has_dropout

    config = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    for rate in (0.0, 0.1):
        model = Qwen2ForCausalLM(Qwen2Config(**config, num_key_value_heads=1, attention_dropout=rate))
        assert has_dropout(model) == (rate > 0)
    assert has_dropout(torch.nn.Sequential(torch.nn.Dropout1d(0.1)))
    assert not has_dropout(torch.nn.Sequential(torch.nn.Dropout1d(0.0)))


@pytest.mark.parametrize("name", ["_compute_loss", "compute_loss"])
def test_a_loss_of_the_users_own_finds_what_trl_gives_it(name, base, engine, plain, config, lora):
    seen = []

    def loss(self, model, inputs, *args, **kwargs):
        seen.append({"old_per_token_logps", "importance_sampling_ratio"} <= inputs.keys())
        return getattr(super(Mine, self), name)(model, inputs, *args, **kwargs)

    Mine = type("Mine", (QLoRAGRPOTrainer,), {name: loss, "__module__": __name__})
    with Mine(
        model=base, reward_funcs=by_place, train_dataset=plain, peft_config=lora, rollout=engine, args=config()
    ) as trainer:
        trainer.train()
    assert seen == [True]


def test_an_evaluation_between_two_steps_is_measured_as_it_is_sampled(make_trainer, config, plain):
    args = config(max_steps=2, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    trainer = make_trainer(args=args, eval_dataset=plain.select(range(2)))
    trainer.train()
    assert len(trainer.fidelity.history) == 4
    assert any("eval_qlora_rl/mismatch_kl" in row for row in trainer.state.log_history)


def test_who_scores_while_drawing_gets_logprobs(make_trainer, engine, config):
    """A rollout_func has to return logprobs; it may ask the trainer for them."""
    found = []

    def sample(prompts, trainer):
        ids = [trainer.processing_class(text)["input_ids"] for text in prompts]
        rollout = trainer.engine.generate(ids, max_tokens=4)
        rows = [p + c for p, c in zip(ids, rollout.completion_ids, strict=True)]
        for row, completion in zip(rows, rollout.completion_ids, strict=True):
            whole = torch.tensor([row])
            scored = trainer._get_per_token_logps_and_entropies(
                trainer.model, whole, torch.ones_like(whole), len(completion)
            )
            found.append(scored[0][0].tolist())
        return {
            "prompt_ids": ids,
            "completion_ids": rollout.completion_ids,
            "logprobs": [r[:] for r in found[-len(ids) :]],
        }

    trainer = make_trainer(args=config(max_steps=1), rollout_func=sample)
    trainer.train()
    assert found
    assert all(value < 0 for row in found for value in row)


def test_a_training_that_was_interrupted_within_a_batch_begins_with_a_new_one(make_trainer, config, monkeypatch):
    trainer = make_trainer(args=config(max_steps=4, gradient_accumulation_steps=4, save_strategy="no"))
    kept, calls = trainer.training_step, []

    def struck(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return kept(*args, **kwargs)

    monkeypatch.setattr(trainer, "training_step", struck)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer._step % 4 != 0
    trainer.train()  # the alarm would see a batch that was not sampled for its step
    assert trainer.state.global_step == 4
    assert trainer._step == 16
