"""QLoRAGRPOTrainer on real vLLM and real bitsandbytes."""

import gc
import json
import os
import tempfile
from pathlib import Path

import psutil
import pytest
import torch
from peft import LoraConfig, PeftModel
from support import randomise, score

from qlora_rl import (
    AdapterRejectedError,
    AdapterSync,
    LocalEngine,
    QLoRAGRPOTrainer,
    RewardFunctionError,
    SyncError,
    cpu_matmul,
    load_base,
    prepare_base,
)
from qlora_rl.adapter.store import default_root
from qlora_rl.base.decode import uses_avx512
from qlora_rl.cpu_features import SETTING
from qlora_rl.engine.cleanup import trim_memory
from qlora_rl.engine.linears.base_compute import packs_away
from qlora_rl.sync.transports import DirectoryTransport

OURS = (
    "rollout",
    "sync",
    "sync_dir",
    "existing_run",
    "engine_options",
    "share_base",
    "adapter_dtype",
    "api_key_file",
    "canary_every",
    "on_mismatch",
    "gpu_memory",
    "remove_padding",
)


def config(directory, **fields):
    from trl import GRPOConfig

    return GRPOConfig(
        **{
            "output_dir": str(directory),
            "max_steps": 3,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 6,
            "learning_rate": 1e-2,
            "use_cpu": True,
            "bf16": True,
            "gradient_checkpointing": False,
            "save_strategy": "no",
            "report_to": [],
            "logging_steps": 1,
            "disable_tqdm": True,
            "vllm_max_model_length": 32,
            **fields,
        }
    )


def reward_digits(completions, **_):
    """Share of digits: what a random model can learn in a few steps."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def make(base, directory, **fields):
    from datasets import Dataset

    arguments = {
        "reward_funcs": reward_digits,
        "train_dataset": Dataset.from_list([{"prompt": f"{a}+{a}="} for a in range(10, 42)]),
        "peft_config": LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        **{k: fields.pop(k) for k in list(fields) if k in ("reward_funcs", "train_dataset", "peft_config", "model")},
    }
    extra = {k: fields.pop(k) for k in list(fields) if k in OURS}
    return QLoRAGRPOTrainer(**{"model": base, **arguments}, args=config(directory, **fields), **extra)


def lines(directory, name="metrics.jsonl"):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def test_a_hundred_steps_move_the_adapter_and_not_one_bit_of_the_base(base, tmp_path):
    with make(base, tmp_path, max_steps=100, learning_rate=3e-3) as trainer:
        before = {n: t.detach().clone() for n, t in trainer.model.state_dict().items()}
        trainer.train()
        moved = {n for n, t in trainer.model.state_dict().items() if not torch.equal(t, before[n])}
        assert moved
        assert all(".lora_" in name for name in moved)
        assert sum("lora_B" in name for name in moved) == 14

        metrics, pushes = lines(tmp_path), lines(tmp_path, "sync.jsonl")
        assert [m["step"] for m in metrics] == list(range(1, 101))
        assert [p["version"] for p in pushes] == list(range(1, 101))
        # The learning rate is far above any sane one, and the policy ends far from the base: no alarm, with room to
        # spare. With 1e-2 one of thirteen trainings had 0.029 for three checks: a token whose logprob moved by a nat
        # when its embedding moved by half a unit of bf16.
        scored = [p["canary_difference"] for p in pushes if p["canary_difference"] is not None]
        assert len(scored) == 25  # one of four
        assert max(scored) < 0.75 * trainer.bridge.strategy.canary.threshold, max(scored)
        print("largest scored", max(scored), "threshold", trainer.bridge.strategy.canary.threshold)
        assert [m["policy_version"] for m in metrics] == list(range(1, 101))
        # bf16 against bf16: measured 2e-5 to 2e-4 on this random model; one stale version would be far above.
        assert max(m["mismatch_kl"] for m in metrics) < 5e-3
        assert torch.tensor([m["mismatch_kl"] for m in metrics]).median() < 5e-4
        assert all(0.9 < m["ess"] <= 1 for m in metrics)
        # The reward is easy and the learning rate high: it must rise.
        rewards = [m["reward"] for m in metrics]
        assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.2


def test_where_bf16_is_slow_trainer_and_engine_multiply_in_float32_while_they_are_open(base, tmp_path, monkeypatch):
    monkeypatch.setenv(SETTING, "float32")
    rows, product = [], cpu_matmul._product
    monkeypatch.setattr(cpu_matmul, "_product", lambda a, *rest: rows.append(len(a)) or product(a, *rest))
    before = set(cpu_matmul._claims[torch.bfloat16])
    with make(base, tmp_path, max_steps=2) as trainer:
        assert len(cpu_matmul._claims[torch.bfloat16] - before) == 2  # one of each
        trainer.train()
    gc.collect()
    assert cpu_matmul._claims[torch.bfloat16] <= before
    assert len(rows) > 100
    assert max(line["mismatch_kl"] for line in lines(tmp_path)) < 5e-3
    machine = json.loads((tmp_path / "config.json").read_text())["machine"]
    assert machine["processor"]["multiplies_bf16_in"] == "float32"


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_distance_does_not_grow_with_the_temperature(base, tmp_path, temperature):
    with make(base, tmp_path, temperature=temperature) as trainer:
        trainer.train()
    assert all(m["mismatch_kl"] < 5e-4 for m in lines(tmp_path))


def test_the_run_directory_is_complete_and_its_adapter_is_the_trained_one(base, tmp_path):
    with make(base, tmp_path) as trainer:
        trainer.train()
        trained = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if ".lora_" in n}
    loaded = PeftModel.from_pretrained(load_base(base), tmp_path / "adapter")
    for name, parameter in loaded.named_parameters():
        if ".lora_" in name:
            assert torch.equal(parameter, trained[name].to(parameter.dtype)), name
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["base"]["identity"] == base.identity
    assert described["plan"]["strategy"] == "lora_adapter"
    assert described["base_compute"]["packs_plain"] == packs_away(torch.bfloat16)
    assert described["machine"]["bitsandbytes_avx512"] == uses_avx512()
    needed = {"reward", "mismatch_kl", "logprob_diff_mean", "logprob_diff_max", "ratio_p01", "ratio_p99", "ess", "loss"}
    needed |= {"sync_seconds", "sync_bytes", "rollout_tokens_per_s", "step_seconds", "grad_norm", "learning_rate"}
    for line in lines(tmp_path):
        assert not [name for name in needed if not isinstance(line[name], float | int)]


def test_training_on_a_16_bit_base_is_the_control_row(model_dir, tmp_path):
    with make(prepare_base(model_dir, "none"), tmp_path) as trainer:
        trainer.train()
    described = json.loads((tmp_path / "config.json").read_text())
    held, is_packed = described["base_held"], packs_away(torch.bfloat16)
    assert described["base_compute"]["packs_plain"] == is_packed
    assert "bitsandbytes_avx512" not in described["machine"]
    assert held["copies"] == 1 + is_packed
    assert ("packed it away" in held.get("reason", "")) == is_packed
    assert all(m["mismatch_kl"] < 5e-4 for m in lines(tmp_path))


def test_a_float32_base_leaves_no_distance_but_rounding(model_dir, tmp_path):
    base = prepare_base(model_dir, "none", compute_dtype="float32")
    with make(base, tmp_path, bf16=False, max_steps=6) as trainer:
        trainer.train()
    # float32 on both sides: measured about 1e-12 after the adapter has moved; 1e-9 would be a wrong scale.
    assert all(m["mismatch_kl"] < 1e-10 for m in lines(tmp_path))
    assert all(m["logprob_diff_max"] < 1e-4 for m in lines(tmp_path))


def test_the_engine_serves_what_was_trained(base, tmp_path, prompts):
    with make(base, tmp_path) as trainer:
        trainer.train()
        trainer.sync()
        rollout = trainer.engine.generate(prompts, max_tokens=8, seed=1)
        assert score(trainer.model.float(), prompts, rollout).mean() < 0.02


def test_an_engine_object_is_used_and_not_closed(base, tmp_path, prompts):
    with LocalEngine(base, max_lora_rank=8, max_model_length=32, max_num_seqs=8) as engine:
        with make(base, tmp_path, rollout=engine, vllm_max_model_length=None) as trainer:
            trainer.train()
        assert engine.version == 3
        assert len(engine.generate(prompts, max_tokens=2).completion_ids) == 8


def test_nothing_is_left_on_tmpfs(base, tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory(dir=default_root()) as own:  # others of this machine come and go
        monkeypatch.setattr("qlora_rl.adapter.store.default_root", lambda: Path(own))
        trainer = make(base, tmp_path)
        assert len(os.listdir(own)) == 1
        trainer.close()
        assert os.listdir(own) == []


def test_a_failing_reward_ends_the_run_and_loses_nothing(base, tmp_path):
    calls = []

    def reward_that_breaks(completions, **_):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("no digits at all")
        return reward_digits(completions)

    with make(base, tmp_path, reward_funcs=reward_that_breaks) as trainer:
        with pytest.raises(RewardFunctionError, match="'reward_that_breaks' raised ZeroDivisionError"):
            trainer.train()
        trained = (
            trainer.model.get_base_model().model.layers[0].self_attn.q_proj.lora_B["default"].weight.detach().clone()
        )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert len(lines(tmp_path)) == 2
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert torch.equal(saved["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"], trained)


def resident():
    trim_memory()
    return psutil.Process().memory_info().rss / 2**20


def test_five_hundred_syncs_leave_memory_flat(base, adapted, prompts):
    with LocalEngine(base, max_lora_rank=8, max_model_length=64, max_num_seqs=8) as engine:
        strategy = AdapterSync(adapted, engine, DirectoryTransport())
        before = 0.0
        for push in range(600):
            report = strategy.push()
            assert report.version == engine.version == push + 1
            if push % 20 == 0:
                engine.generate(prompts, max_tokens=4)
            if push == 99:  # pools and caches are warm
                before = resident()
        assert len(list(strategy.transport.store.root.iterdir())) == 2
        grown = resident() - before
        strategy.close()
        assert grown < 20, f"{grown:.1f} MiB over 500 syncs"


def test_train_close_and_train_on_another_base_gives_the_memory_back(base, other_model_dir, tmp_path):
    levels = []
    for turn, used in enumerate([base, prepare_base(other_model_dir), base, prepare_base(other_model_dir)]):
        trainer = make(used, tmp_path / str(turn))
        trainer.train()
        assert trainer.engine.base == used.path
        trainer.close()
        del trainer
        gc.collect()
        levels.append(resident())
    # The first turn leaves the libraries' own pools behind; after it, every turn must end where it began.
    assert max(levels[1:]) - levels[0] < 50, levels


def test_a_trainer_that_nobody_closed_gives_its_engine_back(base, tmp_path):
    trainer = make(base, tmp_path)
    engine = trainer.engine
    del trainer
    gc.collect()
    assert engine._is_closed


def test_an_old_version_serves_when_a_push_fails(base, adapted, prompts):
    with LocalEngine(base, max_lora_rank=8, max_model_length=64, max_num_seqs=8) as engine:
        strategy = AdapterSync(adapted, engine, DirectoryTransport())
        strategy.push()
        before = engine.generate(prompts, max_tokens=8, seed=1)
        randomise(adapted, 0.3, seed=9)
        weight = adapted.get_base_model().model.layers[0].self_attn.q_proj.lora_A["default"].weight
        good = weight.detach().clone()
        with torch.no_grad():
            weight[0, 0] = float("inf")
        with pytest.raises(AdapterRejectedError, match="NaN or infinite"):
            strategy.push()
        with torch.no_grad():
            weight.copy_(good)
        load, engine.load_adapter = engine.load_adapter, _fail
        with pytest.raises(SyncError, match="planted"):
            strategy.push()
        engine.load_adapter = load
        assert engine.generate(prompts, max_tokens=8, seed=1).logprobs == before.logprobs
        assert len(list(strategy.transport.store.root.iterdir())) == 1
        report = strategy.push()
        assert report.version == engine.version == 2
        assert engine.generate(prompts, max_tokens=8, seed=1).logprobs != before.logprobs
        strategy.close()


def _fail(*_):
    raise SyncError("planted")
