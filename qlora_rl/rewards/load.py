"""`load_reward`: a reward function out of what stands in a file or on a command line; `import_function`: any
function."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from qlora_rl.errors import ConfigConflictError, QloraRLError, RewardFunctionError, raise_where

# Ours, and the module of each.
BUILT_IN = {
    **dict.fromkeys(("exact_match", "numeric_match"), "match"),
    "math_match": "formulas",
    **dict.fromkeys(("format_match", "length_match"), "match"),
    "program_match": "programs",
}
# Arguments that TRL gives reward functions itself: a column of that name is given twice (the first two), or is lost;
# `environments` where there are some.
OF_REWARDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
# Top-level modules next to a file, and that file's folder: a module of that name in another folder is another one.
_BESIDE: dict[str, Path] = {}
_DOING = "loading a reward function"


def load_reward(
    name: str, arguments: Mapping[str, Any] | None = None, *, folder: str | os.PathLike[str] | None = None
) -> Callable[..., Any]:
    """The reward function of a name.

    Args:
        name: a built-in one ("numeric_match", or "numeric"), "path.py:function", or "package.module:function". A class
            is called with the arguments, once.
        arguments: of the function, fixed from now on: `{"column": "solution"}`.
        folder: that a relative path starts from; by default the working directory.

    Returns:
        The function, with TRL's signature; a `functools.partial` of it, under its own name, where there are arguments.

    Raises:
        ConfigConflictError: there is no such function, or it does not take these arguments.
        RewardFunctionError: its file raised while it was imported.
    """
    colon = ":" in name
    function = import_function(name, folder=folder, raised=RewardFunctionError) if colon else built_in(name)
    if function is None:
        hint = f" Did you mean {name}:FUNCTION?" if name.endswith(".py") else ""
        raise ConfigConflictError(
            f"{_DOING}: {name!r} does not exist.{hint} Use one of {', '.join(BUILT_IN)}, or your own as "
            "path.py:function."
        )
    bind: Any = _made if inspect.isclass(function) else _with_arguments
    return bind(function, name, dict(arguments or {}))


def import_function(
    name: str,
    *,
    folder: str | os.PathLike[str] | None = None,
    doing: str = _DOING,
    raised: type[QloraRLError] = ConfigConflictError,
) -> Callable[..., Any]:
    """A function or class by "path.py:name" or "package.module:name".

    Args:
        name: of it.
        folder: that a relative path starts from; by default the working directory.
        doing: for messages.
        raised: class of the error where the file itself raises.

    Raises:
        ConfigConflictError: there is no such file, or nothing in it that can be called by that name.
    """
    place, _, own = name.rpartition(":")
    if not own.isidentifier() or not place:
        raise ConfigConflictError(f"{doing}: {place}:{own} is not path.py:function, nor package.module:function.")
    module = (
        _of_file(Path(folder or ".") / Path(place).expanduser(), doing, raised)
        if place.endswith(".py")
        else _of_package(place, doing, raised)
    )
    function = getattr(module, own, None)
    if not callable(function):
        names = sorted(
            each
            for each, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not each.startswith("_")
        )
        what = "is not there" if function is None else f"is a {type(function).__name__}, not a function"
        raise ConfigConflictError(f"{doing}: {own} {what} in {place}. Its functions: {', '.join(names) or 'none'}.")
    return function


def reward_name(reward: Callable[..., Any]) -> str:
    """The name under which TRL logs a reward function: its own, or that of its class."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return str(getattr(reward, "__name__", type(reward).__name__))


def built_in(name: str) -> Callable[..., Any] | None:
    """Ours of that name, "numeric_match" or "numeric"; `None` where there is none."""
    full = name if name in BUILT_IN else f"{name}_match"
    if full not in BUILT_IN:
        return None
    return getattr(importlib.import_module(f"{__package__}.{BUILT_IN[full]}"), full)


def _made(kind: type, name: str, arguments: dict[str, Any]) -> Callable[..., Any]:
    try:
        made = kind(**arguments)
    except Exception as error:
        raise RewardFunctionError(f"{_DOING}: {name}(**{arguments}) raised {type(error).__name__}: {error}.") from error
    if not callable(made):
        raise ConfigConflictError(f"{_DOING}: {name} is a class without __call__. Give it one, or name a function.")
    return made


def parameters_of(function: Callable[..., Any]) -> tuple[list[str] | None, list[str]]:
    """Arguments of a reward function besides TRL's, `None` where it takes any; and those that one of ours needs: it has
    them behind a star, and all others are the dataset's columns."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C: it says nothing about itself
        parameters = []
    is_ours = str(getattr(function, "__module__", "")).startswith(f"{__package__}.")
    if not parameters or (not is_ours and any(each.kind is each.VAR_KEYWORD for each in parameters)):
        return None, []
    named = [each for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each.name for each in named if is_ours and each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    return [each.name for each in named if each.name not in OF_REWARDS], needed


def _with_arguments(function: Callable[..., Any], name: str, arguments: dict[str, Any]) -> Callable[..., Any]:
    known, needed = parameters_of(function)
    unknown = [] if known is None else sorted(arguments.keys() - set(known))
    missing = [each for each in needed if each not in arguments]
    raise_where(
        _DOING,
        [
            (
                unknown,
                f"{name!r} takes no {', '.join(map(repr, unknown))}. It takes {', '.join(known or ()) or 'nothing'}.",
            ),
            (
                missing,
                f"{name!r} needs {', '.join(missing)}. Give it as an argument, or write a function of your own around "
                f"qlora_rl.rewards.{reward_name(function)} and name it as path.py:function.",
            ),
        ],
    )
    if not arguments:
        return function
    bound: Any = functools.partial(function, **arguments)
    bound.__name__ = getattr(function, "__name__", name)  # under which TRL logs it
    return bound


def _of_file(file: Path, doing: str, raised: type[QloraRLError]) -> ModuleType:
    """The file as a module; modules next to it can be imported meanwhile."""
    file = file.resolve()
    if not file.is_file():
        raise ConfigConflictError(f"{doing}: there is no file {file}. Name it as path.py:function.")
    # A name of its own: "rewards.py" must not hide a package of that name, nor another file; what has changed is read
    # again.
    digest = hashlib.sha256(str(file).encode() + file.read_bytes()).hexdigest()
    name = f"qlora_rl_reward_{file.stem}_{digest[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    for other in [each for each, place in _BESIDE.items() if place != file.parent]:
        sys.modules.pop(other, None)
        del _BESIDE[other]
    before = set(sys.modules)
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise raised(
            f"{doing}: {file} raised {type(error).__name__} while it was imported: {error}. Try it: python {file}"
        ) from error
    finally:
        sys.path.remove(str(file.parent))
        for each in set(sys.modules) - before:
            if Path(getattr(sys.modules[each], "__file__", None) or "").resolve().is_relative_to(file.parent):
                _BESIDE[each] = file.parent
    return module


def _of_package(place: str, doing: str, raised: type[QloraRLError]) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ConfigConflictError(
            f"{doing}: there is no module {place!r} ({error}). Name a file as path.py:function, or install the package."
        ) from error
    except Exception as error:
        raise raised(f"{doing}: {place} raised {type(error).__name__} while it was imported: {error}.") from error
