"""What a killed server must not leave behind: processes that it has started, and directories.

These it locks while it lives, so that a later one can tell, and remove them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

# Younger ones may be about to be locked, in seconds.
_YOUNG_S = 60.0


def hold(directory: Path) -> int:
    """Lock a directory until the process ends, or the handle that is returned is closed."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def sweep(root: Path, pattern: str, *, young_s: float = _YOUNG_S) -> list[Path]:
    """Remove directories of ours under `root` that no living process holds; the names of those that were.

    Args:
        root: where to look.
        pattern: of their names.
        young_s: what was changed so many seconds ago, or later, is left alone.
    """
    removed = []
    for directory in root.glob(pattern):
        with contextlib.suppress(OSError):
            handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                about = os.fstat(handle)
                if about.st_uid != os.getuid() or time.time() - about.st_mtime < young_s:
                    continue
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its owner lives
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory)
            finally:
                os.close(handle)
    return removed


def end_with(parent: int, by: int) -> bool:
    """Have the kernel send `by` when the thread that started this process ends, however it ends (Linux); whether it still lives."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG
    return os.getppid() == parent


class EndsWithParent:
    """Put into vLLM's config, it has each process that is started with that config killed when its parent ends.

    vLLM hands its config to its processes as the first thing that they read, long before they load our worker extension: a server
    that is killed while it starts would leave them behind.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {"parent": os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        parent = state["parent"]
        if parent != os.getpid() and not end_with(parent, signal.SIGKILL):  # within one process it was only copied
            os._exit(1)

    def compute_hash(self) -> str:
        """What vLLM compiles does not depend on it."""
        return ""
