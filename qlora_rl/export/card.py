"""The model card of an export: README.md."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_rl.export.check import Distance
from qlora_rl.inference.trained import TrainedRun, arguments_of
from qlora_rl.report.parts import object_in
from qlora_rl.report.quantities import plain
from qlora_rl.report.run import Run, read_run, summarise
from qlora_rl.train.run import describe_versions

CARD, NUMBERS = "README.md", "export.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Card:
    """What the card is made of; see `export_run`."""

    trained: TrainedRun
    kind: str
    dtype: str
    distance: Distance | None
    prompts: str
    load: dict[str, str]
    llama_cpp: Distance | None


def write_card(card: Card, directory: Path) -> None:
    """Write README.md and export.json."""
    run = read_run(card.trained.path)
    numbers = {
        "run": card.trained.name,
        "to": card.kind,
        "dtype": None if card.kind == "adapter" else card.dtype,
        "base_identity": card.trained.base.identity,
        "distance": None if card.distance is None else vars(card.distance),
        "llama_cpp": None if card.llama_cpp is None else vars(card.llama_cpp),
        "prompts": card.prompts,
        "versions": describe_versions(),
    }
    (directory / NUMBERS).write_text(json.dumps({k: v for k, v in numbers.items() if v is not None}, indent=1) + "\n")
    (directory / CARD).write_text(_text(card, run))


def _where_base_is(card: Card) -> str:
    """An adapter is nothing without its base, which the lines above call by name."""
    if card.kind != "adapter":
        return ""
    base = card.trained.base
    return (
        f"\n\n`{base.path.name}` is the directory of the base, identity `{base.identity[:16]}`: prepared by `qlora-rl "
        f"prepare`, in the cache of "
        "qlora_rl where it was trained."
    )


def _where_it_stops(trained: TrainedRun) -> str:
    """What vLLM and transformers take with a request alone; a Modelfile has it, but for texts with a quote or a line
    end."""
    if not trained.stop:
        return ""
    return (
        "\n\nCompletions of the run ended at these texts, too; pass them as `stop` (transformers: `stop_strings`): "
        f"`{json.dumps(trained.stop['stop'])}`."
    )


def _text(card: Card, run: Run) -> str:
    trained, base = card.trained, card.trained.base
    parts = [
        _front_matter(card),
        f"# {trained.name}: {_TITLES[card.kind]}",
        _what(card),
        "## Load it\n\n"
        + "\n".join(f"{name}:\n\n```\n{line}\n```\n" for name, line in card.load.items()).rstrip()
        + _where_base_is(card)
        + _where_it_stops(trained),
        "## Is it the policy that was trained?",
        *_distance(card),
        "## The run",
        _table(["", ""], _run_rows(card, run)),
    ]
    heads, steps = _steps(run)
    if steps:
        parts.append(_table(heads, steps))
    parts += [
        "## The base",
        f"{base.spec.label}, compute dtype {base.spec.compute_dtype}; identity `{base.identity}`. "
        f"{_again(card)}".rstrip(),
        "## Versions",
        _table(["", "trained with", "exported with"], _version_rows(trained.config.get("versions"))),
    ]
    return "\n\n".join(parts) + "\n"


_TITLES = {
    "adapter": "adapter",
    "merged": "merged model",
    "merged-original": "adapter merged into the original weights",
    "gguf": "merged model, GGUF",
}


def _distance(card: Card) -> list[str]:
    if card.distance is None:
        return [
            "It was not checked (`--no-check`): nobody has loaded these files again and compared them with the policy."
        ]
    measured = {"transformers": card.distance, "llama.cpp": card.llama_cpp}
    rows = [
        (name, f"{found.kl_mean:.2e}", f"{found.kl_max:.2e}", f"{found.agreement:.2%}")
        for name, found in measured.items()
        if found is not None
    ]
    unasked = " llama.cpp was not installed, so what it computes was not measured."
    return [
        "These files were loaded again before they got their name, and compared with the policy on "
        f"{card.distance.tokens} tokens that the "
        f"policy sampled itself (prompts: {card.prompts}), in nats per token."
        + (unasked if card.kind == "gguf" and card.llama_cpp is None else ""),
        _table(["computed by", "mean KL(policy ‖ export)", "worst token", "same likeliest token"], rows),
    ]


def _front_matter(card: Card) -> str:
    library = "gguf" if card.kind == "gguf" else "transformers"
    lines = [f"library_name: {'peft' if card.kind == 'adapter' else library}"]
    if _is_hub_name(card.trained.source):
        lines.append(f"base_model: {card.trained.source}")
    lines += ["pipeline_tag: text-generation", "tags:", "- qlora-rl", "- trl"]
    return "---\n" + "\n".join(lines) + "\n---"


def _what(card: Card) -> str:
    label = card.trained.base.spec.label
    if card.kind == "adapter":
        form = (
            " In canonical form: its scale is folded into B, all ranks are equal, `lora_alpha` is `r`."
            if "vllm" in card.load
            else " As PEFT has saved it: it is more than LoRA."
        )
        return f"The LoRA adapter alone, to be served on the {label} base that it was trained on.{form}"
    if card.kind == "merged-original":
        return (
            f"The adapter, added to the weights from before the quantisation. It was trained on the {label} base, so "
            "this is another function; how far away it is stands below."
        )
    return (
        f"The {label} base, dequantised exactly, with the adapter added: the function that was trained, each weight "
        f"rounded once to {card.dtype}."
    )


def _again(card: Card) -> str:
    source, spec = card.trained.source, card.trained.base.spec
    if not _is_hub_name(source) or not spec.is_4bit or card.trained.base.calibrated_on is not None:
        return ""
    double = "" if spec.double_quant else " --no-double-quant"
    skip = f" --skip {' '.join(spec.skip_modules)}" if spec.skip_modules else ""
    experts = " --quantize-experts" if spec.quantize_experts else ""
    experts += " --quantize-tower" if spec.quantize_tower else ""
    return (
        f"To make it again: `qlora-rl prepare {source} base --quant {spec.quant_type} --blocksize {spec.blocksize} "
        f"--compute-dtype {spec.compute_dtype}{double}{skip}{experts}`."
    )


def _is_hub_name(name: str) -> bool:
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


def _run_rows(card: Card, run: Run) -> list[tuple[str, str]]:
    config, facts = run.config, summarise(run)
    arguments = arguments_of(config)
    rows = [("state", run.status), ("steps", plain(facts["steps"]))]
    if card.trained.step not in (None, facts["steps"]):
        rows.append(("exported", f"as it was after step {card.trained.step}"))
    known = (
        "learning_rate",
        "per_device_train_batch_size",
        "num_generations",
        "max_completion_length",
        "temperature",
        "beta",
        "loss_type",
        "seed",
    )
    rows += [(name, str(arguments[name])) for name in known if name in arguments]
    lora = object_in(config, "lora")
    rows += [
        (name, str(getattr(lora[name], "value", lora[name])))
        for name in ("r", "lora_alpha", "peft_type")
        if lora.get(name) is not None
    ]
    rows += [(f"data: {name}", str(value)) for name, value in object_in(config, "data").items()]
    if tokens := sum(run.values("rollout_tokens")):
        rows.append(("sampled tokens", plain(tokens)))
    labels = (
        ("evaluated before", "eval_before"), ("evaluated after", "eval_after"), ("on prompts", "eval_prompts"),
        ("reward at first", "reward_first"), ("reward at last", "reward_last"),
        ("loss at first", "loss_first"), ("loss at last", "loss_last"),
        ("mismatch KL, median", "mismatch_kl_median"), ("mismatch KL, worst step", "mismatch_kl_max"),
    )  # fmt: skip
    return rows + [(label, plain(facts[key])) for label, key in labels if facts[key] is not None]


def _steps(run: Run, count: int = 8) -> tuple[list[str], list[list[str]]]:
    """Some steps of the run, the first and the last among them: heads and rows."""
    last = len(run.metrics) - 1
    chosen = sorted({round(i * last / (count - 1)) for i in range(count)}) if last >= 0 else []
    columns = {"reward": "reward", "completion length": "completion_length", "mismatch KL": "mismatch_kl"}
    if not run.is_online:
        columns = {"loss": "loss", (run.hits or "").replace("_", " "): run.hits or ""}
    known = {"step": "step"} | {head: name for head, name in columns.items() if run.values(name)}
    return list(known), [[plain(run.metrics[i].get(name)) for name in known.values()] for i in chosen]


def _version_rows(trained: Any) -> list[tuple[str, str, str]]:
    then, now = trained if isinstance(trained, dict) else {}, describe_versions()
    return [(name, str(then.get(name, "")), now.get(name, "")) for name in dict.fromkeys([*then, *now])]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
