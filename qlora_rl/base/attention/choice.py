"""`attention_for`: the attention implementation with which a model computes all that its config says."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from qlora_rl.errors import ConfigConflictError

logger = logging.getLogger(__name__)

# transformers' names; ours is "sdpa_per_sequence".
_BOUND = "attn_logit_softcapping"


def attention_for(config: Any, wish: Any = None, doing: str = "loading the model") -> Any:
    """What transformers is given as `attn_implementation`: what is wished for, `None` for its own choice, or ours where
    that leaves something out.

    Softcapped scores: transformers hands the bound to every implementation, and SDPA, its own choice, computes without
    it. Of attention sinks transformers knows by itself that SDPA has none.

    Args:
        config: of transformers.
        wish: of the user; a name, or one for each part of the model.

    Raises:
        ConfigConflictError: what is wished for computes without the bound.
    """
    bound = softcap_of(config)
    if bound is None:
        return wish
    if wish is None:
        return _ours()
    for name in wish.values() if isinstance(wish, dict) else [wish]:
        if why := _leaves_out(name):
            raise ConfigConflictError(
                f"{doing}: attn_implementation={name!r} with {_BOUND}={bound} in the config: {why}, and the engine "
                "applies it. Leave attn_implementation out, or use 'eager' or 'flash_attention_2'."
            )
    return wish


def softcap_of(config: Any) -> float | None:
    """The bound of a score of attention."""
    return getattr(config.get_text_config(), _BOUND, None)


def apply_attention(model: Any) -> None:
    """Have a model that was loaded elsewhere (a bare one, a reference, a reward model) compute all that its config
    says.

    Its implementation is what transformers has chosen, or a wish: the model does not say which. So another one that
    computes the model's own function is set, and a warning names both.

    Raises:
        ConfigConflictError: it has its attention within itself, and leaves something out.
    """
    config, name = model.config, model.config._attn_implementation
    try:
        attention_for(config, name)
    except ConfigConflictError as error:
        model.set_attn_implementation(_ours())
        if config._attn_implementation == name:
            raise ConfigConflictError(
                f"reading the model: {type(model).__name__} was loaded with attn_implementation={name!r}, which leaves "
                f"out {_BOUND} of its config, and it cannot be given another one. Load it with "
                "attn_implementation='eager'."
            ) from error
        logger.warning(
            "%s was loaded with attn_implementation=%r, which leaves out %s=%s of its config. It computes with %r from "
            "now on.",
            type(model).__name__, name, _BOUND, softcap_of(config), config._attn_implementation,
        )  # fmt: skip


def _ours() -> str:
    from qlora_rl.base.attention.attend import NAME, register

    register()
    return NAME


def _leaves_out(name: str) -> str:
    """Why an implementation computes without the bound of scores; empty where it applies it, or is not known before a
    model is loaded with it."""
    from transformers import AttentionInterface

    known = AttentionInterface()
    if name not in known or "softcap" in inspect.signature(known[name]).parameters:
        return ""
    return "it computes without that bound"
