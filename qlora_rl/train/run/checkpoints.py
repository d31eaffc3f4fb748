"""Checkpoints on disk: whole, or not there. Files only; what they hold is the business of `resume`.

A checkpoint is staged in a hidden directory next to its place. Every file reaches the disk, a manifest with the digest
of each is written last, and one rename makes it `checkpoint-N`. Whatever is killed in the middle leaves a hidden
directory, which the next start adopts if it is whole, and removes if it is not.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qlora_rl.documents import printable, read_object
from qlora_rl.errors import RunDirectoryError
from qlora_rl.locks import flush

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
# A random number follows them: neither name is ever used twice.
_STAGING, _OLD = ".staging-checkpoint-", ".old-checkpoint-"
_NAME = re.compile(r"checkpoint-(\d+)")


@contextmanager
def staged(root: Path, step: int) -> Iterator[Path]:
    """A directory for the files of `checkpoint-<step>`; when the block ends they appear under `root`, all of them or
    none.

    Raises:
        RunDirectoryError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    staging = root / f"{_STAGING}{secrets.token_hex(4)}"
    try:
        directory = staging / f"checkpoint-{step}"
        directory.mkdir(parents=True)
        yield directory
        _seal(directory)
        _publish(directory, root)
    # safetensors and torch report a full disk as errors of their own, which are no OSError.
    except Exception as error:
        if not _is_full(root, error):
            raise
        raise RunDirectoryError(
            f"writing checkpoint-{step} to {root}: {getattr(error, 'strerror', None) or error}. {way_out(error)}; the "
            "checkpoints before it are whole."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def way_out(error: Exception) -> str:
    """What to do where a run directory cannot be written."""
    # A full disk is also reported by errors that are no OSError.
    is_full = not isinstance(error, OSError) or error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{'Free some space or choose' if is_full else 'Choose'} another output_dir ([run] dir in a run's file)"


def damage(directory: Path) -> list[str]:
    """What is wrong with a checkpoint, one sentence each; nothing, if all of it is there as it was written."""
    try:
        files = dict(read_object(directory / MANIFEST)["files"])
    except FileNotFoundError:
        return [f"it has no {MANIFEST}: it is torn, or was saved by something else"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        return [f"its {MANIFEST} cannot be read ({type(error).__name__})"]
    reasons = []
    for name, digest in files.items():
        try:
            if _digest(directory / name) != digest:
                reasons.append(f"{printable(name)} is not what was written")
        except (OSError, ValueError):  # the latter of a name that no file can have
            reasons.append(f"{printable(name)} is missing")
    return reasons


def last_whole(root: Path) -> Path | None:
    """The newest checkpoint under `root` that is whole; torn ones are skipped, each with a line in the log."""
    for directory in reversed(numbered(root)):
        reasons = damage(directory)
        if not reasons:
            return directory
        logger.warning("%s is skipped: %s", directory, "; ".join(reasons))
    return None


def numbered(root: Path) -> list[Path]:
    """The directories `checkpoint-N` under `root`, by N, whole or not."""
    found = [d for d in root.glob("checkpoint-*") if _NAME.fullmatch(d.name) and d.is_dir()]
    return sorted(found, key=step_of)


def step_of(directory: Path) -> int:
    """N of `checkpoint-N`."""
    return int(_NAME.fullmatch(directory.name)[1])


def tidy(root: Path) -> None:
    """After a kill: adopt checkpoints that were whole and had not got their name yet, remove what is half written or
    was replaced."""
    for staging in root.glob(f"{_STAGING}*"):
        for directory in numbered(staging):
            if not (root / directory.name).exists() and not damage(directory):
                os.rename(directory, root / directory.name)
                logger.info("%s was whole, and has its name now", directory.name)
        shutil.rmtree(staging, ignore_errors=True)
    for old in root.glob(f"{_OLD}*"):
        shutil.rmtree(old, ignore_errors=True)


def rotate(root: Path, limit: int | None, best: str | None = None) -> None:
    """Remove the oldest until `limit` are left (`None` or 0: no limit); the newest and `best` stay."""
    there = numbered(root)
    if not limit or limit < 0 or not there:
        return
    protected = {there[-1].name, Path(best).name if best else there[-1].name}
    excess = len(there) - max(limit, len(protected))
    for directory in [d for d in there if d.name not in protected][: max(0, excess)]:
        _discard(directory)


def set_aside(root: Path, after: int) -> None:
    """Training goes on from step `after`: newer checkpoints are of another future, and must not be found again.

    They stay on disk as `superseded-checkpoint-N`.
    """
    for directory in numbered(root):
        if step_of(directory) > after:
            target = root / f"superseded-{directory.name}"
            shutil.rmtree(target, ignore_errors=True)
            os.rename(directory, target)
            logger.warning("%s is newer than step %d, from which training goes on: now %s", directory, after, target)


def remove_all(root: Path) -> None:
    """Remove every checkpoint, and what is left of those that never were."""
    for pattern in (f"{_STAGING}*", f"{_OLD}*", "checkpoint-*", "superseded-checkpoint-*"):
        for directory in root.glob(pattern):
            shutil.rmtree(directory, ignore_errors=True)


def _seal(directory: Path) -> None:
    """Bring every file to the disk, and say in a manifest what each of them is."""
    files = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            flush(path)
            files[str(path.relative_to(directory))] = _digest(path)
    manifest = directory / MANIFEST
    manifest.write_text(json.dumps({"files": files}, indent=1))
    for path in (manifest, *(p for p in directory.rglob("*") if p.is_dir()), directory):
        flush(path)


def _publish(directory: Path, root: Path) -> None:
    target = root / directory.name
    if target.exists():  # torn, or saved twice at one step
        _discard(target, lambda: os.rename(directory, target))
    else:
        os.rename(directory, target)
    flush(root)


def _discard(directory: Path, then=lambda: None) -> None:
    """Remove a directory; at no moment does a part of it have its name."""
    old = directory.parent / f"{_OLD}{secrets.token_hex(4)}"
    os.rename(directory, old)
    then()
    shutil.rmtree(old, ignore_errors=True)


def flush_all(directory: Path) -> None:
    """Files and directories under `directory`, and itself, survive a power cut from here on."""
    for path in (*directory.rglob("*"), directory):
        flush(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_full(root: Path, error: Exception) -> bool:
    """The error is about the disk, not about what was to be written."""
    if isinstance(error, OSError):
        return True
    return "No space left" in str(error) or shutil.disk_usage(root).free < 2**20
