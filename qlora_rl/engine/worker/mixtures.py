"""vLLM's worker for a mixture of experts. Named to vLLM as `worker_cls`, and only when a base is one."""

from __future__ import annotations

from typing import Any

from qlora_rl.engine.compat import platform_is_cpu
from qlora_rl.engine.worker.experts import experts_of
from qlora_rl.engine.worker.extension import BaseExtension

if platform_is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker


class Worker(VllmWorker, BaseExtension):
    """What vLLM is told to start; it names the extension itself, as `gpu.Worker` does."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """As vLLM's, with experts as the base has them, which no adapter changes."""
        with experts_of(self.vllm_config.model_config.model):
            super().load_model(*arguments, **options)
