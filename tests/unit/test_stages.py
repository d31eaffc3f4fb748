"""What is taking long is said, and that it still is."""

import fcntl
import io
import logging
import os
import pty
import struct
import termios
import threading
import time
from types import SimpleNamespace

import pytest
from transformers import TrainerState

from qlora_rl import prepare_base, stages
from qlora_rl.train.run import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def wait_for(is_there, seconds=60):
    end = time.monotonic() + seconds
    while not is_there() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_there()


def test_in_a_pipe_a_stage_is_a_line_and_a_long_one_another_now_and_then(monkeypatch):
    monkeypatch.setattr(stages, "PLAIN_S", 0.02)
    stream = io.StringIO()
    with stages.shown(stream):
        stages.begin("reading the model")
        assert stream.getvalue() == "     reading the model\n"
        wait_for(lambda: "     ... 0 s\n" in stream.getvalue())
        stages.begin("writing it")
    said = stream.getvalue()
    assert said.splitlines().index("     writing it") > said.splitlines().index("     ... 0 s")
    time.sleep(0.1)
    assert stream.getvalue() == said  # nothing is alive


def test_on_a_terminal_a_stage_keeps_its_line_and_leaves_its_time(monkeypatch):
    monkeypatch.setattr(stages, "LIVE_S", 0.02)
    stream = Terminal()
    with stages.shown(stream):
        with stages.ended():
            stages.begin("reading the model")
            wait_for(lambda: stream.getvalue().count("\r") > 1)
        assert stream.getvalue().endswith("     reading the model: 0 s\n")
        said = stream.getvalue()
        time.sleep(0.1)
        assert stream.getvalue() == said
    assert stream.getvalue().count("\n") == 1


def test_a_process_that_is_forked_gets_lines_and_no_thread(monkeypatch):
    monkeypatch.setattr(stages, "Beat", lambda *_: pytest.fail("a thread"))
    for stream in (io.StringIO(), Terminal()):
        with stages.shown(stream, beats=False):
            stages.begin("starting vLLM")
        assert stream.getvalue() == "     starting vLLM\n"


def test_a_stage_that_counts_says_how_far_it_is(monkeypatch):
    monkeypatch.setattr(stages, "PLAIN_S", 0.02)
    monkeypatch.setattr(stages, "LIVE_S", 0.02)
    monkeypatch.setenv("COLUMNS", "40")
    for stream, said in (
        (io.StringIO(), "     ... prompt 3 of 16: 0 s\n"),
        (Terminal(), "     sampling from  prompt 3 of 16: 0 s\r"),
    ):
        with stages.shown(stream):
            stages.begin("sampling from the policy and scoring it")
            stages.count("prompt", 3, 16)
            wait_for(lambda stream=stream, said=said: said in stream.getvalue())
            stages.begin("writing it")
            assert not stages.counted()


def test_a_terminal_without_a_width_is_none():
    """`script -c` without a terminal makes one of 0 columns, on which tqdm writes nothing at all."""
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        assert os.get_terminal_size(theirs).columns == 0
        assert not stages.is_live(terminal)
        assert not progress.Progress(stream=terminal).is_live
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        assert stages.is_live(terminal)
    os.close(ours)


def test_a_script_sees_stages_unless_somebody_else_shows_them_or_has_set_the_level(caplog):
    def shown(stream):
        with stages.shown_to_scripts(stream) as is_shown:
            stages.begin("reading the model")
        return is_shown, stream.getvalue()

    stream = Terminal()
    assert shown(stream) == (True, "     reading the model\n")
    with stages.shown(io.StringIO()):
        assert shown(Terminal()) == (False, "")
    with caplog.at_level(logging.WARNING, logger="qlora_rl.stages"):
        assert shown(Terminal()) == (False, "")
    with caplog.at_level(logging.INFO):
        assert shown(Terminal()) == (False, "")
    assert logging.getLogger("qlora_rl.stages").level == logging.NOTSET


def test_in_python_a_stage_is_a_record_and_nothing_is_shown(capfd, caplog):
    stages.begin("reading the model")
    assert capfd.readouterr() == ("", "")
    with caplog.at_level(logging.INFO, logger="qlora_rl.stages"):
        stages.begin("writing it")
    assert caplog.messages == ["writing it"]


def test_a_closed_pipe_ends_nothing():
    stream = io.StringIO()
    stream.close()
    with stages.shown(stream):
        stages.begin("reading the model")


def test_a_long_step_of_a_training_says_that_it_is_being_made(monkeypatch):
    monkeypatch.setattr(progress, "BEAT_S", 0.02)
    stream, state = io.StringIO(), TrainerState(max_steps=10, global_step=4, is_world_process_zero=True)
    bar = progress.Progress(stream=stream)
    bar.on_train_begin(None, state, None)
    wait_for(lambda: "training: step 5/10 has taken 0 s so far\n" in stream.getvalue())
    stages.count("sequence", 3, 64)
    wait_for(lambda: "training: step 5/10 has taken 0 s so far (sequence 3 of 64)\n" in stream.getvalue())
    bar.on_substep_end(SimpleNamespace(gradient_accumulation_steps=4), state, None)
    wait_for(lambda: "so far (training on micro-batch 2 of 4)\n" in stream.getvalue())
    bar.on_step_end(None, state, None)
    assert not stages.counted()
    bar.close()
    time.sleep(0.1)
    said = stream.getvalue()
    time.sleep(0.1)
    assert stream.getvalue() == said


def test_the_stages_of_a_base_are_told_and_end(model_dir, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="qlora_rl.stages"):
        prepare_base(model_dir, out=tmp_path / "base")
    told = [record.getMessage() for record in caplog.records if record.name == "qlora_rl.stages"]
    assert [each.split()[0] if each else "" for each in told] == ["reading", "loading", "recording", ""]


def test_a_remark_is_no_stage_and_a_warning_is_one_without_a_command_too(caplog):
    stream = io.StringIO()
    with stages.shown(stream):
        stages.begin("loading it again")
        stages.remark("the limit was 0.01")
        stages.remark("the copy is far", warns=True)
    assert stream.getvalue() == "     loading it again\n     the limit was 0.01\n     WARNING: the copy is far\n"
    stages.remark("the copy is far", warns=True)
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.WARNING, "the copy is far")]


def test_a_line_that_is_written_again_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    with stages.shown(stream, beats=True):
        stages.begin("sampling from the policy and scoring it")
        assert stream.getvalue() == "     sampling from " + "\r"


def test_without_stderr_nothing_is_said_and_nothing_fails(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    with stages.shown():
        stages.begin("reading the model")


def test_a_beat_that_is_at_work_when_it_is_stopped_ends_first():
    calls, has_begun, may_end = [], threading.Event(), threading.Event()

    def call(seconds):
        has_begun.set()
        may_end.wait(10)
        calls.append(seconds)

    beat = stages.Beat(0.001, call)
    assert has_begun.wait(10)
    threading.Timer(0.1, may_end.set).start()
    beat.stop()
    ended = len(calls)  # on a busy machine more than one comes before it is stopped
    assert ended >= 1
    time.sleep(0.05)
    assert len(calls) == ended
