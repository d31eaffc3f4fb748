"""Tools and environments by name: imported, and looked at as TRL will use them, before anything is loaded."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_type_hints

from qlora_rl.errors import ConfigConflictError, QloraRLError
from qlora_rl.rewards.load import import_function

ENVIRONMENT_COLUMN = "environment"  # by which a row chooses among several
_OF_ENVIRONMENTS = ("reset", "get_reward")  # methods that TRL calls itself
_DOING = "importing"

Environments = str | Mapping[str, str] | None
"""One as "path.py:Class", or several by the name that a row has in its column `environment`."""


def check_tools(tools: Sequence[str], environment: Environments, *, has_rewards: bool) -> list[tuple[str, str]]:
    """Import what is named; everything that TRL could not make a schema of, or not train with.

    Args:
        tools: "path.py:function" of each.
        environment: one, several by name, or none.
        has_rewards: there are reward functions; otherwise the environment must have a reward of its own.

    Returns:
        "tools" or "environment", and what is wrong.
    """
    found: list[tuple[str, str]] = []
    called = [use.rpartition(":")[2] for use in tools]
    for use in tools:
        try:
            tool = import_function(use, doing=_DOING)
        except QloraRLError as error:
            found.append(("tools", str(error)))
        else:
            found += [("tools", text) for text in _check_schema(tool, use)]
    for use in _named(environment).values():
        try:
            kind = _class_of(import_function(use, doing=_DOING))
        except QloraRLError as error:
            found.append(("environment", str(error)))
            continue
        if kind is None:  # a function that says nothing of what it makes: TRL calls it when the run starts
            continue
        names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
        if "reset" not in names:
            found.append(("environment", f"'{use}' has no method reset(self, **row), which begins a completion"))
        if "get_reward" not in names and not has_rewards:
            text = f"'{use}' has no method get_reward(self), and there is no [[rewards]]. Write one of them"
            found.append(("environment", text))
        for name, method in _methods(kind):
            found += [("environment", text) for text in _check_schema(method, f"{use}.{name}")]
            if name in called:
                found.append(("environment", f"'{use}' has a method {name}, and so is a tool called. Rename one"))
    return found + [
        ("tools", f"two are called {name}. Rename one") for name in sorted(set(called)) if called.count(name) > 1
    ]


def load_tools(tools: Sequence[str], environment: Environments) -> dict[str, Any]:
    """The arguments of TRL's trainer; this runs the user's files."""
    found: dict[str, Any] = {"tools": [import_function(use, doing=_DOING) for use in tools]} if tools else {}
    factories = {name: import_function(use, doing=_DOING) for name, use in _named(environment).items()}
    if factories:
        found["environment_factory"] = factories if isinstance(environment, Mapping) else factories[None]
    return found


def schemas(tools: Sequence[str], environment: Environments) -> Callable[[Mapping[str, Any]], list[dict[str, Any]]]:
    """The tools' schemas that TRL puts into the prompt of a row, in the form of OpenAI's `tools`."""
    from transformers.utils import get_json_schema

    own = [get_json_schema(import_function(use, doing=_DOING)) for use in tools]
    of_environments = {}
    for name, use in _named(environment).items():
        factory = import_function(use, doing=_DOING)
        kind = _class_of(factory) or type(factory())
        of_environments[name] = own + [get_json_schema(method) for _, method in _methods(kind)]
    by_row = isinstance(environment, Mapping)
    return lambda row: of_environments.get(row.get(ENVIRONMENT_COLUMN) if by_row else None, own)


def _named(environment: Environments) -> dict[str | None, str]:
    if isinstance(environment, str):
        return {None: environment}
    return dict(environment or {})


def check_template(tokenizer: Any, model: str) -> str | None:
    """TRL's own chat template for training, where it replaces the model's; `None` where the model's stays.

    Raises:
        ConfigConflictError: the model's template shows no tool calls, or TRL cannot read a call out of a completion.
    """
    from trl.chat_template_utils import (
        add_response_schema,
        get_training_chat_template,
        is_chat_template_prefix_preserving,
        supports_tool_calling,
    )

    if not supports_tool_calling(tokenizer):
        raise ConfigConflictError(
            f"reading the run: [tools] and [environment]: the chat template of {model} shows no tool calls. Use a "
            "model that was trained with tools, such as Qwen3."
        )
    if not any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema")):
        try:
            add_response_schema(tokenizer)
        except ValueError as error:
            raise ConfigConflictError(
                f"reading the run: [tools] and [environment]: TRL does not know how the model {model} writes a tool "
                f"call: {error} Set response_template of its tokenizer, and save it."
            ) from error
    return None if is_chat_template_prefix_preserving(tokenizer) else get_training_chat_template(tokenizer)


def _class_of(factory: Any) -> type | None:
    """What an environment's factory makes; `None` where only calling it would tell."""
    if inspect.isclass(factory):
        return factory
    try:
        made = get_type_hints(factory).get("return")
    except (TypeError, NameError):
        return None
    return made if inspect.isclass(made) else None


def _methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The tools of an environment: its public methods, bound as those of an instance are."""
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if name not in _OF_ENVIRONMENTS and not name.startswith("_"):
            is_static = isinstance(inspect.getattr_static(kind, name), staticmethod)
            yield name, function if is_static else types.MethodType(function, kind)


def _check_schema(tool: Callable[..., Any], use: str) -> list[str]:
    from transformers.utils import get_json_schema

    try:
        get_json_schema(tool)
    except Exception as error:  # transformers has several classes, and inspect its own
        why = " ".join(str(error).split())
        return [
            f"'{use}': {why.rstrip('.')}. TRL needs type hints, and a docstring with a line for each argument under "
            "Args:"
        ]
    return []
