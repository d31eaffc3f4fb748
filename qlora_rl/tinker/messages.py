"""Bodies and results that Tinker's client sends and reads as protocol buffers.

Only the fields that are used here are declared; a field's number and type are all that the wire knows. Enums are
integers there, and maps lists of entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from qlora_rl.contracts import Rollout
from qlora_rl.errors import ConfigConflictError
from qlora_rl.train.scoring.losses import TrainingRow

MEDIA_TYPE = "application/x-protobuf"
_TYPES = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
_MESSAGES = """
Csr         crow_indices:bytes=2
Tensor      dense:bytes=1 sparse:Csr=2 dtype:int32=3 shape:bytes=4
Named       key:string=1 value:Tensor=2
Text        tokens:bytes=1
Other       data:bytes=1
Chunk       text:Text=1 image:Other=2 audio:Other=3
Datum       chunks:Chunk*=1 inputs:Named*=2
Number      number:double=1 text:string=2
Setting     key:string=1 value:Number=2
Request     model_id:string=1 seq_id:int32=2 data:Datum*=3 loss_fn:string=4 forward_only:bool=6 config:Setting*=7
Batched     data:bytes=1 offsets:bytes=2 dtype:int32=3
Field       key:string=1 value:Batched=2
Record      type_tag:string=1 fields:Field*=2 num_datums:int64=3
Metric      key:string=1 value:double=2
Passed      kind:string=1 records:Record*=2 metrics:Metric*=3
Sequence    stop_reason:int32=1 tokens:bytes=2 logprobs:bytes=3
Sampled     sequences:Sequence*=1 prompt_logprobs:bytes=2
"""
_ROWS = 3  # number of the field in a request
_FLOAT32, _INT64 = 1, 2
_STOP, _LENGTH = 0, 1
MOST_ROWS = 8192  # of a pass
# Of a pass: rows, pieces of them and settings together; tokens and values of tensors.
_MOST_PIECES, _MOST_VALUES = 2**17, 2**23


def _classes() -> dict[str, Any]:
    package = "qlora_rl_tinker"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for line in _MESSAGES.split("\n")[1:-1]:
        name, *fields = line.split()
        found = file.message_type.add(name=name)
        for each in fields:
            key, _, rest = each.partition(":")
            kind, _, number = rest.partition("=")
            field = found.field.add(name=key, number=int(number), label=3 if kind.endswith("*") else 1)
            kind = kind.removesuffix("*")
            field.type = _TYPES.get(kind, 11)
            if kind not in _TYPES:
                field.type_name = f".{package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        each.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{each.name}"))
        for each in file.message_type
    }


_OF = _classes()


@dataclass(frozen=True)
class PassRequest:
    """A `forward_backward`, or a `forward`, as it was sent.

    Attributes:
        sent: the message; its rows are read when their turn comes, so that what is wrong with them has a number.
    """

    model_id: str
    seq_id: int
    loss: str
    forward_only: bool
    sent: Any

    @classmethod
    def parse(cls, body: bytes, longest: int = 2**31) -> PassRequest:
        """Read a body.

        Args:
            longest: row, in tokens.

        Raises:
            ValueError: it is none, or more than is computed at once: two bytes of it can be a row, which takes
                hundreds when it is read.
        """
        rows = 0
        for pieces, is_row in enumerate(_pieces(memoryview(body)), 1):
            rows += is_row
            if rows > MOST_ROWS or pieces > _MOST_PIECES:
                raise ValueError(
                    f"a forward_backward has at most {MOST_ROWS} rows, and {_MOST_PIECES} pieces of rows and settings. "
                    "Send several."
                )
        sent = _OF["Request"]()
        try:
            sent.ParseFromString(body)
        except message.DecodeError as error:
            raise ValueError(f"the body is no request of Tinker's client: {error}") from error
        if len(sent.model_id) > 512:
            raise ValueError("the body is no request of Tinker's client: it names no model")
        size = sum(len(chunk.text.tokens) for datum in sent.data for chunk in datum.chunks)
        size += sum(len(each.value.dense) for datum in sent.data for each in datum.inputs)
        if size // 4 > (most := min(_MOST_VALUES, 8 * MOST_ROWS * longest)):
            raise ValueError(f"a forward_backward has at most {most} tokens and values, and this {size // 4}.")
        return cls(sent.model_id, sent.seq_id, sent.loss_fn, sent.forward_only, sent)

    @property
    def config(self) -> dict[str, float]:
        """Settings of the loss; text, which no loss here takes, is NaN."""
        return {each.key: math.nan if each.value.text else each.value.number for each in self.sent.config}

    def rows(self) -> list[TrainingRow]:
        """What is scored.

        Raises:
            ConfigConflictError: a row is no text, or its tensors are not one value for each token.
        """
        found = []
        for number, datum in enumerate(self.sent.data):
            try:
                tokens = [token for chunk in datum.chunks for token in _tokens(chunk)]
                values = {each.key: _values(each.value) for each in datum.inputs}
                targets = [int(token) for token in values.pop("target_tokens", ())]
            except ValueError as error:
                raise ConfigConflictError(f"reading row {number}: {error}.") from error
            found.append(TrainingRow(tokens, targets, values))
        return found


def _pieces(sent: memoryview) -> Iterator[bool]:
    """One for each field of a request, and of its rows: whether it is a row."""
    for number, held in _fields(sent):
        yield number == _ROWS
        if number == _ROWS:
            yield from (False for _ in _fields(held))


def _fields(sent: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Numbers of a message's fields, and what those with a length hold; nothing is built."""
    at = 0
    while at < len(sent):
        tag, at = _varint(sent, at)
        size = {1: 8, 5: 4}.get(tag & 7, 0)  # groups, which nobody sends, count as their fields
        if tag & 7 in (0, 2):
            value, at = _varint(sent, at)
            size = value if tag & 7 else 0
        yield tag >> 3, sent[at : at + size]
        at += size


def _varint(sent: memoryview, at: int) -> tuple[int, int]:
    found = 0
    for place, byte in enumerate(sent[at : at + 10]):
        found |= (byte & 127) << 7 * place
        if byte < 128:
            return found, at + place + 1
    raise ValueError("the body is no request of Tinker's client: it ends in a number")


def _tokens(chunk: Any) -> list[int]:
    if not chunk.HasField("text"):
        raise ValueError("it holds an image or audio, and rows of text alone are offered")
    return np.frombuffer(chunk.text.tokens, "<i4").tolist()


def _values(tensor: Any) -> list[float]:
    if tensor.HasField("sparse") or sum(byte < 128 for byte in tensor.shape) > 1:  # ends of numbers
        raise ValueError("it has a tensor of two dimensions, and one value for each token is offered")
    if tensor.dtype not in (_FLOAT32, _INT64):
        raise ValueError(f"it has a tensor of dtype {tensor.dtype}; float32 (1) and int64 (2) are known")
    return np.frombuffer(tensor.dense, "<f4" if tensor.dtype == _FLOAT32 else "<i8").tolist()


def _floats(values: Iterable[float]) -> bytes:
    return np.asarray(list(values), "<f4").tobytes()


def pack_passed(logprobs: Sequence[Sequence[float]], metrics: Mapping[str, float]) -> bytes:
    """The result of a pass: logprobs of each row, and metrics."""
    ends = np.cumsum([0, *(4 * len(row) for row in logprobs)], dtype="<i8").tobytes()
    flat = b"".join(map(_floats, logprobs))
    field = _OF["Field"](key="logprobs", value=_OF["Batched"](data=flat, offsets=ends, dtype=_FLOAT32))
    record = _OF["Record"](type_tag="ArrayRecord", fields=[field], num_datums=len(logprobs))
    given = [_OF["Metric"](key=key, value=value) for key, value in metrics.items()]
    return _OF["Passed"](kind="ArrayRecord", records=[record], metrics=given).SerializeToString()


def pack_sampled(rollout: Rollout, prompt_logprobs: Sequence[float] | None = None) -> bytes:
    """The result of sampling; `prompt_logprobs` with NaN for tokens that were not scored."""
    ended = rollout.has_ended or [True] * len(rollout.completion_ids)
    sequences = [
        _OF["Sequence"](
            stop_reason=_STOP if is_end else _LENGTH,
            tokens=np.asarray(ids, "<i4").tobytes(),
            logprobs=_floats(math.nan if value is None else value for value in logprobs),
        )
        for ids, logprobs, is_end in zip(rollout.completion_ids, rollout.logprobs, ended, strict=True)
    ]
    scored = b"" if prompt_logprobs is None else _floats(prompt_logprobs)
    return _OF["Sampled"](sequences=sequences, prompt_logprobs=scored).SerializeToString()
