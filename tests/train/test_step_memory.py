"""What saves memory in a step changes no run: with sampler, alarm and importance sampling, killed and resumed.
`FakeEngine`, one process."""

from functools import partial

import pytest
import torch
from datasets import Dataset
from host_copies import HostCopies
from peft import LoraConfig
from resumed import adapter, assert_same_run, lines, make
from transformers import TrainerCallback
from trl import DPOConfig

from qlora_rl import QLoRADPOTrainer
from qlora_rl.train.run import recorded_training
from qlora_rl.train.setup import tiled_mlp as tiles_module
from qlora_rl.train.setup.layer_inputs import keep_on_host

CHECKPOINTED = {"gradient_checkpointing": True, "max_steps": 4, "save_steps": 2, "max_completion_length": 8}
OFFLOAD = {"gradient_checkpointing_kwargs": {"use_reentrant": False, "offload": True}}


class Killed(BaseException):
    """Ends a training without any of the clean-up that an error has."""


class KillAt(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 3:
            raise Killed


@pytest.fixture
def copies(monkeypatch):
    copies = HostCopies()
    monkeypatch.setattr(recorded_training, "keep_on_host", partial(keep_on_host, on_host=copies))
    return copies


def test_a_run_with_mlps_in_tiles_is_resumed_bit_for_bit_and_raises_no_alarm(base, monkeypatch, tmp_path):
    """Tiles of eight tokens; the first loss is that of whole MLPs, and the adapter differs by the rounding of its
    gradients."""
    fields = CHECKPOINTED | {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "learning_rate": 1e-3}
    with make(base, tmp_path / "whole", "fake", **fields) as whole:
        whole.train()
    monkeypatch.setattr(tiles_module, "TILE", {"cpu": 8})
    with make(base, tmp_path / "straight", "fake", **fields) as straight:
        straight.train()
        assert straight.alarm is not None
    trainer = make(base, tmp_path / "killed", "fake", **fields)
    trainer.add_callback(KillAt())
    with pytest.raises(Killed):
        trainer.train()
    with make(base, tmp_path / "killed", "fake", **fields) as trainer:
        trainer.train()
    assert_same_run(tmp_path / "killed", tmp_path / "straight")
    assert lines(tmp_path / "whole")[0]["loss"] == lines(tmp_path / "straight")[0]["loss"]
    ours, theirs = adapter(tmp_path / "straight"), adapter(tmp_path / "whole")
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_layer_inputs_in_host_memory_change_no_run_and_it_may_go_on_without(base, copies, tmp_path, beta):
    """With beta TRL disables checkpointing for the reference, and enables it again with all of the config's dict."""
    fields = CHECKPOINTED | {"beta": beta}
    with make(base, tmp_path / "straight", "fake", **fields) as straight:
        straight.train()
    assert copies.sent == []
    trainer = make(base, tmp_path / "killed", "fake", **fields, **OFFLOAD)
    trainer.add_callback(KillAt())
    with pytest.raises(Killed):
        trainer.train()
    sent = len(copies.sent)
    assert sent > 0
    with make(base, tmp_path / "killed", "fake", **fields) as trainer:
        trainer.train()
    assert len(copies.sent) == sent
    assert_same_run(tmp_path / "killed", tmp_path / "straight")


def test_layer_inputs_in_host_memory_change_no_offline_training(base, copies, tmp_path):
    pairs = Dataset.from_list(
        [{"prompt": f"{a}+{a}=", "chosen": str(2 * a), "rejected": str(2 * a + 7)} for a in range(10, 26)]
    )
    for name, extra in (("plain", {}), ("host", OFFLOAD)):
        args = DPOConfig(str(tmp_path / name), max_steps=2, report_to=[], use_cpu=True, bf16=True, **extra)
        lora = LoraConfig(r=4, target_modules="all-linear")
        with QLoRADPOTrainer(base, args=args, train_dataset=pairs, peft_config=lora) as trainer:
            trainer.train()
    plain, host = adapter(tmp_path / "plain"), adapter(tmp_path / "host")
    assert len(copies.sent) > 0
    assert all(torch.equal(plain[name], host[name]) for name in plain)
