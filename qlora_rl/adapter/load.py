"""`load_adapter`: a saved adapter on a loaded model, for inference."""

from __future__ import annotations

import os
import warnings
from typing import Any

from qlora_rl.adapter.directory import adapter_in, without_place
from qlora_rl.adapter.verdict import judge_adapter
from qlora_rl.errors import AdapterRejectedError, collected


def load_adapter(model: Any, directory: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None) -> Any:
    """A PeftModel with the adapter that `save_pretrained` has written, whatever its method.

    Args:
        model: of transformers; PEFT's layers are put into it.
        directory: of the adapter, or of a run.
        base: directory that the adapter is held against (names, shapes, the digest that it was trained on); `None`:
            none.

    Raises:
        AdapterRejectedError: it is damaged, was made for another base, or does not fit the model.
    """
    from peft import PeftConfig, PeftModel

    doing = f"loading the adapter {directory}"
    directory = adapter_in(directory)
    verdict = judge_adapter(directory, base=base)
    if verdict.kind == "reject":
        raise collected(doing, verdict.reasons, AdapterRejectedError)
    config = PeftConfig.from_pretrained(directory)
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # PiSSA and the like would be initialised again, and change the base once more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted = PeftModel.from_pretrained(model, directory, config=config)
        except (RuntimeError, ValueError, KeyError) as error:
            raise AdapterRejectedError(f"{doing}: it does not fit {type(model).__name__}: {error}") from error
    if lost := without_place(adapted, directory):
        raise AdapterRejectedError(
            f"{doing}: {len(lost)} of its tensors have no place in {type(model).__name__}, the first is {lost[0]}, and "
            "PEFT leaves them out without an error. Load it on the base that it was trained on; experts in 4 bits are "
            "other modules than experts in 16 bits."
        )
    return adapted.eval()
