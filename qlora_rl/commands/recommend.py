"""`qlora-rl recommend`: settings for a model, a task and a card, with their sources."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from qlora_rl.commands.codes import COUNT, DOES_NOT_FIT, MODEL, UsageError
from qlora_rl.errors import raise_where
from qlora_rl.methods import ESTIMATED, METHODS


def add(commands: Any) -> None:
    """The command's arguments."""
    recommend = commands.add_parser(
        "recommend", parents=[MODEL], help="recommend settings for a model, a task and a card, with their sources"
    )
    recommend.add_argument(
        "--task",
        choices=ESTIMATED,
        default="grpo",
        help="(default: %(default)s)",
    )
    recommend.add_argument(
        "--max-length",
        type=COUNT,
        metavar="N",
        help="prompt plus completion, in tokens (default: what a known dataset needs, otherwise 2048)",
    )
    recommend.add_argument(
        "--max-steps",
        type=COUNT,
        default=200,
        metavar="N",
        help="optimizer steps; a short run gets a higher learning rate (default: %(default)s)",
    )
    recommend.add_argument("--device", choices=["cuda", "cpu"], help="(default: cuda if available)")
    recommend.add_argument(
        "--data", metavar="DATA", help="dataset on the hub, or a file of rows; needs --toml or --out"
    )
    recommend.add_argument("--subset", metavar="NAME", help="configuration of a hub dataset")
    recommend.add_argument("--split", metavar="NAME", help="split of a hub dataset (default: train)")
    recommend.add_argument(
        "--reward",
        default="",
        metavar="R",
        help="with --data: a built-in reward, or path.py:function (default: by its answers)",
    )
    recommend.add_argument(
        "--teacher",
        default="",
        metavar="T",
        help="with --task distill: adapter or run directory, or a second model (default: itself, shown the answer)",
    )
    form = recommend.add_mutually_exclusive_group()
    form.add_argument("--toml", action="store_true", help="print a file for `qlora-rl train`; needs --data")
    form.add_argument(
        "--out", type=Path, metavar="FILE", help="write that file; paths in it are relative to it. Needs --data"
    )
    form.add_argument("--json", action="store_true", help="print JSON")
    recommend.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit 0 fits (or no limit), 3 nothing fits."""
    import json

    _check_usage(arguments)
    arguments.toml = arguments.toml or arguments.out is not None
    from qlora_rl.engine.loading import loading

    trusts, length, tables = arguments.trust_remote_code, arguments.max_length, None
    with loading("qlora_rl.adapter.initialization"):
        from qlora_rl.advice import chat_of, is_adapter, recommend, run_file, tables_for, tables_from
        from qlora_rl.base.model_classes import takes_images
        from qlora_rl.memory.shape import read_config, stored_spec

        # What is wrong with the model or its directory is said before seconds of imports.
        stored_spec(arguments.model)
        config = read_config(arguments.model, trust_remote_code=trusts)
    if arguments.data:
        import datasets

        datasets.disable_progress_bars()
    if arguments.toml:
        chat = chat_of(arguments.model, trust_remote_code=trusts)
        chosen = {"subset": arguments.subset, "split": arguments.split, "reward": arguments.reward}
        chosen["teacher"] = arguments.teacher
        sees = takes_images(config)
        tables = tables_for(arguments.data, arguments.task, chat, takes_images=sees, **chosen)
        length = tables.length if length is None else length
    advice = recommend(
        arguments.model,
        arguments.task,
        arguments.gpu_memory,
        max_length=length,
        max_steps=arguments.max_steps,
        device=arguments.device,
        trust_remote_code=trusts,
        teacher=None if is_adapter(arguments.teacher) else arguments.teacher or None,
    )
    if tables is not None:
        command = _command(arguments)
        model = arguments.model
        if arguments.out is not None:
            model, tables = tables_from(arguments.out.parent, model, tables)
        text = run_file(advice, model, tables, switch=chat.switch, command=command, trust_remote_code=trusts)
        if arguments.out is None:
            print(text, end="")
        else:
            _write(arguments.out, text, asks_base=METHODS[arguments.task].scores)
            if advice.pace is not None and advice.fits:
                print(f"  {advice.pace.whole(arguments.max_steps)}")
    else:
        print(json.dumps(advice.as_dict(), indent=1, default=str) if arguments.json else advice)
    return 0 if advice.fits else DOES_NOT_FIT


def _check_usage(arguments: argparse.Namespace) -> None:
    makes_file = arguments.toml or arguments.out is not None
    of_data = arguments.subset or arguments.split or arguments.reward
    raise_where(
        "recommending settings",
        [
            (
                arguments.teacher and not METHODS[arguments.task].is_taught,
                f"--teacher with --task {arguments.task}. Pass --task distill.",
            ),
            (
                makes_file != bool(arguments.data),
                "--data and --toml or --out belong together: a run's file names its data.",
            ),
            (
                arguments.out is not None and arguments.out.exists(),
                f"{arguments.out} exists already. Choose another name, or remove it.",
            ),
            (of_data and not arguments.data, "--subset, --split and --reward are about --data. Leave them out."),
            (
                makes_file and Path(arguments.model).is_file(),
                "a run's file needs a model, and a config.json is none. Pass a directory.",
            ),
        ],
        UsageError,
    )


def _command(arguments: argparse.Namespace) -> str:
    """What writes the same file again."""
    words = ["qlora-rl", "recommend", arguments.model]
    for name in ("task", "data", "subset", "split", "reward", "teacher", "gpu_memory", "max_length", "device"):
        if (value := getattr(arguments, name)) not in (None, ""):
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    words += ["--max-steps", str(arguments.max_steps)] if arguments.max_steps != 200 else []
    form = ["--toml"] if arguments.out is None else ["--out", str(arguments.out)]
    return shlex.join([*words, *(["--trust-remote-code"] if arguments.trust_remote_code else []), *form])


def _write(file: Path, text: str, *, asks_base: bool) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"recommending settings: {file} cannot be written: {error.strerror}.") from error
    name = shlex.quote(str(file))
    print(f"  run file: {file}\n  to look at its prompts: qlora-rl data {name}")
    if asks_base:
        print(f"  to see how the base's answers are scored: qlora-rl eval {name}")
    print(f"  to train: qlora-rl train {name}")
