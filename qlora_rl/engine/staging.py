"""`Stage`: full weights on their way into a server. Every part is there, checked, before the engine is touched; no vLLM
here."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from qlora_rl.contracts import Leaf
from qlora_rl.errors import ConfigConflictError, SyncError
from qlora_rl.locks import hold, sweep

# What safetensors' header may take for each tensor, in bytes; and for a part.
_HEADER_BYTES, _PART_HEADER_BYTES = 1024, 4096
_BLOCK = 2**20
# Names of all directories that are made here.
STAGES = "qlora-rl-weights-*"


class Stage:
    """One version's weights on their way into an engine: nothing is loaded before all are there, checked.

    They are safetensors files in a directory of mode 700, into which a client of the same user on this host may write.

    Args:
        root: under which it is made.
        expected: the weights that must come, by transformers' name.
        version: that they will have.
        session: of the client that may send them.

    Attributes:
        token: the push's name.
        nbytes: of all weights that must come.

    Raises:
        SyncError: `root` has no room for them.
    """

    def __init__(self, root: Path, expected: Mapping[str, Leaf], version: int, session: str):
        self.version, self.session, self.token = version, session, secrets.token_hex(16)
        self.expected = expected
        self.nbytes = sum(math.prod(leaf.shape) * getattr(torch, leaf.kind).itemsize for leaf in expected.values())
        self._taken: list[str] = []  # the digest of each part
        self.received = 0
        self._limit = self.nbytes + _HEADER_BYTES * len(expected) + _PART_HEADER_BYTES
        sweep(root, STAGES)
        if shutil.disk_usage(root).free < self._limit:
            sweep(root, STAGES, young_s=0.0)
        free = shutil.disk_usage(root).free
        if free < self._limit:
            raise SyncError(
                f"taking weights version={version}: {self._limit / 2**20:.0f} MiB are needed and {free / 2**20:.0f} "
                f"MiB are free at {root}. Free some; a server takes another directory, with room for the whole "
                "model, by --adapter-dir."
            )
        self.incoming = root / f"qlora-rl-weights-{self.token}"
        self.incoming.mkdir(mode=0o700)
        self._locks = [hold(self.incoming)]
        self._names: set[str] = set()

    @property
    def parts(self) -> list[Path]:
        """The files that were taken, in their order."""
        return [self.incoming / part_name(i) for i in range(len(self._taken))]

    def write(self, index: int, offset: int, piece: bytes) -> None:
        """Put a piece of a part's bytes where it belongs; the same piece may come again.

        Raises:
            SyncError: it is no continuation of what is there, or too much.
        """
        file = self.incoming / part_name(index)
        if index < len(self._taken):
            return
        self._reject_other(index)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            size = os.fstat(handle).st_size
            if offset > size or self.received + offset + len(piece) > self._limit:
                raise SyncError(
                    f"taking weights: a piece of {len(piece)} bytes at offset={offset} of part={index} does not follow "
                    f"the {size} bytes before it, or is more than the model's {self.nbytes} bytes. Push again."
                )
            rest, place = memoryview(piece), offset
            while rest:
                written = os.pwrite(handle, rest, place)
                rest, place = rest[written:], place + written
        except OSError as error:
            raise SyncError(f"taking weights: part={index}: {error.strerror}. Push again.") from error
        finally:
            os.close(handle)

    def take(self, index: int, digest: str) -> bool:
        """Check a part that is complete; the same part may be announced again.

        Returns:
            It had not been taken before.

        Raises:
            SyncError: it is not what was sent, or does not fit the model.
        """
        if index < len(self._taken) and self._taken[index] == digest:
            return False
        self._reject_other(index)
        file = self.incoming / part_name(index)
        try:
            came = sum(entry.lstat().st_size for entry in self.incoming.iterdir())
            if came > self._limit:
                raise SyncError(
                    f"taking weights: {came} bytes came, more than the {self.nbytes} of the model. Push to the right "
                    "engine."
                )
            found, size = _digest(file)
        except OSError as error:
            raise SyncError(f"taking weights: part={index} is not there ({error.strerror}). Push again.") from error
        if found != digest:
            raise SyncError(
                f"taking weights: part={index}, {size} bytes, has digest={found[:16]} != digest={digest[:16]} of what "
                "was sent. It was cut off or damaged on the way. Push again."
            )
        self.received += size
        names = _check(file, self.expected, self._names)
        self._names |= names
        self._taken.append(digest)
        return True

    def require_all(self) -> None:
        """Raise `SyncError` where a weight of the model is missing."""
        if missing := sorted(self.expected.keys() - self._names):
            raise SyncError(
                f"taking weights version={self.version}: no value came for {len(missing)} of {len(self.expected)} "
                f"weights of the engine, first {missing[0]}. The stream broke off, or the model is another one; push "
                "again.",
                reasons=missing,
            )

    def discard(self) -> None:
        """Remove everything; harmless when repeated."""
        shutil.rmtree(self.incoming, ignore_errors=True)
        while self._locks:
            os.close(self._locks.pop())

    def _reject_other(self, index: int) -> None:
        if index != len(self._taken):
            raise SyncError(f"taking weights: part={index} came, part={len(self._taken)} is due. Push again.")


def part_name(index: int) -> str:
    """File of a part."""
    return f"{index:06d}.safetensors"


def read_parts(files: Sequence[str | os.PathLike[str]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and weight, one after the other; one file is open at a time."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "pt") as part:
            for name in part.keys():  # noqa: SIM118  (it is no mapping)
                yield name, part.get_tensor(name)


def encode_part(weights: Sequence[tuple[str, torch.Tensor]]) -> list[memoryview]:
    """A safetensors file in pieces, of which only the first, its header, is a copy.

    Args:
        weights: name and tensor, on the CPU and contiguous; they must outlive the result.
    """
    header, start = {}, 0
    for name, weight in weights:
        end = start + weight.numel() * weight.element_size()
        header[name] = {"dtype": _DTYPES[weight.dtype], "shape": list(weight.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    values = [memoryview(weight.reshape(-1).view(torch.uint8).numpy()) for _, weight in weights if weight.numel()]
    return [memoryview(len(text).to_bytes(8, "little") + text), *values]


# safetensors' names of the dtypes in which an engine serves.
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def open_regular(file: str | os.PathLike[str]) -> BinaryIO:
    """A file to read, where others may write: no link is followed, and no pipe is waited for.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):  # `fdopen` of a directory raises, and leaves it open
            raise OSError(errno.EINVAL, "it is no regular file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _digest(file: Path) -> tuple[str, int]:
    """sha256 of a regular file that is no link, and its size in bytes."""
    found, size = hashlib.sha256(), 0
    with open_regular(file) as opened:
        while block := opened.read(_BLOCK):
            found.update(block)
            size += len(block)
    return found.hexdigest(), size


def _check(file: Path, expected: Mapping[str, Leaf], seen: set[str]) -> set[str]:
    """Names in a part that fits the model.

    Raises:
        SyncError: it does not, or holds NaN.
    """
    names: set[str] = set()
    try:
        for name, weight in read_parts([file]):
            check_weight(name, weight, expected, seen | names)
            names.add(name)
    except SyncError:
        raise
    except Exception as error:  # safetensors and torch have many for what somebody may have written
        raise SyncError(f"taking weights: a part is no safetensors file: {error}. Push again.") from error
    return names


def check_weight(name: str, weight: torch.Tensor, expected: Mapping[str, Leaf], seen: Collection[str]) -> None:
    """Raise `SyncError` where a weight is none of the model's, holds NaN, or has been `seen`."""
    leaf, kind = expected.get(name), str(weight.dtype).removeprefix("torch.")
    if leaf is None:
        raise SyncError(f"taking weights: the engine has no weight {name}: another model? Push to its own engine.")
    if tuple(weight.shape) != leaf.shape or kind != leaf.kind:
        raise SyncError(
            f"taking weights: {name} has shape={tuple(weight.shape)}, dtype={kind}; the engine's is {leaf.shape}, "
            f"{leaf.kind}: another model? Push to its own engine."
        )
    if name in seen:
        raise SyncError(f"taking weights: {name} came twice. Push again.")
    # NaN comes out as smallest and largest; a twentieth of what a sum costs in 16 bits.
    if weight.numel() and not bool(torch.isfinite(torch.stack(weight.aminmax())).all()):
        raise SyncError(f"taking weights: {name} holds NaN or infinity. Lower the learning rate.")


class OpenPush:
    """The push that is open, if there is one.

    Attributes:
        staging: of it.
    """

    def __init__(self) -> None:
        self.staging: Any = None

    @contextlib.contextmanager
    def own(self, token: str, session: str) -> Iterator[Any]:
        """Its staging, where this is the push, and the trainer that has begun it; thrown away at an error.

        Raises:
            SyncError: it is another one, or none is open.
            ConfigConflictError: the token is none.
        """
        if not token:
            raise ConfigConflictError("taking weights: the query names no push. Begin with POST /weights.")
        staging: Stage | None = self.staging
        is_same = staging is not None and secrets.compare_digest(staging.token.encode(), token.encode(errors="replace"))
        if not is_same or staging.session != session:
            raise SyncError(
                "taking weights: this push is not open: another one was begun, or the engine was restarted. Push again."
            )
        try:
            yield staging
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Throw it away; harmless when repeated."""
        staging, self.staging = self.staging, None
        if staging is not None:
            staging.discard()
