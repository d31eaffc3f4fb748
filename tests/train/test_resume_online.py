"""Runs of the other trainers that sample go on, too: RLOO, online DPO, and GRPO whose rollouts overlap. `FakeEngine`,
one process."""

import collections

import pytest
from online_kinds import KINDS
from resumed import assert_same_run, lines, make
from test_resume import KillAt, Killed, killed, rows

from qlora_rl import ConfigConflictError, QLoRAAsyncGRPOTrainer

MIDDLE = {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
EVALUATED = {"eval_dataset": rows(2, 60), "eval_strategy": "steps", "eval_steps": 3}
CASES = {
    # steps, saved at, killed before; fields
    "in the third epoch": (12, 10, 11, {"train_dataset": rows(8)}),
    "at the end of an epoch": (6, 4, 5, {"train_dataset": rows(8)}),
    "completions of an earlier step": (8, 3, 5, MIDDLE),
    "two steps of one batch": (6, 3, 5, {"steps_per_generation": 2, "gradient_accumulation_steps": 1}),
    "two batches of one step": (6, 3, 5, {"steps_per_generation": 1, "gradient_accumulation_steps": 2}),
    "evaluation pushes before the checkpoint": (6, 3, 5, EVALUATED),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_goes_on_is_the_run_that_was_never_stopped(kind, base, tmp_path):
    trainer, config, own = KINDS[kind]
    fields = {"trainer": trainer, "config": config, "max_steps": 8, "save_steps": 3, "logging_steps": 2, **own}
    make(base, tmp_path / "straight", "fake", **fields).train()
    killed(base, tmp_path / "killed", 5, **fields)
    with make(base, tmp_path / "killed", "fake", **fields) as trainer:
        trainer.train()
        assert len(trainer.fidelity.history) == 5
    assert_same_run(tmp_path / "killed", tmp_path / "straight")


@pytest.mark.parametrize("case", CASES)
def test_without_staleness_it_goes_on_bit_for_bit_and_is_grpo(case, base, tmp_path):
    steps, saved, stop, fields = CASES[case]
    fields = {"max_steps": steps, "save_steps": saved, **fields}
    ours = {**fields, "trainer": QLoRAAsyncGRPOTrainer, "max_staleness": 0}
    make(base, tmp_path / "straight", "fake", **ours).train()
    killed(base, tmp_path / "killed", stop, **ours)
    make(base, tmp_path / "killed", "fake", **ours).train()
    assert_same_run(tmp_path / "killed", tmp_path / "straight")
    make(base, tmp_path / "grpo", "fake", **fields).train()
    assert lines(tmp_path / "grpo", "sync.jsonl") == lines(tmp_path / "straight", "sync.jsonl")
    for plain, found in zip(lines(tmp_path / "grpo"), lines(tmp_path / "straight"), strict=True):
        assert plain == {name: found[name] for name in plain}


class Noted(QLoRAAsyncGRPOTrainer):
    """Notes what every step is computed from, and with which seeds it was sampled."""

    def __init__(self, *args, **kwargs):
        self.trained, self.seeds = [], {}
        super().__init__(*args, **kwargs)
        real = self.bridge.sample

        def sample(prompts, images=None, *, seed, **more):
            text = self.processing_class.decode(prompts[0])
            self.seeds.setdefault(text, []).append(seed)
            return real(prompts, images, seed=seed, **more)

        self.bridge.sample = sample

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.trained.append((self.state.global_step, [row["prompt"] for row in inputs]))
        return output


@pytest.mark.parametrize(
    ("case", "staleness"),
    [
        ("plain", 1),
        ("plain", 2),
        ("completions of an earlier step", 2),
        ("two batches of one step", 1),
        # Both ages with both cases: nothing that the four above do not reach.
        pytest.param("completions of an earlier step", 1, marks=pytest.mark.full),
        pytest.param("two batches of one step", 2, marks=pytest.mark.full),
    ],
)
def test_with_staleness_every_batch_is_trained_on_once_and_no_seed_is_used_twice(case, staleness, base, tmp_path):
    fields = {"max_steps": 8, "save_steps": 3, "train_dataset": rows(16), **CASES.get(case, (0, 0, 0, {}))[-1]}
    fields |= {"trainer": Noted, "max_staleness": staleness, **EVALUATED}
    with make(base, tmp_path / "straight", "fake", **fields) as straight:
        straight.train()
    stopped = killed(base, tmp_path / "killed", 5, **fields)
    with make(base, tmp_path / "killed", "fake", **fields) as trainer:
        trainer.train()
    before = [batch for batch in stopped.trained if batch[0] < 3]
    assert before + trainer.trained == straight.trained
    if case == "plain":
        counted = collections.Counter(prompt for _, batch in straight.trained for prompt in batch)
        assert set(counted.values()) == {2}
    # The seeds: those of the run that was never stopped, batch by batch, and each of one batch alone.
    for text, seeds in trainer.seeds.items():
        assert set(seeds) <= set(straight.seeds[text])
    used = [seed for seeds in straight.seeds.values() for seed in seeds]
    assert len(used) == len(set(used))
    assert lines(tmp_path / "killed", "sync.jsonl")[-1]["version"] == len(lines(tmp_path / "straight", "sync.jsonl"))
    versions = [line["version"] for line in lines(tmp_path / "killed", "sync.jsonl")]
    assert versions == list(range(1, len(versions) + 1))
    written = [(line["step"], "eval_loss" in line) for line in lines(tmp_path / "killed")]
    assert [step for step, evaluated in written if not evaluated] == list(range(1, 9))
    assert [step for step, evaluated in written if evaluated] == [3, 6, 8]  # and at the end


def test_another_staleness_is_another_run(base, tmp_path):
    fields = {"trainer": QLoRAAsyncGRPOTrainer, "save_steps": 2}
    make(base, tmp_path, "fake", max_steps=2, max_staleness=1, **fields).train()
    with pytest.raises(ConfigConflictError, match="max_staleness was 1 and is 2"):
        make(base, tmp_path, "fake", max_steps=3, max_staleness=2, **fields)


def test_what_the_alarm_has_learnt_goes_on(base, tmp_path):
    with make(base, tmp_path, "fake", max_steps=2, save_steps=2) as trainer:
        trainer.train()
        learnt = trainer.alarm.state()
    assert learnt["threshold"] > 0
    with make(base, tmp_path, "fake", max_steps=3, save_steps=3) as trainer:
        trainer.add_callback(KillAt(2))
        with pytest.raises(Killed):
            trainer.train()
        assert trainer.alarm.state() == learnt
