"""What is sampled is sampled by the policy of the trainer that asks, as it is now; what is logged is of the steps that
it names. `FakeEngine`."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
from resumed import lines, make
from test_resume import KillAt, Killed, rows

from qlora_rl import EngineBrokenError, QLoRAAsyncGRPOTrainer, QLoRAGRPOTrainer
from qlora_rl.adapter.export import export_adapter
from qlora_rl.adapter.store import write_adapter

# Trainer and FakeEngine compute by the same kernels: a policy one step older is far above.
SAME = 1e-4
EVALUATED = {"eval_dataset": rows(2, 60), "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
FOREIGN = 100
KINDS = [QLoRAGRPOTrainer, QLoRAAsyncGRPOTrainer]


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_best_model_is_loaded_it_is_the_one_that_is_evaluated(kind, base, tmp_path):
    scores = iter([1.0, 0.0, 0.0])
    wish = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    with make(base, tmp_path, "fake", trainer=kind, max_steps=3, **EVALUATED, **wish) as trainer:
        evaluate = trainer.evaluate
        trainer.evaluate = lambda *a, **k: evaluate(*a, **k) | {"eval_loss": next(scores)}
        trainer.train()
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
        assert evaluate()["eval_qlora_rl/mismatch_kl"] < SAME
        version = trainer.engine.version
        evaluate()
        assert trainer.engine.version == version, "nothing has changed"


@pytest.mark.parametrize("kind", KINDS)
def test_who_shares_an_engine_draws_with_its_own_policy(kind, base, tmp_path):
    fields = {"trainer": kind, "max_steps": 2, **EVALUATED}
    with make(base, tmp_path / "a", "fake", **fields) as ours:
        ours.train()  # and evaluates last
        with make(base, tmp_path / "b", ours.engine, **fields, seed=5) as other:
            other.train()
            assert ours.evaluate()["eval_qlora_rl/mismatch_kl"] < SAME
            assert other.evaluate()["eval_qlora_rl/mismatch_kl"] < SAME
        ours.engine.drop_adapter()
        assert ours.evaluate()["eval_qlora_rl/mismatch_kl"] < SAME


def test_what_somebody_else_has_pushed_in_the_middle_of_a_rollout_is_not_trained_on(base, tmp_path):
    with make(base, tmp_path / "a", "fake", max_steps=2) as ours:
        bridge, real = ours.bridge, ours.engine.generate

        def generate(*arguments, **named):
            bridge.strategy.push()
            return real(*arguments, **named)

        ours.engine.generate = generate
        with pytest.raises(EngineBrokenError, match=r"version=2 .*version=1"):
            ours.train()
        del ours.engine.generate


def test_a_rollout_that_begins_while_somebody_else_pushes_is_sampled_with_our_policy(base, tmp_path):
    fields, pushed = {"trainer": QLoRAAsyncGRPOTrainer, "max_steps": 6, "max_staleness": 1}, threading.Event()
    with make(base, tmp_path / "a", "fake", **fields) as ours:
        real, theirs = ours.engine.generate, tmp_path / "theirs"
        theirs.mkdir()
        write_adapter(export_adapter(ours.model), theirs)

        def generate(*arguments, **named):
            try:
                return real(*arguments, **named)
            finally:
                if not pushed.is_set():
                    pushed.set()
                    ours.engine.load_adapter(theirs, FOREIGN)

        ours.engine.generate = generate
        # Where it was sampled before, or was pushed again just then, the run goes on.
        with contextlib.suppress(EngineBrokenError):
            ours.train()
        del ours.engine.generate
        assert pushed.is_set()
        is_trained = (tmp_path / "a" / "metrics.jsonl").exists()  # otherwise it has ended at its first step
        assert FOREIGN not in {line["rollout_version"] for line in (lines(tmp_path / "a") if is_trained else ())}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_same_process", [True, False])
def test_who_goes_on_from_a_checkpoint_pushes_once_a_step_and_accuses_nobody(
    kind, is_same_process, base, tmp_path, caplog
):
    fields = {"trainer": kind, "max_steps": 4, **EVALUATED}
    fields |= {"max_staleness": 0} if kind is QLoRAAsyncGRPOTrainer else {}
    with make(base, tmp_path, "fake", **fields) as trainer:
        callback = KillAt(3)
        trainer.add_callback(callback)
        with pytest.raises(Killed):
            trainer.train()
        trainer.remove_callback(callback)
        if is_same_process:
            trainer.train(resume_from_checkpoint=True)
    if not is_same_process:
        with make(base, tmp_path, "fake", existing="resume", **fields) as trainer:
            trainer.train()
    versions = [push["version"] for push in lines(tmp_path, "sync.jsonl")]
    assert len(versions) == len(set(versions)) == 5, "four steps, and the evaluation after the last"
    assert versions == sorted(versions)
    assert "was pushed last" not in caplog.text


def test_an_engine_that_is_another_one_on_any_rank_is_verified_on_all(base, tmp_path, monkeypatch):
    with make(base, tmp_path, "fake", max_steps=1) as trainer:
        trainer.train()
        proofs = []
        monkeypatch.setattr(trainer.bridge.strategy, "verify", lambda: proofs.append(1))
        for elsewhere, count in ((False, 0), (True, 1)):
            both = SimpleNamespace(size=2, gather=lambda value, _, elsewhere=elsewhere: [value, elsewhere])
            monkeypatch.setattr("qlora_rl.train.rollouts.bridge.ranks", lambda both=both: both)
            trainer.bridge._prove()
            assert len(proofs) == count


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_failed_training_has_not_logged_is_not_logged_by_the_next(kind, base, tmp_path):
    fields = {"trainer": kind, "max_steps": 6, "save_steps": 2, "logging_steps": 6}
    fields |= {"max_staleness": 0} if kind is QLoRAAsyncGRPOTrainer else {}
    with make(base, tmp_path / "straight", "fake", **fields) as straight:
        straight.train()
    with make(base, tmp_path / "again", "fake", **fields) as trainer:
        callback = KillAt(5)
        trainer.add_callback(callback)
        with pytest.raises(Killed):
            trainer.train()
        assert trainer._metrics["train"], "or there is nothing to forget"
        trainer.remove_callback(callback)
        trainer.train(resume_from_checkpoint=True)
    logged = [each.state.log_history[-2] for each in (straight, trainer)]
    for name in ("reward", "completions/mean_length", "num_tokens", "loss", "qlora_rl/mismatch_kl"):
        assert logged[0][name] == logged[1][name], name
    assert [line["step"] for line in lines(tmp_path / "again")] == list(range(1, 7))
