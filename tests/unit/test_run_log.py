"""Warnings of libraries are in the run's log and not on the screen."""

import logging
import warnings

import pytest

from qlora_rl.errors import ConfigConflictError
from qlora_rl.train.run.log import LOG, RunLog


def warn():
    logging.getLogger("transformers.tokenization").warning("clean_up_tokenization_spaces")
    warnings.warn("pin_memory but no accelerator is found", UserWarning, stacklevel=1)
    logging.getLogger("qlora_rl.train").warning("batch 1: apart")


def test_warnings_of_libraries_are_in_the_file_alone_and_errors_on_the_screen_too(tmp_path, capsys):
    before = [
        (each := logging.getLogger(name), each.handlers, each.level, each.propagate)
        for name in ("transformers", "vllm")
    ]
    with RunLog() as log:
        warn()
        log.write_to(tmp_path)
        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # its import sets up its logger
        log.take_over()
        logging.getLogger("vllm.engine").warning("no triton")
        logging.getLogger("vllm.engine").error("no engine")
    said, shown = (tmp_path / LOG).read_text(), capsys.readouterr().err
    for each in ("clean_up_tokenization_spaces", "pin_memory", "batch 1: apart", "no triton", "no engine"):
        assert each in said
    assert said.count("batch 1: apart") == 1
    assert "no engine" in shown
    assert not any(each in shown for each in ("clean_up", "pin_memory", "no triton"))
    assert all((own.handlers, own.level, own.propagate) == was for own, *rest in before if (was := tuple(rest)))


@pytest.mark.parametrize(("error", "is_shown"), [(RuntimeError("?"), True), (ConfigConflictError("a field"), False)])
def test_a_run_that_never_began_shows_what_was_warned_of_where_its_error_is_unknown(capsys, error, is_shown):
    def run():
        with RunLog():
            warn()
            raise error

    with pytest.raises(type(error)):
        run()
    assert ("pin_memory" in capsys.readouterr().err) == is_shown


def test_a_record_that_cannot_be_formatted_or_encoded_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with RunLog() as log:
        log.write_to(tmp_path)
        logging.getLogger("transformers.x").warning("is deprecated", FutureWarning)
        # Of a library, as its loggers do not propagate: pytest's report cannot carry the character to its other
        # process.
        logging.getLogger("vllm.engine").warning("half a character: \ud83d")
    assert "half a character: \\ud83d" in (tmp_path / LOG).read_text()
