"""Small models that are trained on the spot: each by a recipe, once, into the cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qlora_rl.cpu_features import keep_few_kernels, processor
from qlora_rl.cpu_matmul import Float32Products
from qlora_rl.stages import begin, count

Progress = Callable[[int, int, float], None]
"""Called as `progress(step, steps, loss)` after every step of the pretraining."""

_RECIPE = "recipe.json"
# Variables that have MKL and oneDNN take other kernels than the processor's best; torch's own are
# `Processor.torch_kernels`.
_CHOOSE_KERNELS = ("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")


def numerics() -> dict[str, Any]:
    """What decides in which order sums are added: equal recipes with equal numerics give equal weights."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": processor().as_dict(),
        "kernels": {name: os.environ.get(name) for name in _CHOOSE_KERNELS},
    }


def autocast() -> torch.autocast:
    """Autocast to bf16 on a CPU, off where bf16 products are computed in float32.

    There rounding to bf16 in between saves nothing. It takes a quarter of a step of the tiny model, a fifth of the chat
    model's, and of the picture model's nine tenths, as convolutions in bf16 are slow too.
    """
    return torch.autocast("cpu", torch.bfloat16, processor().multiplies_in(torch.bfloat16) == torch.bfloat16)


def made_once(
    kind: str, recipe: Any, out_dir: str | os.PathLike[str] | None, seed: int, make: Callable[[], tuple[Any, Any]]
) -> Path:
    """The directory of a bf16 checkpoint that `make` trains, where that recipe's is not cached yet.

    Another processor adds in another order: its weights differ, and so does their name in the cache. torch's random
    state is left as it was.

    Args:
        kind: begins its name in the cache (`$QLORA_RL_CACHE`, else `~/.cache/qlora_rl`).
        recipe: plain values that decide what it is, but for `numerics`.
        out_dir: put a copy here instead of giving the directory in the cache, which is read-only; nothing may be there
            but an earlier copy, by whatever processor.
        seed: of what `make` does.
        make: trains the model; gives it, and its tokenizer or processor.

    Raises:
        FileExistsError: `out_dir` holds something else.
    """
    from qlora_rl.base.checkpoint import cache_root

    digest = _digest(recipe)
    cached = cache_root() / f"{kind}-{_digest([digest, numerics()])[:12]}"
    out = None if out_dir is None else Path(out_dir)
    if out is not None and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if (out / _RECIPE).is_file() and json.loads((out / _RECIPE).read_text()) == digest:
            return out
        raise FileExistsError(
            f"making a model: out_dir={str(out)!r} contains other files. Choose a new or an empty directory."
        )

    def fill(target: Path) -> None:
        # Muon multiplies in bf16 whatever the model is.
        keep_few_kernels()  # the demo goes on to train in this process, and its trainer would come too late
        with torch.random.fork_rng(devices=[]), Float32Products(torch.bfloat16):
            torch.manual_seed(seed)
            model, tokenizer = make()
        model.to(torch.bfloat16).save_pretrained(target)
        tokenizer.save_pretrained(target)
        (target / _RECIPE).write_text(json.dumps(digest) + "\n")

    if not cached.is_dir():
        put_directory(cached, fill)
    if out is None:
        return cached
    put_directory(out, lambda target: shutil.copytree(cached, target, dirs_exist_ok=True))
    return out


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def put_directory(directory: Path, fill: Callable[[Path], object]) -> None:
    """Fill a temporary directory next to `directory` and rename it; where another process was first, its directory
    stays."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        fill(work)
        work.chmod(0o755)
        try:
            os.replace(work, directory)
        except OSError:
            if not directory.is_dir() or not any(directory.iterdir()):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def descend(
    model: Any,
    steps: int,
    loss_of_batch: Callable[[], torch.Tensor],
    progress: Progress | None = None,
    *,
    muon_lr: float = 0.02,
    adamw_lr: float = 3e-3,
    muon_weight_decay: float = 0.1,
    warmup: float = 0.05,
    decay: float = 0.6,
) -> None:
    """Train by Muon for the matrices of a model's layers, AdamW for all else.

    Args:
        model: to be trained.
        steps: over which the rates rise, stay and fall.
        loss_of_batch: the loss of the next batch.
        progress: called after every step.
        muon_lr: highest rate.
        adamw_lr: highest rate.
        muon_weight_decay: of the matrices; all else has none.
        warmup: share of the steps in which the rates rise.
        decay: share in which they fall.
    """
    inner = (".layers.", ".blocks.")  # of a language model, of a vision tower
    layers = {id(p) for name, p in model.named_parameters() if p.ndim == 2 and any(part in name for part in inner)}
    matrices, others = ([p for p in model.parameters() if (id(p) in layers) == is_in] for is_in in (True, False))
    optimizers = [
        torch.optim.Muon(matrices, lr=muon_lr, weight_decay=muon_weight_decay),
        torch.optim.AdamW(others, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    peaks = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    model.train()
    for step in range(steps):
        loss, done = loss_of_batch(), step / steps
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group, peak in peaks:
            group["lr"] = peak * min(1.0, done / warmup + 0.02, (1 - done) / decay)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        count("step", step + 1, steps)
        if progress is not None:
            progress(step + 1, steps, loss.item())


def printed(every: int) -> Progress:
    """A `Progress` that prints a line of every so many steps, and of the last."""
    started = time.monotonic()

    def report(step: int, steps: int, loss: float) -> None:
        if step % every == 0 or step == steps:
            begin("")
            print(f"step {step} of {steps}, loss {loss:.3f}, {time.monotonic() - started:.0f} s", flush=True)

    return report
