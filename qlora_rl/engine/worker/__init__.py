"""What runs inside vLLM's processes: describes and lends the base, repairs its scales, fills LoRA slots."""

from qlora_rl.engine.worker.extension import BaseExtension

__all__ = ["BaseExtension"]
