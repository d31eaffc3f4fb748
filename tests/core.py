"""The core and its extras: what a reader holds in one head, and what is built around it.

The core trains by GRPO in one process: base, adapter, engine, sync, trainer. It imports an extra only where `ENTRIES`
says so, inside a function; with the extras deleted it does all of that (`engine/test_core.py`).
"""

from __future__ import annotations

from pathlib import Path

import qlora_rl

PACKAGE = Path(qlora_rl.__file__).parent
# Packages, folders and modules below `qlora_rl`.
EXTRAS = (
    # commands, and what they are made of
    "__main__", "cli", "commands", "config", "data", "advice", "demo", "doctor", "export", "inference", "report",
    "memory.pace", "engine.loading", "adapter.load", "train.setup.kto", "train.setup.tools",
    # rewards of ours
    "rewards.match", "rewards.numbers", "rewards.formulas", "rewards.programs", "rewards.judging",
    # other trainers
    "train.rloo", "train.online_dpo", "train.distillation", "train.teacher", "train.offline", "train.attach",
    "train.async_grpo", "train.rollouts.ahead", "train.rollouts.workers",
    "train.scoring.divergence",
    # engines elsewhere, several processes, other frameworks
    "engine.server", "engine.client", "engine.fleet", "torchrl",
    "train.ranks.rank_rpc", "train.ranks.shared_engine", "train.ranks.zero",
    # many adapters on one base
    "tinker", "train.adapters", "train.scoring.losses", "adapter.several",
    # full weights
    "base.bake", "adapter.merged_weights", "sync.full_weights", "engine.staging", "engine.chunks",
    # bases by calibration, starts of adapters, experts in 4 bits, images on a CPU, products on a GPU
    "base.calibration", "adapter.initialization", "engine.worker.experts_4bit", "engine.worker.expert_adapters",
    "engine.worker.routing", "engine.worker.bidirectional_attention",
)  # fmt: skip
# Where the core enters an extra, by a module of the core.
ENTRIES = {
    "base.calibrated": {"base.calibration"},
    "engine.options": {"base.bake"},
    "engine.worker.experts": {"engine.worker.experts_4bit"},
    "engine.worker.extension": {"engine.staging"},
    "engine.worker.workers": {"engine.worker.expert_adapters", "engine.worker.routing"},
    "rewards": {"rewards.formulas", "rewards.match", "rewards.programs"},
    "train.ranks.sharded": {"train.ranks.zero"},
    "train.rollouts.engine_link": {"base.bake", "engine.fleet", "sync.full_weights", "train.ranks.shared_engine"},
    "train.setup.config_checks": {"train.setup.kto"},
    "train.setup.processes": {"train.ranks.zero"},
    "train.setup.residual_init": {"adapter.initialization"},
}  # fmt: skip


def name_of(path: Path) -> str:
    """Of a module, below `qlora_rl`; empty for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def extra_of(name: str) -> str | None:
    """The extra that a module belongs to; `None`: to the core."""
    return next((extra for extra in EXTRAS if name == extra or name.startswith(f"{extra}.")), None)


# Modules of the core, in the order of their names.
CORE = [name for path in sorted(PACKAGE.rglob("*.py")) if not extra_of(name := name_of(path))]
