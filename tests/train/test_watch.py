"""The alarm in a trainer whose engine is plain torch; on real vLLM: tests/engine/test_mismatch.py."""

import json

import pytest
import torch
from peft import LoraConfig

from qlora_rl import PolicyMismatchError


def test_dropout_is_no_alarm(make_trainer, config):
    lora = LoraConfig(r=4, lora_alpha=64, lora_dropout=0.5, target_modules="all-linear")
    trainer = make_trainer(args=config(max_steps=4, learning_rate=3e-2), peft_config=lora)
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
        with pytest.raises(PolicyMismatchError, match="holds version 2, which is not the newest") as stopped:
            trainer.train()
    finally:
        del engine.serve_slot
    assert stopped.value.cause == "stale"
    assert versions[-1] in (3, 4)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "PolicyMismatchError" in summary["error"]


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
