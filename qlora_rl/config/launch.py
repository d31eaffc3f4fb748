"""A checked `RunConfig` becomes a trainer, and is trained."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import qlora_rl
from qlora_rl.config.data import load_data
from qlora_rl.config.read import resolved_toml
from qlora_rl.config.rewards import digest, load_reward
from qlora_rl.config.schema import METHODS, PLANNED, Adapter, Rollout, RunConfig, default
from qlora_rl.config.trl_fields import make_args
from qlora_rl.errors import AdapterRefusedError, NotYetSupportedError, collected

RESOLVED = "run.toml"
_OURS = ("kind", "start_from", "dtype")
# What of [rollout] is no option of the engine.
_NO_ENGINE = {"where", "api_key_file", "share_base", "max_staleness", "rollout_threads"}


def launch(config: RunConfig) -> Path:
    """Train; what the rewards and the data hold is looked at before the base is made.

    Returns:
        The run directory, with the resolved configuration in `run.toml`.

    Raises:
        ConfigConflictError: a reward file or a dataset cannot be read.
        AdapterRefusedError: the adapter to start from is damaged, or was trained on another base.
        NotYetSupportedError: this version has no trainer for the method.
    """
    trainer_class = find_trainer(config.method)
    rewards = [load_reward(reward) for reward in config.rewards]
    train, held_out = load_data(config.data)
    args = trl_config(config)
    import torch

    torch.manual_seed(config.run.seed)  # the start of the adapter
    model, peft_config = _model(config)
    arguments = {
        "model": model,
        "args": args,
        "train_dataset": train,
        "eval_dataset": held_out,
        "peft_config": peft_config,
        **({"reward_funcs": rewards} if rewards else {}),
        **trainer_arguments(config),
    }
    with trainer_class(**arguments) as trainer:
        out = Path(config.run.dir)
        (out / RESOLVED).write_text(record(config), encoding="utf-8")
        resume = args.resume_from_checkpoint
        trainer.train(**({"resume_from_checkpoint": resume} if resume else {}))
    return out


def find_trainer(method: str) -> type:
    """The trainer of a method.

    Raises:
        NotYetSupportedError: this version has none.
    """
    name = METHODS[method].trainer
    found = getattr(qlora_rl, name, None)
    if found is None:
        there = ", ".join(each for each, known in METHODS.items() if known.trainer in qlora_rl.__all__)
        raise NotYetSupportedError(
            f"choosing the trainer: method = '{method}': this version has no {name}. It has {there}."
        )
    return found


def trl_config(config: RunConfig) -> Any:
    """TRL's config of the run: `[train]`, and what has its place elsewhere."""
    from qlora_rl.train.methods import config_class

    kind = config_class(config.method)
    known = {each.name for each in fields(kind)}
    own: dict[str, Any] = {"output_dir": config.run.dir, "seed": config.run.seed}
    if config.base.trust_remote_code and "trust_remote_code" in known:
        own["trust_remote_code"] = True
    if config.base.attn_implementation and config.adapter.start_from is None:
        own["model_init_kwargs"] = {"attn_implementation": config.base.attn_implementation}
    if any(reward.weight != 1 for reward in config.rewards):
        own["reward_weights"] = [reward.weight for reward in config.rewards]
    return make_args(kind, config.train, **own)


def trainer_arguments(config: RunConfig) -> dict[str, Any]:
    """Arguments of our trainers beside TRL's."""
    found: dict[str, Any] = {"adapter_dtype": config.adapter.dtype, "existing_run": config.run.existing}
    if config.method in PLANNED:
        found["gpu_memory"] = config.run.gpu_memory
    if config.method == "async_grpo":
        found |= {"max_staleness": config.rollout.max_staleness, "rollout_threads": config.rollout.rollout_threads}
    if not METHODS[config.method].draws:
        return found
    rollout, sync = config.rollout, config.sync
    usual = {each.name: default(each) for each in fields(Rollout)}
    engine = {name: value for name, value in vars(rollout).items() if name not in _NO_ENGINE and value != usual[name]}
    return found | {
        "rollout": rollout.where,
        "api_key_file": rollout.api_key_file,
        "share_base": rollout.share_base,
        "engine_options": engine | engine.pop("vllm", {}),
        "sync": sync.how,
        "sync_dir": sync.dir,
        "canary_every": sync.canary_every,
        "allow_base_mismatch": sync.allow_base_mismatch,
    }


def record(config: RunConfig) -> str:
    """The resolved configuration, and what it was made with."""
    lines = [
        f"# Settled by qlora_rl {qlora_rl.__version__}. Runs this run again:",
        "#   qlora-rl train run.toml --set run.dir=ANOTHER",
    ]
    lines += [f"# sha256 of {each.use}: {digest(each)}" for each in config.rewards if digest(each)]
    return "\n".join([*lines, "", resolved_toml(config)])


def _model(config: RunConfig) -> tuple[Any, Any]:
    """What the trainer takes as model= and peft_config=."""
    from qlora_rl.adapter.verdict import judge_adapter
    from qlora_rl.adapter.wish import make_lora, open_adapter
    from qlora_rl.base.checkpoint import load_base, prepare_base

    held = config.base
    base = prepare_base(
        held.model,
        held.quant,
        double_quant=held.double_quant,
        blocksize=held.blocksize,
        compute_dtype=held.compute_dtype,
        skip_modules=held.skip_modules,
        revision=held.revision,
        trust_remote_code=held.trust_remote_code,
    )
    if config.adapter.kind == "none":
        return base, None
    if config.adapter.start_from is not None:
        verdict = judge_adapter(config.adapter.start_from, base=base.path)
        if verdict.kind == "refuse":
            doing = f"reading [adapter] start_from = {config.adapter.start_from!r}"
            raise collected(doing, verdict.reasons, AdapterRefusedError)
        options = {"trust_remote_code": held.trust_remote_code, "attn_implementation": held.attn_implementation}
        return open_adapter(load_base(base, **options), config.adapter.start_from), None
    lora = {each.name: getattr(config.adapter, each.name) for each in fields(Adapter) if each.name not in _OURS}
    return base, make_lora(lora)
