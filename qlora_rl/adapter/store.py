"""An adapter as bytes: a PEFT directory, one safetensors blob, and `AdapterStore`, a ring of versions on disk."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from qlora_rl.contracts import AdapterBundle
from qlora_rl.documents import parse_object
from qlora_rl.errors import SyncError
from qlora_rl.locks import let_go, new_directory

if TYPE_CHECKING:
    import torch

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
ORIGIN = "qlora_adapter.json"  # next to PEFT's two files, which have no field for it
STATE = "qlora_rl.json"  # of a run, in its checkpoints
_CONFIG_KEY = "adapter_config"


def write_adapter(bundle: AdapterBundle, directory: Path) -> None:
    """Write the bundle as a PEFT directory (two files) into an existing directory."""
    from safetensors.torch import save_file

    save_file(dict(bundle.tensors), directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(dict(bundle.config), indent=1))


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of the one adapter in a PEFT directory, by PEFT's names."""
    from safetensors.torch import load_file

    return load_file(directory / WEIGHTS)


def write_origin(directory: Path, base_identity: str) -> None:
    """Store next to an adapter on which base it was trained (`PreparedBase.identity`); `judge_adapter` of the directory
    compares it."""
    (directory / ORIGIN).write_text(json.dumps({"base_identity": base_identity}))


def pack_adapter(bundle: AdapterBundle) -> bytes:
    """The bundle as one safetensors blob, with its config in the header."""
    from safetensors.torch import save

    return save(dict(bundle.tensors), metadata={"format": "pt", _CONFIG_KEY: json.dumps(dict(bundle.config))})


def unpack_adapter(blob: bytes) -> AdapterBundle:
    """Inverse of `pack_adapter`; nothing in the blob is run.

    Raises:
        SyncError: it is no such blob, or was cut off.
    """
    try:
        header = blob[8 : 8 + int.from_bytes(blob[:8], "little")]
        config = (parse_object(header).get("__metadata__") or {}).get(_CONFIG_KEY)
        if not isinstance(config, str):
            raise ValueError(f"its header holds no {_CONFIG_KEY}")
        return parse_adapter(blob, config)
    except ValueError as error:
        raise SyncError(f"unpacking an adapter of {len(blob)} bytes: {error}. Send it again.") from error


def parse_adapter(weights: bytes, config: bytes | str) -> AdapterBundle:
    """An adapter out of what its two files hold; nothing in it is run.

    Raises:
        ValueError: it is none.
    """
    from safetensors.torch import load

    try:
        tensors = load(weights)
    except Exception as error:  # safetensors and torch have many for what somebody may have written
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return AdapterBundle(tensors, parse_object(config))


class AdapterStore:
    """A ring of the newest versions under one root.

    A path is never used twice: vLLM's prefix cache is keyed by it. The root belongs to this object alone and goes with
    `close()`; that of a process that was killed goes when another one makes a store in the same default place.

    Args:
        root: parent directory; by default tmpfs (`/dev/shm`) where there is one.
        keep: versions that stay on disk, at least 2, so that the one before the newest can still be re-read while the
            newest loads.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, keep: int = 2):
        if keep < 2:
            raise ValueError(f"keeping adapter versions: keep={keep} < 2. The version that still serves must stay.")
        parent = Path(root) if root is not None else default_root()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.root = new_directory(parent, "qlora-rl-adapter-", sweeps=root is None)
        except OSError as error:
            raise SyncError(
                f"making a directory for adapters under {parent}: {error.strerror}. Pass another with sync_dir=."
            ) from error
        self.keep = keep
        self._versions: list[Path] = []

    def publish(self, bundle: AdapterBundle, version: int) -> Path:
        """Write `bundle` as `version` and return its directory, which appears whole or not at all.

        Raises:
            SyncError: the disk is full or not writable; earlier versions are untouched.
        """
        nonce = secrets.token_hex(4)
        staging = self.root / f".staging-{nonce}"
        target = self.root / f"v{version:06d}-{nonce}"
        try:
            staging.mkdir(mode=0o700)
            write_adapter(bundle, staging)
            os.rename(staging, target)
        # safetensors reports a full disk as its own error type, which is no OSError.
        except Exception as error:
            shutil.rmtree(staging, ignore_errors=True)
            if not self.root.is_dir():
                raise SyncError(
                    f"writing adapter version={version}: {self.root} is gone (the strategy was closed, or something "
                    "cleaned it up). Make a new trainer or strategy."
                ) from error
            free_mib = shutil.disk_usage(self.root).free / 2**20
            raise SyncError(
                f"writing adapter version={version}: {error}. {bundle.nbytes / 2**20:.1f} MiB are needed and "
                f"{free_mib:.1f} MiB are free at {self.root}. Free some, or pass another directory with sync_dir=."
            ) from error
        self._versions.append(target)
        return target

    def retire(self) -> None:
        """Remove all but the newest `keep` versions; call when the newest one serves."""
        while len(self._versions) > self.keep:
            shutil.rmtree(self._versions.pop(0), ignore_errors=True)

    def withdraw(self, directory: Path) -> None:
        """Remove a version that never came to serve."""
        if directory in self._versions:
            self._versions.remove(directory)
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        self._versions.clear()
        shutil.rmtree(self.root, ignore_errors=True)
        let_go(self.root)


def default_root() -> Path:
    """tmpfs where there is one (bytes never touch a disk), else the system's directory for temporary files."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def read_directory(directory: Path) -> AdapterBundle:
    """The adapter in a PEFT directory.

    Raises:
        SyncError: it cannot be read.
    """
    try:
        return parse_adapter((directory / WEIGHTS).read_bytes(), (directory / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise SyncError(f"reading the adapter in {directory}: {error}. Write it again.") from error
