"""Plain values and protocols that several packages use.

Shape letters: P prompts, G rollouts per prompt, B = P·G, T completion tokens, V vocabulary, I/O in- and out-features of
a linear, R rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, get_args, runtime_checkable

if TYPE_CHECKING:
    import torch

# The ranks that vLLM accepts as `max_lora_rank` (vllm/config/lora.py, MaxLoRARanks).
LORA_RANK_CLASSES = (1, 8, 16, 32, 64, 128, 256, 320, 512)


# With less than this vLLM samples with this (`_MAX_TEMP`); 0 is greedy.
LEAST_TEMPERATURE = 0.01


@dataclass(frozen=True)
class SamplingSpec:
    """How to sample completions. Defaults are those of TRL's GRPOConfig.

    Attributes:
        max_tokens: longest completion, in tokens; what the engine's maximum length leaves may be less.
        temperature: 0 is greedy.
        top_k: 0 switches it off.
        seed: base of the seeds per request; request i of a call gets its own, derived from it. `None`: sampled without
            seeds.
        regex: completions must match it (structured output).
        stop_token_ids: tokens that end a completion besides the engine's own: the trainer's EOS. Not with `ignore_eos`
            in `extra`.
        first_place: index of the call's first request in the whole batch, if the call is a part of it; decides the
            seeds.
        extra: further fields of vLLM's SamplingParams. Those that are fields here as well become them.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    regex: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    first_place: int = 0
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.extra, Mapping):
            raise TypeError(f"extra={self.extra!r} is no mapping of names to values")
        ours = {name: self.extra[name] for name in _SAID_TWICE if self.extra.get(name) is not None}
        for name, value in ours.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "extra", {name: value for name, value in self.extra.items() if name not in ours})


# What TRL's config and its generation_kwargs both have. `stop_token_ids` of `extra` join ours, also with `ignore_eos`.
_SAID_TWICE = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Rollout:
    """What an engine returned for B prompts.

    Attributes:
        completion_ids: B lists of token ids, the end-of-sequence token included where it was sampled.
        logprobs: B lists as long as `completion_ids`: natural log of the probability with which each token was sampled
            (after temperature and filters); `None` where the engine reports none, which the alarm does not accept for
            long. Not read where `gives_logprobs=False`.
        version: of the adapter that made every token (0: the bare base).
        seconds: wall time of the call.
        routing: of a mixture with `gives_routing`: the experts chosen for each token of prompt and completion but the
            last, [tokens, layers that are mixtures, chosen], int16, and their `routing_weights`, of a float dtype. -1
            and NaN, or `None`, where not known.
        has_ended: of each completion: an end, a stop token or a stop text has ended it, and no limit of length; `None`
            where not known.
    """

    completion_ids: list[list[int]]
    logprobs: list[list[float | None]]
    version: int
    seconds: float
    routing: Sequence[torch.Tensor | None] | None = field(default=None, compare=False, repr=False)
    routing_weights: Sequence[torch.Tensor | None] | None = field(default=None, compare=False, repr=False)
    has_ended: Sequence[bool] | None = field(default=None, compare=False)

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(ids) for ids in self.completion_ids)


# Where TRL looks for the images of a row.
IMAGES = "images"
# How a base can be held; how an engine multiplies with it; how a policy is to be sent.
QuantType = Literal["nf4", "fp4", "none"]
QUANT_TYPES = get_args(QuantType)
ComputeWish = Literal["nf4", "vllm"]
SyncWish = Literal["auto", "lora_adapter", "weights"]
# Key in the config of an adapter that only a check samples with: a server gives it no model name.
IS_PROBE = "qlora_rl_is_probe"


_PREFIX = "base_model.model."


def lora_name(module: str, part: str) -> str:
    """PEFT's name of a module's A or B in a file: `base_model.model.<module>.lora_A.weight`."""
    return f"{_PREFIX}{module}.lora_{part}.weight"


def module_of(name: str) -> str:
    """The module that a tensor of an adapter belongs to, as the base model calls it."""
    return name.removeprefix(_PREFIX).rsplit(".lora_", 1)[0]


@dataclass(frozen=True)
class AdapterBundle:
    """An adapter in canonical form: plain LoRA, one rank, scaling folded into B.

    Attributes:
        tensors: `base_model.model.<module>.lora_A.weight` [R, I] and `….lora_B.weight` [O, R]; the delta of a module is
            B @ A, no more.
        config: the `adapter_config.json` that goes with them (`lora_alpha == r`, no patterns; `IS_PROBE` where it is no
            policy's).
    """

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]

    @property
    def rank(self) -> int:
        """R."""
        return int(self.config["r"])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def modules(self) -> list[str]:
        """Dotted names of the adapted modules, as the base model calls them."""
        return [module_of(name) for name in self.tensors if name.endswith(".lora_A.weight")]


@dataclass(frozen=True)
class Leaf:
    """One weight of a base.

    Attributes:
        kind: "nf4" or "fp4" for a 4-bit linear, otherwise the torch name of the dtype.
        shape: of the weight that it stands for (not of the packed codes).
        values: digest of the packed codes, or of the bytes of an unquantised weight.
        scales: digest of the un-nested scales (float32); `None` where there are none, like the next two.
        table: digest of the 16 values that the codes stand for (float32).
        blocksize: weights per scale.
    """

    kind: str
    shape: tuple[int, ...]
    values: str
    scales: str | None = None
    table: str | None = None
    blocksize: int | None = None


@dataclass(frozen=True)
class BaseFingerprint:
    """The *function* of a whole base.

    Attributes:
        leaves: by the name that transformers gives the parameter.
        facts: digests of what else belongs to a base: "config", "tokenizer", "chat_template", "special_tokens",
            "skip_modules", "code", where known.
        faults: of weights that are sharded over ranks of an engine and differ from its directory: which rank holds
            what.
    """

    leaves: Mapping[str, Leaf]
    facts: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """One digest over all weights (hex)."""
        lines = [f"{name}:{leaf}" for name, leaf in sorted(self.leaves.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        leaves = {name: asdict(leaf) for name, leaf in self.leaves.items()}
        faults = {"faults": dict(self.faults)} if self.faults else {}
        return {"digest": self.digest, "facts": dict(self.facts), **faults, "leaves": leaves}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> BaseFingerprint:
        """Inverse of `as_dict`."""
        leaves = {n: Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for n, leaf in content["leaves"].items()}
        return cls(leaves, content.get("facts", {}), content.get("faults", {}))


@dataclass(frozen=True)
class EngineCapabilities:
    """What an engine can be asked for.

    Attributes:
        name: for people, such as "vllm 0.31.0 (cpu)".
        takes_adapters: it serves LoRA adapters.
        takes_dense: it can be given full weights.
        max_lora_rank: largest R that it serves; 0 without adapters.
        max_model_length: prompt plus completion, in tokens.
        adapter_dtype: torch name of the dtype in which it multiplies adapters, such as "bfloat16".
        can_sleep: it can give back memory between rollouts.
        takes_in_place: it lends the buffers that its layers multiply with (`InPlaceEngine`).
        takes_bytes, byte_way: it takes an adapter as bytes (`ByteEngine`), by "http" or "object_store" (Ray's).
        dense_way: how full weights reach it: "stream" (in this process), "http" or "object_store".
        holds_two: it samples with two versions at once: what has begun with a version ends with it, that which serves
            or the one before it, and several threads may ask, also during a push. Where not, nothing may be sampled
            during a push.
        gives_logprobs: it reports the logprobs of what it samples. Where not, only the canary watches it, and nothing
            corrects the distance.
        takes_images: `generate` and `score` take `ImagePrompt`s.
        gives_routing: `generate` says which experts were chosen.
        adapts_experts: it serves adapters on the 4-bit experts of a mixture.
    """

    name: str
    takes_adapters: bool
    takes_dense: bool
    max_lora_rank: int
    max_model_length: int
    adapter_dtype: str
    can_sleep: bool
    takes_in_place: bool = False
    takes_bytes: bool = False
    byte_way: str = "http"
    dense_way: str = "stream"
    holds_two: bool = False
    gives_logprobs: bool = True
    takes_images: bool = False
    gives_routing: bool = False
    adapts_experts: bool = False


@dataclass(frozen=True)
class AdapterSlots:
    """Two places inside an engine for adapters of one shape; one serves while the other is written.

    Attributes:
        places: for each slot the buffers that the layers multiply with, by canonical name: A [R, I] and B [O, R].
        is_valid: they are still the engine's; it may have taken them back.
        let_go: to be called with the number of a slot before it is written: returns when nothing is sampled from it any
            more.
    """

    places: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
    is_valid: Callable[[], bool]
    let_go: Callable[[int], None] = lambda slot: None


@dataclass(frozen=True)
class Delivery:
    """What a transport did with one adapter (seconds of wall time)."""

    transport: str
    nbytes: int
    deliver_seconds: float
    load_seconds: float


@dataclass(frozen=True)
class SyncReport:
    """One push: which version, how, how much, how long (wall seconds).

    `export_seconds` is looking at the live adapter, `deliver_seconds` making and moving the bytes, `load_seconds` the
    engine's part. `seconds` is the push without the canary; `canary_seconds` is the canary, `canary_difference` the
    mean difference of logprobs that it found (`None` where it did not score).
    """

    version: int
    mode: str
    transport: str
    bytes: int
    tensors: int
    export_seconds: float
    deliver_seconds: float
    load_seconds: float
    seconds: float
    canary_seconds: float = 0.0
    canary_difference: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


class ClosedAtEnd:
    """Something that is closed at the end of its `with` block."""

    def close(self) -> None:
        """Give everything back."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BaseHolder(Protocol):
    """Whatever holds a base that can be compared with the trainer's."""

    def describe_base(self) -> BaseFingerprint:
        """The base that this engine really multiplies with, read from its own weights."""
        ...

    def repair_base(self) -> Mapping[str, float]:
        """Write the exact scales back where a loader has rounded them; the largest relative error of each weight."""
        ...

    def capabilities(self) -> EngineCapabilities:
        """What this engine can be asked for."""
        ...


@runtime_checkable
class RolloutEngine(BaseHolder, Protocol):
    """Whatever generates."""

    @property
    def version(self) -> int:
        """The adapter version that serves now; 0 is the bare base."""
        ...

    @property
    def incarnation(self) -> int:
        """Grows with every start, rebuild and wake, after which everything must be verified again."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec, *, version: int | None = None
    ) -> Rollout:
        """One completion for each of B prompts (token ids); repeat a prompt for several.

        With `version` only under that one; another that serves is an error. `QLoRAAsyncGRPOTrainer` names one.
        """
        ...

    def load_adapter(self, directory: Path, version: int) -> None:
        """Serve the PEFT directory as `version` from the next request on; on failure the old version stays."""
        ...

    def drop_adapter(self) -> None:
        """Serve the bare base again, as version 0."""
        ...

    def withdraw_adapter(self, reason: str) -> None:
        """Serve nothing until the next adapter is loaded or the bare base is asked for: the current version was not
        verified."""
        ...

    def score(self, sequences: Sequence[Sequence[int]], *, bare: bool = False) -> list[list[float]]:
        """Natural log of the probability of every token but the first of each sequence.

        Under the version that serves; with `bare` under the base alone.
        """
        ...

    def held_adapter(self, rank: int) -> Mapping[str, str]:
        """What it multiplies with now: a digest of each A and B by canonical name, cut to `rank`; zero parts left
        out."""
        ...

    def sleep(self) -> None:
        """Give back what memory can be given back until `wake`."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...

    def close(self) -> None:
        """Give everything back; the engine cannot be used afterwards."""
        ...

    def __enter__(self) -> RolloutEngine: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class InPlaceEngine(RolloutEngine, Protocol):
    """An engine in this process whose adapter buffers can be written directly."""

    def lend_slots(self, directory: Path) -> AdapterSlots:
        """Load the canonical PEFT directory into two slots, and lend their buffers; what serves goes on serving."""
        ...

    def serve_slot(self, slots: AdapterSlots, index: int, version: int, recover: Callable[[], Path]) -> None:
        """Serve the adapter in a slot as `version` from the next request on.

        `recover` returns a PEFT directory with the same adapter, for when the engine must be rebuilt.
        """
        ...


class ByteEngine(RolloutEngine, Protocol):
    """An engine that takes an adapter as bytes, wherever it runs."""

    def load_packed(self, blob: bytes, version: int) -> None:
        """Serve the adapter in the bytes of `pack_adapter` as `version`; on failure the old version stays."""
        ...


@runtime_checkable
class CancellableEngine(Protocol):
    """An engine whose calls another thread can end."""

    def cancel(self) -> None:
        """Have the calls that generate now end soon, with `RolloutCancelledError`."""
        ...


@runtime_checkable
class ReplicatedEngine(Protocol):
    """Several engines as one: each of them is verified."""

    def score_each(self, sequences: Sequence[Sequence[int]], *, bare: bool = False) -> list[list[list[float]]]:
        """`RolloutEngine.score` of every one."""
        ...


class DenseEngine(RolloutEngine, Protocol):
    """An engine that can be given all of its weights."""

    def load_dense(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        """Serve these weights as `version` from the next request on: all of them, or nothing; returns bytes."""
        ...

    @property
    def holds_dense(self) -> bool:
        """It still holds the weights that it was given last, and may serve them."""
        ...

    def withdraw_dense(self, reason: str) -> None:
        """Serve nothing until the next `load_dense`."""
        ...


class AdapterSource(Protocol):
    """The policy's adapter, as a transport sees it."""

    @property
    def shape(self) -> Hashable:
        """Equal for adapters that fit the same places."""
        ...

    def bundle(self) -> AdapterBundle:
        """In canonical form (CPU tensors)."""
        ...

    def write_into(self, places: Mapping[str, torch.Tensor]) -> int:
        """Copy it in canonical form over `places`; returns bytes."""
        ...


class Transport(Protocol):
    """One way for an adapter's bytes to reach an engine.

    Two more attributes count where a transport has them: `keeps_before` (the version that serves is served again
    without a load) lets a probe be served before the push, `has_readers` (others read what is delivered) forbids it.
    """

    name: str

    def deliver(self, adapter: AdapterSource, version: int, engine: Any) -> Delivery:
        """Bring the adapter to the engine as `version`: all of it, or raise and leave the old version serving.

        Args:
            adapter: of the policy.
            version: its number.
            engine: a `RolloutEngine` of the kind that this transport writes to.
        """
        ...

    def commit(self, pushed: AdapterBundle | None = None) -> None:
        """The newest version was verified: finish what is left to do for it.

        Args:
            pushed: what it is, on the CPU, where that is at hand; it does not change any more.
        """
        ...

    def revoke(self, engine: Any, version: int) -> None:
        """Take `version`, the newest, back and have the engine serve the one before it, or the bare base. What an
        interrupt has ended can be repeated: no other version is taken back."""
        ...

    def before(self) -> tuple[int, Mapping[str, torch.Tensor]] | None:
        """The version before the newest, and its tensors in canonical form; `None` where it has them no more."""
        ...

    def close(self) -> None:
        """Remove what the transport left behind."""
        ...


class SyncStrategy(Protocol):
    """One way to make an engine equal to the trainer's policy.

    Attributes:
        after: versions go on behind this one, whatever the engine serves.
    """

    after: int

    def push(self) -> SyncReport:
        """Hand the current policy to the engine as the next version: all of it, or raise SyncError."""
        ...

    def verify(self) -> None:
        """Check again that the engine serves what was pushed last; after a wake or a rebuild."""
        ...

    def close(self) -> None:
        """Remove what the strategy left behind."""
        ...


def rank_class(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM that holds `rank`.

    Raises:
        EngineUnsupportedError: rank above 512, the largest class.
    """
    from qlora_rl.errors import EngineUnsupportedError

    for candidate in LORA_RANK_CLASSES:
        if rank <= candidate:
            return candidate
    raise EngineUnsupportedError(
        f"choosing vLLM's LoRA rank: rank={rank} > max_lora_rank={LORA_RANK_CLASSES[-1]}. Use a rank of at most "
        f"{LORA_RANK_CLASSES[-1]}; for reinforcement learning 8 to 32 is usually enough."
    )
