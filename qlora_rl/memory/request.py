"""`MemoryRequest`: what a run is to do, as far as memory depends on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qlora_rl.base.quant import QuantSpec
from qlora_rl.errors import ConfigConflictError
from qlora_rl.memory.shape import ModelShape
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
        chunked_logits: the output head works in tiles (TRL's way); otherwise all logits are held.
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
    chunked_logits: bool = True
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
        wrong = [f"{name}={value} must be above 0" for name, value in positive.items() if not value > 0]
        if wrong:
            raise ConfigConflictError(f"planning the memory: {'; '.join(wrong)}.", reasons=wrong)
        if self.method not in ESTIMATED:
            raise ConfigConflictError(
                f"planning the memory: method={self.method!r} is none of {', '.join(ESTIMATED)}. Plan online DPO as "
                "'grpo' with twice the batch."
            )
        if self.method not in TAUGHT and (self.teacher_bytes or self.teacher_more or self.teacher_top_k):
            raise ConfigConflictError(
                f"planning the memory: method={self.method!r} has no teacher. Leave it out, or plan 'distill'."
            )
        if self.has_engine and self.method in OFFLINE:
            raise ConfigConflictError(
                f"planning the memory: method={self.method!r} makes no engine. Pass has_engine=False, or leave it out."
            )
        if self.device not in ("cuda", "cpu"):
            raise ConfigConflictError(f"planning the memory: device={self.device!r} is neither 'cuda' nor 'cpu'.")
        if self.shared and self.has_engine and max(self.trainer_parts, self.engine_parts) > 1:
            raise ConfigConflictError(
                f"planning the memory: shared=True, and a base in {max(self.trainer_parts, self.engine_parts)} parts "
                "is held twice. Pass shared=False."
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
