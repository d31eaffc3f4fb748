"""`Teacher`: what a student is compared with, token by token: its own model under another adapter, under none, or with
another prompt; or a model of its own.

TRL's DistillationTrainer asks a second model for hidden states and for its output head. Where the teacher shares the
student's base there is none: the one model answers twice.

Letters: B sequences, T tokens, H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from trl.trainer.utils import use_adapter

from qlora_rl.adapter.directory import adapter_in
from qlora_rl.adapter.inspected import active_adapter, bare_model, is_bare
from qlora_rl.adapter.load import add_frozen
from qlora_rl.adapter.store import CONFIG, WEIGHTS
from qlora_rl.base.attention.choice import apply_attention
from qlora_rl.base.checkpoint import PreparedBase
from qlora_rl.base.fingerprint import digest_bytes
from qlora_rl.base.source_digest import digest_file, digest_parts
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError
from qlora_rl.sync.forward import evaluating, without_adapter
from qlora_rl.train.setup.linears import apply_linears

# Words for `teacher_adapter`; anything else is a directory.
NONE, POLICY = "none", "policy"
# The name of the frozen adapter in the student's PeftModel.
NAME = "teacher"


class Teacher(torch.nn.Module):
    """What TRL takes for the teacher's model: it has a config, an output head, and `base_model`.

    Args:
        model: the student's PeftModel, or a model of its own.
        within: makes it the teacher while it computes.

    Attributes:
        sequences: token ids and mask [B, T] that it reads in place of the student's; they end with the same tokens.
    """

    def __init__(self, model: Any, within: Callable[[], AbstractContextManager[Any]] = nullcontext):
        super().__init__()
        self._held = (model,)  # no submodule: TRL puts this one into eval mode, and the student trains
        self._within = within
        self.sequences: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def config(self) -> Any:
        """Of the model inside."""
        return bare_model(self._held[0]).config

    def get_output_embeddings(self) -> Any:
        """The output head, which no adapter changes."""
        return bare_model(self._held[0]).get_output_embeddings()

    @torch.no_grad()
    def base_model(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **inputs: Any) -> Any:
        """The model without its head; its `last_hidden_state` is [B, T, H]. There is no dropout."""
        ids_BT, mask_BT = self.sequences or (input_ids, attention_mask)
        model = self._held[0]
        with evaluating(model), self._within():
            return bare_model(model).base_model(input_ids=ids_BT, attention_mask=mask_BT, **inputs)


def on_same_base(model: Any, teacher: str | os.PathLike[str], base: PreparedBase) -> tuple[Teacher, dict[str, str]]:
    """The teacher that shares the student's base, and what it is: its kind, and the digest of what never changes.

    Args:
        model: the student's PeftModel; it gets a frozen adapter where `teacher` is a directory.
        teacher: "none", "policy", or the directory of an adapter or of a run.
        base: that both are on.

    Raises:
        AdapterRejectedError: the directory holds none that fits the base.
        NotYetSupportedError: an adapter changes the output head, or the biases of the base.
    """
    if teacher == POLICY:
        found: tuple[Teacher, dict[str, str]] = Teacher(model), {"kind": POLICY}
    elif teacher == NONE:
        found = Teacher(model, partial(without_adapter, model)), {"kind": "base", "digest": base.identity}
    else:
        directory = adapter_in(teacher)
        add_frozen(model, directory, NAME, base=base.path)
        digest = digest_parts([digest_file(directory / file) for file in (CONFIG, WEIGHTS)])
        found = (
            Teacher(model, partial(_under, model, NAME)),
            {"kind": "adapter", "digest": digest, "path": str(directory)},
        )
    head = bare_model(model).get_output_embeddings()
    biases = [name for name, config in model.peft_config.items() if getattr(config, "bias", "none") != "none"]
    if not isinstance(head, torch.nn.Linear) or biases:
        what = f"bias={model.peft_config[biases[0]].bias!r}" if biases else "an adapter on the output head"
        raise NotYetSupportedError(
            f"choosing the teacher: {what}, which is the student's and would be the teacher's, too. Leave it out, or "
            "pass a model of its own as teacher_model."
        )
    return found


def on_own_base(model: Any) -> tuple[Teacher, dict[str, str]]:
    """The teacher that is a model of its own, and what it is."""
    apply_attention(bare_model(model))
    apply_linears(bare_model(model))
    digest = digest_parts([f"{name}:{digest_bytes(tensor)}" for name, tensor in model.state_dict().items()])
    return Teacher(model), {"kind": "model", "digest": digest}


def check_name_is_free(model: Any) -> None:
    """Raises: ConfigConflictError: the PeftModel that was passed has an adapter of the teacher's name."""
    if not is_bare(model) and NAME in model.peft_config:
        raise ConfigConflictError(
            f"reading the PeftModel: it holds an adapter {NAME!r} already. Remove it: model.delete_adapter({NAME!r}); "
            f"the one that is trained is {active_adapter(model)!r}."
        )


@contextmanager
def _under(model: Any, adapter: str) -> Iterator[None]:
    """Within it another adapter is active; what is trained stays what it was."""
    trained = {p: p.requires_grad for p in model.parameters()}
    try:
        with use_adapter(model, adapter):
            yield
    finally:
        for parameter, wanted in trained.items():
            parameter.requires_grad_(wanted)
