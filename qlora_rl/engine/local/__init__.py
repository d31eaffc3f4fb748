"""vLLM in this process, and a model on its tensors."""

from qlora_rl.engine.local.base_sharing import borrow_base
from qlora_rl.engine.local.engine import LocalEngine

__all__ = ["LocalEngine", "borrow_base"]
