"""What saves memory in a step, under FSDP2: layer inputs in host memory and no padding, by two processes; MLPs stay
whole. Long."""

import json

import pytest
from conftest import FSDP2, distance, launch, said

pytestmark = pytest.mark.full  # one process does so in train/test_memory_switches.py

OFFLOAD = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False, "offload": True}}


def test_layer_inputs_in_host_memory_change_no_sharded_run(exact_base, recorded, tmp_path):
    """One process has trained on the doubled batch, without checkpointing."""
    one, kept = recorded
    call = {"base": exact_base, "kept": kept, "per_device_train_batch_size": 4, "max_steps": 4, "save_steps": 2}
    done = launch([{**call, "out": str(tmp_path / "host"), "offloads": True, **OFFLOAD}], **FSDP2)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        assert said(tmp_path / "host", rank)["error"] is None
        assert said(tmp_path / "host", rank)["inputs_on_host"] > 0
    padding = json.loads((tmp_path / "host" / "config.json").read_text())["padding"]
    assert padding == {"removed": True, "shares_prompts": True}
    assert distance(tmp_path / "host", one) < 1e-3
