"""`run_file`: recommended settings as a run's file, with the source of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qlora_rl.advice.rows import Tables
from qlora_rl.advice.settings import Recommendation
from qlora_rl.config.text import value
from qlora_rl.methods import METHODS

# PEFT is told it by the trainer, and the trainer's field has another name in the file.
_ELSEWHERE = ("task_type",)
_NAMES = {"adapter_dtype": "dtype"}
# Of a first run; what is recommended does not depend on it.
_FIRST = {
    "logging_steps": (1, ""),
    "save_steps": (50, "an interrupted run resumes from the last checkpoint"),
}
_TEACHERS = {
    "adapter": "the student itself, or an adapter of its base, which is held once",
    "model": "a second model in this process",
    "prompt_template": "what the teacher reads in place of the prompt",
}
_REWARDS = {
    "numeric_match": "compares the last number of the completion with the answer",
    "math_match": "compares as mathematics; install math-verify",
    "exact_match": "the whole completion must equal the answer, so the prompt must ask for nothing else; if every "
    "reward of the first steps is 0, change one of them",
    "format_match": "rewards the form that the prompt asks for",
}


def run_file(
    advice: Recommendation,
    model: str,
    tables: Tables,
    *,
    switch: str = "",
    command: str = "",
    trust_remote_code: bool = False,
) -> str:
    """A complete file for `qlora-rl train`, as TOML.

    Args:
        advice: of `recommend`, for the same model.
        model: hub name or directory.
        tables: of `tables_for`, for the same task.
        switch: argument of the chat template that turns thinking off; empty where there is none.
        command: that writes it, for its first line.
        trust_remote_code: let the model's own code run.
    """
    gpu_memory = advice.trainer.get("gpu_memory")
    data = dict(tables.data)
    comments = dict(tables.comments)
    if switch and data.get("format") == "chat":
        data["chat_template_kwargs"] = {switch: False}
        comments["chat_template_kwargs"] = "no thinking, so completions are shorter; remove this to train with thinking"
    train = advice.config | {name: each for name, (each, _) in _FIRST.items()}
    train["save_steps"] = max(1, min(train["save_steps"], advice.config["max_steps"] // 2))
    own = {_NAMES.get(n, n): v for n, v in advice.trainer.items() if n in _NAMES}
    reasons = {_NAMES.get(name, name): why for name, why in advice.reasons.items()}
    reasons |= {name: why for name, (_, why) in _FIRST.items()} | comments
    if tables.length == advice.estimate.request.max_length:
        reasons |= dict.fromkeys(
            ("vllm_max_model_length", "max_length"), "prompt plus completion; what this dataset needs"
        )
    lora = {name: each for name, each in advice.lora.items() if name not in _ELSEWHERE}
    lines = [
        *([f"# Written by `{command}`."] if command else []),
        "# `qlora-rl data FILE` prints the prompts as the model will see them; `qlora-rl train FILE` trains.",
        "# Sources: QLoRA: arXiv 2305.14314. LWR: LoRA Without Regret, thinkingmachines.ai/blog/lora. TRL: defaults of "
        "1.16.",
        *(["# TIS: truncated importance sampling, docs/fidelity.md."] if advice.task == "grpo" else []),
        f"# Memory estimate: {str(advice.estimate).splitlines()[0]}",
        *([f"# T{str(advice.pace)[1:]}"] if advice.pace and advice.fits else []),
        "",
        f"method = {value(advice.task)}",
    ]
    blocks: list[tuple[str, Mapping[str, Any], Mapping[str, str]]] = [
        (
            "[base]",
            {"model": model} | advice.base | ({"trust_remote_code": True} if trust_remote_code else {}),
            reasons,
        ),
        ("[adapter]", lora | own, reasons),
        ("[data]", data, comments),
        *(("[[rewards]]", each, {"use": _REWARDS.get(each["use"], "")}) for each in tables.rewards),
        *((("[teacher]", tables.teacher, _TEACHERS),) if tables.teacher else ()),
        ("[train]", train, reasons),
    ]
    if gpu_memory and METHODS[advice.task].is_planned:
        blocks.append(("[run]", {"gpu_memory": gpu_memory}, reasons))
    for head, held, why in blocks:
        lines += ["", head, *_rows(held, why)]
        if head == "[base]" and "calibrate" in why:
            lines.append(f"# calibrate = true  # {why['calibrate']}")
    return "\n".join(lines) + "\n"


def _rows(held: Mapping[str, Any], why: Mapping[str, str]) -> Iterator[str]:
    for name, each in held.items():
        shown = int(each) if isinstance(each, float) and name == "gpu_memory" and each.is_integer() else each
        comment = why.get(name, "")
        yield f"{name} = {value(shown)}" + (f"  # {comment}" if comment else "")
