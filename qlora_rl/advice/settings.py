"""`recommend`: settings for QLoRA that are known to work, each with its source, made to fit into a card.

Sources:
    QLoRA: Dettmers, Pagnoni, Holtzman, Zettlemoyer, "QLoRA: Efficient Finetuning of Quantized LLMs", 2023 (arXiv 2305.14314).
    LWR: Schulman and Thinking Machines Lab, "LoRA Without Regret", 2025 (thinkingmachines.ai/blog/lora).
    TRL: its documentation and the defaults of its configs, 1.16.
    TIS: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025 (truncated importance sampling).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qlora_rl.base.functions import Limit, engine_positions, function_limit
from qlora_rl.base.kinds import adaptable
from qlora_rl.base.quant import QuantSpec
from qlora_rl.contracts import LEARNING_RATES
from qlora_rl.engine.compat import may_sleep
from qlora_rl.errors import ConfigConflictError
from qlora_rl.fidelity import CORRECTION
from qlora_rl.ledger.cards import card_size
from qlora_rl.ledger.plan import GIB, MemoryLedger, largest_length, plan_memory
from qlora_rl.ledger.shape import check_supported, read_config, stored_spec

TASKS = ("grpo", "rloo", "sft", "dpo")
_SAMPLING = ("grpo", "rloo")
_LARGE = 30e9  # parameters, from which QLoRA halves the rate
_RANKS = {"grpo": 16, "rloo": 16, "sft": 64, "dpo": 16}
_ALPHA = 32
# Sequences of one optimizer step; of GRPO and RLOO: eight prompts, eight completions each.
_PER_STEP = {"grpo": 64, "rloo": 64, "sft": 32, "dpo": 32}
_GENERATIONS = 8


@dataclass(frozen=True)
class Recommendation:
    """What to pass on, and why.

    ::

        advice = recommend("Qwen/Qwen3-8B", task="grpo", gpu_memory=24)
        trainer = QLoRAGRPOTrainer(
            model=prepare_base("Qwen/Qwen3-8B", **advice.base), args=GRPOConfig(output_dir="run", **advice.config),
            peft_config=LoraConfig(**advice.lora), reward_funcs=reward, train_dataset=dataset, **advice.trainer,
        )

    Attributes:
        task: "grpo", "rloo", "sft" or "dpo".
        base: arguments of `prepare_base`.
        lora: of PEFT's LoraConfig.
        config: of TRL's config for the task.
        trainer: of our trainer.
        reasons: why, by the name of the argument.
        `ledger`: memory estimate of such a run.
    """

    task: str
    base: dict[str, Any]
    lora: dict[str, Any]
    config: dict[str, Any]
    trainer: dict[str, Any]
    reasons: dict[str, str]
    ledger: MemoryLedger

    @property
    def fits(self) -> bool:
        """It fits into the given memory, or none was given."""
        return self.ledger.fits

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        parts = ("task", "base", "lora", "config", "trainer", "reasons")
        return {name: getattr(self, name) for name in parts} | {"fits": self.fits, "ledger": self.ledger.as_dict()}

    def __str__(self) -> str:
        kinds = {"grpo": "GRPOConfig", "rloo": "RLOOConfig", "sft": "SFTConfig", "dpo": "DPOConfig"}
        titles = {"base": "prepare_base", "lora": "LoraConfig", "config": kinds[self.task], "trainer": "the trainer"}
        lines = []
        for part, title in titles.items():
            values = getattr(self, part)
            if values:
                lines.append(title)
                lines += [_row(name, value, self.reasons.get(name, "")) for name, value in values.items()]
        return "\n".join([*lines, "", str(self.ledger)])


def recommend(
    model: str | os.PathLike[str],
    task: str = "grpo",
    gpu_memory: str | float | None = None,
    *,
    max_length: int = 2048,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Recommendation:
    """Settings for one model, task and card.

    - NF4 with double quantisation, 64 weights to a scale, bf16 to compute in: QLoRA, section 3 and table 4.
    - LoRA on every linear: QLoRA (figure 2: needed to match full fine-tuning) and LWR (attention alone is worse at equal size).
    - Rank 16 for reinforcement and preferences, which teach little per sequence (LWR: down to rank 1); 64 for SFT (QLoRA's). Alpha 32
      with PEFT's alpha / r (LWR): the best learning rate then hardly depends on the rank.
    - No dropout: LWR uses none, QLoRA needs it for small models only; in GRPO it would be a distance to the engine.
    - Ten times the learning rate of full fine-tuning (LWR; TRL's default is the latter), half of it from 30 B on (QLoRA, table 9);
      constant (both), after a short warm-up.
    - Paged 8-bit AdamW on CUDA (paging: QLoRA, section 3; 8-bit states: Dettmers et al. 2022, arXiv 2110.02861); torch's on a CPU.
    - Gradient checkpointing: QLoRA; TRL's default.
    - 64 completions or 32 other sequences a step: LWR finds LoRA less tolerant of large batches than full fine-tuning.
    - In GRPO truncated importance sampling by token: TIS, and docs/fidelity.md#the-correction.
    - float32 adapter weights: docs/fidelity.md#the-dtype-of-the-adapter.

    Until the run fits, the batch is lowered; then the plan turns on what only costs time (`ledger/choice.py`); then the length is lowered.

    Args:
        model: checkpoint or base directory, config.json, or hub name; no weight is read.
        task: "grpo", "rloo", "sft" or "dpo".
        gpu_memory: all that the run may hold, in GiB; the size of a card, such as 24 or "24GB", is what these cards have, less a
            reserve (`ledger/cards.py`); `None` for no limit.
        max_length: prompt plus completion, in tokens, at most.
        device: "cuda" or "cpu"; by default CUDA where there is some, or a card was named.
        trust_remote_code: let the model's own code run.

    Raises:
        ConfigConflictError: an unknown task, a size that is none, or nothing that transformers can read.
        NotYetSupportedError: a mixture of experts, or a model for images, of an unsupported type.
    """
    if task not in TASKS:
        raise ConfigConflictError(f"recommending settings: task={task!r} is not one of {TASKS}.")
    try:
        gpu_memory = None if gpu_memory is None else card_size(gpu_memory)
    except ValueError as error:
        raise ConfigConflictError(f"recommending settings: gpu_memory={error}.") from None
    device = device or _device(gpu_memory)
    spec = stored_spec(model)
    optimizer = "paged_adamw_8bit" if device == "cuda" else "adamw_torch_fused"
    config_of_model = read_config(model, trust_remote_code=trust_remote_code)
    check_supported(config_of_model)
    adapted = adaptable(config_of_model, "all-linear")
    request = {
        "spec": spec,
        "rank": _RANKS[task],
        "target_modules": adapted,
        "optimizer": optimizer,
        "gpu_memory_gib": gpu_memory,
        "device": device,
        "has_engine": task in _SAMPLING,
        "can_sleep": may_sleep(lends=True),
    }
    ledger = _fitted(config_of_model, task, max_length, request)
    if (
        not ledger.fits and ledger.shape.experts and spec == QuantSpec()
    ):  # of a base that is prepared nothing can be chosen
        spec = replace(spec, quantize_experts=True)
        ledger = _fitted(config_of_model, task, max_length, request | {"spec": spec})
    batch = ledger.request.batch_size // (2 if task == "dpo" else 1)
    length = ledger.request.max_length
    size = ledger.shape.parameters
    rate = LEARNING_RATES[task] / (2 if size >= _LARGE and task == "sft" else 1)
    config: dict[str, Any] = {
        "learning_rate": rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
        "optim": optimizer,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": max(1, _PER_STEP[task] // batch),
        "gradient_checkpointing": True,
        "bf16": True,
    }
    config |= {way.config[0]: way.config[1] for way in ledger.chosen}
    if task in _SAMPLING:
        config |= {
            "num_generations": _GENERATIONS,
            "vllm_max_model_length": length,
            "max_completion_length": length // 2,
        }
        config |= CORRECTION if task == "grpo" else {}
    else:
        config["max_length"] = length
    lora = {
        "r": _RANKS[task],
        "lora_alpha": _ALPHA,
        "lora_dropout": 0.0,
        "target_modules": adapted,
        "task_type": "CAUSAL_LM",
    }
    base = {"quant": spec.quant_type, **({"double_quant": spec.double_quant} if spec.is_4bit else {})}
    base |= {"quantize_experts": True} if spec.quantize_experts else {}
    trainer: dict[str, Any] = {"adapter_dtype": "float32"}
    if task in _SAMPLING and gpu_memory is not None:
        trainer["gpu_memory"] = gpu_memory
    reasons = _reasons(task, device, ledger, max_length, function_limit(config_of_model))
    return Recommendation(task, base, lora, config, trainer, reasons, ledger)


def _fitted(config: Any, task: str, max_length: int, request: Mapping[str, Any]) -> MemoryLedger:
    """The memory estimate of the largest batch that fits at full length, if need be with what the plan turns on; or of one sequence, shorter."""
    text = config.get_text_config()
    positions = engine_positions(config) if task in _SAMPLING else getattr(text, "max_position_embeddings", None)
    pairs = 2 if task == "dpo" else 1  # chosen and rejected, in one forward
    wanted = plan_memory(
        config,
        **request,
        max_length=min(max_length, positions or max_length),
        sequences=_PER_STEP[task] if task in _SAMPLING else 1,
    )
    for chosen in ({"offload": False, "sleeps": False}, {}):
        for batch in (8, 4, 2, 1):
            ledger = wanted.changed(batch_size=batch * pairs, **chosen)
            if ledger.fits:
                return ledger
    shorter = largest_length(ledger)
    return ledger.changed(max_length=shorter) if shorter else ledger


def _reasons(task: str, device: str, ledger: MemoryLedger, wished: int, limit: Limit | None) -> dict[str, str]:
    fits = "the largest of 8, 4, 2, 1 that fits" if ledger.fits else "none fits: a larger card, or a smaller model"
    if ledger.request.gpu_memory_gib is None:
        fits = "no limit was named"
    only_so = {
        way.config[0]: f"{way.words}: it fits only so, at about {way.cost:.0%} of a step's time"
        for way in ledger.chosen
    }
    length = "as asked" if ledger.request.max_length == wished else "what the model, or the card, allows"
    if task in _SAMPLING and limit is not None and ledger.request.max_length == limit.length < wished:
        length = f"not {wished}: beyond, {limit.why}"
    return {
        "quant": "NormalFloat, better than FP4 and int4 at equal size (QLoRA, table 4); or as the base is held",
        "double_quant": "0.37 bits a weight less, at no loss (QLoRA, section 3)",
        "quantize_experts": "in 16 bits, trainer and engine each, they do not fit (docs/mixtures.md)",
        "r": "little is learnt per sequence (LWR: rank 1 can do)"
        if task != "sft"
        else "QLoRA's; LWR: more for large data",
        "lora_alpha": "LWR; the best learning rate then hardly depends on r",
        "lora_dropout": "LWR; in GRPO it would be a distance to the engine",
        "target_modules": "attention: on experts it takes far more memory, and they must be in 4 bits (docs/mixtures.md)"
        if ledger.shape.experts
        else "every linear of the language model: an engine applies no adapter to a vision tower (docs/images.md)"
        if ledger.shape.tower is not None
        else "every linear: needed to match full fine-tuning (QLoRA, figure 2; LWR)",
        "learning_rate": "ten times TRL's default for full fine-tuning (LWR); half of it from 30 B on in SFT (QLoRA)",
        "lr_scheduler_type": "constant (QLoRA, LWR), after a short warm-up",
        "optim": "paging: QLoRA, section 3; 8-bit states: arXiv 2110.02861"
        if device == "cuda"
        else "there is no paged 8-bit AdamW on a CPU",
        "per_device_train_batch_size": fits,
        "gradient_accumulation_steps": f"{_PER_STEP[task]} sequences a step; LoRA likes small batches (LWR)",
        "gradient_checkpointing": "QLoRA, section 2; TRL's default",
        "bf16": "the dtype in which the base was prepared to compute (QLoRA, section 3)",
        "vllm_importance_sampling_mode": "both sides hold the same weights: what is left is rounding, token by token",
        "vllm_importance_sampling_clip_max": "TIS; never reached by rounding",
        "num_generations": "TRL's default for GRPO",
        "vllm_max_model_length": length,
        "max_length": length,
        "max_completion_length": "half of it",
        "adapter_dtype": "small updates are not rounded away; multiplied in bf16 as the engine does",
        "gpu_memory": _limit(ledger),
    } | only_so


def _limit(ledger: MemoryLedger) -> str:
    asked, budget = ledger.request.gpu_memory_gib, ledger.budget_bytes
    if asked is None or budget is None or budget == int(asked * GIB):
        return "as asked"
    return f"a card of {asked:g} GB: {budget / GIB:.1f} GiB of it, so that every such card has them and some is left"


def _device(gpu_memory: float | None) -> str:
    if gpu_memory is not None:
        return "cuda"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _row(name: str, value: Any, why: str) -> str:
    return f"  {name + ' = ' + repr(value):<51} {why}".rstrip()
