"""Files that appear whole, and what killed processes leave of them."""

import os
import subprocess
import sys
import time

import pytest

from qlora_rl.locks import replace_file

KILLED = """
import os, sys
from pathlib import Path
from qlora_rl.locks import replace_file
os.replace = lambda *_: os.kill(os.getpid(), 9)
replace_file(Path(sys.argv[1]), b"half")
"""


def test_a_process_that_is_killed_leaves_the_file_before_and_the_next_removes_what_it_has_left(tmp_path):
    target = tmp_path / "report.html"
    replace_file(target, b"one")
    done = subprocess.run([sys.executable, "-c", KILLED, str(target)])
    assert done.returncode == -9
    assert target.read_bytes() == b"one"
    (left,) = tmp_path.glob(".*")
    replace_file(target, b"two")
    assert left.exists()  # for all that is known, it is being written
    os.utime(left, (time.time() - 3600,) * 2)
    replace_file(target, b"three")
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    assert target.read_bytes() == b"three"


def test_what_cannot_be_written_leaves_the_file_before_and_nothing_else(tmp_path):
    target = tmp_path / "eval.json"
    target.mkdir()
    with pytest.raises(OSError):
        replace_file(target, b"one")
    assert [each.name for each in tmp_path.iterdir()] == ["eval.json"]
