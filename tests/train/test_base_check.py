"""The handshake in the trainer, and what a second `train()` and other adapter names do."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training

from qlora_rl import BaseMismatchError, CanaryError, ConfigConflictError, FakeEngine, load_base, prepare_base
from qlora_rl.report import write_report


@pytest.fixture
def other_engine(other_model_dir):
    with FakeEngine(load_base(prepare_base(other_model_dir)), max_model_length=64) as engine:
        yield engine


def test_an_engine_on_another_base_is_rejected(make_trainer, other_engine, tmp_path):
    with pytest.raises(BaseMismatchError, match="values differ"):
        make_trainer(rollout=other_engine)
    assert other_engine.version == 0
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_mismatch_that_is_allowed_marks_metrics_and_report(make_trainer, other_engine, tmp_path):
    trainer = make_trainer(rollout=other_engine, allow_base_mismatch=True)
    trainer.train()
    run = tmp_path / "run"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["base_verified"] for m in metrics] == [0.0]
    assert json.loads((run / "config.json").read_text())["base_proof"]["verified"] is False
    assert json.loads((run / "fingerprints.json").read_text())["differences"]
    assert "held different bases" in write_report(run).read_text()


def test_a_verified_base_stands_in_the_run_directory(make_trainer, tmp_path):
    trainer = make_trainer()
    trainer.train()
    run = tmp_path / "run"
    proof = json.loads((run / "fingerprints.json").read_text())
    assert proof["verified"] is True
    assert proof["ours"] == proof["theirs"]
    assert json.loads((run / "metrics.jsonl").read_text())["base_verified"] == 1.0
    assert "held different bases" not in write_report(run).read_text()


def test_a_second_train_pushes_before_it_generates(make_trainer):
    trainer = make_trainer()
    trainer.train()
    version = trainer.engine.version
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    trainer.train()
    assert trainer.engine.version == version + 1
    assert trainer.fidelity.last.mismatch_kl < 1e-3


def test_an_adapter_of_any_name_is_saved_where_it_is_looked_for(make_trainer, base, tmp_path):
    model = get_peft_model(load_base(base), LoraConfig(r=4, target_modules=["q_proj"]), adapter_name="mine")
    trainer = make_trainer(model=model, peft_config=None)
    trainer.train()
    loaded = PeftModel.from_pretrained(load_base(base), tmp_path / "run" / "adapter")
    for name, parameter in loaded.named_parameters():
        if ".lora_" in name:
            trained = trainer.model.get_parameter(name.replace(".default.", ".mine."))
            assert torch.equal(parameter.float(), trained.float())


@pytest.mark.parametrize(
    ("every", "scored"), [(1, [True, True, True]), (2, [True, False, True]), (0, [False, False, False])]
)
def test_the_canary_runs_as_often_as_it_is_told(make_trainer, config, tmp_path, every, scored):
    trainer = make_trainer(args=config(max_steps=3), canary_every=every)
    trainer.train()
    pushes = [json.loads(line) for line in (tmp_path / "run" / "sync.jsonl").read_text().splitlines()]
    assert [p["canary_difference"] is not None for p in pushes] == scored
    assert all(p["canary_difference"] < trainer.bridge.strategy.canary.threshold for p in pushes if every == 1)


def test_what_the_policy_writes_now_decides_where_the_fixed_sequences_have_become_unlikely(
    make_trainer, monkeypatch, caplog
):
    """Rounding is large at tokens that a policy has come to never write; an engine that is wrong is so at others
    too."""
    trainer = make_trainer()
    strategy, engine = trainer.bridge.strategy, trainer.engine
    real, fixed, moved = engine.score, strategy.canary.sequences, []
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.3)

    def score(sequences, **options):
        found = real(sequences, **options)
        if sequences == fixed or moved:
            return [[a - 1.0 for a in row] for row in found]
        return found

    monkeypatch.setattr(engine, "score", score)
    monkeypatch.setattr(strategy.canary, "wants_probe", lambda: False)  # a probe would see it first
    report = strategy.push()
    # Rounding: 7.2e-4 with AVX-512, 1.1e-3 with AVX2.
    assert report.canary_difference < strategy.canary.threshold / 10
    assert "have become unlikely" in caplog.text
    moved.append(True)
    strategy.canary.every = 1
    with pytest.raises(CanaryError, match="on what the policy writes now"):
        strategy.push()
    assert engine.version == report.version


def test_overwriting_begins_only_when_nothing_can_be_rejected_any_more(make_trainer, config, tmp_path):
    make_trainer().train()
    run = tmp_path / "run"
    before = {f.name: f.read_bytes() for f in run.iterdir() if f.is_file()}
    with pytest.raises(Exception, match="nowhere"):
        make_trainer(model=str(tmp_path / "nowhere"), existing_run="overwrite")
    assert {f.name: f.read_bytes() for f in run.iterdir() if f.is_file()} == before
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    make_trainer(args=config(max_steps=2), existing_run="overwrite").train()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


def test_an_interrupt_while_the_adapter_is_saved_loses_no_adapter(make_trainer, tmp_path, monkeypatch):
    import os

    trainer = make_trainer()
    trainer.train()
    run = tmp_path / "run"
    saved = (run / "adapter" / "adapter_model.safetensors").read_bytes()
    real, calls = os.rename, []

    def interrupted(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.run.save_adapter(trainer.model)
    assert (run / "adapter" / "adapter_model.safetensors").read_bytes() == saved
    assert not list(run.glob(".*"))


def test_a_model_that_was_lifted_for_k_bit_training_is_rejected_by_name(make_trainer, base):
    model = prepare_model_for_kbit_training(load_base(base))
    model.qlora_base = None
    with pytest.raises(ConfigConflictError, match="prepare_model_for_kbit_training"):
        make_trainer(model=model)
