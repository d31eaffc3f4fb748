"""Tokens per second of a rollout, against vLLM with its bitsandbytes plugin and its own way with an adapter."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rounds import compare, described, in_turns
from shapes import RANK, SIZES, make_adapter, make_bases
from vanilla_vllm import VanillaEngine

from qlora_rl.contracts import SamplingSpec
from qlora_rl.engine.local import LocalEngine

PROMPT, POSITIONS = 8, 128


def bench_rollout(
    size: str,
    *,
    batches: Sequence[int] = (16, 64),
    modes: Sequence[str] = ("nf4",),
    tokens: int = 32,
    minutes: float = 4.0,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Each of our modes and stock vLLM generate the same rollouts in turns, with an adapter of rank 16; also vLLM on
    the 16-bit model without an adapter, which is the upper limit.

    Args:
        size: of `SIZES`.
        batches: B, prompts per call.
        modes: values of `base_compute`.
        tokens: T of every completion.
        minutes: for generating; making the model and starting the engines comes on top.

    Returns:
        For each batch: `ours`, `against` (tokens per second) and `ratio` by mode, under commit, versions and machine.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        say(f"making a random model of size {size}")
        nf4, bf16 = make_bases(Path(work), SIZES[size])
        adapter = make_adapter(nf4, Path(work) / "adapter")
        options: dict[str, Any] = {"max_model_length": POSITIONS, "max_num_seqs": max(batches)}
        engines: dict[str, Any] = {
            "stock": stack.enter_context(VanillaEngine(nf4.path, max_lora_rank=RANK, adapter=adapter, **options))
        }
        notes = {}
        for mode in modes:
            engine = stack.enter_context(LocalEngine(nf4, max_lora_rank=RANK, base_compute=mode, **options))
            engine.load_adapter(adapter, 1)
            engines[mode], notes[mode] = engine, engine.base_compute.as_dict()
            say(f"{mode}: {engine.base_compute}")
        engines["bf16"] = stack.enter_context(VanillaEngine(bf16.path, max_lora_rank=0, **options))
        for batch in batches:
            sides = {name: _drawer(engine, batch, tokens) for name, engine in engines.items()}
            speeds = in_turns(sides, 60 * minutes / len(batches))
            rows = {mode: compare(speeds[mode], speeds["stock"]) for mode in modes}
            rows["bf16"] = compare(speeds["bf16"], speeds["stock"])
            for mode in modes:
                rows[mode]["of_bf16"] = compare(speeds[mode], speeds["bf16"])["ratio"]
            say(table(batch, rows))
            facts = {
                "size": size,
                "shape": vars(SIZES[size]),
                "batch": batch,
                "rank": RANK,
                "prompt_tokens": PROMPT,
                "completion_tokens": tokens,
                "unit": "tokens/s",
                "engines": notes,
                "modes": rows,
            }
            found[f"{size}, batch {batch}"] = described(facts)
    return found


def table(batch: int, rows: dict[str, Any]) -> str:
    """For the terminal."""
    lines = [f"batch {batch}: tokens/s, and how often stock's"]
    for mode, row in rows.items():
        part = f", {row['of_bf16']:.2f} of bf16 without an adapter" if "of_bf16" in row else ""
        lines.append(f"  {mode:<6} {row['ours']:7.0f}  {row['against']:7.0f}  {row['ratio']:5.2f}x{part}")
    return "\n".join(lines)


def _drawer(engine: Any, batch: int, tokens: int) -> Callable[[], float]:
    """Generates once, and returns tokens per second."""
    spec = SamplingSpec(max_tokens=tokens, temperature=1.0, seed=0, extra={"ignore_eos": True})
    calls = 0

    def sample() -> float:
        nonlocal calls
        calls += 1
        # Prompts of their own in every round: nothing comes out of the prefix cache.
        prompts = [[40 + (i * 7 + j * (calls + 3)) % 50 for j in range(PROMPT)] for i in range(batch)]
        started = time.perf_counter()
        rollout = engine.generate(prompts, spec)
        return sum(map(len, rollout.completion_ids)) / (time.perf_counter() - started)

    return sample
