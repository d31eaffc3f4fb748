"""The report of every kind of run: what it has is shown, what it cannot have is not asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_report import METRIC, make_run, read_page

from qlora_rl.report import read_run, summarise


def examples_of(path: Path, column: str, steps: int = 30, **config: object) -> Path:
    """A run of SFT or DPO: a loss, how often it was right, and nothing of a sampler."""
    lines = [
        {"step": i + 1, "step_seconds": 0.2, "loss": 1 - i / 60, "mean_token_accuracy": 0.5 + i / 100, column: i / 40}
        for i in range(steps)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    summary = {"status": "finished", "steps": steps}
    return make_run(path, metrics=text, config=config, summary=summary)


@pytest.mark.parametrize(
    ("column", "tile", "title"),
    [
        ("rewards/accuracies", "Pairs ranked right", "Preference: how often the chosen answer gained more"),
        ("num_tokens", "Tokens predicted right", "Accuracy: how often the next token is right"),
    ],
)
def test_a_run_that_learned_from_examples_shows_its_loss_and_no_empty_sections(tmp_path, column, tile, title):
    page = read_page(examples_of(tmp_path / "sft", column), (examples_of(tmp_path / "other", column),))
    assert "<h1>In 30 steps (6.0 s) the loss fell from 0.983 to 0.533.</h1>" in page
    assert page.count("<svg") == 2
    for there in (f"<dt>{tile}</dt>", f"<h2>{title}</h2>", "<h2>Loss: what training makes small</h2>", "Loss at last"):
        assert there in page
    main = page[page.index("<main>") : page.index("</main>")].lower()
    for gone in ("not recorded", "reward was", "sampler", "what is pushed", "mismatch"):
        assert gone not in main


def test_beside_a_run_with_rewards_a_loss_is_no_result(tmp_path):
    page = read_page(make_run(tmp_path / "grpo"), (examples_of(tmp_path / "sft", "num_tokens"),))
    assert "Reward: how good the answers were" in page
    assert "Loss: what training" not in page
    lines = "".join(json.dumps({"step": i, "reward": 0.5, "loss": 0.1, **METRIC}) + "\n" for i in range(30))
    assert summarise(read_run(make_run(tmp_path / "b", metrics=lines)))["loss_last"] is None


def test_steps_that_were_planned_are_those_of_trls_config(tmp_path):
    path = make_run(tmp_path / "a", config={"grpo": {"max_steps": 60}}, summary={"status": "interrupted"})
    assert "Interrupted after 40 of 60 steps" in read_page(path)
    assert read_run(make_run(tmp_path / "b", config={"sft": {"max_steps": -1}})).planned_steps is None


CHECKED = {"canary_seconds": 0.1}
SLEPT = CHECKED | {"sleep_seconds": 0.02, "wake_seconds": 0.03}


@pytest.mark.parametrize(
    ("times", "said", "absent"),
    [
        (
            CHECKED,
            "a: sampler writes answers 200 ms, trainer scores and learns 98 ms, push to the sampler 2.0 ms, "
            "check of the push 100 ms",
            "check of the push</th>",
        ),
        (
            SLEPT,
            "learns 48 ms, push to the sampler 2.0 ms, check of the push 100 ms, sampler sleeps and wakes 50 ms",
            "sleeps and wakes",
        ),
    ],
    ids=["the proof of its push", "the sleep of its engine"],
)
def test_a_step_is_taken_apart(tmp_path, times, said, absent):
    lines = "".join(json.dumps({"step": i, "reward": 0.5, **METRIC, **times}) + "\n" for i in range(5))
    assert said in read_page(make_run(tmp_path / "a", metrics=lines))
    assert absent not in read_page(make_run(tmp_path / "b"))  # there is none


def test_a_run_that_draws_ahead_is_charged_with_its_waits_and_says_how_old_its_answers_were(tmp_path):
    ahead = {"trainer_wait_seconds": 0.01, "staleness_mean": 1, "staleness_max": 1, "rollout_sampled_seconds": 0.9}
    lines = "".join(
        json.dumps({"step": i, "reward": 0.5, **METRIC, "rollout_seconds": 0.9, "rollouts_ready": i % 2, **ahead})
        + "\n"
        for i in range(4)
    )
    ours = make_run(tmp_path / "ours", metrics=lines)
    page = read_page(ours)
    assert "ours: trainer waits for answers 10 ms, trainer scores and learns 388 ms, push" in page
    table = page[page.index("Sampling and training at the same time") :]
    for label, value in (("Policies that answers were behind, mean", "1"), ("found their answers ready", "50 %")):
        assert re.search(f"{label}</th><td[^>]*>{value}</td>", table)
    beside = read_page(make_run(tmp_path / "plain"), (ours,))
    assert "sampler writes answers (ours: the wait for them)" in beside
    assert "Sampling and training at the same time" not in read_page(tmp_path / "plain")
