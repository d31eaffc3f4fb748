"""The ways to train: one row of `METHODS` for each, which everything else reads.

To add one: a trainer that names its row, its export in `qlora_rl/__init__.py`, and the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
        name: in a run's file, and for `plan` and `recommend`.
        trainer: public name of the trainer.
        config: TRL's config class.
        says: what it does, in one line.
        module: of TRL, which has that class.
        columns: the datasets that it takes, by the columns that they must have: one of these sets.
        first: what a first run sets in [train], by TRL's names, and what each is.
        example: what it sets elsewhere, by table and field.
        recorded_as: name of TRL's config in config.json of a run, where it is not that of the method.
        learning_rate: ten times TRL's default, which is for full fine-tuning: LWR finds LoRA's best rate there,
            whatever the rank.
        rank: of an adapter, as `recommend` says.
        per_step: sequences of an optimizer step, as it says; of GRPO and RLOO eight prompts, eight completions each.
        sequences: of a row of the batch, which are computed together.
        `samples`: it samples completions, so it has an engine.
        scores: it scores them with reward functions.
        is_taught: it compares with a teacher.
        is_ahead: it samples while it trains, so the engine never rests.
        is_planned: its trainer plans its memory: `gpu_memory`.
        is_estimated: `plan` and `recommend` know it.
        why_padded: its micro-batches keep their padding, in words; empty where its trainer takes `remove_padding`.
        replays: its trainer can follow the experts that the engine chose: `routing_replay`.
        takes_images: rows may have some.
        takes_tools: the model may call tools, and methods of environments.
        takes_template_kwargs: for the chat template.
        trains_all: also all weights, without an adapter.
    """

    name: str
    trainer: str
    config: str
    says: str
    module: str = "trl"
    columns: tuple[tuple[str, ...], ...] = (("prompt",),)
    first: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)
    recorded_as: str = ""
    learning_rate: float = 1e-5
    rank: int = 16
    per_step: int = 64
    sequences: int = 1
    samples: bool = True
    scores: bool = True
    is_taught: bool = False
    is_ahead: bool = False
    is_planned: bool = True
    is_estimated: bool = True
    why_padded: str = ""
    replays: bool = False
    takes_images: bool = False
    takes_tools: bool = False
    takes_template_kwargs: bool = True
    trains_all: bool = True

    @property
    def record(self) -> str:
        """Name of TRL's config in config.json of a run."""
        return self.recorded_as or self.name


# What learns from data alone: there is no engine, and nothing that only one with an engine can do.
_OFFLINE: dict[str, Any] = {
    "per_step": 32,
    "samples": False,
    "scores": False,
    "is_planned": False,
    "trains_all": False,
}
_ROWS = {"max_length": (1024, "tokens; longer rows are cut")}
_PAIRS = {**_ROWS, "beta": (0.1, "how close to the start")}
_SAMPLED = {
    "max_completion_length": (256, "tokens"),
    "vllm_max_model_length": (1024, "prompt plus completion, in tokens"),
    "temperature": (1.0, "of the rollouts"),
}
_GROUPS = {"num_generations": (8, "completions of a prompt"), **_SAMPLED}
# As examples/data/sums.jsonl has prompt, answer and careless.
_BETTER = {"data.columns": {"chosen": "answer", "rejected": "careless"}}

_ALL = (
    Method(
        "sft",
        "QLoRASFTTrainer",
        "SFTConfig",
        "imitates the completions of a dataset",
        columns=(("text",), ("messages",), ("prompt", "completion"), ("input_ids",)),
        first=_ROWS,
        example={"data.columns": {"completion": "answer"}},
        learning_rate=2e-4,
        rank=64,
        takes_images=True,
        **_OFFLINE,
    ),
    Method(
        "dpo",
        "QLoRADPOTrainer",
        "DPOConfig",
        "learns which of two completions is better",
        columns=(("chosen", "rejected"),),
        first=_PAIRS,
        example=_BETTER,
        sequences=2,
        takes_images=True,
        **_OFFLINE,
    ),
    Method(
        "kto",
        "QLoRAKTOTrainer",
        "KTOConfig",
        "learns from completions that are good or bad",
        columns=(("prompt", "completion", "label"), ("chosen", "rejected")),
        first=_PAIRS,
        example=_BETTER,
        **_OFFLINE,
    ),
    Method(
        "grpo",
        "QLoRAGRPOTrainer",
        "GRPOConfig",
        "samples a group per prompt, rewards it",
        first=_GROUPS,
        replays=True,
        takes_images=True,
        takes_tools=True,
    ),
    Method(
        "rloo",
        "QLoRARLOOTrainer",
        "RLOOConfig",
        "as grpo, with the others of the group as baseline",
        first=_GROUPS,
        replays=True,
        takes_images=True,
    ),
    Method(
        "online_dpo",
        "QLoRAOnlineDPOTrainer",
        "OnlineDPOConfig",
        "samples two per prompt, prefers the better one",
        module="trl.experimental.online_dpo",
        first={
            "max_new_tokens": (256, "of a completion"),
            "max_length": (1024, "prompt plus completion, in tokens"),
        },
        # TRL holds logits of B x T x V here, which the memory estimate does not know.
        is_planned=False,
        is_estimated=False,
        why_padded="TRL holds all logits here",
        takes_template_kwargs=False,
    ),
    Method(
        "async_grpo",
        "QLoRAAsyncGRPOTrainer",
        "GRPOConfig",  # ours is GRPO ahead of itself, not TRL's experimental trainer
        "as grpo, while the next completions are sampled",
        first=_GROUPS,
        recorded_as="grpo",
        is_ahead=True,
        is_estimated=False,
        takes_tools=True,
    ),
    Method(
        "distill",
        "QLoRADistillationTrainer",
        "DistillationConfig",
        "samples one per prompt, learns what a teacher says there",
        first={**_SAMPLED, "beta": (1.0, "1: reverse KL, 0: forward KL, between: Jensen-Shannon")},
        example={"teacher.adapter": "policy", "teacher.prompt_template": "{prompt}{answer}\n{prompt}"},
        recorded_as="distillation",
        scores=False,
        is_taught=True,
        why_padded="TRL computes padded batches here",
        trains_all=False,
    ),
)
METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _ALL})


def select(is_meant: Callable[[Method], bool]) -> tuple[str, ...]:
    """The names of some, in the order of the table."""
    return tuple(method.name for method in _ALL if is_meant(method))


SAMPLING = select(lambda method: method.samples)
OFFLINE = select(lambda method: not method.samples)
TAUGHT = select(lambda method: method.is_taught)
AHEAD = select(lambda method: method.is_ahead)
ESTIMATED = select(lambda method: method.is_estimated)
