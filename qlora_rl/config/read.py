"""A TOML file and the `--set` of a command line become one checked `RunConfig`; or all that is wrong is said at
once."""

from __future__ import annotations

import contextlib
import os
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qlora_rl.config.check import check_document
from qlora_rl.config.cross_checks import check_together
from qlora_rl.config.directories import are_several, check_directory, own_directory, usual_directory
from qlora_rl.config.findings import Finding, nearest, show
from qlora_rl.config.paths import anchored
from qlora_rl.config.schema import TABLES, TRAIN, RunConfig, Table, applies, options
from qlora_rl.config.text import to_toml
from qlora_rl.data.files import DATA_FILES
from qlora_rl.engine.started import ENGINES, STARTED
from qlora_rl.errors import ConfigConflictError, MissingDependencyError, collected
from qlora_rl.memory.cards import card_size
from qlora_rl.methods import SAMPLING


def read_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, asks_trl: bool = True, trains: bool = False
) -> RunConfig:
    """Read, override, check.

    Args:
        path: of the TOML file. Paths in it are relative to its directory, but for `[run] dir`.
        overrides: "table.field=value", the value as TOML has it; a text needs no quotes. Paths are relative to the
            working directory.
        asks_trl: check `[train]` against TRL's config, which takes seconds to import; and what goes to vLLM against
            its; and import tools and environments.
        trains: the run is to be trained, so that its directory must be free.

    Raises:
        ConfigConflictError: with everything that is wrong, each with its place.
    """
    path = Path(path)
    document, found = _document(path, overrides)
    config, wrong = check_document(document)
    found += [*wrong, *check_together(config)]
    usual, uncertain = own_directory(config.run, path) if trains else (usual_directory(path), [])
    out = usual if config.run.dir is None else config.run.dir
    found += [*uncertain, *check_directory(out, config.run.existing)] if trains else []
    found += [*_ask_trl(config), *_ask_vllm(config)] if asks_trl else []
    if asks_trl and not any(each.place.startswith(("[tools]", "[environment]")) for each in wrong):
        found += _import_tools(config)
    if found:
        raise collected(f"reading {path}", list(dict.fromkeys(map(str, found))), ConfigConflictError)
    existing = "reject" if config.run.existing == "auto" else config.run.existing  # the name has been chosen
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": out, "existing": existing})})


def resolved(config: RunConfig) -> dict[str, Any]:
    """The whole run as a document: every field that its method knows, absolute paths."""
    document: dict[str, Any] = {"method": config.method}
    for name in TABLES:
        held = getattr(config, name)
        found = [_said(config.method, each) for each in (held if name == "rewards" else [held])]
        document |= {name: found if name == "rewards" else found[0]} if any(found) else {}
        document |= {TRAIN: dict(config.train)} if name == "data" and config.train else {}
    return document


def resolved_toml(config: RunConfig) -> str:
    """`resolved`, as the file that runs the run again."""
    return to_toml(resolved(config))


def _document(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[Finding]]:
    try:
        document = anchored(tomllib.loads(path.read_text(encoding="utf-8")), path.resolve().parent)
    except OSError as error:
        raise ConfigConflictError(
            f"reading {path}: {error.strerror}. `--example METHOD` prints a file to start from."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        if path.suffix in DATA_FILES:
            raise ConfigConflictError(
                f"reading {path}: these are data, and a run's file is wanted. `qlora-rl recommend MODEL --data {path} "
                "--out run.toml` writes one."
            ) from error
        raise ConfigConflictError(f"reading {path}: it is not valid TOML: {error}.") from error
    found = []
    for override in overrides:
        problem = _apply(document, override)
        found += [Finding(f"--set {override}", problem)] if problem else []
    run = document.get("run")
    if isinstance(run, dict) and isinstance(run.get("gpu_memory"), str):
        with contextlib.suppress(ValueError):  # its check says what it is instead
            run["gpu_memory"] = card_size(run["gpu_memory"])
    return document, found


def _apply(document: dict[str, Any], override: str) -> str:
    """Write one override into the document; what is wrong with it, or nothing."""
    dotted, equals, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        return "is no table.field=value"
    nested: Any = _value(text.strip())
    for key in reversed(keys):
        nested = {key: nested}
    # With the working directory as anchor, before it meets what the file says.
    return _merge(document, anchored(nested, Path.cwd()), keys)


def _merge(document: Any, nested: Any, keys: Sequence[str]) -> str:
    key: Any
    for place, key in enumerate(keys):
        value = nested[key]
        is_last = place == len(keys) - 1
        if isinstance(document, list):
            if not key.isdigit() or int(key) >= len(document):
                return f"there is no number {key} among {len(document)}; they are counted from 0"
            key = int(key)
        elif not isinstance(document, dict):
            return f"{'.'.join(keys[:place])} is no table"
        if is_last:
            document[key] = value
        elif isinstance(document, dict):
            document.setdefault(key, {})
        document, nested = document[key], value
    return ""


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _ask_trl(config: RunConfig) -> list[Finding]:
    """What TRL's config of the method has to say about `[train]`."""
    from qlora_rl.config.trl_fields import PLACE, check_train, make_args
    from qlora_rl.train.setup.config_checks import contradictions
    from qlora_rl.train.setup.settings import config_class

    if not config.method:
        return []
    kind = config_class(config.method)
    if found := check_train(config.method, config.train, kind):
        return found
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said when the run makes it
            args = make_args(kind, config.train)
    except (ValueError, TypeError, ImportError) as error:
        return [Finding(PLACE, f"TRL rejects it: {' '.join(str(error).split())}")]
    return [Finding(PLACE, text) for text in contradictions(config.method, args, config.rollout.where)]


def _ask_vllm(config: RunConfig) -> list[Finding]:
    """Is it there, where one is to be started, and does it know what `[rollout] vllm` says?"""
    where, given = config.rollout.where, config.rollout.vllm
    if config.method not in SAMPLING or where not in STARTED:
        return []
    from qlora_rl.engine.options import OWN, vllm_arguments

    try:
        ENGINES[where].require()
    except MissingDependencyError as error:
        return [Finding("[rollout] where", str(error))]
    taken = [f"{show(name)} is set by the engine itself. Leave it out" for name in given if name in OWN]
    known = vllm_arguments() if given else ()
    unknown = [f"vLLM has no {show(name)}{nearest(name, known)}" for name in given if name not in known]
    return [Finding("[rollout] vllm", text) for text in [*taken, *unknown]]


def _import_tools(config: RunConfig) -> list[Finding]:
    """Tools and environments, whose names are right."""
    tools, environment = config.tools.use or [], config.environment.use
    if not tools and not environment:
        return []
    from qlora_rl.train.setup.tools import check_tools

    found = check_tools(tools, environment, has_rewards=bool(config.rewards))
    return [Finding(f"[{table}] use", text) for table, text in found]


def chooses_directory(path: Path, overrides: Sequence[str] = ()) -> bool:
    """A run of the file takes the next free directory: nothing else is said, and it is of one process."""
    run = check_document(_document(path, overrides)[0])[0].run
    return not are_several() and run.dir is None and run.existing == "auto"


def _said(method: str, table: Table) -> dict[str, Any]:
    """The fields of a table that the method knows, without what says nothing."""
    known = options(type(table))
    return {
        name: each
        for name, each in table.model_dump().items()
        if each is not None and each != {} and applies(known[name], method)
    }
