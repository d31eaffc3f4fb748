"""Reward functions, guarded: what goes wrong inside one is said with its name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from qlora_rl.errors import RewardFunctionError


def guard(reward: Any) -> Any:
    """Wrap a reward function so that an exception or a wrong result names it; models and names pass through."""
    if not callable(reward) or isinstance(reward, str) or hasattr(reward, "parameters"):
        return reward
    name = getattr(reward, "__name__", type(reward).__name__)
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None)):  # noqa: B004

        @functools.wraps(reward, updated=())
        async def wait(*args: Any, **kwargs: Any) -> Any:
            try:
                result = await reward(*args, **kwargs)
            except Exception as error:
                raise _failed(name, error) from error
            return _checked(name, result, kwargs)

        wait.__name__ = name
        return wait

    @functools.wraps(reward, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = reward(*args, **kwargs)
        except Exception as error:
            raise _failed(name, error) from error
        return _checked(name, result, kwargs)

    call.__name__ = name
    return call


def guard_all(rewards: Any) -> Any:
    """`guard` over what TRL takes as `reward_funcs`: one, a list, or nothing. The caller's list is left alone."""
    if rewards is None:
        return None
    return [guard(r) for r in rewards] if isinstance(rewards, list) else guard(rewards)


def _failed(name: str, error: Exception) -> RewardFunctionError:
    return RewardFunctionError(
        f"scoring completions: the reward function {name!r} raised {type(error).__name__}: {error}. It gets prompts, "
        "completions, completion_ids and the dataset's columns as keyword lists, and must return one number (or None) per "
        "completion, whatever the completion holds."
    )


def _checked(name: str, result: Any, kwargs: dict[str, Callable | Sequence]) -> list[float | None]:
    expected = len(kwargs["completions"]) if "completions" in kwargs else None
    try:
        values = list(result)
    except TypeError:
        raise RewardFunctionError(
            f"scoring completions: the reward function {name!r} returned {type(result).__name__} instead of a list with one "
            "number per completion."
        ) from None
    if expected is not None and len(values) != expected:
        raise RewardFunctionError(
            f"scoring completions: the reward function {name!r} returned {len(values)} values for {expected} completions. "
            "Return exactly one per completion, in their order."
        )
    for i, value in enumerate(values):
        if value is None:
            continue
        try:
            float(value)
        except (TypeError, ValueError):
            raise RewardFunctionError(
                f"scoring completions: the reward function {name!r} returned {value!r} for completion {i}. Return a number, or "
                "None to leave it out."
            ) from None
    return [None if value is None else float(value) for value in values]
