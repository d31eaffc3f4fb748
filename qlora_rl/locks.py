"""What a process is writing, so that a later one can tell what a killed one has left, and remove it: locked
directories, half-written files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

# Younger ones may be about to be locked, in seconds.
_YOUNG_S = 60.0
# Of those that are locked as soon as they are made.
_YOUNG_WHEN_CLAIMED_S = 10.0
# Half-written files of processes that are gone.
_ABANDONED_S = 600.0
_claimed: dict[str, int] = {}


def hold(directory: Path, *, alone: bool = False) -> int:
    """Lock a directory until the process ends, or the handle that is returned is closed.

    Args:
        alone: nobody else may hold it.

    Raises:
        BlockingIOError: somebody does.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if alone:
            os.close(handle)
            raise
    except OSError:  # a file system without locks
        pass
    return handle


def is_held(directory: Path) -> bool:
    """A living process, this one too, has locked the directory."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
    return False


def new_directory(root: Path, prefix: str, *, sweeps: bool = True) -> Path:
    """Make a directory with mode 700 under `root`, and claim it; first, those of killed processes with this prefix go.

    Args:
        root: an existing directory.
        prefix: of its name.
        sweeps: False where `root` may be on a network, whose locks may hold on one machine only.
    """
    if sweeps:
        sweep(root, f"{prefix}*", young_s=_YOUNG_WHEN_CLAIMED_S)
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    claim(directory)
    return directory


def claim(directory: Path) -> None:
    """Lock a directory until the process ends, or `let_go`; whoever made it may be forgotten, others still know its
    path."""
    let_go(directory)  # one that was removed and created again
    _claimed[str(directory)] = hold(directory)


def let_go(directory: Path) -> None:
    """Inverse of `claim`; harmless for one that is not claimed."""
    handle = _claimed.pop(str(directory), None)
    if handle is not None:
        os.close(handle)


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


def replace_file(target: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all; what killed processes have left of it is removed.

    Raises:
        OSError: it cannot be written; the one before it is untouched.
    """
    staging = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        staging.write_bytes(content)
        os.replace(staging, target)
    finally:
        staging.unlink(missing_ok=True)
    for left in target.parent.glob(f".{target.name}.*.tmp"):
        # Another machine's process may be writing it now, on a shared disk.
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                left.unlink()


def flush(path: Path) -> None:
    """What was written to a file or directory survives a power cut from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
