"""vLLM's worker for a GPU, with its 4-bit linears changed between loading and compiling.

Later would be too late: what vLLM has compiled and captured holds the linears as they were. Named to vLLM as
`worker_cls`, and only when an engine with `base_compute="auto"` starts on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker as VllmWorker

from qlora_rl.engine.linears.base_compute import BaseCompute
from qlora_rl.engine.linears.gpu_compute import install_on_gpu, table_of_this_gpu
from qlora_rl.engine.linears.kernel_choice import RuledLinear
from qlora_rl.engine.worker.extension import BaseExtension
from qlora_rl.engine.worker.weight_names import name_as_stored


class Measuring:
    """Mixed in before one of vLLM's workers: measures and changes the linears when the model is there.

    Attributes:
        qlora_installed: what was done, which `qlora_multiply_directly` says.
    """

    qlora_installed: tuple[BaseCompute, list[RuledLinear]]

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """As vLLM's, then `qlora_install`."""
        worker: Any = self
        name_as_stored(worker.vllm_config.model_config.hf_config)
        super().load_model(*arguments, **options)  # type: ignore[misc]
        self.qlora_installed = self.qlora_install(
            worker.model_runner.get_model(), worker.vllm_config.scheduler_config.max_num_seqs
        )
        # A compiled graph has the rules in it as constants: they are part of the key under which vLLM keeps it.
        done = self.qlora_installed[0]
        worker.vllm_config.additional_config["qlora_rl"] = {"ways": dict(done.ways), "left": dict(done.left)}

    def qlora_install(self, model: torch.nn.Module, most: int) -> tuple[BaseCompute, list[RuledLinear]]:
        """`install_on_gpu` with the table of this GPU."""
        return install_on_gpu(model, most, table=table_of_this_gpu())


class Worker(Measuring, VllmWorker, BaseExtension):
    """What vLLM is told to start.

    It names the extension itself: vLLM does not mix it into a class that has inherited it, which this one has as soon
    as another engine of this process has started vLLM's own worker.
    """
