"""`VanillaEngine`: `vllm.LLM` with its bitsandbytes plugin and its own way with an adapter, and nothing of ours; to
compare with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from qlora_rl.contracts import Rollout, SamplingSpec
from qlora_rl.cpu_matmul import torchs_own
from qlora_rl.engine import compat
from qlora_rl.engine.options import start_options
from qlora_rl.engine.sampling import sampled, sampling_params


class VanillaEngine:
    """vLLM as it comes: one slot, no worker extension, scales as its loader rounds them.

    Args:
        base: directory of a base.
        max_lora_rank: 0 switches LoRA off.
        adapter: PEFT directory that serves.
        options: of `LocalEngine`, as far as they are vLLM's.
    """

    def __init__(self, base: Path, *, max_lora_rank: int, adapter: Path | None = None, **options: Any) -> None:
        self._owns_process_group = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        arguments = start_options(base, max_lora_rank=max_lora_rank, max_loras=1, **options).arguments
        del arguments["worker_extension_cls"]
        with compat.construction(), torchs_own():
            from vllm import LLM

            self._llm: Any = LLM(**arguments)
        compat.started(self._llm)
        self._request: Any = None
        if adapter is not None:
            from vllm.lora.request import LoRARequest

            self._request = LoRARequest("policy", 1, str(adapter))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec) -> Rollout:
        """One completion for each of B prompts, through `LLM.generate`."""
        started = time.perf_counter()
        with torchs_own():
            outputs = self._llm.generate(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts],
                sampling_params(sampling, range(len(prompts))),
                lora_request=self._request,
                use_tqdm=False,
            )
        return Rollout(
            **sampled(outputs), version=int(self._request is not None), seconds=time.perf_counter() - started
        )

    def close(self) -> None:
        """Stop vLLM; harmless when repeated."""
        llm, self._llm = self._llm, None
        if llm is not None:
            compat.shut_down(llm, owns_process_group=self._owns_process_group)
            del llm
            compat.trim_memory()

    def __enter__(self) -> VanillaEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
