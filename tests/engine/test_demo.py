"""The command that a newcomer types."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import support

from qlora_rl.demo.job import table


def command(*arguments):
    return [sys.executable, "-m", "qlora_rl.cli", *map(str, arguments)]


@pytest.fixture(scope="module")
def demo_cache(demo_home):
    """The demo's own model, pretrained once for all that use it (about a minute)."""
    return {**os.environ, "QLORA_RL_CACHE": str(demo_home)}


@pytest.fixture(scope="module")
def finished(demo_cache, pretraining, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "run"
    whole, temporary = command("demo", "--steps", 60, "--out", out), out.parent / "temporary"
    temporary.mkdir()
    with pretraining():
        done = subprocess.run(whole, env={**demo_cache, "TMPDIR": str(temporary)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done.stdout


def test_the_demo_learns_to_carry(finished):
    out, printed = finished
    summary = json.loads((out / "summary.json").read_text())
    assert 0.15 <= summary["accuracy_before"] <= 0.50
    assert summary["accuracy_after"] > 0.80
    assert summary["reward_last"] > summary["reward_first"] + 0.2
    assert summary["mismatch_kl_median"] <= 2e-4
    assert summary["mismatch_kl_p95"] <= 1e-3
    assert summary["mismatch_kl_max"] <= 5e-3
    assert summary["sync_seconds_median"] <= 0.08 * summary["step_seconds_median"]
    assert table(summary) in printed


def test_the_demo_leaves_a_whole_run_directory(finished):
    out, printed = finished
    assert {f.name for f in out.iterdir()} >= {
        "config.json", "metrics.jsonl", "sync.jsonl", "summary.json", "eval.json", "report.html", "adapter",
    }  # fmt: skip
    keys = {"reward_first", "reward_last", "accuracy_before", "accuracy_after", "mismatch_kl_median", "mismatch_kl_p95"}
    keys |= {"mismatch_kl_max", "sync_seconds_median", "step_seconds_median", "rollout_tokens_per_s", "steps_per_s"}
    assert keys <= json.loads((out / "summary.json").read_text()).keys()
    assert str(out) in printed
    assert not list((out.parent / "temporary").glob("vllm*"))


def test_ctrl_c_leaves_a_readable_run_with_the_last_adapter_and_no_process(finished, demo_cache, tmp_path):
    out = tmp_path / "run"
    job = subprocess.Popen(
        command("demo", "--steps", 500, "--quiet", "--out", out),
        env=demo_cache, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 420
    while time.monotonic() < deadline and (not (out / "metrics.jsonl").exists() or _count(out) < 5):
        assert job.poll() is None, job.stderr.read()[-3000:]
        time.sleep(0.2)
    children = psutil.Process(job.pid).children(recursive=True)
    job.send_signal(signal.SIGINT)
    _, stderr = job.communicate(timeout=240)
    assert job.returncode == 130
    assert "the run so far and the last adapter are in" in stderr
    assert "Traceback" not in stderr
    # multiprocessing's tracker sees the end of a pipe, a moment later
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["steps"] == _count(out) >= 5
    for line in (out / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    assert (out / "adapter" / "adapter_model.safetensors").stat().st_size > 100_000
    assert "interrupted" in (out / "report.html").read_text().lower()


def _count(out: Path) -> int:
    return len((out / "metrics.jsonl").read_text().splitlines())


def test_trls_own_way_runs_the_same_job_and_is_measured(finished, demo_cache, tmp_path):
    ours, _ = finished
    out = tmp_path / "merge"
    arguments = ["--steps", 6, "--sync", "trl-merge", "--quiet", "--out", out]
    done = support.command("demo", *arguments, environment=demo_cache)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    adapter_only = json.loads((ours / "summary.json").read_text())
    assert summary["steps"] == 6
    # Measured: 0.5 median over 40 steps against 1e-5.
    assert summary["mismatch_kl_max"] > 10 * adapter_only["mismatch_kl_max"]
    assert summary["sync_seconds_median"] > 5 * adapter_only["sync_seconds_median"]


# What an adapter becomes as full weights is compared weight by weight in test_dense.py, for all three.
@pytest.mark.parametrize("adapter", ["dora", *(pytest.param(name, marks=pytest.mark.full) for name in ("lora", "ia3"))])
def test_the_demo_by_full_weights_leaves_a_whole_run(demo_cache, tmp_path, adapter):
    out = tmp_path / adapter
    arguments = ["--steps", 4, "--sync", "weights", "--adapter", adapter, "--quiet", "--out", out]
    done = support.command("demo", *arguments, environment=demo_cache)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["mismatch_kl_max"] < 1e-3
    config = json.loads((out / "config.json").read_text())
    assert (config["sync"], config["base_held"]["copies"]) == ("weights", 2)
    assert "baked" in config["base_held"]["reason"]
    assert (out / "report.html").is_file()


def test_prepare_makes_a_base_and_says_what(model_dir, tmp_path, demo_cache):
    out = tmp_path / "base"
    arguments = ["prepare", model_dir, out, "--quant", "fp4", "--no-double-quant", "--blocksize", 128]
    done = support.command(*arguments, environment=demo_cache)
    assert done.returncode == 0, done.stderr
    assert "fp4-128" in done.stdout
    from qlora_rl.base.checkpoint import open_base

    assert open_base(out).spec.blocksize == 128
    done = support.command("prepare", tmp_path / "none", out, environment=demo_cache)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
