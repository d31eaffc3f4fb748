"""Two processes with bf16=True, TRL's default on a GPU. DDP's own tests and `test_zero.py` have more of it."""

import pytest
from conftest import WAYS, distance, launch
from job import main
from resumed import lines

TWO = {"per_device_train_batch_size": 4, "max_steps": 3, "save_strategy": "no", "bf16": True}


@pytest.fixture(scope="module")
def ddp(base, tmp_path_factory):
    """What DDP trains on recorded rollouts, and these."""
    root = tmp_path_factory.mktemp("ddp")
    one = {**TWO, "per_device_train_batch_size": 8, "record": str(root / "kept.json")}
    main({"base": str(base.path), "out": str(root / "one"), **one})
    two = {"base": str(base.path), "out": str(root / "two"), "kept": str(root / "kept.json"), "bitsandbytes": True}
    done = launch([two | TWO])
    assert done.returncode == 0, done.stderr[-3000:]
    return root / "two", str(root / "kept.json")


def test_sharded_in_bf16_trains_what_ddp_trains(ddp, base, tmp_path):
    done = launch([{"base": str(base.path), "out": str(tmp_path / "run"), "kept": ddp[1], **TWO}], **WAYS["fsdp2"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert distance(tmp_path / "run", ddp[0]) < 1e-5  # the adapter is gathered, its gradients added up, in float32
    steps = lines(tmp_path / "run")
    assert len(steps) == 3
    assert all(step["mismatch_kl"] < 1e-3 and step["grad_norm"] > 0 for step in steps)
