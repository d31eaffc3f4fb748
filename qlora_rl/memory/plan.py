"""`plan_memory`: what a run will hold, whether it fits, and what to lower if it does not. A function of values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import ceil
from typing import Any

import torch

from qlora_rl.adapter.directory import adapter_in
from qlora_rl.adapter.store import read_tensors
from qlora_rl.base.quant import QuantSpec
from qlora_rl.contracts import rank_class
from qlora_rl.errors import MemoryBudgetError, raise_where
from qlora_rl.memory import lines as count
from qlora_rl.memory import step
from qlora_rl.memory.cards import ROOM, usable_gib
from qlora_rl.memory.lines import Line, counted
from qlora_rl.memory.shape import ModelShape, model_and_adapter, read_config, read_shape, stored_spec
from qlora_rl.methods import ESTIMATED, METHODS, OFFLINE, TAUGHT


@dataclass(frozen=True)
class MemoryRequest:
    """What a run is to do, as far as memory depends on it.

    `None` leaves `offload` and `sleeps` to the plan: with a limit it turns on the cheapest of them that let the run fit
    (`memory/plan.py`), without one none.

    Attributes:
        spec: how the base is held.
        method: one of `ESTIMATED`. "sft", "dpo" and "kto" make no engine, and DPO has two sequences for every one of
            `batch_size`.
        adapters: that are held at once, each with gradients, optimizer state and slots of its own (`Adapters`).
        teacher: of "distill", the shape of a second model; `None` where the teacher shares the student's base, or is at
            a server.
        teacher_bytes: the weights of the second model, or of an adapter of the teacher's own.
        teacher_more: tokens that the teacher reads of a sequence besides the student's.
        teacher_top_k: likeliest tokens that a server says at each place; 0 where there is none.
        max_length: prompt plus completion, in tokens.
        engine_length: the longest sequence that the engine admits, where that is more: its KV cache must hold one.
        image_tokens: of a sequence, those that stand for images, where the model takes them; `None` for an image of
            about 900 x 900 pixels.
        batch_size: sequences of one forward and backward pass (`per_device_train_batch_size`).
        sequences: completions that are sampled at once.
        optimizer: transformers' name of it (`GRPOConfig.optim`).
        gradient_checkpointing: keep layer inputs only.
        offload: keep them in host memory (`gradient_checkpointing_kwargs={"offload": True}`); on the CPU, where it has
            no effect, the estimate is for a device of the same kind.
        tiles: norms, and MLPs where the model has such, work on some tokens at a time under gradient checkpointing.
        adapter_dtype: torch name of the dtype of the trained weights.
        shared: trainer and engine hold one base; otherwise two.
        baked: the engine serves the baked base, for full weights; then nothing is shared.
        sleeps: the KV cache is given back while the trainer works.
        can_sleep: it may be; not where the engine never rests, nor, before vLLM 0.31, where it lends its base.
        padded: micro-batches keep their padding (`remove_padding=False`), so that attention gets masks; as they do for
            a model that needs it (`ModelShape.needs_masks`).
        cache_dtype: of the KV cache.
        kv_cache_gib: size of the KV cache; by default what is left, up to what `sequences` of full length need.
        gpu_memory_gib: all that may be held; with device="cuda" the size of a card, such as 24, is what these cards
            have, less a reserve (`memory/cards.py`); `None` for no limit.
        host_memory_gib: that layer inputs may take in host memory; `None` for no limit.
        device: "cuda" or "cpu".
        has_engine: the run makes an engine; otherwise its lines are left out.
        trainer_parts: processes, with a GPU each, that the trainer's base is sharded over. The estimate is for one GPU.
        engine_parts: GPUs that the engine's base is sharded over (`tensor_parallel_size`).
    """

    spec: QuantSpec = field(default_factory=QuantSpec)
    method: str = "grpo"
    max_length: int = 2048
    engine_length: int | None = None
    image_tokens: int | None = None
    batch_size: int = 8
    sequences: int = 8
    optimizer: str = "adamw_torch_fused"
    gradient_checkpointing: bool = True
    offload: bool | None = None
    tiles: bool = True
    adapter_dtype: str = "float32"
    shared: bool = True
    baked: bool = False
    sleeps: bool | None = None
    can_sleep: bool = True
    padded: bool = False
    cache_dtype: str = "auto"
    kv_cache_gib: float | None = None
    gpu_memory_gib: float | None = None
    host_memory_gib: float | None = None
    device: str = "cuda"
    has_engine: bool = True
    trainer_parts: int = 1
    engine_parts: int = 1
    adapters: int = 1
    teacher: ModelShape | None = None
    teacher_bytes: int = 0
    teacher_more: int = 0
    teacher_top_k: int = 0

    def __post_init__(self) -> None:
        counts = ("max_length", "batch_size", "sequences", "trainer_parts", "engine_parts", "adapters")
        positive = {name: getattr(self, name) for name in counts}
        limits = ("kv_cache_gib", "gpu_memory_gib", "host_memory_gib")
        positive |= {n: v for n in limits if (v := getattr(self, n)) is not None}
        parts = max(self.trainer_parts, self.engine_parts)
        has_teacher = self.teacher_bytes or self.teacher_more or self.teacher_top_k
        raise_where(
            "planning the memory",
            [
                *((not value > 0, f"{name}={value} must be above 0.") for name, value in positive.items()),
                (
                    self.method not in ESTIMATED,
                    f"method={self.method!r} is none of {', '.join(ESTIMATED)}. Plan online DPO as 'grpo' with twice "
                    "the batch.",
                ),
                (
                    self.method not in TAUGHT and has_teacher,
                    f"method={self.method!r} has no teacher. Leave it out, or plan 'distill'.",
                ),
                (
                    self.method in OFFLINE and self.has_engine,
                    f"method={self.method!r} makes no engine. Pass has_engine=False, or leave it out.",
                ),
                (self.device not in ("cuda", "cpu"), f"device={self.device!r} is neither 'cuda' nor 'cpu'."),
                (
                    self.shared and self.has_engine and parts > 1,
                    f"shared=True, and a base in {parts} parts is held twice. Pass shared=False.",
                ),
            ],
        )

    @property
    def rows(self) -> int:
        """Sequences of one forward and backward pass."""
        return self.batch_size * METHODS[self.method].sequences

    @property
    def keeps_padding(self) -> bool:
        """Attention gets masks."""
        return self.padded or bool(METHODS[self.method].why_padded)

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        teacher = None if self.teacher is None else self.teacher.name
        return {**vars(self), "spec": self.spec.as_dict(), "teacher": teacher}


GIB = 2**30


@dataclass(frozen=True)
class Saving:
    """One thing to lower: which, and how many bytes of the peak it saves."""

    advice: str
    nbytes: int
    is_enough: bool


@dataclass(frozen=True)
class MemoryEstimate:
    """What a run will hold, line by line.

    Attributes:
        shape: of the model.
        request: what the run is to do.
        adapter: shapes of the trained tensors.
        lines: all of it but the KV cache.
        asked: `request`, before the plan has decided what was left to it.
        chosen: what it has turned on.
        unaided_bytes: the smallest peak without that.
    """

    shape: ModelShape
    request: MemoryRequest
    adapter: Mapping[str, tuple[int, ...]]
    lines: tuple[Line, ...]
    asked: MemoryRequest
    chosen: tuple[Way, ...] = ()
    unaided_bytes: int = 0

    # --- sums -------------------------------------------------------------------------------------------------------

    def _sum(self, when: str) -> int:
        return sum(line.nbytes for line in self.lines if line.when == when)

    @property
    def held_bytes(self) -> int:
        """What is allocated from start to end, without the KV cache."""
        return self._sum("always")

    @property
    def step_bytes(self) -> int:
        """The peak of forward, backward and optimizer step, on top of what is held."""
        whole = self._sum("step") + max(self._sum("layer"), self._sum("head"))
        return max(self._sum("tower"), self._sum("teacher"), whole)

    @property
    def rollout_bytes(self) -> int:
        """The peak of the engine's work, on top of what is held, without the KV cache."""
        return self._sum("rollout")

    @property
    def host_bytes(self) -> int:
        """Layer inputs in host memory."""
        return self._sum("host")

    @property
    def host_budget_bytes(self) -> int | None:
        """All that they may take."""
        limit = self.request.host_memory_gib
        return None if limit is None or self.request.device != "cuda" else int(limit * GIB)

    @property
    def budget_bytes(self) -> int | None:
        """All that may be held."""
        limit = self.request.gpu_memory_gib
        return None if limit is None else int((usable_gib(limit) if self.request.device == "cuda" else limit) * GIB)

    @property
    def _card_words(self) -> str:
        limit = self.request.gpu_memory_gib
        return "" if limit is None or self.budget_bytes == int(limit * GIB) else f" of a card of {limit:g} GB"

    # --- the KV cache -----------------------------------------------------------------------------------------------

    def _cache(self, sequences: int, length: int | None = None) -> int:
        request = self.request
        if not request.has_engine:
            return 0
        element = 1 if "fp8" in request.cache_dtype else count.width(request.spec)
        block = count.KV_BLOCK[request.device]
        length = length or request.max_length
        whole = count.cache_bytes(self.shape, length=length, sequences=sequences, element=element, block=block)
        return ceil(whole / min(request.engine_parts, self.shape.kv_heads))  # fewer heads than GPUs are replicated

    @property
    def _least_cache(self) -> int:
        """One sequence of the longest kind that the engine admits; vLLM starts with no less."""
        return self._cache(1, max(self.request.max_length, self.request.engine_length or 0))

    @property
    def cache_bytes(self) -> int:
        """The KV cache: what was asked for, or what is left, between one sequence of full length and all of them."""
        if self.request.kv_cache_gib is not None and self.request.has_engine:
            return int(self.request.kv_cache_gib * GIB)
        least = self._least_cache
        wanted = max(self._cache(self.request.sequences), least)
        if self.budget_bytes is None:
            return wanted
        beside = self.rollout_bytes if self.request.sleeps else max(self.step_bytes, self.rollout_bytes)
        room = int(ROOM * self.budget_bytes) if self.request.device == "cuda" else 0
        return max(least, min(wanted, self.budget_bytes - self.held_bytes - beside - room))

    @property
    def cache_gib(self) -> float:
        """`cache_bytes` in GiB."""
        return self.cache_bytes / GIB

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache holds, as parts of sequences of full length."""
        one = self._cache(1) - self._cache(0)
        return int((self.cache_bytes - self._cache(0)) / one * self.request.max_length) if one else 0

    @property
    def cache_sequences(self) -> int:
        """Sequences of full length that the KV cache holds at once."""
        one = self._cache(1) - self._cache(0)
        return int((self.cache_bytes - self._cache(0)) // one) if one else self.request.sequences

    # --- the verdict ------------------------------------------------------------------------------------------------

    @property
    def peak_bytes(self) -> int:
        """The most that is held at any moment."""
        return self._peak(self.cache_bytes)

    @property
    def least_bytes(self) -> int:
        """The peak with the smallest KV cache that is allowed."""
        asked = self.request.kv_cache_gib is not None
        return self._peak(self.cache_bytes if asked else self._least_cache)

    def _peak(self, cache: int) -> int:
        step = self.step_bytes + (0 if self.request.sleeps else cache)
        return self.held_bytes + max(step, self.rollout_bytes + cache)

    @property
    def fits(self) -> bool:
        """All of it is within the budget, with room for one sequence of full length in the KV cache; and layer inputs
        within the host's memory."""
        within = self.budget_bytes is None or self.peak_bytes <= self.budget_bytes
        return within and self.cache_bytes >= self._least_cache and self.fits_host

    @property
    def fits_host(self) -> bool:
        """What waits in host memory has room there."""
        return self.host_budget_bytes is None or self.host_bytes <= self.host_budget_bytes

    def too_much_for_host(self) -> str:
        """What to do where layer inputs have no room in host memory."""
        asked = f"{self.request.rows} x {self.request.max_length} tokens"
        return (
            f"layer inputs of {asked} need {self.host_bytes / GIB:.2f} GiB of host memory > "
            f"{self.request.host_memory_gib or 0:.2f} GiB, which are free. Leave out offload=True "
            "(gradient_checkpointing_kwargs), lower max_length or the micro-batch, or free memory."
        )

    def changed(self, **request: Any) -> MemoryEstimate:
        """The estimate for the same model and adapter with other fields of the request, such as `shared=False`."""
        return _estimate(self.shape, replace(self.asked, **request), self.adapter)

    def savings(self) -> list[Saving]:
        """What could be lowered, the largest saving first; of the peak with the smallest KV cache."""
        found = []
        for advice, change in _changes(self):
            other = change if isinstance(change, MemoryEstimate) else _with(self, **change)
            saved = self.least_bytes - other.least_bytes
            if saved > 0:
                found.append(Saving(advice, saved, other.fits))
        return sorted(found, key=lambda saving: -saving.nbytes)

    def raise_if_too_big(self) -> None:
        """Raise where it cannot fit.

        Raises:
            MemoryBudgetError: the numbers, and what to lower.
        """
        if self.fits:
            return
        if self.cache_bytes < self._least_cache:
            length = max(self.request.max_length, self.request.engine_length or 0)
            raise MemoryBudgetError(
                f"planning the memory: kv_cache_gib={self.cache_gib:.3g} < {self._least_cache / GIB:.3g} GiB, which "
                f"one sequence of {length} tokens needs. Raise it, or lower the length."
            )
        if not self.fits_host:
            raise MemoryBudgetError(f"planning the memory: {self.too_much_for_host()}")
        peak, budget = self.least_bytes / GIB, (self.budget_bytes or 0) / GIB
        savings = self.savings()
        ways = "".join(
            f"\n  {s.advice}: saves {s.nbytes / GIB:.2f} GiB{', which is enough' if s.is_enough else ''}"
            for s in savings
        )
        chosen = f"{self.choice}\n" if self.choice else ""
        largest = largest_length(self)
        shorter = f"\n  max_length={largest}: the longest that fits" if largest else "\n  no length fits by itself"
        raise MemoryBudgetError(
            f"planning the memory: {self.shape.name} needs {peak:.2f} GiB at its peak > "
            f"gpu_memory={budget:.2f} GiB{self._card_words}.\n"
            f"{self.table()}\n{chosen}Lower one of these:{ways}{shorter}",
            reasons=[
                f"peak={peak:.2f} GiB > gpu_memory={budget:.2f} GiB{self._card_words}",
                *(s.advice for s in savings),
            ],
        )

    @property
    def choice(self) -> str:
        """What the plan has turned on, and why; empty where nothing was left to it."""
        if self.budget_bytes is None or not (left := _left_open(self.asked)):
            return ""
        without = f"{self.unaided_bytes / GIB:.2f} GiB > {self.budget_bytes / GIB:.2f} GiB"
        said = "fits without freeing the KV cache or moving layer inputs to host memory"
        if self.chosen:
            ways = ", and ".join(
                f"{way.words} ({way.setting}, about {way.cost:.0%} more time per step)" for way in self.chosen
            )
            said = f"turned on to save memory{'' if self.fits else ', but not enough'}: {ways}; without this: {without}"
        moved = self.unaided_bytes > self.budget_bytes and OFFLOAD in left and OFFLOAD not in self.chosen
        if moved and not (other := _with(self, offload=True)).fits_host:
            said += (
                f"; layer inputs stay on the GPU: {other.host_bytes / GIB:.2f} GiB > "
                f"{other.request.host_memory_gib:.2f} GiB of host memory"
            )
        return said

    # --- for people -------------------------------------------------------------------------------------------------

    def table(self) -> str:
        """The lines, one below the other."""
        cache = Line(
            "KV cache",
            self.cache_bytes,
            f"{self.cache_sequences} sequences of {self.request.max_length} tokens at once",
            "rollout" if self.request.sleeps else "always",
        )
        rows = [*self.lines, cache] if self.request.has_engine else list(self.lines)
        names = max(len(row.name) for row in rows)
        text = [
            f"  {row.name:<{names}}  {row.gib:8.3f} GiB  {row.when:<7}  {'' if row.is_exact else '~ '}{row.why}"
            for row in sorted(rows, key=lambda row: count.WHEN.index(row.when))
        ]
        text.append(f"  {'peak':<{names}}  {self.peak_bytes / GIB:8.3f} GiB  {self._peak_words()}")
        if self.budget_bytes is not None:
            left = (self.budget_bytes - self.peak_bytes) / GIB
            words = "left" if left >= 0 else "too much"
            said = f"{abs(left):.3f} GiB {words}{self._card_words}"
            text.append(f"  {'gpu_memory':<{names}}  {self.budget_bytes / GIB:8.3f} GiB  {said}")
        if self.host_budget_bytes is not None:
            left = (self.host_budget_bytes - self.host_bytes) / GIB
            said = f"{abs(left):.3f} GiB {'left' if left >= 0 else 'too much'}"
            text.append(f"  {'host_memory':<{names}}  {self.host_budget_bytes / GIB:8.3f} GiB  {said}")
        return "\n".join(text)

    def _peak_words(self) -> str:
        tower = "tower, " * (self.shape.tower is not None) + "teacher, " * bool(self._sum("teacher"))
        return f"always + the larger of {tower}(step + the larger of layer and head) and rollout"

    def __str__(self) -> str:
        verdict = "" if self.budget_bytes is None else "fits: " if self.fits else "does not fit: "
        r = self.request
        head = (
            f"{verdict}{self.shape.name}, {counted(self.shape.parameters)} parameters as {r.spec.label}, "
            f"{'' if r.method == 'grpo' else f'{r.method}, '}{r.rows} x {r.max_length} tokens, {r.optimizer}, "
            "gradient checkpointing "
            f"{'on' if r.gradient_checkpointing else 'off'}{', layer inputs in host memory' if r.offload else ''}, "
            f"{'one base' if r.shared or not r.has_engine else 'two bases'}"
        )
        return "\n".join(filter(None, [head, self.table(), self.choice]))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: request, lines, sums and the verdict."""
        return {
            "model": self.shape.name,
            "parameters": self.shape.parameters,
            "request": self.request.as_dict(),
            "choice": self.choice,
            "chosen": {way.field: way.setting for way in self.chosen},
            "lines": [vars(line) for line in self.lines],
            "kv_cache_bytes": self.cache_bytes,
            "kv_cache_sequences": self.cache_sequences,
            "kv_cache_tokens": self.cache_tokens,
            "held_bytes": self.held_bytes,
            "step_bytes": self.step_bytes,
            "rollout_bytes": self.rollout_bytes,
            "peak_bytes": self.peak_bytes,
            "budget_bytes": self.budget_bytes,
            "host_bytes": self.host_bytes,
            "host_budget_bytes": self.host_budget_bytes,
            "fits": self.fits,
        }


def plan_memory(
    config: Any,
    *,
    lora: Any = None,
    rank: int = 16,
    target_modules: str | Sequence[str] = "all-linear",
    adapter: Mapping[str, tuple[int, ...]] | None = None,
    teacher: Any = None,
    teacher_spec: QuantSpec | None = None,
    **request: Any,
) -> MemoryEstimate:
    """The memory of one run: with trainer and engine on one device, or of a trainer alone (`method="sft"`, `"dpo"`,
    `"kto"`).

    ::

        memory = plan_memory(AutoConfig.from_pretrained("Qwen/Qwen3-8B"), max_length=4096, gpu_memory_gib=24)
        print(memory)
        memory.raise_if_too_big()

    Args:
        config: transformers config of the model; no weight is loaded.
        lora: PEFT's config of the adapter; otherwise `rank` and `target_modules` say what it is.
        rank: R.
        target_modules: as PEFT takes them; in a mixture "all-linear" is the attention, and the experts where these are
            4-bit.
        adapter: shapes of the trained tensors, where they are known already; wins over the three before it.
        teacher: of "distill" the transformers config of a second model; `None` where the teacher shares the base.
        teacher_spec: how that is held; by default as the base.
        request: the fields of `MemoryRequest`.

    Raises:
        ConfigConflictError: a config that is no causal language model, an adapter that finds nothing, a number that
            makes no sense.
    """
    if request.get("method") in OFFLINE:
        request.setdefault("has_engine", False)
    if teacher is not None:
        of_teacher, held = read_shape(teacher), teacher_spec or request.get("spec") or QuantSpec()
        request |= {"teacher_bytes": count.trainer_base(of_teacher, held), "teacher": of_teacher}
    wanted = MemoryRequest(**request)
    if adapter is not None:
        return _estimate(read_shape(config), wanted, adapter)
    shape, trained = model_and_adapter(config, wanted.spec, lora, rank, target_modules)
    return _estimate(shape, wanted, dict(trained))


def teacher_fields(
    *,
    adapter: str | os.PathLike[str] | None = None,
    model: Any = None,
    spec: QuantSpec | None = None,
    top_k: int = 0,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Arguments of `plan_memory` for a teacher.

    Args:
        adapter: directory of its own, on the student's base.
        model: name or config of a second model.
        spec: how that is held; by default as it is stored.
        top_k: likeliest tokens that a server says; then there is nothing else.
    """
    if top_k:
        return {"teacher_top_k": top_k}
    if adapter is not None:
        return {"teacher_bytes": 4 * sum(each.numel() for each in read_tensors(adapter_in(adapter)).values())}
    if isinstance(model, str | os.PathLike):
        config = read_config(model, trust_remote_code=trust_remote_code)
        return {"teacher": config, "teacher_spec": spec or stored_spec(model)}
    return {} if model is None else {"teacher": model, "teacher_spec": spec}


def largest_length(estimate: MemoryEstimate) -> int:
    """The largest `max_length` with which it still fits: a multiple of 64, 0 where none does, or what the model
    allows."""
    low, high = 0, max((estimate.shape.positions or 2**20) // 64, 1)
    while low < high:
        middle = (low + high + 1) // 2
        fits = estimate.changed(max_length=64 * middle).fits
        low, high = (middle, high) if fits else (low, middle - 1)
    return 64 * low


def _left_open(asked: MemoryRequest) -> list[Way]:
    """What the plan may turn on."""
    if asked.device != "cuda":
        return []
    works = ((SLEEPS, asked.has_engine and asked.can_sleep), (OFFLOAD, asked.gradient_checkpointing))
    return [way for way, does in works if does and getattr(asked, way.field) is None]


def _estimate(shape: ModelShape, asked: MemoryRequest, adapter: Mapping[str, tuple[int, ...]]) -> MemoryEstimate:
    """With the cheapest of what was left to the plan that lets it fit; with all of that where nothing does."""
    tried: list[MemoryEstimate] = []
    for chosen in sets_of(_left_open(asked)):
        one = _settled(shape, asked, adapter, chosen)
        if tried and OFFLOAD in chosen and not one.fits_host:
            continue  # what has no room on the host stays where it is
        tried.append(one)
        if one.fits:
            break
    return replace(tried[-1], unaided_bytes=tried[0].least_bytes)


def _settled(
    shape: ModelShape, asked: MemoryRequest, adapter: Mapping[str, tuple[int, ...]], chosen: Sequence[Way]
) -> MemoryEstimate:
    settled: dict[str, Any] = {
        way.field: way in chosen for way in (SLEEPS, OFFLOAD) if getattr(asked, way.field) is None
    }
    request = replace(asked, **settled)
    return MemoryEstimate(shape, request, adapter, _lines(shape, request, adapter), asked, tuple(chosen))


def _with(estimate: MemoryEstimate, **change: Any) -> MemoryEstimate:
    """With other fields of the request, and what the plan has decided as it is."""
    return _settled(estimate.shape, replace(estimate.request, **change), estimate.adapter, ())


def _lines(shape: ModelShape, request: MemoryRequest, adapter: Mapping[str, tuple[int, ...]]) -> tuple[Line, ...]:
    spec, device = request.spec, request.device
    trained = getattr(torch, request.adapter_dtype).itemsize
    batch, length = request.rows, request.max_length
    tiled = request.gradient_checkpointing and request.tiles and batch * length > count.TILE[device]
    base = count.base_lines(shape, spec, request.shared and request.has_engine, request.baked, device)
    seen = min(request.image_tokens or count.ASSUMED_IMAGE_TOKENS, length)
    lines = [
        *count.parted_base(base, shape, spec, request.trainer_parts, request.engine_parts),
        *count.adapter_lines(shape, spec, adapter, trained, device, tiled=tiled and step.has_tiles(shape)),
        count.optimizer_line(adapter, trained, request.optimizer),
        *step.activation_lines(
            shape,
            spec,
            adapter,
            batch=batch,
            length=length,
            checkpointing=request.gradient_checkpointing,
            device=device,
            padded=request.keeps_padding or shape.needs_masks(length),
            offload=bool(request.offload),
            tiled=tiled,
        ),
        *(
            step.candidate_lines(shape, spec, batch=batch, length=length, device=device, top_k=request.teacher_top_k)
            if request.teacher_top_k
            else step.teacher_lines(
                shape,
                spec,
                batch=batch,
                length=length,
                device=device,
                weights=request.teacher_bytes,
                teacher=request.teacher,
                more=request.teacher_more,
                gradients=count.adapter_bytes(adapter, trained),
            )
            if request.method in TAUGHT
            else [step.head_line(shape, spec, batch=batch, length=length, device=device, tiled=tiled)]
        ),
        *count.tower_lines(
            shape,
            spec,
            batch=batch,
            sequences=batch if request.method in OFFLINE else request.sequences,
            image_tokens=seen,
        ),
        count.rollout_line(shape, spec, sequences=request.sequences, length=length, image_tokens=seen),
    ]
    if device == "cuda":
        overhead = int(count.OVERHEAD_GIB * GIB)
        lines.append(Line("CUDA and vLLM", overhead, "context, workspaces, CUDA graphs (assumed)", is_exact=False))
    if not request.has_engine:
        if device == "cuda":
            context = int(count.CONTEXT_GIB * GIB)
            lines.append(Line("CUDA", context, "context, workspaces (assumed)", is_exact=False))
        lines = [line for line in lines if line.name not in count.OF_THE_ENGINE]
    return tuple(count.for_several(line, request.adapters) for line in lines)


def _changes(estimate: MemoryEstimate) -> list[tuple[str, Any]]:
    """Everything that may be lowered, as fields of the request or as another estimate."""
    request = estimate.request
    batch, length, sequences, cache = request.batch_size, request.max_length, request.sequences, request.kv_cache_gib
    is_on_gpu, is_kept = request.device == "cuda", request.gradient_checkpointing and not request.offload
    rank = max((rank for _, rank in count.adapted_inputs(estimate.adapter).values()), default=0)
    halved = {name: _halved(name, shape) for name, shape in estimate.adapter.items()}
    half = 0 if cache is None else cache / 2
    changes: list[tuple[Any, str, Any]] = [
        (
            batch > 1,
            f"per_device_train_batch_size={batch // 2} (with gradient_accumulation_steps doubled the same training)",
            {"batch_size": batch // 2},
        ),
        (length > 128, f"max_length={length // 2}", {"max_length": length // 2}),
        ((request.engine_length or 0) > length, f"vllm_max_model_length={length}", {"engine_length": length}),
        (not request.gradient_checkpointing, "gradient_checkpointing=True", {"gradient_checkpointing": True}),
        (
            is_kept and is_on_gpu and _with(estimate, offload=True).fits_host,
            OFFLOAD.setting,
            {OFFLOAD.field: True},
        ),
        (request.padded and not estimate.shape.needs_masks(length), "remove_padding=True", {"padded": False}),
        (not request.spec.is_4bit, "quant='nf4'", {"spec": QuantSpec(compute_dtype=request.spec.compute_dtype)}),
        (
            not request.shared and not request.baked and request.trainer_parts == request.engine_parts == 1,
            "one base for trainer and engine",
            {"shared": True},
        ),
        (count.OPTIMIZERS.get(request.optimizer, (2, 0))[0], "optim='adamw_8bit'", {"optimizer": "adamw_8bit"}),
        (not request.sleeps and request.can_sleep and is_on_gpu, SLEEPS.setting, {SLEEPS.field: True}),
        (cache is not None, f"kv_cache_gib={half:g}", {"kv_cache_gib": half}),
        (
            sequences > 1 and request.method not in OFFLINE,
            f"{sequences // 2} completions at once",
            {"sequences": sequences // 2},
        ),
        (
            rank > 8 and rank_class(rank // 2) <= rank_class(rank),
            f"rank {rank // 2}",
            _settled(estimate.shape, request, halved, ()),
        ),
    ]
    return [(advice, change) for is_possible, advice, change in changes if is_possible]


def _halved(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor of an adapter of half the rank."""
    if ".lora_A." in name:
        return (max(1, shape[0] // 2), *shape[1:])
    if ".lora_B." in name:
        return (*shape[:-1], max(1, shape[-1] // 2))
    return shape


@dataclass(frozen=True)
class Way:
    """One way to need less memory on a GPU for some time.

    Attributes:
        field: of `MemoryRequest`, which `None` leaves to the plan.
        config: field of TRL's config that turns it on, and the value.
        words: what it does.
        cost: how much longer a step takes, as a part of it, with sequences so long that it is needed. Decides which way
            is tried first.
        source: of the cost.
    """

    field: str
    config: tuple[str, Any]
    words: str
    cost: float
    source: str

    @property
    def setting(self) -> str:
        """`config`, as it is written."""
        return f"{self.config[0]}={self.config[1]}"


# Neither has been measured on a GPU here. Tiles cost no time (docs/memory.md#mlps-and-norms), so they are no choice.
SLEEPS = Way(
    "sleeps",
    ("vllm_enable_sleep_mode", True),
    "the KV cache is freed between rollouts",
    0.01,
    "vLLM's blog of 2025-10-26: waking takes 0.1 to 0.8 s with the weights of a small model, which stay where they are "
    "here; about a hundredth of a step of a minute",
)
OFFLOAD = Way(
    "offload",
    ("gradient_checkpointing_kwargs", {"offload": True}),
    "layer inputs wait in host memory",
    0.02,
    "huggingface/accelerate#4175, whose copies are not hidden: 0.6 % of a step at a million tokens, a third of a step "
    "of one second",
)
WAYS = (SLEEPS, OFFLOAD)


def sets_of(ways: Sequence[Way]) -> Iterator[tuple[Way, ...]]:
    """All sets of some ways, the cheapest first: nothing, and at the end all of them."""
    sets = [each for size in range(len(ways) + 1) for each in combinations(ways, size)]
    yield from sorted(sets, key=lambda each: (sum(way.cost for way in each), len(each)))
