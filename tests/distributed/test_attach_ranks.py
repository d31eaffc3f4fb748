"""`attach` in two processes: recorded rollouts against one process with the doubled batch, and how they end."""

import pytest
import torch
from conftest import WAYS, distance, launch, said, skip_without_deepspeed
from job import in_4_bits, main
from resumed import lines
from safetensors.torch import load_file

STEPS = {"method": "attach", "max_steps": 4}
TWO = {"per_device_train_batch_size": 4}
ADAPTER = "adapter/adapter_model.safetensors"
GLOBAL = ("reward", "reward_std", "grad_norm", "qlora_rl/rollout_tokens", "qlora_rl/policy_version", "qlora_rl/ess")


@pytest.fixture(scope="module")
def its_base(model_dir):
    """The bytes of a model that transformers has quantised."""
    from transformers import AutoTokenizer

    from qlora_rl import prepare_base

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return str(prepare_base(in_4_bits(model_dir), "none", compute_dtype="float32", tokenizer=tokenizer).path)


@pytest.fixture(scope="module")
def alone(its_base, model_dir, tmp_path_factory):
    """One process with the doubled batch, and everything that it has sampled."""
    root = tmp_path_factory.mktemp("alone")
    call = {
        "base": its_base,
        "model": str(model_dir),
        "out": str(root / "one"),
        "record": str(root / "kept.json"),
        **STEPS,
    }
    main(call | {"per_device_train_batch_size": 8})
    return root / "one", str(root / "kept.json")


# By default DDP; trainers of ours are sharded in test_full_weights.py.
@pytest.fixture(
    scope="module", params=["ddp", *(pytest.param(way, marks=pytest.mark.full) for way in WAYS if way != "ddp")]
)
def two(request, alone, its_base, model_dir, tmp_path_factory):
    """Recorded rollouts replayed; then rewards that raise on rank 1."""
    skip_without_deepspeed(request.param)
    root = tmp_path_factory.mktemp(request.param)
    common = {"base": its_base, "model": str(model_dir), **STEPS, **TWO, "parts": request.param == "zero3"}
    calls = [
        {**common, "out": str(root / "two"), "kept": alone[1]},
        {**common, "out": str(root / "fails"), "fails": [1, 2]},
    ]
    done = launch(calls, **WAYS[request.param])
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def test_two_processes_train_what_one_trains_on_the_doubled_batch(two, alone):
    assert distance(two / "two", alone[0]) < 1e-5
    for ours, theirs in zip(lines(two / "two"), lines(alone[0]), strict=True):
        for name in GLOBAL:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


def test_save_model_writes_an_adapter_with_what_was_trained(two):
    saved, trained = load_file(two / "two/saved/adapter_model.safetensors"), load_file(two / "two" / ADAPTER)
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], trained[name]) for name in trained)
    assert (two / "two" / "saved" / "adapter_config.json").exists()


def test_every_step_pushes_once_and_every_rank_serves_the_same_version(two):
    assert [line["qlora_rl/policy_version"] for line in lines(two / "two")] == [1, 2, 3, 4]
    ends = [said(two / "two", rank) for rank in (0, 1)]
    assert [(end["error"], end["pushes"]) for end in ends] == [(None, 4)] * 2


def test_a_reward_that_raises_on_rank_1_raises_the_same_on_rank_0(two):
    ends = [said(two / "fails", rank) for rank in (0, 1)]
    assert ends[0]["error"] == ends[1]["error"]
    assert "raised ZeroDivisionError: only here" in ends[0]["error"]
    assert ends[0]["notes"] == ["raised on rank 1"]


@pytest.mark.full  # two processes with vLLM each; by default FakeEngine
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_vllm_serves_both_ranks(way, base, model_dir, tmp_path):
    call = {"base": str(base.path), "model": str(model_dir), "dtype": "bfloat16", "bf16": True, **STEPS, **TWO}
    call |= {"max_steps": 3, "vllm_max_model_length": 32}
    calls = [call | {"out": str(tmp_path / name), "rollout": name} for name in ("server", "colocate")]
    done = launch(calls, **WAYS[way])
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("server", "colocate"):
        ends = [said(tmp_path / name, rank) for rank in (0, 1)]
        assert [(end["error"], end["pushes"]) for end in ends] == [(None, 3)] * 2
        assert [end["owns_engine"] for end in ends] == [True, name == "colocate"]
        steps = lines(tmp_path / name)
        assert [step["qlora_rl/policy_version"] for step in steps] == [1, 2, 3]
        assert all(step["qlora_rl/mismatch_kl"] < 1e-2 for step in steps)
