"""Full weights from two processes, further: other kinds of policies, checkpoints, memory, and vLLM itself. Long."""

import json
import shutil

import pytest
from conftest import WAYS, distance, launch, said, skip_without_deepspeed
from job import main
from resumed import lines
from support import make_model

from qlora_rl import prepare_base

# DoRA is in test_full_weights.py, the other kinds for one process in engine/test_dense.py.
pytestmark = pytest.mark.full

ONE = {"per_device_train_batch_size": 8, "max_steps": 4, "save_steps": 2}
TWO = {"per_device_train_batch_size": 4, "max_steps": 4, "save_steps": 2}
# A base that is not 4-bit is trained itself, and much faster than an adapter.
KINDS = {"dora": {}, "norms": {}, "ia3": {}, "none": {"learning_rate": 1e-4}}
PARTED = ("fsdp2", "zero3")


def kinds_of(way):
    """Where layers have hooks, IA3, too: a layer is copied to be asked, with what ZeRO-3 has put on it."""
    return {kind: fields for kind, fields in KINDS.items() if kind != "ia3" or way.startswith("zero")}


@pytest.fixture(scope="module")
def plain_base(model_dir):
    return str(prepare_base(model_dir, quant="none", compute_dtype="float32").path)


@pytest.fixture(scope="module")
def bases(exact_base, plain_base):
    return {"dora": exact_base, "norms": exact_base, "ia3": exact_base, "none": plain_base}


@pytest.fixture(scope="module")
def alone(bases, tmp_path_factory):
    """Each kind by one process, and what it has sampled."""
    root = tmp_path_factory.mktemp("alone")
    for kind, fields in KINDS.items():
        call = {"base": bases[kind], "out": str(root / kind), "record": str(root / f"{kind}.json"), "adapter": kind}
        main({**call, **ONE, **fields})
    return root


@pytest.fixture(scope="module")
def wide_base(tmp_path_factory):
    """Weights that are much larger than what is dequantised at once."""
    model = make_model(tmp_path_factory.mktemp("wide") / "model", head_dim=256)
    return str(prepare_base(model, compute_dtype="float32").path)


@pytest.fixture(scope="module", params=WAYS)
def two(request, bases, wide_base, alone, tmp_path_factory):
    """Recorded rollouts replayed; one process's checkpoint gone on from; pushes weighed."""
    skip_without_deepspeed(request.param)
    root = tmp_path_factory.mktemp(request.param)
    calls, parts = [], {"parts": request.param == "zero3"}
    for kind, fields in kinds_of(request.param).items():
        call = {"base": bases[kind], "kept": str(alone / f"{kind}.json"), "adapter": kind, **TWO, **fields, **parts}
        calls.append({**call, "out": str(root / kind), "proves": True})
        back = root / f"{kind}-resumed"
        shutil.copytree(alone / kind, back)
        for left in ("checkpoint-4", "adapter", "model"):
            shutil.rmtree(back / left, ignore_errors=True)
        (back / "summary.json").unlink()
        calls.append({**call, "out": str(back), "existing": "resume"})
    weighed = {"base": wide_base, "out": str(root / "weighed"), "adapter": "dora", "weighs": True, **parts}
    calls.append({**weighed, **TWO, "max_steps": 3, "save_strategy": "no"})
    done = launch(calls, **WAYS[request.param])
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param, root


def root_of(kind, two):
    way, root = two
    if kind not in kinds_of(way):
        pytest.skip(f"{kind} is not among what is trained under {way}: {sorted(kinds_of(way))}")
    return root


def bar(way):
    """Of the relative distance between float32 sums in another order."""
    return 1e-5 if way.startswith("fsdp") else 1e-3


def apart(kind, one, other):
    """Relative distance of what was trained, of the parts that move."""
    if kind == "none":
        return distance(one, other, file="model/model.safetensors")
    parts = {"dora": ("lora_B", "lora_A"), "norms": ("lora_B", "norm"), "ia3": ("ia3",)}
    return max(distance(one, other, only=part) for part in parts[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_what_one_trains_on_the_doubled_batch(kind, two, alone):
    root = root_of(kind, two)
    assert apart(kind, root / kind, alone / kind) < bar(two[0])
    assert [push["version"] for push in lines(root / kind, "sync.jsonl")] == [1, 2, 3, 4]
    ends = [said(root / kind, rank) for rank in (0, 1)]
    assert [end["error"] for end in ends] == [None, None]
    assert ends[0]["held"] == ends[1]["held"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_checkpoint_of_one_process_goes_on_in_two(kind, two, alone):
    root = root_of(kind, two)
    assert apart(kind, root / f"{kind}-resumed", alone / kind) < bar(two[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_checkpoint_of_two_processes_goes_on_in_one(kind, two, alone, bases, tmp_path):
    root = root_of(kind, two)
    back = tmp_path / "back"
    shutil.copytree(root / kind, back)
    for left in ("checkpoint-4", "adapter", "model"):
        shutil.rmtree(back / left, ignore_errors=True)
    (back / "summary.json").unlink()
    call = {"base": bases[kind], "kept": str(alone / f"{kind}.json"), "adapter": kind, **ONE, **KINDS[kind]}
    main({**call, "out": str(back), "existing": "resume"})
    assert apart(kind, back, alone / kind) < bar(two[0])


def test_the_base_lies_in_parts_and_a_push_holds_two_modules_at_most(two):
    way, root = two
    for rank in (0, 1):
        found = said(root / "weighed", rank)
        assert found["shares"]["base"] == pytest.approx(0.5 if way in PARTED else 1.0, abs=0.01)
        assert len(found["growth"]) == 3
        assert all(0.5 < each <= 2.0 for each in found["growth"]), found["growth"]


@pytest.mark.parametrize("rollout", ["colocate", "server"])
@pytest.mark.parametrize("way", WAYS)
def test_vllm_is_given_full_weights(way, rollout, base, tmp_path):
    skip_without_deepspeed(way)
    out = tmp_path / "run"
    call = {"base": str(base.path), "out": str(out), "rollout": rollout, "adapter": "dora", "vllm_max_model_length": 32}
    call |= TWO | {"max_steps": 2, "save_strategy": "no", "proves": True, "bf16": True}
    done = launch([call | {"parts": way == "zero3"}], **WAYS[way])
    assert done.returncode == 0, done.stderr[-3000:]
    ends = [said(out, rank) for rank in (0, 1)]
    assert [end["error"] for end in ends] == [None, None]
    assert [push["version"] for push in lines(out, "sync.jsonl")] == [1, 2]
    assert ends[0]["held"] == ends[1]["held"]
    assert [end["pushes"] for end in ends] == [3, 3]
    assert all(step["mismatch_kl"] < 1e-2 and step["base_verified"] for step in lines(out))
    assert json.loads((out / "config.json").read_text())["plan"]["strategy"] == "weights"
