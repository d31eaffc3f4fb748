"""vLLM's workers with something of ours around the loading of a model. Named to vLLM as `worker_cls`, each only where
it is needed.

Each names the extension among its bases: vLLM does not mix it into a class that has inherited it, which one of these
has as soon as another engine of this process has started vLLM's own worker.
"""

from __future__ import annotations

from typing import Any

from qlora_rl.engine.compat import platform_is_cpu
from qlora_rl.engine.worker.experts import experts_of
from qlora_rl.engine.worker.extension import BaseExtension
from qlora_rl.engine.worker.weight_names import name_as_stored

if platform_is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker


class FusedWorker(VllmWorker, BaseExtension):
    """For models that have a fused linear in their checkpoints, where vLLM names its parts."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """As vLLM's, with the names of the checkpoint."""
        name_as_stored(self.vllm_config.model_config.hf_config)
        super().load_model(*arguments, **options)


class MixtureWorker(VllmWorker, BaseExtension):
    """For a mixture of experts."""

    _qlora_choices: Any = None  # `routing.Choices`

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """As vLLM's, with experts as the base has them; on the CPU those in 4 bits take adapters."""
        with experts_of(self.vllm_config.model_config.model):
            super().load_model(*arguments, **options)
        if platform_is_cpu():
            from qlora_rl.engine.worker.expert_adapters import take_adapters

            take_adapters(self.model_runner)

    def execute_model(self, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        """As vLLM's; the routing of the step is noted where somebody asked for them."""
        if self._qlora_choices is None:
            return super().execute_model(scheduler_output, *arguments, **options)
        self._qlora_choices.begin()
        found = super().execute_model(scheduler_output, *arguments, **options)
        self._qlora_choices.end(scheduler_output, self.model_runner.input_batch.req_ids)
        return found

    def qlora_note_routing(self) -> None:
        """Note which experts are chosen and their weights, from now on; every request has to be taken then."""
        from qlora_rl.engine.worker.routing import Choices

        self._qlora_choices = Choices(self.model_runner.get_model())

    def qlora_take_routing(self, names: list[str]) -> list[Any]:
        """What was noted of requests, by vLLM's names of them; see `Choices.take`."""
        return [] if self._qlora_choices is None else self._qlora_choices.take(names)
