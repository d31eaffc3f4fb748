"""vLLM's CPU worker, changed as the one for a GPU is, under a clock that likes joined parts."""

from qlora_rl.engine.linears.gpu_compute import Table, install_on_gpu
from qlora_rl.engine.worker import BaseExtension
from qlora_rl.engine.worker.workers import MeasuringWorker


class Clock:
    """By turns the time of vLLM's own way, of joined parts, and of decoding first."""

    def __init__(self):
        self.asked = 0

    def __call__(self, calls):
        for call in calls:
            call()
        self.asked += 1
        return (3.0, 1.0, 2.0)[(self.asked - 1) % 3]


class Worker(MeasuringWorker, BaseExtension):
    def qlora_install(self, model, most):
        table = Table.open("a card", {}, None)
        return install_on_gpu(model, most, table=table, stopwatch=Clock(), with_triton=False, device="cpu")
