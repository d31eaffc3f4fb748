"""A base that is sharded over several ranks of one engine: every shard is compared with the same slice of the base
directory.

The digest of a weight cannot be computed from digests of its shards. So each rank digests what it holds, and this
module digests the same slice of the file. Where all of them agree and leave no gap, the ranks together hold the file's
weight, and its digest is theirs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from qlora_rl.base.fingerprint import digest_plain, facts_of
from qlora_rl.base.reader import StoredTensors
from qlora_rl.contracts import BaseFingerprint, Leaf

_AXES = ("rows", "columns")


@dataclass(frozen=True)
class Shard:
    """A part of one weight, as a rank holds it.

    Attributes:
        leaf: of the part.
        dim: along which the weight is cut; `None` where the rank holds all of it.
        start: first row (dim 0) or column (dim 1) of the part in the whole weight.
    """

    leaf: Leaf
    dim: int | None = None
    start: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, which can also be sent between processes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Shard:
        """Inverse of `as_dict`."""
        leaf = Leaf(**{**content["leaf"], "shape": tuple(content["leaf"]["shape"])})
        return cls(leaf, content["dim"], content["start"])

    @property
    def stop(self) -> int:
        """One behind the last row or column."""
        return self.start + (self.leaf.shape[self.dim] if self.dim is not None else 0)

    @property
    def where(self) -> str:
        """In words, such as "rows 64 to 127"."""
        return "" if self.dim is None else f" in {_AXES[self.dim]} {self.start} to {self.stop - 1}"

    def of(self, whole: torch.Tensor) -> torch.Tensor | None:
        """The same part of the whole weight; `None` where it has no such part."""
        if self.dim is None:
            return whole if tuple(whole.shape) == self.leaf.shape else None
        if self.dim >= whole.ndim or self.stop > whole.shape[self.dim]:
            return None
        part = whole.narrow(self.dim, self.start, self.stop - self.start)
        return part if tuple(part.shape) == self.leaf.shape else None


# What one rank holds of each weight, by transformers' name; of a weight whose parts were fused before they were cut,
# several pieces.
Held = Mapping[str, Sequence[Shard]]


def join_shards(held: Sequence[Held], directory: str | os.PathLike[str]) -> BaseFingerprint:
    """The *function* of the base that several ranks hold together.

    A weight that is not as in the directory gets a digest that no weight has, and is named in `faults`, with the rank.

    Args:
        held: by every rank, in order.
        directory: the base directory that they have loaded; not a 4-bit one.
    """
    stored = StoredTensors(directory)
    leaves: dict[str, Leaf] = {}
    faults: dict[str, str] = {}
    for name in sorted({name for each in held for name in each}):
        pieces = [list(each.get(name, ())) for each in held]
        whole = stored.get(name)
        found = _faults(pieces, whole)
        if whole is not None and not found:
            leaves[name] = digest_plain(whole)
        else:
            leaves[name], faults[name] = _leaf_of_parts(pieces, whole), "; ".join(found)
    return BaseFingerprint(leaves, facts_of(directory), faults)


def _faults(pieces: Sequence[Sequence[Shard]], whole: torch.Tensor | None) -> list[str]:
    """What is wrong with a weight's parts, in words; of each rank."""
    if whole is None:
        return ["the engine's own directory has no such weight"]
    found = []
    for rank, shards in enumerate(pieces):
        here = f"rank {rank} of {len(pieces)}"
        if not shards:
            found.append(f"{here} holds none of it")
        for shard in shards:
            wanted = shard.of(whole)
            if wanted is None:
                found.append(f"{here} holds {shard.leaf.shape}{shard.where}, which is no part of {tuple(whole.shape)}")
            elif digest_plain(wanted) != shard.leaf:
                found.append(f"{here} holds something else{shard.where}")
    return found or _gaps([shard for shards in pieces for shard in shards], whole)


def _gaps(shards: Sequence[Shard], whole: torch.Tensor) -> list[str]:
    """What no rank holds."""
    dims = {shard.dim for shard in shards}
    if None in dims:
        return []
    if len(dims) != 1:
        return ["the ranks cut it along rows and along columns"]
    (dim,) = dims
    found, end = [], 0
    for start, stop in [*sorted((shard.start, shard.stop) for shard in shards), (whole.shape[dim], whole.shape[dim])]:
        if start > end:
            found.append(f"no rank holds {_AXES[dim]} {end} to {start - 1}")
        end = max(end, stop)
    return found


def _leaf_of_parts(pieces: Sequence[Sequence[Shard]], whole: torch.Tensor | None) -> Leaf:
    """What stands for a weight that is not as in the directory."""
    shards = [shard for each in pieces for shard in each]
    alike = {shard.leaf for shard in shards if shard.dim is None}
    if len(alike) == 1 and len(shards) == len(pieces):
        return alike.pop()  # all ranks hold the same whole weight
    digest = hashlib.sha256("\n".join(str(shard) for shard in shards).encode()).hexdigest()[:32]
    return Leaf(shards[0].leaf.kind, tuple(whole.shape) if whole is not None else shards[0].leaf.shape, digest)
