"""What the ranks of a tensor-parallel vLLM hold, and what that is together.

A rank holds some rows of a column-parallel linear, some columns of a row-parallel one, some rows of the vocabulary, and
all of the rest; of an adapter it holds the rows of B, or the columns of A, that belong to its part of the weight. Heads
that are fewer than the ranks are replicated.

`places_of`, `held_shards` and `held_pieces` run inside vLLM's worker; `described` and `held_digests` where the engine
is driven.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qlora_rl.base.fingerprint import digest_bytes, digest_plain
from qlora_rl.base.shards import Shard, join_shards
from qlora_rl.contracts import BaseFingerprint
from qlora_rl.engine.worker.weight_names import parts, shard_names, unquantised_parameters

# For people, when they do not start.
IN_PROCESSES = (
    " Its ranks are processes of their own, whose output stands above. They import the script that starts them: what "
    "it does must stand under "
    '`if __name__ == "__main__":`.'
)


@dataclass(frozen=True)
class Place:
    """Where a piece of a rank's tensor is in a weight of the base.

    Attributes:
        dim: along which it is cut: 0 rows, 1 columns.
        own: first row or column in the rank's tensor.
        start: the same in the whole weight.
        size: rows or columns.
    """

    dim: int
    own: int
    start: int
    size: int


def places_of(owner: Any, count: int) -> list[list[Place]] | None:
    """Where the pieces of a rank's weight are, for each of the weights that transformers knows in it; `None`: it holds
    all of them.

    Args:
        owner: vLLM's layer.
        count: of the weights that are fused in it.
    """
    vocabulary = getattr(owner, "shard_indices", None)
    if vocabulary is not None:
        start, stop = vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index
        return [[Place(0, 0, start, stop - start)]]
    columns, rows = getattr(owner, "input_size", None), getattr(owner, "output_size", None)
    if (size := getattr(owner, "input_size_per_partition", columns)) != columns:
        return [[Place(1, 0, owner.tp_rank * size, size)]]
    if getattr(owner, "output_size_per_partition", rows) == rows:
        return None
    # Heads of keys and values that are fewer than the ranks: so many ranks hold the same ones.
    sizes, sharers = owner.output_partition_sizes, getattr(owner, "num_kv_head_replicas", 1)
    found, own, whole = [], 0, 0
    for i, size in enumerate(sizes):
        same = sharers if i else 1
        start = owner.tp_rank // same * size
        found.append(Place(0, own, start if count > 1 else whole + start, size))
        own += size
        whole += size * owner.tp_size // same
    return [[place] for place in found] if count > 1 else [found]


def held_shards(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, list[dict[str, Any]]]:
    """Digests of the parts of the base that this rank holds (`Shard.as_dict`), by transformers' name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, weight, owner in unquantised_parameters(model, dtype):
        names = shard_names(model, name)
        places = places_of(owner, len(names))
        if places is None or (weight.ndim == 1 and places[0][0].dim == 1):  # the bias of a row-parallel linear is whole
            for shard, part in parts(model, name, weight, owner):
                found[shard] = [Shard(digest_plain(part)).as_dict()]
            continue
        for shard, pieces in zip(names, places, strict=True):
            found[shard] = [
                Shard(digest_plain(weight.narrow(p.dim, p.own, p.size)), p.dim, p.start).as_dict() for p in pieces
            ]
    return found


def described(answers: Sequence[Mapping[str, Any]], directory: str | os.PathLike[str]) -> BaseFingerprint:
    """The base of an engine, from what `qlora_describe_base` says on each of its ranks.

    Args:
        answers: in the order of the ranks.
        directory: that the engine has loaded.
    """
    if len(answers) == 1:
        return BaseFingerprint.from_dict(answers[0])
    held = [{name: [Shard.from_dict(each) for each in found] for name, found in answer.items()} for answer in answers]
    return join_shards(held, directory)


def held_pieces(
    places: Mapping[str, torch.Tensor], owners: Mapping[str, tuple[Any, int, int]], rank: int
) -> dict[str, list[dict[str, Any]]]:
    """The pieces of an adapter's A and B that this rank holds, with their bytes; of what every rank holds only rank 0
    sends these.

    Args:
        places: the buffers A [R, I] and B [O, R] of a slot, by canonical name.
        owners: by the same names: vLLM's layer, how many weights are fused in it, and the number of this one.
        rank: this one's.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for name, tensor in places.items():
        owner, count, number = owners[name]
        dim = 1 if ".lora_A." in name else 0
        cut = places_of(owner, count)
        if cut is None or cut[0][0].dim != dim:
            found[name] = [_piece(tensor, None, 0, with_bytes=rank == 0)]
            continue
        own = cut[number][0].own  # a buffer holds one of the fused weights alone
        found[name] = [_piece(tensor.narrow(dim, p.own - own, p.size), dim, p.start) for p in cut[number]]
    return found


def held_digests(answers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Digests of the A and B that an engine holds, from what `qlora_held_adapter` says on each of its ranks; zero parts
    left out."""
    if len(answers) == 1:
        return dict(answers[0])
    return {name: digest for name in answers[0] if (digest := _joined([answer.get(name, ()) for answer in answers]))}


def _piece(tensor: torch.Tensor, dim: int | None, start: int, *, with_bytes: bool = True) -> dict[str, Any]:
    whole = tensor.contiguous()
    return {
        "dim": dim,
        "start": start,
        "shape": list(whole.shape),
        "dtype": str(whole.dtype).removeprefix("torch."),
        "digest": digest_bytes(whole),
        "bytes": whole.flatten().view(torch.uint8).cpu().numpy().tobytes() if with_bytes else b"",
    }


def _joined(held: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Digest of the whole matrix; empty where it is zero. Ranks that hold the same part must agree on it."""
    pieces: dict[int, Mapping[str, Any]] = {}
    for rank, each in enumerate(held):
        if not each:
            return f"nothing on rank {rank} of {len(held)}"
        for piece in each:
            known = pieces.setdefault(piece["start"], piece)
            if known["digest"] != piece["digest"]:
                return f"{piece['digest']} on rank {rank} of {len(held)}, {known['digest']} on another"
    tensors = [_tensor(pieces[start]) for start in sorted(pieces)]
    dim = next(iter(pieces.values()))["dim"]
    whole = tensors[0] if dim is None else torch.cat(tensors, dim=dim)
    return digest_bytes(whole) if bool(whole.any()) else ""


def _tensor(piece: Mapping[str, Any]) -> torch.Tensor:
    return torch.frombuffer(bytearray(piece["bytes"]), dtype=getattr(torch, piece["dtype"])).reshape(piece["shape"])


def adapter_sizes(answers: Sequence[Mapping[str, list[int]]], base: BaseFingerprint) -> dict[str, list[int]]:
    """[I, O] of every linear that can be adapted, whole, from what `qlora_adapter_sizes` says on each rank."""
    if len(answers) == 1:
        return dict(answers[0])
    return {name: list(reversed(base.leaves[f"{name}.weight"].shape)) for name in answers[0]}


def adapted_layers(model: torch.nn.Module, modules: Mapping[str, Any]) -> Iterator[tuple[str, Any, int, int]]:
    """Each linear that can be adapted: transformers' name, vLLM's layer, how many are fused in it, and the number of
    this one."""
    for path, layer in modules.items():
        if not isinstance(layer.lora_a_stacked, tuple):
            continue  # an embedding or a head, which we never fill
        names = shard_names(model, f"{path}.weight")
        for number, name in enumerate(names):
            yield name.removesuffix(".weight"), layer, len(names), number
