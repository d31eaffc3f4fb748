"""vLLM's worker for models that have a fused linear in their checkpoints, where vLLM names its parts. Named to vLLM as
`worker_cls`."""

from __future__ import annotations

from typing import Any

from qlora_rl.engine.compat import platform_is_cpu
from qlora_rl.engine.worker.extension import BaseExtension
from qlora_rl.engine.worker.weight_names import name_as_stored

if platform_is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker


class Worker(VllmWorker, BaseExtension):
    """What vLLM is told to start; it names the extension itself, as `gpu.Worker` does."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """As vLLM's, with the names of the checkpoint."""
        name_as_stored(self.vllm_config.model_config.hf_config)
        super().load_model(*arguments, **options)
