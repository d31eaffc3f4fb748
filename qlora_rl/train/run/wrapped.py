"""`WrappedModel`: how a trainer's model is sharded and saved, where accelerate's own way would round or leave out what
is trained."""

from __future__ import annotations

from typing import Any

from qlora_rl.distributed import ranks
from qlora_rl.train.ranks.sharded import is_gathered, trained_weights
from qlora_rl.train.setup.processes import sharding_of


class WrappedModel:
    """Before one of transformers' trainers in the order of classes."""

    args: Any
    accelerator: Any
    model: Any

    def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers'.

        accelerate would have FSDP2 gather weights, and add up their gradients, in the dtype of autocast, which
        multiplies in that dtype anyway: an adapter would be rounded before it is gathered, and torch rejects 16-bit
        gradients of a float32 one.
        """
        if sharding_of(self.args) == "fsdp2":
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = None
        return super()._wrap_model(model, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """transformers', which would gather a sharded base; here what is trained is gathered, and rank 0 writes it."""
        if not is_gathered(self.model):
            super().save_model(output_dir, _internal_call)
            return
        weights = trained_weights(self.model)
        if ranks().is_first:
            self._save(output_dir or self.args.output_dir, state_dict=weights)
