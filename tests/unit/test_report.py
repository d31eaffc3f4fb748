"""The report reads whatever a run left, shows it truly, and needs nothing but itself."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from qlora_rl.errors import RunDirectoryError
from qlora_rl.locks import hold
from qlora_rl.report import read_run, summarise, write_report
from qlora_rl.report.charts import Line, Reference, draw_chart, log_axis, smooth, thin_out
from qlora_rl.report.page import name_runs

METRIC = dict(
    mismatch_kl=8e-5, ratio_p01=0.98, ratio_p50=1.0, ratio_p99=1.02, ess=0.999, sync_seconds=0.002, sync_bytes=1.3e6,
    rollout_seconds=0.2, rollout_tokens_per_s=17800.0, step_seconds=0.4,
)  # fmt: skip


def make_run(path: Path, steps: int = 40, **files: object) -> Path:
    """A run directory. `files` replaces a file's content by its stem (text is written as it is), or drops it (None)."""
    path.mkdir(parents=True, exist_ok=True)
    metrics = [{"step": i + 1, "reward": (i + 1) / max(steps, 1), **METRIC} for i in range(steps)]
    contents: dict[str, object] = {
        "config": {
            "model": "Qwen/Qwen3-0.6B",
            "steps": steps,
            "plan": {"strategy": "lora_adapter", "reasons": ["same base"]},
        },
        "metrics": "".join(json.dumps(m) + "\n" for m in metrics),
        "summary": {"status": "finished", "eval_before": 0.31, "eval_after": 0.88, "eval_prompts": 400},
        **files,
    }
    for stem, content in contents.items():
        if content is not None:
            target = path / f"{stem}.{'jsonl' if stem == 'metrics' else 'json'}"
            target.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def read_page(path: Path, against: tuple[Path, ...] = ()) -> str:
    return write_report(path, against).read_text(encoding="utf-8").replace("\u202f", " ")


def test_headline_says_the_result_in_plain_words(tmp_path):
    page = read_page(make_run(tmp_path / "a"))
    assert "<h1>In 40 steps (16 s) the reward rose from 0.31 to 0.88 on 400 held-out prompts.</h1>" in page
    assert "Trainer and sampler stayed together: median mismatch KL 8.0e-05" in page


@pytest.mark.parametrize(
    ("summary", "sentence"),
    [
        (
            {"status": "finished", "eval_before": 0.6, "eval_after": 0.1},
            "the reward fell from 0.6 to 0.1 on held-out prompts",
        ),
        ({"status": "finished", "eval_before": 0.6, "eval_after": 0.6}, "the reward stayed at 0.6"),
        (
            {"status": "interrupted", "reward_first": 0.1, "reward_last": 0.5},
            "Interrupted after 40 steps (16 s): the reward",
        ),
        ({"status": "failed", "error": "no <memory>"}, "The run ended with an error: no &lt;memory&gt;"),
        ({}, "So far, in 40 steps (16 s), the reward rose from"),
    ],
)
def test_headline_fits_how_the_run_ended(tmp_path, summary, sentence):
    assert sentence in read_page(make_run(tmp_path / "a", summary=summary))


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([1.05, 0.91, 1.16], "the reward went from 1.05 to 1.16, which may be chance: single steps differ as much"),
        ([i / 40 + 0.05 * (-1) ** i for i in range(40)], "the reward rose from"),
        ([1 - i / 40 + 0.05 * (-1) ** i for i in range(40)], "the reward fell from"),
        ([0.5] * 12, "the reward stayed at 0.5"),
    ],
)
def test_what_may_be_chance_is_not_told_as_a_rise(tmp_path, rewards, said):
    lines = "".join(json.dumps({"step": i, "reward": r}) + "\n" for i, r in enumerate(rewards))
    assert said in read_page(make_run(tmp_path / "a", metrics=lines, summary={"status": "finished"}))


def test_collapse_is_named(tmp_path):
    rewards = [i / 50 for i in range(50)] + [1 - i / 50 for i in range(50)]
    lines = "".join(json.dumps({"step": i, "reward": r, "mismatch_kl": 0.02}) + "\n" for i, r in enumerate(rewards))
    page = read_page(make_run(tmp_path / "a", metrics=lines))
    assert "Smoothed, the reward peaked at" in page
    assert "Trainer and sampler drifted apart: in 100 of 100 steps" in page


def test_html_in_values_is_shown_and_not_obeyed(tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror='alert(2)'>\"&"
    path = make_run(
        tmp_path / "<b>run",
        config={"model": evil, evil: evil, "plan": {"strategy": evil, "reasons": [evil]}, "versions": {evil: evil}},
        metrics=json.dumps({"step": 1, "reward": 1.0, evil: 2.0, **METRIC}) + "\n",
        summary={"status": evil, "error": evil},
        eval=EVAL
        | {"rows": [{"prompt": evil, "answer": evil, "before": evil, "after": [{"role": "user", "content": evil}]}]},
    )
    page = read_page(path, (make_run(tmp_path / "<i>other"),))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page.count("<script>") == 1
    assert not re.search(r"<(img|b|i)[> ](?!class)", page)
    assert "'alert(2)'" not in page


def test_page_asks_nothing_of_any_network(tmp_path):
    sample = {"prompt": "see https://example.com/x.png", "answer": "2", "before": "url(http://a.b)", "after": "2"}
    page = read_page(make_run(tmp_path / "a", eval=EVAL | {"rows": [sample]}), (make_run(tmp_path / "b"),))
    assert "default-src 'none'" in page.replace("&#x27;", "'")
    markup = re.sub(r">[^<]*<", "><", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL))
    links = re.findall(r'\s(?:src|href|srcset|action|poster)="([^"]*)"', markup)
    assert links
    assert all(link.startswith(("data:,", "data:text/csv;base64,")) for link in links)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL).group(1)
    assert not re.search(r"url\(|@import|https?:|//", style)
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL).group(1)
    assert not re.search(r"fetch|XMLHttp|import|https?:|innerHTML", script)


def test_cut_off_last_line_is_skipped_and_said(tmp_path):
    whole = "".join(json.dumps({"step": i, "reward": 0.5}) + "\n" for i in (1, 2, 3))
    path = make_run(tmp_path / "a", metrics=whole + '{"step": 4, "rewa', summary=None)
    run = read_run(path)
    assert run.steps == [1, 2, 3]
    assert run.status == "unfinished"
    assert run.problems == ("The last line of metrics.jsonl is cut off; it was skipped.",)
    assert "The last line of metrics.jsonl is cut off" in read_page(path)


def test_damaged_lines_amid_good_ones_are_counted(tmp_path):
    lines = '{"step": 1, "reward": 1}\nnonsense\n[1, 2]\n\n{"step": 2, "reward": 2}\n'
    run = read_run(make_run(tmp_path / "a", metrics=lines))
    assert run.column("reward") == [1.0, 2.0]
    assert run.problems == ("2 damaged lines in metrics.jsonl skipped.",)


def test_resumed_run_keeps_the_later_record_of_a_step(tmp_path):
    lines = "".join(json.dumps({"step": s, "reward": r}) + "\n" for s, r in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.9)))
    assert read_run(make_run(tmp_path / "a", metrics=lines)).column("reward") == [0.1, 0.9, 0.3]


@pytest.mark.parametrize("stem", ["config", "metrics", "summary", "rollouts", "eval"])
@pytest.mark.parametrize("content", [None, "", "{", "null", "[]", "{}", '"text"', "\x00\ufffd"])
def test_any_file_may_be_missing_or_hold_anything(tmp_path, stem, content):
    page = read_page(make_run(tmp_path / "a", **{stem: content}), (make_run(tmp_path / "b", **{stem: content}),))
    assert page.count("<h1>") == 1
    assert page.endswith("</html>\n")


def test_empty_directory_gives_a_page_that_says_so(tmp_path):
    page = read_page(tmp_path)
    assert "Nothing to show yet: this run has not recorded a step." in page
    assert "<svg" not in page


def test_directory_that_is_not_there_is_rejected(tmp_path):
    with pytest.raises(RunDirectoryError):
        write_report(make_run(tmp_path / "a"), [tmp_path / "b"])
    assert not (tmp_path / "a" / "report.html").exists()


def test_nan_null_and_nonsense_values_become_gaps(tmp_path):
    values = ["NaN", "null", "Infinity", '"text"', "true", "1e999", "[1]", "9" * 400, "0.5", "-1e300"]
    lines = "".join(f'{{"step": {i}, "reward": {v}, "mismatch_kl": {v}}}\n' for i, v in enumerate(values))
    path = make_run(tmp_path / "a", metrics=lines, summary='{"reward_last": NaN, "eval_after": null}')
    assert read_run(path).values("reward") == [0.5]
    page = read_page(path)
    shown = re.sub(r"<[^>]*>", " ", page[page.index("<main>") : page.index("</main>")])
    drawn = " ".join(re.findall(r' d="([^"]*)"', page))
    assert not re.search(r"nan|inf(inity)?\b|\bnone\b|\bnull\b", shown + drawn, re.IGNORECASE)


def test_series_that_are_only_zero_or_constant_are_drawn(tmp_path):
    lines = "".join(
        json.dumps({"step": i, "reward": 0, "mismatch_kl": 0, "ratio_p01": 1, "ratio_p99": 1}) + "\n" for i in range(3)
    )
    page = read_page(make_run(tmp_path / "a", metrics=lines))
    assert page.count("<svg") == 3
    assert "exactly the same probability: the mismatch KL was 0 throughout" in page


def test_other_runs_are_tabled_and_drawn_beside(tmp_path):
    slow = "".join(json.dumps({"step": i, "reward": 0.5, **METRIC, "sync_seconds": 0.6}) + "\n" for i in range(30))
    page = read_page(make_run(tmp_path / "ours"), (make_run(tmp_path / "merge", metrics=slow),))
    table = page[page.index("Side by side") :]
    assert re.search(r"Time per push</th><td[^>]*>2\.0 ms</td><td[^>]*>600 ms</td>", table)
    assert page.count('class="bold s1"') == 3
    assert page.count('<i class="key s1"></i>merge') == 3
    assert "Side by side" not in read_page(tmp_path / "ours")


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [read_run(make_run(tmp_path / parent / "run")) for parent in ("x", "y")]
    assert name_runs(runs) == ["x/run", "y/run"]
    assert name_runs([runs[0], runs[0]]) == ["x/run", "x/run (2)"]


def test_page_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = make_run(tmp_path / "a")
    write_report(path)
    before = (path / "report.html").read_bytes()
    seen = []

    def fail(source, target):
        seen.append((Path(source).read_bytes()[-8:], Path(source).parent, Path(target).name))
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(path)
    assert seen == [(b"</html>\n", path, "report.html")]
    assert (path / "report.html").read_bytes() == before
    assert [p.name for p in path.glob(".*")] == []


def test_half_a_surrogate_pair_does_not_stop_the_page(tmp_path):
    path = make_run(tmp_path / "a", rollouts='{"last": {"prompt": "\\ud83d", "rollouts": [{"completion": "2"}]}}')
    assert "<p>?</p>" in read_page(path)


def test_secrets_of_the_configuration_are_hidden(tmp_path):
    config = {
        "command": ["train", "--api-key", "sk-1", "--steps", "3"],
        "server": {"api_key": "sk-2"},
        "max_tokens": 64,
    }
    page = read_page(make_run(tmp_path / "a", config=config))
    assert "sk-1" not in page
    assert "sk-2" not in page
    assert "train --api-key (hidden) --steps 3" in page
    assert "<td>64</td>" in page


def test_summary_fills_in_what_the_file_leaves_out(tmp_path):
    facts = summarise(read_run(make_run(tmp_path / "a", summary={"sync_seconds_median": 9.0})))
    assert facts["sync_seconds_median"] == 9.0
    assert facts["mismatch_kl_max"] == 8e-5
    assert facts["reward_last"] == pytest.approx(fmean([37, 38, 39, 40]) / 40)  # float sums differ in the last bit
    assert facts["step_seconds_mean"] == pytest.approx(0.4)
    assert facts["eval_after"] is None


def test_thinning_keeps_every_spike():
    y: list[float | None] = [0.0] * 10_000
    y[777], y[5_001] = 9.0, -9.0
    x, thin = thin_out(list(range(10_000)), y)
    assert len(thin) <= 400
    assert dict(zip(x, thin, strict=True))[777] == 9.0
    assert min(thin) == -9.0
    assert x == sorted(x)


def test_smoothing_leaves_gaps_and_does_not_count_them():
    assert smooth([1.0, None, 3.0, 5.0], 3, fmean) == [1.0, None, 4.0, 4.0]


@pytest.mark.parametrize("values", [[0.015], [0.0, 0.0], [1e-12, 0.015], [0.9, 1.1], [1e-299, 1e99], [0.5, 0.5], []])
def test_log_axis_holds_its_data_between_a_few_ticks(values):
    axis = log_axis(values)
    positive = [v for v in values if v > 0]
    assert 2 <= len(axis.ticks) <= 9
    assert 0 < axis.low <= min(positive, default=1)
    assert axis.high >= max(positive, default=0.1)
    assert axis.place(0.0) == 0.0
    assert axis.place(axis.high) == 1.0


def test_chart_speaks_to_those_who_cannot_see_it():
    chart = draw_chart(
        "Reward", "mean reward", [Line("ours", [1, 2, 3], [0.1, None, 0.9])], references=[Reference(0.5, "bar")]
    )
    label = re.search(r'<svg[^>]* role="img" aria-label="([^"]*)"', chart).group(1)
    assert label == (
        "Reward. mean reward over training step. ours: from 0.1 to 0.9, lowest 0.1, highest 0.9. Reference line: bar."
    )


def test_lone_point_between_gaps_is_a_dot():
    chart = draw_chart("t", "y", [Line("ours", [1, 2, 3], [None, 0.5, None])])
    assert re.search(r'<path d="M500 [\d.]+h0" class="bold s0">', chart)


# --- what the model wrote ---------------------------------------------------------------------------------------------

EVAL = {
    "asked": {"data": "test.jsonl"},
    "rewards": {"exact": {side: {"value": v, "error": 0.0125} for side, v in (("base", 0.25), ("policy", 0.75),
        ("difference", 0.5))}},
    "lengths": [3.0, 4.5], "cut_off": [0.5, 0.25], "prompts": 120, "samples": 4, "sampling": {"temperature": 1.0},
    "rows": [{"prompt": "p", "before": "one", "after": "two", "before_rewards": {"exact": 0.0},
        "after_rewards": {"exact": 1.0}}],
}  # fmt: skip


def test_an_evaluation_is_tabled_with_its_errors(tmp_path):
    page = read_page(make_run(tmp_path / "a", eval=EVAL))
    text = re.sub(r"<[^>]*>", "|", page[page.index("Evaluation: the base") :])
    assert "120 prompts of test.jsonl, 4 answers to each, temperature 1." in text
    assert re.search(r"exact\|+0\.25\|+ ± 0\.013\|+0\.75\|+ ± 0\.013\|+0\.5\|+ ± 0\.013", text)
    assert re.search(r"Share cut off[^|]*\|+0\.5\|+0\.25\|", text)
    assert "Before training|reward 0|" in text
    assert "After training|reward 1|" in text
    older = {name: each for name, each in EVAL.items() if name != "cut_off"}
    assert "Share cut off" not in read_page(make_run(tmp_path / "b", eval=older))


def test_rollouts_are_shown_with_their_rewards(tmp_path):
    group = {"prompt": [{"role": "user", "content": "2+2?"}], "rollouts": [
        {"completion": "4", "rewards": {"right": 1.0, "short": 0.5}}, {"completion": "", "rewards": {"right": 0.0,
        "short": None}}
    ]}  # fmt: skip
    page = read_page(make_run(tmp_path / "a", rollouts={"first": {"step": 1, **group}, "last": {"step": 40, **group}}))
    for said in (
        "First step (1)",
        "Newest step (40)",
        "2+2?",
        "reward right 1, short 0.5",
        "reward right 0, short –",
        "(nothing)",
    ):
        assert said in page


def test_images_of_a_prompt_are_shown_small_and_nothing_else_is_shown_as_an_image(tmp_path):
    from PIL import Image

    from qlora_rl.image_io import as_thumbnails

    def prompt(*images):
        return [
            {
                "role": "user",
                "content": [*({"type": "image", "image": each} for each in images), {"type": "text", "text": "What?"}],
            }
        ]

    good = as_thumbnails(prompt(Image.new("RGB", (640, 320), "red")))
    source = good[0]["content"][0]["image"]
    assert Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).size == (160, 80)
    bad = prompt(
        "https://host/a.png",
        "data:image/svg+xml;base64,AAAA",
        'data:image/jpeg;base64,AA" onerror="alert(1)',
        "data:image/jpeg;base64," + "A" * 70_000,
        None,
        7,
    )
    answers = [{"completion": "red", "rewards": {"right": 1.0}}]
    groups = {
        "first": {"step": 1, "prompt": good, "rollouts": answers},
        "last": {"step": 40, "prompt": bad, "rollouts": answers},
    }
    page = read_page(make_run(tmp_path / "a", rollouts=groups))
    assert page.count("<img") == 1
    assert f'<img src="{source}" alt="image 1 of the prompt">' in page
    assert "[image] What?" in page
    assert "onerror" not in page


def test_memory_and_proof_of_the_base_are_in_the_details(tmp_path):
    memory = {
        "lines": [
            {"name": "adapter", "nbytes": 2e6, "when": "always"},
            {"name": "base", "nbytes": 3e9, "when": "always"},
            7,
        ]
    }
    config = {"memory": memory | {"kv_cache_bytes": 5e6}, "base_proof": {"verified": True, "repaired": 21}}
    page = read_page(make_run(tmp_path / "a", config=config))
    details = page[page.index("How it was run") :]
    assert details.index(">base<") < details.index(">adapter<")  # the largest first
    assert re.search(r"KV cache</th><td[^>]*>5\.0 MB", details)
    assert re.search(r"repaired</th><td>21", details)


@pytest.mark.parametrize("measured", [None, {"kl": 0.092, "perplexity_source": 12.9, "perplexity_base": 13.4}, 7])
def test_what_4_bits_cost_the_base_is_said_where_it_was_measured(measured, tmp_path):
    page = read_page(make_run(tmp_path / "a", config={"base": {"quant_type": "nf4", "measured": measured}}))
    said = "a KL of 0.092 nats a token away from the model that it was made from: perplexity 13.4 instead of 12.9"
    assert (said in page) == isinstance(measured, dict)
    assert ("away from the model" in page) == isinstance(measured, dict)


def test_a_live_page_is_read_again_as_long_as_the_run_trains(tmp_path):
    path = make_run(tmp_path / "a", summary=None)
    handle = hold(path)
    assert 'http-equiv="refresh"' not in read_page(path)
    assert 'http-equiv="refresh"' in write_report(path, is_live=True).read_text()
    os.close(handle)
    (path / "summary.json").write_text('{"status": "finished"}')
    assert 'http-equiv="refresh"' not in write_report(path, is_live=True).read_text()


def test_the_command_follows_a_run_until_ctrl_c(tmp_path):
    path = make_run(tmp_path / "a", summary=None)
    command = [sys.executable, "-m", "qlora_rl.cli", "report", str(path), "--live"]
    handle = hold(path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().strip() == str(path / "report.html")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    os.close(handle)
    assert 'http-equiv="refresh"' not in (path / "report.html").read_text()


GRPO = {
    "rewards/numeric/mean": 0.25, "rewards/numeric/std": 0.4, "rewards/short/mean": 0.75, "frac_reward_zero_std": 0.5,
    "completions/clipped_ratio": 0.125, "entropy": 1.5, "kl": 0.01, "clip_ratio/region_mean": 0.02,
    "completion_length": 30.0,
}  # fmt: skip


def write_lines(path, lines, **files):
    metrics = "".join(json.dumps(line) + "\n" for line in lines)
    return make_run(path, metrics=metrics, summary={"status": "finished"}, **files)


def test_the_health_of_a_training_is_there(tmp_path):
    metrics = "".join(json.dumps({"step": i, "reward": 0.5, **GRPO}) + "\n" for i in (1, 2, 3))
    page = read_page(make_run(tmp_path / "a", metrics=metrics))
    assert "<h2>Training health</h2>" in page
    assert "Each reward function" in page
    assert all(name in page for name in ("numeric", "short"))
    for title in (
        "Length of completions",
        "Truncated completions",
        "Prompts that teach nothing",
        "Entropy",
        "KL to the reference",
        "Clipped tokens",
    ):
        assert f"<h3>{title}</h3>" in page
    assert "<h3>GPU memory</h3>" not in page  # not logged


def test_what_to_look_at_is_on_top_and_names_the_way_out(tmp_path):
    lines = [{"step": i, "reward": 0.5, **METRIC, **GRPO} for i in range(1, 11)]
    calm = write_lines(tmp_path / "calm", lines)
    assert "What to look at" not in read_page(calm)
    for line in lines[5:]:
        line.update({"completions/clipped_ratio": 0.9, "frac_reward_zero_std": 0.95})
    lines[0]["mismatch_cause"], lines[3]["mismatch_cause"] = "dtype", "noise"
    config = {"grpo": {"max_completion_length": 24}}
    top = read_page(write_lines(tmp_path / "a", lines, config=config)).split("<dl")[0]
    told = [re.sub(r"<[^>]*>", "", each) for each in re.findall(r"<li[^>]*>(.*?)</li>", top)]
    assert [each.split(":")[0] for each in told] == [
        "90 % of the answers at the end were cut off after 24 tokens",
        "95 % of the prompts at the end teach nothing",
        "The mismatch alarm was raised in step 1",
    ]
    assert "max_completion_length" in told[0]
    assert "num_generations" in told[1]
    assert "dtype" in told[2]
    assert "noise" not in told[2]


def test_prompts_that_are_learned_are_told_apart_from_prompts_that_teach_nothing(tmp_path):
    def told(name, rewards, **files):
        lines = [
            {"step": i, **METRIC, "reward": each, "frac_reward_zero_std": 0.9} for i, each in enumerate(rewards, 1)
        ]
        return read_page(write_lines(tmp_path / name, lines, **files)).split("<dl")[0]

    assert "has learned these prompts" in told("a", [0.2, 0.5, 0.9, 1.0, 1.0, 1.0])
    for number, rewards in enumerate(([0.0] * 6, [1.0] * 6, [0.2, 0.5, 0.9, 0.5, 0.2, 0.2])):
        page = told(f"b{number}", rewards)
        assert "has learned" not in page
        assert "easier or harder prompts" in page
    seldom = {"step": 1, "prompt": "2+2?", "rollouts": [{"completion": "4", "rewards": {"right": 1.0}}]}
    page = told("c", [0.0, 0.01, 0.02, 0.02, 0.02, 0.02], rollouts={"first": seldom, "last": seldom})
    assert "has learned" not in page  # one answer was far better


@pytest.mark.parametrize(
    ("policy", "error", "said"),
    [
        (0.75, 0.0125, "the reward rose from 0.25 to 0.75 on 120 held-out prompts"),
        (0.26, 0.2, "the reward went from 0.25 to 0.26 on 120 held-out prompts, which may be chance"),
        (0.25, None, "the reward stayed at 0.25 on 120 held-out prompts"),
    ],
)
def test_an_evaluation_is_in_the_headline(tmp_path, policy, error, said):
    sides = (("base", 0.25), ("policy", policy), ("difference", policy - 0.25))
    found = EVAL | {"rewards": {"exact": {side: {"value": v, "error": error} for side, v in sides}}}
    assert f"In 40 steps (16 s) {said}." in read_page(
        make_run(tmp_path / "a", eval=found, summary={"status": "finished"})
    )


def test_the_time_of_a_step_is_one_wherever_it_is_told(tmp_path):
    """The first step is longest, and medians of parts do not add up to the median of the whole."""
    times = [(60.0, 50.0), (0.5, 0.2), (0.8, 0.7), (0.7, 0.3), (0.9, 0.1)]
    lines = [
        {"step": i, "reward": 0.5, **METRIC, "step_seconds": s, "rollout_seconds": r}
        for i, (s, r) in enumerate(times, 1)
    ]
    page = read_page(write_lines(tmp_path / "a", lines))
    assert '<dt>Time per step</dt><dd class="big">800 ms</dd><dd class="small">median; mean 13 s</dd>' in page
    assert '<span>a</span><span class="num">800 ms</span>' in page
    assert "steps per second" not in page.lower()


def test_a_run_whose_process_lives_is_running(tmp_path):
    path = make_run(tmp_path / "a", summary=None)
    assert read_run(path).status == "unfinished"
    handle = hold(path)
    assert read_run(path).status == "running"
    assert '<span class="chip running">running</span>' in read_page(path)
    os.close(handle)
    assert read_run(path).status == "unfinished"
    finished = make_run(tmp_path / "b")
    handle = hold(finished)
    assert read_run(finished).status == "finished"
    os.close(handle)


def test_one_reward_function_is_the_reward(tmp_path):
    metrics = "".join(json.dumps({"step": i, "reward": 0.5, "rewards/numeric/mean": 0.5}) + "\n" for i in (1, 2))
    assert "Each reward function" not in read_page(make_run(tmp_path / "a", metrics=metrics))
