"""The same job through TRL 1.16's own way: merge into the 4-bit weights, push, unmerge. Only measured, not changed.

Here to be compared with; see docs/comparison.md for what it does to the base.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from trl import GRPOTrainer

from qlora_rl.cpu_matmul import Float32Products
from qlora_rl.train.metrics.measure import MeasuredSteps
from qlora_rl.train.run import SYNCS, RunDirectory


class MergingTrainer(MeasuredSteps, GRPOTrainer):
    """TRL's GRPOTrainer with its own colocated vLLM; a stop-watch around its sync and its generation.

    Args:
        run: where the steps are recorded.
        arguments: of GRPOTrainer.
    """

    def __init__(self, *, run: RunDirectory | None, **arguments: Any):
        from qlora_rl.engine import compat

        # Not TRL's: without them a step of the demo takes a quarter of a minute on a processor without bf16
        # instructions.
        self._products = Float32Products(torch.bfloat16, owner=self)
        with engine_environment():
            super().__init__(**arguments)
        compat.started(self.vllm_generation.llm)
        self.run = run
        self.measure_into(run)
        self._facts: dict[str, float] = {}
        self._pushes = 0
        backend = self.vllm_generation
        sync, generate = backend.sync_weights, backend.generate

        def timed_sync() -> None:
            started = time.perf_counter()
            sync()
            self._pushes += 1
            seconds = time.perf_counter() - started
            self._facts |= {"sync_seconds": seconds, "policy_version": self._pushes}
            if run is not None:
                run.append(SYNCS, {"version": self._pushes, "mode": "trl-merge", "seconds": seconds})

        def timed_generate(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = generate(*args, **kwargs)
            seconds, tokens = time.perf_counter() - started, sum(len(ids) for ids in result[1])
            self._facts |= {
                "rollout_tokens": tokens,
                "rollout_seconds": seconds,
                "rollout_tokens_per_s": tokens / seconds,
            }
            return result

        backend.sync_weights, backend.generate = timed_sync, timed_generate

    def _rollout_facts(self) -> dict[str, float]:
        facts, self._facts = self._facts, {}
        return facts

    def close(self) -> None:
        """Stop the vLLM that TRL has no way to stop."""
        from qlora_rl.engine import compat

        self._products.close()
        llm, self.vllm_generation.llm = self.vllm_generation.llm, None
        if llm is not None:
            compat.shut_down(llm, owns_process_group=True)
            compat.trim_memory()


@contextlib.contextmanager
def engine_environment() -> Iterator[None]:
    """What TRL's colocated engine needs in the environment on a CPU (there is no argument for it), then put back."""
    from qlora_rl.engine import compat

    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with compat.restored_environment(*wanted):
        os.environ.update(wanted)
        yield
