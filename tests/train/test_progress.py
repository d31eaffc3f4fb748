"""What people see of a training, and what trackers get."""

import io
import math
import sys

import pytest
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState

from qlora_rl.train.run.progress import Progress, show_progress, shown

OURS = (
    "qlora_rl/mismatch_kl",
    "qlora_rl/rollout_tokens_per_s",
    "qlora_rl/sync_seconds",
    "qlora_rl/policy_version",
    "qlora_rl/ess",
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def trained(make_trainer, config, stream, plain, **fields):
    trainer = make_trainer(args=config(disable_tqdm=False, max_steps=3, **fields), eval_dataset=plain.select(range(2)))
    (bar,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, ProgressCallback)]
    assert type(bar) is Progress
    bar._stream, bar.every_s = stream, 0.0
    trainer.train()
    return stream.getvalue()


def test_outside_a_terminal_a_step_is_a_line(make_trainer, config, plain):
    text = trained(make_trainer, config, io.StringIO(), plain, eval_strategy="steps", eval_steps=2)
    assert "\r" not in text
    first, _, evaluation, *rest = text.splitlines()
    (last,) = [line for line in rest if line.startswith("training")]  # another evaluation comes behind it
    assert first.startswith("training: step 1/3, reward 0.500, loss ")
    for part in (", KL ", " tok/s, ", " s/step, ", " gone, ", " left"):
        assert part in first
    assert evaluation.startswith("evaluation at step 2: reward 0.500")
    assert last.startswith("training: step 3/3")
    assert last.endswith(" gone, 0:00:00 left")
    assert text.count("step 3/3") == 1  # not again when it ends


def test_what_is_prepared_before_the_first_step_is_told(make_trainer, config, caplog):
    """The engine is given here, so that none is started."""
    with caplog.at_level("INFO", logger="qlora_rl.stages"):
        make_trainer(args=config(max_steps=1))
    told = [record.getMessage() for record in caplog.records if record.name == "qlora_rl.stages"]
    wanted = ["loading the base", "verifying that trainer and engine hold one base", "calibrating the check of pushes"]
    assert [each for each in told if each in wanted] == wanted
    assert told[-1] == ""


def test_a_script_is_told_what_is_prepared_and_at_the_end_where_the_run_is(make_trainer, config, capsys, caplog):
    for name in (None, "qlora_rl"):  # whatever other tests have set: somebody's own logging would show the stages
        caplog.set_level("WARNING", name)
    trainer = make_trainer(args=config(disable_tqdm=False))
    said = capsys.readouterr().err
    assert "     loading the base\n" in said
    assert "     verifying that trainer and engine hold one base\n" in said
    trainer.train()
    out = trainer.args.output_dir
    lines = capsys.readouterr().err.splitlines()
    assert f"     the run is in {out}; look at it: qlora-rl report {out}, talk to it: qlora-rl chat {out}" in lines


@pytest.mark.parametrize("quiet", [{"disable_tqdm": True}, {"disable_tqdm": False, "log_level": "error"}])
def test_a_script_that_wants_no_bar_or_only_errors_is_told_nothing(make_trainer, config, capsys, quiet):
    trainer = make_trainer(args=config(**quiet))
    trainer.train()
    assert not [line for line in capsys.readouterr().err.splitlines() if line.startswith("     ")]


def test_rewards_that_are_all_equal_are_warned_of_at_once_and_others_are_not(make_trainer, config, caplog):
    def trained(reward, name):
        caplog.clear()
        make_trainer(reward_funcs=reward, args=config(output_dir=name, max_steps=4, disable_tqdm=True)).train()
        return [r.getMessage() for r in caplog.records if "nothing can be learned" in r.getMessage()]

    out = config().output_dir
    (said,) = trained(lambda completions, **_: [0.0] * len(completions), f"{out}-a")
    assert "rewards so far are equal (0)" in said
    assert 'completion[-1]["content"]' in said
    assert trained(lambda completions, **_: [float(i % 2) for i in range(len(completions))], f"{out}-b") == []


def test_no_sign_of_life_is_left_of_a_training_that_fails(make_trainer, config):
    trainer = make_trainer(args=config(disable_tqdm=False, max_steps=3))
    (bar,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, Progress)]
    beats = []

    class Fails(TrainerCallback):
        def on_step_end(self, *_, **__):
            beats.append(bar._beat)
            raise RuntimeError("no further")

    trainer.add_callback(Fails())
    with pytest.raises(RuntimeError, match="no further"):
        trainer.train()
    assert beats[0]._is_over.is_set()


def test_a_run_that_ends_before_the_first_log_is_a_line_without_values(make_trainer, config, plain):
    text = trained(make_trainer, config, io.StringIO(), plain, logging_steps=10)
    assert ", ," not in text
    assert text.startswith("training: step 3/3, ")
    assert " s/step, " in text


def test_a_slow_first_step_is_forgotten(monkeypatch):
    """100 s, then 10 s each: after five more steps the line knows of ten seconds alone."""
    stream, now = io.StringIO(), 0.0
    monkeypatch.setattr("qlora_rl.train.run.progress.time.monotonic", lambda: now)
    bar, state = Progress(stream=stream, every_s=0.0), TrainerState(max_steps=10, is_world_process_zero=True)
    bar.on_train_begin(None, state, None)
    for step, seconds in enumerate((100, 10, 10, 10, 10, 10), start=1):
        now += seconds
        state.global_step = step
        bar.on_step_end(None, state, None)
        bar.on_log(None, state, None, logs={"loss": 0.0})
    first, *_, last = stream.getvalue().splitlines()
    assert first.endswith("100.00 s/step, 0:01:40 gone, 0:15:00 left")
    assert last.endswith("10.00 s/step, 0:02:30 gone, 0:00:40 left")


def test_in_a_terminal_a_bar_stays_on_its_line(make_trainer, config, plain):
    text = trained(make_trainer, config, Terminal(), plain)
    assert text.count("\n") == 1  # at its end
    last = text.split("\r")[-1]
    assert "training: 100%" in last
    assert "3/3" in last
    assert "reward 0.500, loss" in last


def test_who_wants_no_bar_gets_what_transformers_has(make_trainer, config):
    trainer = make_trainer(args=config(disable_tqdm=True))
    kinds = {type(callback) for callback in trainer.callback_handler.callbacks}
    assert PrinterCallback in kinds
    assert not [kind for kind in kinds if issubclass(kind, ProgressCallback)]
    trainer = make_trainer(args=config(disable_tqdm=False, output_dir=f"{trainer.args.output_dir}-2"))
    trainer.remove_callback(ProgressCallback)  # ours is one
    assert not [c for c in trainer.callback_handler.callbacks if isinstance(c, ProgressCallback)]


def test_a_log_is_shown_in_one_line_without_what_is_no_number():
    log = {"loss": 0.25, "reward": 0.5, "qlora_rl/mismatch_kl": math.nan, "qlora_rl/rollout_tokens_per_s": 12345.6}
    assert shown(log | {"entropy": 1.0, "note": "text"}) == "reward 0.500, loss 0.2500, 12,346 tok/s"
    assert shown({}) == ""


def test_a_tracker_gets_our_metrics_at_every_step(make_trainer, config):
    class Tracker(TrainerCallback):
        """What wandb's, mlflow's, trackio's and tensorboard's callbacks do."""

        seen = []

        def on_log(self, args, state, control, logs=None, **_):
            self.seen.append((state.global_step, dict(logs)))

    make_trainer(args=config(max_steps=3), callbacks=[Tracker()]).train()
    steps = {step: logs for step, logs in Tracker.seen if "loss" in logs}
    assert list(steps) == [1, 2, 3]
    for logs in steps.values():
        assert all(math.isfinite(logs[name]) for name in OURS)


def test_in_a_notebook_lines_on_stdout_take_the_place_of_the_table_of_losses(make_trainer, config):
    class NotebookProgressCallback(TrainerCallback):
        """That of transformers cannot be imported without IPython; it is known by its name."""

    trainer = make_trainer(args=config(disable_tqdm=True))
    trainer.add_callback(NotebookProgressCallback())
    show_progress(trainer)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert NotebookProgressCallback not in kinds
    (ours,) = [c for c in trainer.callback_handler.callbacks if type(c) is Progress]
    assert ours.stream is sys.stdout
