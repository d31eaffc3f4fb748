"""`plain_forward`: the trainer's model as its class has it, without the forward that TRL puts on it, sharded or not."""

from __future__ import annotations

from typing import Any

from qlora_rl.pieces import is_sharded, outermost


def plain_forward(model: Any, **inputs: Any) -> Any:
    """The output of the transformers model inside, adapter applied; of a sharded one all ranks call it.

    Args:
        model: the PeftModel, or the bare one.
        inputs: of the model's own `forward`.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not is_sharded(model):
        return type(base).forward(base, **inputs)
    # What gathers the layers one by one hangs on the outermost module; TRL's forward hangs on the innermost.
    of_trl = vars(base).pop("forward", None)
    try:
        return outermost(model)(**inputs)
    finally:
        if of_trl is not None:
            base.forward = of_trl
