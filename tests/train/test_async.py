"""Rollouts and training at once, on the fake engine: what is sampled, when, by which version, and what is left at the
end."""

import collections
import json
import threading
import time

import pytest
import torch
from datasets import Dataset
from test_arguments import Scripted, call, talking  # noqa: F401 - a fixture

from qlora_rl import ConfigConflictError, QLoRAAsyncGRPOTrainer, RewardFunctionError, load_base
from qlora_rl.contracts import Rollout
from qlora_rl.train.rollouts.ahead import StalenessLimit


def rows(count):
    return Dataset.from_list([{"prompt": f"{10 + i}+{11 + i}=", "number": i} for i in range(count)])


@pytest.fixture
def make_async(base, engine, config, lora):
    """QLoRAAsyncGRPOTrainer on the tiny base; arguments replace the usual ones."""
    made = []

    def make(cls=QLoRAAsyncGRPOTrainer, **arguments):
        usual = {"model": base, "reward_funcs": Reward(), "peft_config": lora, "rollout": engine}
        made.append(cls(**usual | arguments))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()
    assert not [thread for thread in threading.enumerate() if "qlora-rl-rollouts" in thread.name]


class Reward:
    """Differs within every group; counts what it is asked, and may wait or fail."""

    __name__ = "counted"

    def __init__(self, seconds=0.0, fails_at=None):
        self.seconds, self.fails_at, self.calls, self.seen = seconds, fails_at, 0, collections.Counter()
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def __call__(self, completions, number, log_metric=None, **_):
        with self._lock:
            self.calls += 1
            self.seen.update(number)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            call = self.calls
        time.sleep(self.seconds)
        with self._lock:
            self.at_once -= 1
        if call == self.fails_at:
            raise ValueError("the judge is ill")
        log_metric("mine", float(sum(number)))
        return [float(i % 2) for i in range(len(completions))]


def steps_of(trainer):
    return [json.loads(line) for line in (trainer.run.path / "metrics.jsonl").read_text().splitlines()]


class Counted(QLoRAAsyncGRPOTrainer):
    """Notes what each optimizer step is really computed from."""

    def __init__(self, *args, **kwargs):
        self.trained, self.staleness = collections.Counter(), []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.trained.update(row["number"] for row in inputs)
        return output

    def _rollout_facts(self):
        facts = super()._rollout_facts()
        if "staleness_max" in facts:
            self.staleness.append((facts["policy_version"], facts["rollout_version"], facts["staleness_max"]))
        return facts


@pytest.mark.parametrize(
    ("staleness", "fields"),
    [
        (0, {}),
        (1, {}),
        (2, {}),
        (1, {"num_train_epochs": 2, "max_steps": -1}),  # over the end of an epoch
        (2, {"steps_per_generation": 2, "gradient_accumulation_steps": 2}),
        (1, {"steps_per_generation": 1, "gradient_accumulation_steps": 2}),  # two batches for one policy
        (1, {"steps_per_generation": 2, "gradient_accumulation_steps": 1}),  # two steps from one batch
        (1, {"num_iterations": 2}),
    ],
)
def test_every_prompt_of_an_epoch_is_sampled_and_trained_on_exactly_once(make_async, config, staleness, fields):
    epochs = fields.get("num_train_epochs", 1)
    reward = Reward()
    arguments = config(**{"max_steps": -1, "num_train_epochs": 1} | fields)
    trainer = make_async(Counted, args=arguments, reward_funcs=reward, train_dataset=rows(8), max_staleness=staleness)
    trainer.train()
    expected = dict.fromkeys(range(8), 2 * epochs)  # two completions of each
    assert trainer.trained == reward.seen == expected
    assert all(age <= staleness for _, _, age in trainer.staleness)
    assert all(age == pushed - drew for pushed, drew, age in trainer.staleness)
    if staleness == 0:
        assert {age for _, _, age in trainer.staleness} == {0}


def test_without_staleness_it_is_grpo_to_the_last_bit(make_async, make_trainer, config, tmp_path):
    from peft import LoraConfig

    found = []
    for make, extra in ((make_trainer, {}), (make_async, {"max_staleness": 0})):
        torch.manual_seed(0)
        trainer = make(
            args=config(output_dir=str(tmp_path / str(len(found))), max_steps=4, seed=3),
            train_dataset=rows(8),
            reward_funcs=Reward(),
            peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]),
            **extra,
        )
        trainer.train()
        weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        found.append((weights, steps_of(trainer), trainer.state.log_history))
    (ours, our_steps, our_log), (theirs, their_steps, their_log) = found
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for name in ("reward", "loss", "mismatch_kl", "completion_length", "rollout_tokens"):
        assert [step[name] for step in our_steps] == [step[name] for step in their_steps]
    for name in ("mine", "num_tokens", "completions/mean_length", "rewards/counted/mean"):
        assert [entry[name] for entry in our_log[:4]] == [entry[name] for entry in their_log[:4]]


def test_rewards_that_wait_are_asked_for_two_batches_at_once(make_async, config):
    """What that is worth in seconds: tests/engine/test_async_training.py, on a machine that does nothing else."""
    reward = Reward(0.5)
    trainer = make_async(args=config(max_steps=6), train_dataset=rows(12), reward_funcs=reward, max_staleness=1)
    trainer.train()
    assert reward.most_at_once == 2
    steps = steps_of(trainer)
    assert steps[0]["staleness_max"] == 0
    assert {step["staleness_max"] for step in steps[1:]} <= {0, 1}  # younger where a thread was late
    assert sum(step["staleness_max"] for step in steps) >= 3
    assert {"trainer_wait_seconds", "rollout_idle_seconds", "rollouts_ready", "rollout_version"} <= set(steps[0])
    assert "qlora_rl/staleness_mean" in trainer.state.log_history[0]


def test_an_error_in_a_thread_is_raised_by_train_as_itself_and_no_thread_is_left(make_async, config):
    trainer = make_async(
        args=config(max_steps=6), train_dataset=rows(12), reward_funcs=Reward(0.05, fails_at=3), max_staleness=2
    )
    with pytest.raises(RewardFunctionError, match="the judge is ill"):
        trainer.train()
    assert trainer.state.global_step <= 4  # calls of several threads: which of them is the third may vary
    assert json.loads((trainer.run.path / "summary.json").read_text())["status"] == "failed"
    trainer.train()  # it is whole, and begins anew
    assert trainer.state.global_step == 6


def test_ctrl_c_ends_the_trainer_and_its_threads(make_async, config):
    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            raise KeyboardInterrupt

    trainer = make_async(
        args=config(max_steps=6),
        train_dataset=rows(12),
        reward_funcs=Reward(0.3),
        callbacks=[Interrupt()],
        max_staleness=2,
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not [thread for thread in threading.enumerate() if "qlora-rl-rollouts" in thread.name]
    assert json.loads((trainer.run.path / "summary.json").read_text())["status"] == "interrupted"


def test_it_evaluates_the_policy_of_the_moment_in_between_and_loses_no_batch(make_async, config):
    reward = Reward()
    trainer = make_async(
        Counted,
        args=config(
            max_steps=4, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, num_generations_eval=1
        ),
        train_dataset=rows(8),
        eval_dataset=rows(4),
        reward_funcs=reward,
        max_staleness=1,
    )
    trainer.train()
    assert sum("eval_reward" in entry for entry in trainer.state.log_history) == 4
    assert max(age for _, _, age in trainer.staleness) <= 1
    assert trainer.trained == {**dict.fromkeys(range(4), 2 + 4), **dict.fromkeys(range(4, 8), 2)}
    before = trainer.engine.version
    assert "eval_reward" in trainer.evaluate()  # the last step's policy was pushed for the last evaluation already
    assert trainer.engine.version == before


class Clerk:
    """An environment with a slow tool; while a rollout lasts it must have one of its own."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.owner = None

    def reset(self, number, **_):
        assert self.owner is None, "two rollouts share an environment"
        self.owner = number
        return f" {number}!"

    def look(self, by: int) -> str:
        """
        Looks it up.

        Args:
            by: How far.
        """
        time.sleep(0.05)
        return f"{self.owner} found"

    def get_reward(self):
        number, self.owner = self.owner, None
        return float(number)


class Asking(Scripted):
    """Calls the tool in the first turn and ends in the second; notes which version was asked for each prompt's
    turns."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.versions, self.inside = collections.defaultdict(list), 0

    def generate(self, prompts, sampling=None, **fields):
        self.inside += 1
        assert self.inside == 1, "an engine that knows nothing of threads was asked by two"
        is_answered = "<tool_response>" in bytes(prompts[0]).decode()
        line = "done<|im_end|>" if is_answered else call("look", by=1)
        ids = [list(line.encode()) for _ in prompts]
        for prompt in prompts:
            self.versions[bytes(prompt).decode().split("!")[0].split()[-1]].append((is_answered, self.version))
        time.sleep(0.02)
        self.inside -= 1
        return Rollout(ids, [[-1.0] * len(i) for i in ids], self.version, 0.02)


@pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")
def test_a_conversation_ends_with_the_version_it_began_with_and_each_thread_has_environments_of_its_own(
    make_async,
    talking,  # noqa: F811
    config,
):
    Clerk.made = 0
    rows = [{"prompt": [{"role": "user", "content": "Look"}], "number": i} for i in range(12)]
    with Asking(load_base(talking), max_model_length=4096) as engine:
        trainer = make_async(
            model=talking,
            rollout=engine,
            args=config(max_steps=6, max_completion_length=400),
            train_dataset=Dataset.from_list(rows),
            reward_funcs=None,
            environment_factory=Clerk,
            max_staleness=2,
            canary_every=0,
        )
        trainer.train()
        turns = engine.versions
    assert set(turns) == {str(i) for i in range(12)}
    for asked in turns.values():
        assert sorted(is_answered for is_answered, _ in asked) == [False, False, True, True]
        assert len({version for _, version in asked}) == 1
    assert len({asked[0][1] for asked in turns.values()}) > 2
    assert 4 < Clerk.made <= 3 * 4
    assert sorted(step["reward"] for step in steps_of(trainer)) != [0.0] * 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"max_staleness": -1}, "max_staleness=-1 < 0"), ({"rollout_threads": 0}, "rollout_threads=0 < 1")],
)
def test_what_contradicts_is_rejected(make_async, config, fields, message):
    with pytest.raises(ConfigConflictError, match=message):
        make_async(args=config(), train_dataset=rows(4), **fields)


def test_what_cannot_go_with_overlap_is_rejected_at_once(make_async, config, colocate):
    with pytest.raises(ConfigConflictError, match="vllm_enable_sleep_mode=True"):
        make_async(args=config(vllm_enable_sleep_mode=True), train_dataset=rows(4), rollout="colocate")
    assert colocate[-1]._is_closed


def test_an_interrupted_run_that_is_called_again_begins_with_a_batch_of_its_own(make_async, config):
    """The first call ends between the two steps that one batch is for."""
    reward = Reward(fails_at=2)
    trainer = make_async(
        Counted,
        args=config(steps_per_generation=2, gradient_accumulation_steps=1, max_steps=3),
        train_dataset=rows(8),
        reward_funcs=reward,
        max_staleness=1,
        rollout_threads=1,
    )
    with pytest.raises(RewardFunctionError):
        trainer.train()
    trainer._step += 1  # as if it had been interrupted there
    trainer.trained.clear()
    trainer.train()
    assert trainer.state.global_step == 3
    assert sum(trainer.trained.values()) == 2 * 8  # two batches of four prompts, two completions of each


# --- the turnstile --------------------------------------------------------------------------------------------------


def in_thread(work):
    done = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    return thread, done


def test_a_rollout_that_would_become_too_old_does_not_begin():
    turnstile = StalenessLimit(1, lambda: 7, holds_two=True)
    turnstile.advance(1)
    turnstile.leave(turnstile.enter(2))
    thread, done = in_thread(lambda: turnstile.enter(3))
    thread.join(0.1)
    assert not done
    turnstile.advance(2)
    thread.join(60)
    assert (done[0].policy, done[0].version) == (2, 7)


@pytest.mark.parametrize(("holds_two", "serving", "waits"), [(True, 1, False), (True, 2, True), (False, 1, True)])
def test_a_push_waits_for_what_it_would_overwrite_and_for_nothing_else(holds_two, serving, waits):
    version = 1
    turnstile = StalenessLimit(2, lambda: version, holds_two=holds_two)
    turnstile.advance(1)
    visit = turnstile.enter(1)
    version = serving

    def push():
        with turnstile.pushing():
            return "pushed"

    thread, done = in_thread(push)
    thread.join(0.2 if waits else 60)
    assert bool(done) is not waits
    turnstile.leave(visit)
    thread.join(60)
    assert done == ["pushed"]


def test_nothing_begins_during_a_push():
    turnstile = StalenessLimit(0, lambda: 1, holds_two=True)
    turnstile.advance(1)
    with turnstile.pushing():
        thread, done = in_thread(lambda: turnstile.enter(1))
        thread.join(0.1)
        assert not done
    thread.join(60)
    assert done
