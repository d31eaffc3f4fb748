"""Reward functions, guarded: what goes wrong inside one is said with its name."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from trl.trainer.utils import get_callable_name, is_async_callable

from qlora_rl.base.attention.choice import apply_attention
from qlora_rl.distributed import ranks
from qlora_rl.errors import RewardFunctionError
from qlora_rl.rewards.load import OF_REWARDS

# What a reward function is called with, and how.
_CALLED = ("prompts", "completions", "completion_ids")
_GETS = f"It gets {_CALLED[0]}, {_CALLED[1]}, {_CALLED[2]} and the dataset's columns as keyword lists"


def guard(reward: Any, name: str | None = None, failures: list[RewardFunctionError] | None = None) -> Any:
    """Wrap a reward function so that an exception or a wrong result names it; reward models pass through.

    Args:
        reward: as TRL takes it: a function, a partial, an object with `__call__`, each of them async or not, or a
            model.
        name: under which TRL logs it; by default the one that TRL would choose.
        failures: where an error is kept, and every completion left unscored, instead of raising: of several ranks none
            may leave TRL's next collective alone.
    """
    if isinstance(reward, torch.nn.Module):
        return reward
    name = name or get_callable_name(reward)
    if is_async_callable(reward):

        async def wait(*args: Any, **kwargs: Any) -> Any:
            with _kept(failures, kwargs) as unscored:
                try:
                    result = await reward(*args, **kwargs)
                except Exception as error:
                    raise _failed(name, error, kwargs) from error
                return _checked(name, result, kwargs)
            return unscored

        wait.__name__ = name
        return wait

    def call(*args: Any, **kwargs: Any) -> Any:
        with _kept(failures, kwargs) as unscored:
            try:
                result = reward(*args, **kwargs)
            except Exception as error:
                raise _failed(name, error, kwargs) from error
            return _checked(name, result, kwargs)
        return unscored

    call.__name__ = name
    return call


def apply_attention_to(rewards: Sequence[Any] | None, unwrap: Callable[[Any], Any]) -> None:
    """`apply_attention` to the reward models among TRL's rewards, which it has loaded with transformers' defaults.

    Args:
        unwrap: of the accelerator.

    Raises:
        ConfigConflictError: one leaves something out, and cannot be given another attention.
    """
    for reward in rewards or ():
        if isinstance(reward, torch.nn.Module):
            model = unwrap(reward)
            is_of_transformers = isinstance(getattr(model, "config", None), PreTrainedConfig)
            if is_of_transformers and hasattr(model, "set_attn_implementation"):
                apply_attention(model)


def check_signature(reward: Any, columns: Sequence[str] | None, name: str | None = None) -> None:
    """Reject a function that no call of TRL's can succeed with; what cannot be told is left to the call.

    Args:
        reward: as TRL takes it.
        columns: of the dataset; `None` where it, or something else, may give further ones.
        name: as in `guard`.

    Raises:
        RewardFunctionError: it does not take the arguments of every call, or needs one that none has.
    """
    if isinstance(reward, torch.nn.Module | str):
        return
    try:
        taken = inspect.signature(reward, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # written in C: it says nothing about itself
        return
    named = {each.name: each for each in taken if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken)
    untaken = [] if takes_any else [each for each in _CALLED if each not in named]
    known = {*OF_REWARDS, *(set(columns or ()) - {"prompt", "completion", "completion_ids"})}
    needed = [each.name for each in taken if each.kind is each.POSITIONAL_ONLY and each.default is each.empty]
    if columns is not None:
        needed += [each.name for each in named.values() if each.default is each.empty and each.name not in known]
    if not untaken and not needed:
        return
    why = [f"does not take {', '.join(untaken)}"] if untaken else []
    why += [f"needs {', '.join(needed)}, which it would not get"] if needed else []
    there = "" if columns is None else f" ({', '.join(sorted(known - {*OF_REWARDS})) or 'none'})"
    raise RewardFunctionError(
        f"reading the reward functions: {name or get_callable_name(reward)!r} {' and '.join(why)}. {_GETS}{there}. "
        "Name those that it uses, and add **kwargs for all others: def reward(completions, answer, **kwargs)."
    )


def agree_on(failures: list[RewardFunctionError] | None) -> None:
    """After TRL's collective: what a reward function has raised on one rank is raised on all; called by all, also
    without a list."""
    if failures is not None:
        failed = failures[0] if failures else None
        failures.clear()
        ranks().agree(failed, "scoring completions")


def as_list(rewards: Any) -> list[Any]:
    """What TRL takes as `reward_funcs` (one, several, or nothing) as a new list: TRL writes into the one it is
    given."""
    if rewards is None:
        return []
    return list(rewards) if isinstance(rewards, list | tuple) else [rewards]


@contextlib.contextmanager
def _kept(failures: list[RewardFunctionError] | None, kwargs: dict[str, Any]) -> Iterator[list[None]]:
    """Keep an error in `failures`, if there is such a list; gives what is returned then."""
    try:
        yield [None] * len(kwargs.get("completions", ()))
    except RewardFunctionError as error:
        if failures is None:
            raise
        failures.append(error)


def _failed(name: str, error: Exception, kwargs: Mapping[str, Any]) -> RewardFunctionError:
    first = next(iter(kwargs.get("completions") or ()), None)
    form = " In a chat each completion is a list of messages: its text is completion[0]['content']."
    columns = ", ".join(sorted(set(kwargs) - {*OF_REWARDS}))
    lost = " It got no column: with remove_unused_columns=True in the config TRL removes them. Set it to False."
    if columns or "trainer_state" not in kwargs:  # `eval` calls without it
        lost = f" The columns that it got: {columns or 'none'}."
    is_missing = isinstance(error, KeyError) or (isinstance(error, TypeError) and "argument" in str(error))
    return RewardFunctionError(
        f"scoring completions: the reward function {name!r} raised {type(error).__name__}: {error}. {_GETS}, and "
        "must return one number (or None) per completion, whatever the completion "
        f"holds.{lost if is_missing else ''}{form if isinstance(first, list) else ''}"
    )


def _checked(name: str, result: Any, kwargs: Mapping[str, Any]) -> list[float | None]:
    expected = len(kwargs["completions"]) if "completions" in kwargs else None
    try:
        values = list(result)
    except TypeError:
        raise RewardFunctionError(
            f"scoring completions: the reward function {name!r} returned {type(result).__name__} instead of a list "
            "with one number per completion."
        ) from None
    if expected is not None and len(values) != expected:
        raise RewardFunctionError(
            f"scoring completions: the reward function {name!r} returned {len(values)} values for {expected} "
            "completions. Return exactly one per completion, in their order."
        )
    for i, value in enumerate(values):
        if value is None:
            continue
        try:
            is_number = not isinstance(value, str) and math.isfinite(float(value))
        except (TypeError, ValueError):
            is_number = False
        if not is_number:
            raise RewardFunctionError(
                f"scoring completions: the reward function {name!r} returned {value!r} for completion {i}. Return a "
                "finite number, or None to leave it out."
            )
    return [None if value is None else float(value) for value in values]
