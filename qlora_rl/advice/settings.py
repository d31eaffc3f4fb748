"""`recommend`: settings for QLoRA that are known to work, each with its source, made to fit into a card.

Sources:
    QLoRA: Dettmers, Pagnoni, Holtzman, Zettlemoyer, "QLoRA: Efficient Finetuning of Quantized LLMs", 2023 (arXiv
        2305.14314).
    LWR: Schulman and Thinking Machines Lab, "LoRA Without Regret", 2025 (thinkingmachines.ai/blog/lora).
    TRL: its documentation and the defaults of its configs, 1.16.
    TIS: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025 (truncated
        importance sampling).

How they are chosen:

- NF4 with double quantisation, 64 weights to a scale, bf16 to compute in: QLoRA, section 3 and table 4.
- LoRA on every linear: QLoRA (figure 2: needed to match full fine-tuning) and LWR (attention alone is worse at
  equal size).
- Rank 16 for reinforcement and preferences, which teach little per sequence (LWR: down to rank 1); 64 for SFT
  (QLoRA's). Alpha 32 with PEFT's alpha / r (LWR): the best learning rate then hardly depends on the rank.
- No dropout: LWR uses none, QLoRA needs it for small models only; in GRPO it would be a distance to the engine.
- Ten times the learning rate of full fine-tuning (LWR; TRL's default is the latter), 15 times in a run of less than
  100 steps (LWR); constant (LWR, QLoRA), after a short warm-up. In SFT half of it from 30 B on (QLoRA, table 9). Of
  the other methods TRL's default is taken as that of 8 B, and the rate falls with the square root of the
  parameters; that is our rule.
- Paged 8-bit AdamW on CUDA (paging: QLoRA, section 3; 8-bit states: Dettmers et al. 2022, arXiv 2110.02861);
  torch's on a CPU.
- Gradient checkpointing: QLoRA; TRL's default.
- Distillation: as GRPO, with one completion for each prompt; the KV cache gets what the plan has left for it.
- 64 completions or 32 other sequences a step: LWR finds LoRA less tolerant of large batches than full fine-tuning.
  On a CPU 16 completions, of at most 128 tokens where no length was asked for, as sampling is slow.
- In GRPO truncated importance sampling by token: TIS, and docs/fidelity.md#the-correction.
- float32 adapter weights: docs/fidelity.md#the-dtype-of-the-adapter.

Where completions are sampled the micro-batch is the one with the shortest estimated step (`memory/pace.py`): a
larger one trains faster, and leaves less for the KV cache. Otherwise it is the largest that fits. If none does, the
plan turns on what only costs time (`memory/plan.py`); then the length is lowered.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch

from qlora_rl.base.model_classes import adaptable
from qlora_rl.base.quant import QuantSpec
from qlora_rl.base.unsupported_configs import Limit, engine_positions, function_limit
from qlora_rl.engine.compat import may_sleep
from qlora_rl.errors import ConfigConflictError
from qlora_rl.fidelity import CORRECTION
from qlora_rl.memory.cards import card_size
from qlora_rl.memory.pace import Pace, pace_of
from qlora_rl.memory.plan import GIB, SLEEPS, WAYS, MemoryEstimate, Way, largest_length, plan_memory
from qlora_rl.memory.shape import check_supported, read_config, stored_base, stored_spec
from qlora_rl.methods import ESTIMATED, METHODS, SAMPLING, TAUGHT

_LARGE = 30e9  # parameters, from which QLoRA halves the rate of SFT
_USUAL = 8e9  # parameters, for which the other rates are meant
_SHORT_RUN = 100  # steps, below which LWR finds 15 times the rate of full fine-tuning better than 10 times
_STEPS, _LENGTH = 200, 2048  # of a first run
_GAIN = 0.05  # of a step's time, for which the KV cache is freed between rollouts although the run fits without
_ALPHA = 32
_GENERATIONS = 8
# Where a CPU samples: completions of a step, and tokens of a completion where no length was asked for.
_ON_CPU, _LONGEST_ON_CPU = 16, 128

_CALIBRATED = (
    "closer to the 16-bit model: codes chosen by a text (of 135 M parameters, KL on prose 0.17 instead of 0.57 nats a "
    "token, docs/base.md)"
)
_FLOAT16 = (
    "prepare it with --compute-dtype float16 for less mismatch, though vLLM's 4-bit layers multiply in bfloat16 all "
    "the same, and steps on a CPU are slower (docs/fidelity.md)"
)


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
        task: one of `ESTIMATED`.
        base: arguments of `prepare_base`.
        lora: of PEFT's LoraConfig.
        config: of TRL's config for the task.
        trainer: of our trainer.
        reasons: why, by the name of the argument; and "calibrate", where that can be had.
        `estimate`: memory estimate of such a run.
    """

    task: str
    base: dict[str, Any]
    lora: dict[str, Any]
    config: dict[str, Any]
    trainer: dict[str, Any]
    reasons: dict[str, str]
    estimate: MemoryEstimate

    @property
    def pace(self) -> Pace | None:
        """About how long a step takes; `None` on a CPU, and without a card."""
        return pace_of(self.estimate, METHODS[self.task].per_step)

    @property
    def fits(self) -> bool:
        """It fits into the given memory, or none was given."""
        return self.estimate.fits

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        parts = ("task", "base", "lora", "config", "trainer", "reasons")
        pace = None if self.pace is None else vars(self.pace) | {"step_s": self.pace.step_s}
        return {name: getattr(self, name) for name in parts} | {
            "fits": self.fits,
            "pace": pace,
            "estimate": self.estimate.as_dict(),
        }

    def __str__(self) -> str:
        of_trl = METHODS[self.task].config
        titles = {"base": "prepare_base", "lora": "LoraConfig", "config": of_trl, "trainer": "the trainer"}
        lines = []
        for part, title in titles.items():
            values = getattr(self, part)
            if values:
                lines.append(title)
                lines += [_row(name, value, self.reasons.get(name, "")) for name, value in values.items()]
        return "\n".join([*lines, "", str(self.estimate), *([str(self.pace)] if self.pace and self.fits else [])])


def recommend(
    model: str | os.PathLike[str],
    task: str = "grpo",
    gpu_memory: str | float | None = None,
    *,
    max_length: int | None = None,
    max_steps: int = _STEPS,
    device: str | None = None,
    trust_remote_code: bool = False,
    teacher: str | os.PathLike[str] | None = None,
) -> Recommendation:
    """Settings for one model, task and card; the module's docstring says how they are chosen.

    Args:
        model: checkpoint or base directory, config.json, or hub name; no weight is read.
        task: "grpo", "rloo", "sft", "dpo", "kto" or "distill".
        gpu_memory: all that the run may hold, in GiB; the size of a card, such as 24 or "24GB", is what these cards
            have, less a reserve (`memory/cards.py`); `None` for no limit.
        max_length: prompt plus completion, in tokens, at most; by default 2048.
        max_steps: of the run.
        device: "cuda" or "cpu"; by default CUDA where there is some, or a card was named.
        trust_remote_code: let the model's own code run.
        teacher: of "distill", a second model, held in 4 bits; by default the teacher shares the student's base.

    Raises:
        ConfigConflictError: an unknown task, a size that is none, or nothing that transformers can read.
        NotYetSupportedError: a mixture of experts, or a model for images, of an unsupported type.
    """
    if task not in ESTIMATED:
        raise ConfigConflictError(f"recommending settings: task={task!r} is not one of {ESTIMATED}.")
    try:
        gpu_memory = None if gpu_memory is None else card_size(gpu_memory)
    except ValueError as error:
        raise ConfigConflictError(f"recommending settings: gpu_memory={error}.") from None
    device = device or ("cuda" if gpu_memory is not None or torch.cuda.is_available() else "cpu")
    is_slow = device == "cpu" and task in SAMPLING
    per_step = _ON_CPU if is_slow else METHODS[task].per_step
    config_of_model = read_config(model, trust_remote_code=trust_remote_code)
    check_supported(config_of_model)
    request = _request(config_of_model, task, gpu_memory, device) | {"spec": stored_spec(model)}
    if teacher is not None:
        of_teacher = read_config(teacher, trust_remote_code=trust_remote_code)
        request |= {"teacher": of_teacher, "teacher_spec": stored_spec(teacher)}
    estimate = _fitted(config_of_model, task, max_length or _LENGTH, request, per_step)
    if not estimate.fits and estimate.shape.experts and request["spec"] == QuantSpec():
        # Of a base that is prepared nothing can be chosen.
        request["spec"] = replace(request["spec"], quantize_experts=True)
        estimate = _fitted(config_of_model, task, max_length or _LENGTH, request, per_step)
    config = _training(task, estimate, per_step, max_steps, is_short=is_slow and not max_length)
    lora = {
        "r": METHODS[task].rank,
        "lora_alpha": _ALPHA,
        "lora_dropout": 0.0,
        "target_modules": request["target_modules"],
        "task_type": "CAUSAL_LM",
    }
    trainer: dict[str, Any] = {"adapter_dtype": "float32"}
    if teacher is not None:
        trainer["teacher_model"] = os.fspath(teacher)
    if task in SAMPLING and gpu_memory is not None:
        trainer["gpu_memory"] = gpu_memory
    reasons = _reasons(task, device, estimate, max_length, function_limit(config_of_model))
    if is_slow:
        why = f"no GPU here: {per_step} completions per step instead of {METHODS[task].per_step}"
        reasons["gradient_accumulation_steps"] = f"{why} (docs/situations.md)"
        if not max_length:
            reasons["max_completion_length"] = "no GPU here: short, as sampling is slow; --max-length changes it"
    reasons["learning_rate"] = _why_rate(task, estimate.shape.parameters, max_steps)
    advice = Recommendation(task, _base(request["spec"]), lora, config, trainer, reasons, estimate)
    _add_measured(advice, request["spec"], stored_base(model), config_of_model)
    return advice


def _request(config: Any, task: str, gpu_memory: float | None, device: str) -> dict[str, Any]:
    """What `plan_memory` is asked, but for base, length and batch."""
    return {
        "rank": METHODS[task].rank,
        "target_modules": adaptable(config, "all-linear"),
        "optimizer": "paged_adamw_8bit" if device == "cuda" else "adamw_torch_fused",
        "gpu_memory_gib": gpu_memory,
        "device": device,
        "has_engine": task in SAMPLING,
        "can_sleep": may_sleep(lends=True),
        "method": task if task in TAUGHT else "grpo",
    }


def _base(spec: QuantSpec) -> dict[str, Any]:
    """Arguments of `prepare_base`."""
    base = {"quant": spec.quant_type, **({"double_quant": spec.double_quant} if spec.is_4bit else {})}
    return base | ({"quantize_experts": True} if spec.quantize_experts else {})


def _add_measured(advice: Recommendation, spec: QuantSpec, made: Any, config_of_model: Any) -> None:
    """Add to `advice` what the base that is there was measured to be, or what preparing one can choose."""
    reasons = advice.reasons
    if made is None:
        if spec.is_4bit and not getattr(config_of_model, "quantization_config", None):
            reasons["calibrate"] = _CALIBRATED
            reasons["bf16"] += "; `qlora-rl prepare MODEL DIR` measures whether float16 rounds less"
        return
    reasons["quant"] = "as the base is stored" + (f"; {made.measured}" if made.measured else "")
    if spec.compute_dtype == "float16":
        advice.base["compute_dtype"], advice.config["bf16"] = "float16", False
        reasons["compute_dtype"] = reasons["bf16"] = "the base computes in float16"
        reasons["adapter_dtype"] = reasons["adapter_dtype"].replace("bf16", "float16")
    elif made.measured and spec.compute_dtype == "bfloat16" and (nearer := made.measured.rounds_less):
        reasons["bf16"] += f". {nearer}: {_FLOAT16}"


def _training(task: str, estimate: MemoryEstimate, per_step: int, max_steps: int, *, is_short: bool) -> dict[str, Any]:
    """Fields of TRL's config; `is_short`: completions are short, whatever length there is."""
    request = estimate.request
    batch, length = request.batch_size // METHODS[task].sequences, request.max_length
    config: dict[str, Any] = {
        "max_steps": max_steps,
        "learning_rate": learning_rate(task, estimate.shape.parameters, max_steps),
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": min(10, max_steps // 10),
        "optim": request.optimizer,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": max(1, per_step // batch),
        "gradient_checkpointing": True,
        "bf16": True,
    }
    config |= {way.config[0]: way.config[1] for way in _turned_on(estimate)}
    if task not in SAMPLING:
        return config | {"max_length": length}
    return config | {
        **({} if task in TAUGHT else {"num_generations": _GENERATIONS}),
        "vllm_max_model_length": length,
        "max_completion_length": min(length // 2, _LONGEST_ON_CPU) if is_short else length // 2,
        **(CORRECTION if task == "grpo" else {}),
    }


def learning_rate(task: str, parameters: float, max_steps: int = _STEPS) -> float:
    """The rate for LoRA on a model of that size, rounded; `recommend` says how it is chosen."""
    if task == "sft":
        rate = METHODS[task].learning_rate / (2 if parameters >= _LARGE else 1)
    else:
        rate = METHODS[task].learning_rate * min(10.0, sqrt(_USUAL / parameters))
    return float(f"{float(f'{rate:.0e}') * (1.5 if max_steps < _SHORT_RUN else 1):.1e}")


def _why_rate(task: str, parameters: float, max_steps: int) -> str:
    times = (
        "15 times TRL's default for full fine-tuning, as the run is short"
        if max_steps < _SHORT_RUN
        else "10 times TRL's default for full fine-tuning"
    )
    if task == "sft":
        return f"{times} (LWR){'; half of that from 30 B on (QLoRA)' if parameters >= _LARGE else ''}"
    factor = min(10.0, sqrt(_USUAL / parameters))
    scaled = f", times sqrt(8 B / parameters) = {factor:.2g}" if abs(factor - 1) > 0.05 else ""
    return (
        f"{times} (LWR){scaled}. If {'the loss' if task in TAUGHT else 'the reward'} does not move, try 3 times as much"
        if task in SAMPLING
        else f"{times} (LWR){scaled}"
    )


def _turned_on(estimate: MemoryEstimate) -> list[Way]:
    """What the run needs less memory with, in exchange for time."""
    return [way for way in WAYS if getattr(estimate.request, way.field)]


def _fitted(config: Any, task: str, max_length: int, request: Mapping[str, Any], per_step: int) -> MemoryEstimate:
    """The memory estimate of a batch that fits at full length: the one with the shortest step where that is known, also
    with the KV cache freed between rollouts, otherwise the largest; if need be with what the plan turns on; or of one
    sequence, shorter."""
    text = config.get_text_config()
    positions = engine_positions(config) if task in SAMPLING else getattr(text, "max_position_embeddings", None)
    wanted = plan_memory(
        config,
        **request,
        max_length=min(max_length, positions or max_length),
        sequences=per_step if task in SAMPLING else 1,
    )
    # Chosen and rejected are in one forward; KTO's KL is between rows of a micro-batch.
    sizes = [batch * METHODS[task].sequences for batch in ((8, 4, 2) if task == "kto" else (8, 4, 2, 1))]
    is_paced = wanted.request.has_engine and pace_of(wanted) is not None
    frees = (False, True) if is_paced and wanted.asked.can_sleep else (False,)
    tried = [wanted.changed(batch_size=size, offload=False, sleeps=each) for each in frees for size in sizes]
    if found := [estimate for estimate in tried if estimate.fits]:
        return min(found, key=lambda each: _step_s(each, per_step)) if is_paced else found[0]
    for size in sizes:
        estimate = wanted.changed(batch_size=size)
        if estimate.fits:
            return estimate
    shorter = largest_length(estimate)
    return estimate.changed(max_length=shorter) if shorter else estimate


def _step_s(estimate: MemoryEstimate, per_step: int) -> float:
    """Of a step, and what freeing the KV cache must gain."""
    return pace_of(estimate, per_step).step_s * (1 + _GAIN * bool(estimate.request.sleeps))


def _reasons(
    task: str, device: str, estimate: MemoryEstimate, asked: int | None, limit: Limit | None
) -> dict[str, str]:
    if not estimate.fits:
        batch = "nothing fits: use a larger card or a smaller model"
    elif estimate.request.gpu_memory_gib is None:
        batch = "no memory limit was given"
    elif task in SAMPLING and device == "cuda":
        batch = "of 8, 4, 2 and 1 the fastest step: sampling needs memory for its KV cache, too"
    else:
        batch = f"the largest of {'8, 4 and 2' if task == 'kto' else '8, 4, 2 and 1'} that fits"
    ways = {way.config[0]: f"{way.words}: {_why_on(way, estimate)}" for way in _turned_on(estimate)}
    wished = asked or _LENGTH
    length = (
        "prompt plus completion, as you asked"
        if asked
        else "prompt plus completion; the default, --max-length changes it"
    )
    if estimate.request.max_length != wished:
        length = "the most that the model supports, or that fits"
    if task in SAMPLING and limit is not None and estimate.request.max_length == limit.length < wished:
        length = f"not {wished}: beyond, {limit.why}"
    return {
        "quant": "NormalFloat: more accurate than FP4 or int4 at the same size (QLoRA, table 4)",
        "double_quant": "saves 0.37 bits per weight at no loss (QLoRA, section 3)",
        "quantize_experts": "16-bit experts do not fit, once for the trainer and once for the engine "
        "(docs/mixtures.md)",
        "r": "RL and preferences need little capacity; even rank 1 can be enough (LWR)"
        if task != "sft"
        else "as in QLoRA; a large dataset can need more (LWR)",
        "lora_alpha": "as in LWR; the best learning rate then hardly depends on r",
        "lora_dropout": "none in LWR; in RL it would also make trainer and engine differ"
        if task in SAMPLING
        else "none in LWR",
        "target_modules": "attention only: adapters on experts take far more memory and need 4-bit experts "
        "(docs/mixtures.md)"
        if estimate.shape.experts
        else "every linear of the language model; engines apply no adapter to a vision tower (docs/images.md)"
        if estimate.shape.tower is not None
        else "every linear: needed to match full fine-tuning (QLoRA, figure 2; LWR)",
        "max_steps": "for a first run; raise it while results still improve",
        "lr_scheduler_type": "constant (QLoRA, LWR) after a short warm-up",
        "optim": "paged (QLoRA, section 3), with 8-bit states (arXiv 2110.02861)"
        if device == "cuda"
        else "paged 8-bit AdamW needs a GPU",
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": f"{METHODS[task].per_step} sequences per step; LoRA tolerates large batches "
        "less well (LWR)",
        "gradient_checkpointing": "recomputes activations to save memory (QLoRA, section 2; TRL's default)",
        "bf16": "the compute dtype of the base (QLoRA, section 3)",
        "vllm_importance_sampling_mode": "both sides hold the same weights, so only rounding is left to correct, "
        "token by token",
        "vllm_importance_sampling_clip_max": "from TIS; rounding never reaches it",
        "num_generations": "TRL's default for GRPO",
        "vllm_max_model_length": length,
        "max_length": length,
        "max_completion_length": "half of vllm_max_model_length",
        "adapter_dtype": "keeps small updates from being rounded away; multiplied in bf16, as in the engine",
        "gpu_memory": _limit(estimate),
        "teacher_model": "a second model; adapters of the student's own base cost next to nothing",
    } | ways


def _why_on(way: Way, estimate: MemoryEstimate) -> str:
    cost = f"about {way.cost:.0%} of a step's time"
    if way == SLEEPS and estimate.changed(sleeps=False, offload=False).fits:
        return f"more sequences are sampled at a time, for {cost}"
    return f"the run does not fit without it; costs {cost}"


def _limit(estimate: MemoryEstimate) -> str:
    asked, budget = estimate.request.gpu_memory_gib, estimate.budget_bytes
    if asked is None or budget is None or budget == int(asked * GIB):
        return "GiB, the limit you gave"
    planned = f"{budget / GIB:.1f} GiB are planned, which every such card has, and some is kept in reserve"
    return f"a {asked:g} GB card; {planned}"


def _row(name: str, value: Any, why: str) -> str:
    return f"  {name + ' = ' + repr(value):<51} {why}".rstrip()
