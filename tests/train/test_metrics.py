"""The alarm in a trainer whose engine is plain torch; on real vLLM: tests/engine/test_mismatch.py."""

import json
import re
import threading
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from online_kinds import KINDS, by_place
from peft import IA3Config, LoraConfig, get_peft_model
from support import randomise
from test_models import NF4
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from qlora_rl import FakeEngine, PolicyMismatchError, QLoRAAsyncGRPOTrainer, attach, load_base, prepare_base
from qlora_rl.fidelity import measure
from qlora_rl.report import write_report
from qlora_rl.report.run import read_run, summarise
from qlora_rl.report.sentences import fidelity_sentence
from qlora_rl.sync import mismatch_debugger
from qlora_rl.sync.mismatch_debugger import Diagnosis, MismatchDebugger, Sampled


def test_dropout_is_no_alarm(make_trainer, config, model_dir):
    """In float32: with AVX2's attention a large adapter makes bf16 logprobs depend on how many tokens are scored at
    once."""
    base = prepare_base(model_dir, "none", compute_dtype="float32")
    lora = LoraConfig(r=4, lora_alpha=64, lora_dropout=0.5, target_modules="all-linear")
    engine = FakeEngine(load_base(base), max_model_length=64)
    args = config(max_steps=4, learning_rate=3e-2, bf16=False)
    trainer = make_trainer(args=args, model=base, rollout=engine, peft_config=lora)
    trainer.train()
    assert trainer.alarm.diagnoses
    assert {d.cause for d in trainer.alarm.diagnoses.values()} <= {"dropout", "noise"}
    assert trainer.model.training


def test_an_engine_that_is_given_nothing_new_is_named_and_the_run_directory_says_so(make_trainer, config, tmp_path):
    trainer = make_trainer(args=config(max_steps=6, learning_rate=5e-2), canary_every=0)
    engine = trainer.engine
    engine.drop_adapter()  # all tests share it
    real, versions = engine.serve_slot, []

    def serve_slot(slots, index, version, recover):
        versions.append(version)
        real(slots, index if version < 3 else 1 - index, version, recover)

    engine.serve_slot = serve_slot
    try:
        with pytest.raises(PolicyMismatchError, match="version 2") as stopped:
            trainer.train()
    finally:
        del engine.serve_slot
    assert stopped.value.cause == "stale"
    assert versions[-1] in (3, 4)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "PolicyMismatchError" in summary["error"]


def test_an_adapter_that_runs_under_autocast_only_is_examined_all_the_same(base, engine):
    """IA3's vectors are float32: beside 16-bit activations attention takes them under autocast alone, as in
    training."""
    engine.drop_adapter()  # all tests share it
    ia3 = IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(load_base(base), ia3)
    with pytest.raises(RuntimeError, match="same dtype"), torch.no_grad():
        model(input_ids=torch.tensor([[40, 41, 42]]))
    examiner = MismatchDebugger(model, engine, SimpleNamespace(mode="weights"), None, torch.bfloat16)
    sampled = Sampled([[40, 41]] * 4, [[42, 43]] * 4, [[-0.1, -9.0]] * 4)  # as no policy here would sample
    found = examiner.examine(sampled, limit=1e-3)
    assert found.cause == "function"
    assert found.distance > 1e-3


def test_a_step_writes_the_profile_and_the_threshold(make_trainer, config, tmp_path):
    trainer = make_trainer(args=config(max_steps=2))
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert len(row["by_position"]) == 8
        assert [p for p in row["by_position"] if p is not None]
        assert row["scaled_diff"] >= 0
    assert rows[1]["mismatch_threshold"] == trainer.alarm.threshold
    assert not any("by_position" in name for name in trainer.state.log_history[0])
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


# --- what goes wrong behind the canary's back, in every trainer that samples ----------------------------------------

MODULE = "model.layers.1.mlp.down_proj"


def places(strategy):
    """The buffers that serve."""
    placed = strategy.transport._live[-1]
    return placed.slots.places[placed.slot]


def double_alpha(strategy):
    for name, place in places(strategy).items():
        if "lora_B" in name:
            place.mul_(2.0)


def lose_a_layer(strategy):
    for matrix in "AB":
        places(strategy)[f"base_model.model.{MODULE}.lora_{matrix}.weight"].zero_()


FAULTS = {"scale": (double_alpha, "2 times as strongly"), "layer": (lose_a_layer, MODULE)}


@pytest.fixture
def break_after(engine, monkeypatch):
    """Let a fault have its way with the engine's buffers after every push but the first few."""
    engine.drop_adapter()  # all tests share it

    def broken(bridge, fault, pushes=3, *, hidden=False):
        strategy, real, held, count = bridge.strategy, bridge.strategy.push, engine.held_adapter, []

        def push():
            report = real()
            count.append(report.version)
            if len(count) > pushes:
                digests = held(8)
                fault(strategy)
                if hidden:  # as if the buffers were right, and the multiplication wrong
                    monkeypatch.setattr(engine, "held_adapter", lambda rank: digests)
            return report

        monkeypatch.setattr(strategy, "push", push)

    return broken


@pytest.fixture
def make_async(base, engine, lora):
    made = []

    def make(**arguments):
        made.append(QLoRAAsyncGRPOTrainer(model=base, reward_funcs=by_place, rollout=engine, **arguments))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def rows(trainer):
    return [json.loads(line) for line in (trainer.run.path / "metrics.jsonl").read_text().splitlines()]


LARGE = {"learning_rate": 5e-2, "max_completion_length": 8}
WIDE = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])


@pytest.mark.parametrize("staleness", [1, 2])
def test_staleness_is_no_alarm(make_async, config, plain, staleness, caplog):
    trainer = make_async(
        args=config(max_steps=8, **LARGE),
        train_dataset=plain,
        peft_config=WIDE,
        max_staleness=staleness,
        canary_every=0,
    )
    trainer.train()
    steps = rows(trainer)
    assert {d.cause for d in trainer.alarm.diagnoses.values()} <= {"noise"}
    assert not [r for r in caplog.records if "trainer and engine are" in r.message and r.levelname == "WARNING"]
    stale = [step for step in steps if step["staleness_max"]]
    assert len(stale) >= 3
    # What is recorded is what was measured; as GRPO's alarm looks at it, it would be a fault.
    assert max(step["scaled_diff"] for step in stale) > 10 * trainer.alarm.threshold
    again = [step["rescored_diff"] for step in steps[1:]]
    assert max(again) <= trainer.alarm.threshold
    assert "rescored_diff" not in steps[0]  # nothing was sampled before
    run = read_run(trainer.run.path)
    said = fidelity_sentence(run, summarise(run))
    assert f"up to {staleness} polic" in said
    assert "drifted" not in said


@pytest.mark.parametrize("staleness", [None, 0, 1])
def test_an_engine_whose_logits_are_nan_ends_the_run(
    make_trainer, make_async, config, plain, engine, monkeypatch, staleness
):
    """Every third token, in every rollout of training but the first two; what is scored anew is whole."""
    engine.drop_adapter()
    real, calls = engine.generate, []

    def generate(*arguments, **named):
        rollout = real(*arguments, **named)
        calls.append(1)
        if len(calls) > 2:
            for row in rollout.logprobs:
                row[::3] = [None] * len(row[::3])
        return rollout

    monkeypatch.setattr(engine, "generate", generate)
    fields = {"args": config(max_steps=10), "train_dataset": plain, "canary_every": 0}
    if staleness is None:
        trainer = make_trainer(**fields)
    else:
        trainer = make_async(**fields, peft_config=WIDE, max_staleness=staleness)
    with pytest.raises(PolicyMismatchError, match="of the sampled tokens a side has no logprob") as stopped:
        trainer.train()
    assert stopped.value.cause == "nan"
    assert trainer.state.global_step == 3  # the fourth batch is the second in a row


@pytest.mark.parametrize(
    ("cause", "hidden", "staleness"),
    [("scale", False, 1), ("layer", False, 2), ("layer", True, 1), ("scale", True, 2)],
    ids=["scale-buffers-1", "layer-buffers-2", "layer-multiplication-1", "scale-multiplication-2"],
)
def test_a_broken_sync_is_found_behind_staleness_and_named(
    make_async, break_after, config, plain, staleness, cause, hidden
):
    trainer = make_async(
        args=config(max_steps=10, **LARGE | {"max_completion_length": 16}),
        train_dataset=plain,
        peft_config=WIDE,
        max_staleness=staleness,
        canary_every=0,
    )
    fault, said = FAULTS[cause]
    break_after(trainer.bridge, fault, hidden=hidden)
    with pytest.raises(PolicyMismatchError, match=said) as stopped:
        trainer.train()
    assert stopped.value.cause == cause
    assert trainer.state.global_step in ((4, 5) if hidden else (3,))  # after three honest steps
    assert not [thread for thread in threading.enumerate() if "qlora-rl-rollouts" in thread.name]


@pytest.mark.parametrize("kind", ["rloo", "online_dpo"])
def test_the_other_trainers_that_sample_are_watched_too(make_online, break_after, kind, plain):
    trainer = make_online(kind, {"max_steps": 8, "learning_rate": 5e-2}, peft_config=WIDE, canary_every=0)
    break_after(trainer.bridge, double_alpha)
    with pytest.raises(PolicyMismatchError, match="2 times as strongly"):
        trainer.train()
    assert trainer.state.global_step == 3
    steps = rows(trainer)
    assert steps[1]["mismatch_threshold"] > 0


def test_an_attached_trainer_is_watched_too(model_dir, engine_in_flight, plain, config, break_after):
    model = AutoModelForCausalLM.from_pretrained(model_dir, quantization_config=NF4)
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(model_dir, padding_side="left"),
        reward_funcs=by_place,
        train_dataset=plain,
        peft_config=WIDE,
        args=config(max_steps=8, **LARGE),
    )
    with attach(trainer, rollout=engine_in_flight, canary_every=0) as held:
        break_after(held.bridge, double_alpha)
        with pytest.raises(PolicyMismatchError, match="2 times as strongly"):
            trainer.train()
        assert held.alarm.threshold > 0


def test_completions_scored_together_are_scored_as_alone(make_trainer, monkeypatch):
    """Of different lengths, so that padding has a place; counted are the forwards."""
    trainer = make_trainer()
    randomise(trainer.model)
    generator = torch.Generator().manual_seed(0)
    lengths = [(2, 5), (7, 1), (4, 3), (1, 6)]
    rows = [[torch.randint(3, 60, (n,), generator=generator).tolist() for n in each] for each in lengths]
    sampled = Sampled([p for p, _ in rows], [c for _, c in rows], [[-1.0] * len(c) for _, c in rows])
    examiner = MismatchDebugger(trainer.model, trainer.engine, trainer._link.strategy, trainer.base_check, None)
    passes = []
    trainer.model.get_base_model().model.register_forward_hook(lambda *_: passes.append(1))
    together = examiner._scaled(sampled, (1.0, 0.7))
    assert len(passes) == 1
    monkeypatch.setattr("qlora_rl.sync.forward._LOGITS", 1)
    alone = examiner._scaled(sampled, (1.0, 0.7))
    assert len(passes) == 1 + len(rows)
    for temperature, values in alone.items():
        torch.testing.assert_close(together[temperature], values, rtol=0, atol=0.02)  # bf16 logits
        assert values.numel() == sum(c for _, c in lengths)


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_an_examination_has_a_minute_and_says_what_it_left_out(make_trainer, config, monkeypatch, caplog, seconds):
    trainer = make_trainer(args=config(max_steps=1))
    trainer.train()
    randomise(trainer.model)
    examiner = MismatchDebugger(trainer.model, trainer.engine, trainer._link.strategy, trainer.base_check, None)
    unlikely = Sampled([[40, 41]] * 4, [[42, 43]] * 4, [[-0.1, -9.0]] * 4)
    passes = []
    trainer.model.get_base_model().model.register_forward_hook(lambda *_: passes.append(1))
    monkeypatch.setattr(mismatch_debugger, "_SECONDS", seconds)
    found = examiner._under_other_adapters(unlikely, 1.0, 1e-3)
    assert len(passes) == (0 if seconds == 0.0 else len(found) + 5)  # two layers, four modules: the nearest counts
    assert [each.cause for _, each in found].count("layer") == (seconds > 0)
    assert ("which of 2 layers is lost were not looked for" in caplog.text) == (seconds == 0.0)


def test_what_another_ranks_engine_is_shown_to_hold_is_the_cause_on_all(make_trainer, config, monkeypatch):
    """Whoever finds nothing does not go on alone to what all ranks of a sharded trainer compute together."""
    trainer = make_trainer(args=config(max_steps=1))
    trainer.train()
    examiner = MismatchDebugger(trainer.model, trainer.engine, trainer._link.strategy, trainer.base_check, None)
    theirs = Diagnosis("stale", "rank 1's was not updated")
    monkeypatch.setattr(mismatch_debugger, "ranks", lambda: SimpleNamespace(gather=lambda value, _: [value, theirs]))
    for proof in ("_held", "_bases"):
        monkeypatch.setattr(examiner, proof, lambda: None)
    monkeypatch.setattr(examiner, "_tried", lambda *_: pytest.fail("it went on alone"))
    found = examiner.examine(Sampled([], [], []), 0.1)
    assert (found.cause, found.is_verified) == ("stale", True)


def test_ranks_that_share_an_engine_ask_it_the_same_whatever_they_find(make_trainer, config, monkeypatch):
    trainer = make_trainer(args=config(max_steps=1))
    trainer.train()
    examiner = MismatchDebugger(trainer.model, trainer.engine, trainer._link.strategy, trainer.base_check, None)
    asked, before = [], trainer._link.strategy.before
    monkeypatch.setattr(trainer._link.strategy, "before", lambda: (asked.append(1), before())[1])
    for holds in ("the newest", "another"):
        if holds == "the newest":
            trainer.sync()
        else:
            trainer.engine.drop_adapter()
        examiner._held()
    assert len(asked) == 2


def test_a_steps_record_has_what_grpo_dashboards_show(make_trainer, config, tmp_path):
    args = config(output_dir=str(tmp_path / "shown"), logging_steps=1, beta=0.1)
    make_trainer(args=args, reward_funcs=[by_place, lambda completions, **_: [1.0] * len(completions)]).train()
    (line,) = [json.loads(text) for text in (tmp_path / "shown" / "metrics.jsonl").read_text().splitlines()]
    assert line["rewards/by_place/mean"] == 0.5
    assert line["rewards/<lambda>/mean"] == 1.0
    assert line["frac_reward_zero_std"] == 0.0
    assert 0 <= line["completions/clipped_ratio"] <= 1
    assert line["entropy"] > 0
    assert line["kl"] == pytest.approx(0, abs=1e-3)
    assert line["clip_ratio/region_mean"] >= 0
    assert {"loss", "grad_norm", "learning_rate"} <= line.keys()


@pytest.mark.parametrize("kind", ["grpo", *KINDS])
def test_the_record_of_a_step_is_of_all_its_generations(kind, make_trainer, make_online, config, engine, monkeypatch):
    rewards, rollouts, batches = [], [], []

    def reward(completion_ids=None, completions=None, **_):
        rewards.append([len(rewards) + 0.01 * (i % 2) for i in range(len(completions))])
        return rewards[-1]

    real = FakeEngine.generate

    def generate(self, prompts, sampling=None, **fields):
        rollouts.append(real(self, prompts, sampling, **fields))
        return rollouts[-1]

    monkeypatch.setattr(FakeEngine, "generate", generate)
    fields = {"gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1}
    fields |= {} if kind == "online_dpo" else {"steps_per_generation": 1}
    given = {"reward_funcs": reward, "canary_every": 0}
    trainer = make_trainer(args=config(**fields), **given) if kind == "grpo" else make_online(kind, fields, **given)
    observe = trainer.fidelity.observe
    trainer.fidelity.observe = lambda *parts: (batches.append(parts), observe(*parts))[1]
    trainer.train()
    lines = [json.loads(text) for text in (trainer.run.path / "metrics.jsonl").read_text().splitlines()]
    for step, line in enumerate(lines):
        own = slice(2 * step, 2 * step + 2)
        lengths = [len(ids) for rollout in rollouts[own] for ids in rollout.completion_ids]
        assert line["reward"] == pytest.approx(fmean(map(fmean, rewards[own])))
        assert line["rollout_tokens"] == sum(lengths)
        assert line["rollout_seconds"] >= sum(rollout.seconds for rollout in rollouts[own])
        assert line["rollout_tokens_per_s"] == pytest.approx(sum(lengths) / line["rollout_seconds"])
        assert line["completion_length"] == pytest.approx(fmean(lengths))
        assert line.get("completions/max_length", max(lengths)) == max(lengths)
        parts = [[F.pad(part, (0, 9 - part.shape[1])) for part in column] for column in zip(*batches[own], strict=True)]
        whole = measure(*map(torch.cat, parts))
        for name in ("mismatch_kl", "logprob_diff_max", "ratio_p01", "ratio_p99", "ess"):
            assert line[name] == pytest.approx(getattr(whole, name), rel=1e-9), name
    assert len(lines) == 2
    assert len(trainer.fidelity.history) == len(rollouts) == 4  # the alarm looks at each


def test_all_that_people_watch_in_grpo_is_in_the_report_of_a_run(make_trainer, config, plain, tmp_path):
    """But for the GPU's memory, which needs one."""
    out = tmp_path / "shown"
    args = config(output_dir=str(out), max_steps=2, beta=0.1, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    rewards = [by_place, lambda completions, **_: [1.0] * len(completions)]
    trainer = make_trainer(args=args, reward_funcs=rewards, eval_dataset=plain.select(range(2)))
    trainer.train()
    trainer.evaluate()
    lines = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "step_seconds" not in line]
    assert [line["step"] for line in evaluations] == [0, 1, 2, 2]
    assert all(line["eval_rewards/by_place/mean"] == 0.5 and line["eval_reward"] == 1.5 for line in evaluations)
    assert all("eval_mismatch_kl" in line and "eval_runtime" not in line for line in evaluations)
    run = read_run(out)
    assert (run.steps, [each["step"] for each in run.evaluations]) == ([1, 2], [0, 1, 2])
    assert summarise(run)["held_out_last"] == 1.5
    page = write_report(out).read_text()
    for title in (
        "Each reward function",
        "Held out: evaluation while it trained",
        "Spread of rewards",
        "Prompts that teach nothing",
        "Length of completions",
        "Truncated completions",
        "Entropy",
        "Clipped tokens",
        "KL to the reference",
        "Loss",
        "Gradient norm",
        "Learning rate",
        "Mismatch KL: how far apart trainer and sampler are",
    ):
        assert re.search(f"<h[23]>{re.escape(title)}</h[23]>", page), title
