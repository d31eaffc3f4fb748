"""vLLM in this process, and a model on its tensors."""

from qlora_rl.engine.local.engine import LocalEngine
from qlora_rl.engine.local.shared import borrow_base

__all__ = ["LocalEngine", "borrow_base"]
