"""`qlora-rl train`: the examples run for two steps on real vLLM, and their settled copies run again."""

import json
from pathlib import Path

import pytest
from support import since_vllm

from qlora_rl.cli import main
from qlora_rl.config.read import read_config

ROOT = Path(__file__).resolve().parents[2]
# The tiny model, and little of everything.
SMALL = ["train.max_steps=2", "train.per_device_train_batch_size=8", "train.gradient_checkpointing=false"]


def train(file, out, *overrides: str) -> list[dict]:
    """Run the command; the lines of metrics.jsonl."""
    command = ["train", str(file)]
    for override in (*overrides, f"run.dir={out}"):
        command += ["--set", override]
    assert main(command) == 0
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
    assert (out / "adapter" / "adapter_model.safetensors").is_file()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) == read_config(out / "run.toml", ["run.existing=overwrite"], asks_trl=False).train["max_steps"]
    return lines


def test_the_grpo_example_runs_and_its_settled_copy_gives_the_same_numbers(model_dir, tmp_path):
    out, again = tmp_path / "run", tmp_path / "again"
    small = [*SMALL, f"base.model={model_dir}", "train.learning_rate=1e-3", "adapter.r=8"]
    first = train(ROOT / "examples" / "grpo.toml", out, *small)
    settled = read_config(out / "run.toml", ["run.existing=overwrite"], asks_trl=False)
    assert (settled.base.model, settled.adapter.r, settled.train["max_steps"]) == (str(model_dir), 8, 2)
    second = train(out / "run.toml", again)
    for one, other in zip(first, second, strict=True):
        for name in ("reward", "loss", "grad_norm", "rollout_tokens", "mismatch_kl"):
            assert one[name] is not None
            assert one[name] == other[name], name
    assert read_config(again / "run.toml", [f"run.dir={out}", "run.existing=overwrite"], asks_trl=False) == settled
    held = json.loads((out / "config.json").read_text())
    assert (held["lora"]["r"], held["base_held"]["copies"], held["seed"]) == (8, 1, 42)


@since_vllm("0.31", "the modules of the server that we start")
def test_the_server_example_runs(model_dir, tmp_path):
    lines = train(ROOT / "examples" / "server.toml", tmp_path / "run", *SMALL, f"base.model={model_dir}")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["rollout"] == "server"
    assert all(line["canary_seconds"] > 0 for line in lines)


def test_the_async_example_runs(model_dir, tmp_path):
    lines = train(
        ROOT / "examples" / "async.toml", tmp_path / "run", *SMALL, f"base.model={model_dir}", "train.max_steps=3"
    )
    assert [line["staleness_max"] for line in lines] == [0, 1, 1]


def test_the_distill_example_runs_and_its_settled_copy_gives_the_same_numbers(model_dir, tmp_path):
    small = [*SMALL, f"base.model={model_dir}", "adapter.r=8"]
    first = train(ROOT / "examples" / "distill.toml", tmp_path / "run", *small)
    second = train(tmp_path / "run" / "run.toml", tmp_path / "again")
    for one, other in zip(first, second, strict=True):
        assert one["loss"] > 1e-3
        for name in ("loss", "grad_norm", "rollout_tokens", "mismatch_kl"):
            assert one[name] == other[name], name
    told = json.loads((tmp_path / "run" / "config.json").read_text())
    assert told["teacher"] == {"kind": "policy", "prompt": "teacher_prompt"}
    assert told["base_held"]["copies"] == 1


def test_the_command_rejects_before_it_loads_anything(model_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("qlora_rl.config.launch.launch", lambda config: pytest.fail("it was launched"))
    command = ["train", str(ROOT / "examples" / "grpo.toml"), "--set", f"base.model={model_dir}"]
    assert main([*command, "--set", "train.num_generations=7", "--set", f"run.dir={tmp_path}"]) == 1
    assert "[train]: TRL rejects it" in capsys.readouterr().err
    assert main([*command, "--check", "--set", f"run.dir={tmp_path}"]) == 0
    assert f'model = "{model_dir}"' in capsys.readouterr().out
    assert main([*command, "--set", "rollout.vllm={ block_sise = 32, block_size = 16 }"]) == 1
    assert "[rollout] vllm: vLLM has no 'block_sise'; did you mean 'block_size'?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.full  # test_trainers.py has both on vLLM, without a file
@pytest.mark.parametrize("method", ["rloo", "online_dpo"])
def test_the_other_methods_that_draw_run_too(method, model_dir, tmp_path):
    small = [*SMALL, f"base.model={model_dir}", f"method={method}"]
    file = ROOT / "examples" / "grpo.toml"
    if method == "online_dpo":  # TRL's other names
        file = tmp_path / "pairs.toml"
        file.write_text(
            'method = "online_dpo"\n[base]\nmodel = "set"\n[[rewards]]\nuse = "length_match"\n'
            "arguments = { at_most = 4 }\n"
            f'[data]\ntrain = "{ROOT / "examples" / "data" / "sums.jsonl"}"\n'
            '[train]\nmax_new_tokens = 8\nmax_length = 32\nlogging_steps = 1\nsave_strategy = "no"\n'
        )
    train(file, tmp_path / "run", *small)
    assert read_config(tmp_path / "run" / "run.toml", ["run.existing=overwrite"], asks_trl=False).method == method
