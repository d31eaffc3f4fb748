"""vLLM's worker for a GPU, with its 4-bit linears changed between loading and compiling.

Later would be too late: what vLLM has compiled and captured holds the linears as they were. Named to vLLM as `worker_cls`, and only
when an engine with `base_compute="auto"` starts on a GPU.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker as VllmWorker

from qlora_rl.engine.gpu_compute import install_on_gpu, table_of_this_gpu


class Worker(VllmWorker):
    """Measures and changes the linears when the model is there."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """As vLLM's, then `install_on_gpu`; `qlora_multiply_directly` says what was done."""
        super().load_model(*arguments, **options)
        most = self.vllm_config.scheduler_config.max_num_seqs
        self.qlora_installed = install_on_gpu(self.model_runner.get_model(), most, table=table_of_this_gpu())
