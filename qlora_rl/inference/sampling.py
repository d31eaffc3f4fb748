"""Samples tokens from a transformers model one by one, with a cache; for the check of an export and for a chat.

Shape letter: V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from qlora_rl.cpu_matmul import Float32Products
from qlora_rl.errors import raise_where


def sample(
    model: Any,
    prompt: Sequence[int],
    tokens: int,
    generator: torch.Generator,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    autocast: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    ends: Collection[int] | None = None,
) -> Iterator[int]:
    """What the model says after a prompt; the token that ends it is the last one.

    Args:
        model: in eval mode.
        prompt: token ids, at least one.
        tokens: to sample, at most; no more than the model has positions for.
        generator: of the sampling, on the CPU.
        temperature: 0 is greedy.
        top_p: see `choose`.
        autocast: see `precision`.
        inputs: what the model is given with the prompt besides its ids: images, as its processor makes them.
        ends: tokens that end it; by default those of the model.
    """
    device = next(model.parameters()).device
    ends = end_tokens(model.generation_config) if ends is None else ends
    room = model.config.get_text_config().max_position_embeddings - len(prompt)
    cache, new = None, list(prompt)
    given = {name: value.to(device) for name, value in (inputs or {}).items()}
    for _ in range(min(tokens, room)):
        with torch.no_grad(), precision(model, autocast, tokens=len(new)):
            said = model(input_ids=torch.tensor([new], device=device), past_key_values=cache, use_cache=True, **given)
        cache, given = said.past_key_values, {}
        token = choose(said.logits[0, -1].float().cpu(), temperature, top_p, generator)
        yield token
        if token in ends:
            return
        new = [token]


def end_tokens(generation_config: Any) -> set[int]:
    """The tokens of transformers' `GenerationConfig` that end what a model says."""
    ends = generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}


def check_sampling(doing: str, max_tokens: int, temperature: float, top_p: float) -> None:
    """Reject values that nothing can be sampled with.

    Raises:
        ConfigConflictError: with everything that is out of its range.
    """
    raise_where(
        doing,
        [
            (max_tokens < 1, f"max_tokens={max_tokens} is not at least 1"),
            (not 0 <= temperature < float("inf"), f"temperature={temperature:g} is not at least 0"),
            (not 0 < top_p <= 1, f"top_p={top_p:g} is not above 0 and at most 1"),
        ],
    )


def choose(logits_V: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Sample a token: the likeliest at temperature 0, else among the likeliest that together have `top_p`."""
    if temperature == 0:
        return int(logits_V.argmax())
    share_V, order_V = (logits_V / temperature).softmax(-1).sort(descending=True)
    before_V = share_V.cumsum(-1) - share_V  # the first that passes top_p still counts
    share_V = share_V.where(before_V < top_p, torch.zeros(()))
    return int(order_V[torch.multinomial(share_V, 1, generator=generator)])


@contextlib.contextmanager
def precision(model: Any, autocast: str | None, *, tokens: int = 2) -> Iterator[None]:
    """Autocast to the dtype of this name, on the model's device; `None`: the model as it is.

    16-bit products are those of a trainer on this processor, but for a single token: torch multiplies vectors fast
    everywhere.
    """
    device = next(model.parameters()).device.type
    dtype = model.dtype if autocast is None else getattr(torch, autocast)
    products = Float32Products(dtype) if device == "cpu" and tokens > 1 else contextlib.nullcontext()
    with products, torch.autocast(device, dtype=dtype, enabled=autocast is not None):
        yield
