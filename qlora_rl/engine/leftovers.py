"""What a killed server must not leave behind: processes that it has started. Its directories are the business of `held`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import Any


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
