"""`qlora-rl eval`: rewards before and after a run, or of the base alone, before it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from qlora_rl.commands.codes import AS_JSON, BASE, COUNT, NOT_NEGATIVE, SHARE, UsageError, add_overrides, existing
from qlora_rl.engine.loading import loading
from qlora_rl.errors import raise_where
from qlora_rl.rewards.load import built_in, load_reward, reward_name


def add(commands: Any) -> None:
    """The command's arguments."""
    evaluate = commands.add_parser(
        "eval", parents=[BASE, AS_JSON], help="compare the rewards of base and policy on the same prompts"
    )
    evaluate.add_argument(
        "trained",
        type=existing,
        metavar="RUN",
        help="run directory, or a checkpoint in it; or run.toml before it is trained: what the base answers, sampled "
        "as in training, and whether its rewards leave something to learn",
    )
    add_overrides(evaluate, "overrides a run.toml")
    evaluate.add_argument(
        "--data",
        type=existing,
        metavar="F",
        help='.jsonl, .json, .csv or .parquet file with "prompt" and the columns that the rewards read, or with the '
        "columns of the run (default: [data] eval of the run's file)",
    )
    evaluate.add_argument(
        "--reward",
        nargs="+",
        metavar="R",
        help="one or more of exact_match, numeric_match, math_match, program_match and path.py:function (default: "
        "those of the run's file)",
    )
    evaluate.add_argument(
        "--column", metavar="NAME", help="column with the references, for built-in rewards (default: theirs)"
    )
    evaluate.add_argument(
        "--samples", type=COUNT, metavar="G", help="completions per prompt (default: 1; of a run.toml 8)"
    )
    evaluate.add_argument(
        "--limit", type=COUNT, metavar="N", help="only the first N prompts (default: all; of a run.toml 16)"
    )
    evaluate.add_argument(
        "--max-tokens",
        type=COUNT,
        metavar="N",
        help="longest completion, in tokens (default: as in the run's training; 256 where it sampled nothing)",
    )
    evaluate.add_argument(
        "--temperature", type=NOT_NEGATIVE, metavar="T", help="(default: 0, greedy; of a run.toml that of [train])"
    )
    evaluate.add_argument("--top-p", type=SHARE, metavar="P", help="(default: 1; of a run.toml that of [train])")
    evaluate.add_argument("--seed", type=int, default=0, metavar="N", help="sampling seed (default: %(default)s)")
    evaluate.add_argument("--no-save", action="store_true", help="write no eval.json into the run directory")
    evaluate.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, leave eval.json for the report."""
    from qlora_rl.contracts import SamplingSpec

    if arguments.trained.is_file():
        return _look(arguments)
    if arguments.overrides:
        raise UsageError(f"evaluating: --set changes a run.toml, and {arguments.trained} is a run. Leave it out.")
    columns = {"column": arguments.column} if arguments.column else {}
    rewards = [load_reward(name, columns if built_in(name) else None) for name in arguments.reward or []]
    if columns and not rewards:
        raise UsageError("evaluating: --column is for a --reward. Name one, or leave it out.")
    with loading("qlora_rl.adapter.initialization", quietly=True, has_bars=False):
        from qlora_rl.data.load import read_file
        from qlora_rl.inference.evaluation import evaluate, save
        from qlora_rl.inference.rows import open_images
        from qlora_rl.inference.trained import open_trained

    given = None if arguments.data is None else [*read_file(arguments.data, limit=arguments.limit)]
    trained = open_trained(arguments.trained, base=arguments.base)
    rewards = rewards or [load_reward(each.use, each.arguments) for each in trained.rewards]
    if not rewards:
        raise UsageError(f"evaluating: {trained.path} has no file with rewards. Name one: --reward numeric_match.")
    if given is None:
        rows, source = _own_rows(trained, arguments.limit)
    else:
        rows, source = open_images(given, trained.data, arguments.data.parent), arguments.data.name
    named = _by_name(rewards)
    max_tokens = arguments.max_tokens or trained.max_tokens
    temperature = 0.0 if arguments.temperature is None else arguments.temperature
    top_p = 1.0 if arguments.top_p is None else arguments.top_p
    sampling = SamplingSpec(max_tokens, temperature, top_p, seed=arguments.seed)
    samples, is_ready = arguments.samples or 1, given is None
    found = evaluate(trained, rows, named, samples=samples, sampling=sampling, are_as_trained=is_ready)
    if not arguments.no_save:
        save(found, trained, {"data": source, "rewards": list(named)})
    print(json.dumps(asdict(found), indent=1, default=str) if arguments.json else found)
    return 0


def _look(arguments: argparse.Namespace) -> int:
    """Ask the base of a file that is not trained yet."""
    given = {
        "--data": arguments.data,
        "--reward": arguments.reward,
        "--column": arguments.column,
        "--base": arguments.base,
        "--no-save": arguments.no_save,
    }
    wrong = [name for name, value in given.items() if value]
    raise_where(
        "evaluating",
        [
            (
                wrong,
                f"{arguments.trained} names its data, rewards and base. Leave {', '.join(wrong)} out, or use --set.",
            ),
            (
                arguments.samples == 1 or arguments.temperature == 0,
                "whether a step has something to learn from takes several different completions of a prompt. Use "
                "--samples 2 or more, and a temperature above 0.",
            ),
        ],
        UsageError,
    )
    with loading("qlora_rl.adapter.initialization", quietly=True, has_bars=False):
        from qlora_rl.config.launch import check_model, check_talks, load_tokenizer, make_base, trl_config
        from qlora_rl.config.read import read_config
        from qlora_rl.data.load import TEMPLATE_COLUMN, load_data
        from qlora_rl.inference.first_look import look_at_base
        from qlora_rl.methods import METHODS
        from qlora_rl.stages import begin
        from qlora_rl.train.metrics.rewards import check_signature
        from qlora_rl.train.setup.dataset_checks import check_prompts
        from qlora_rl.train.setup.settings import sampling_spec

        config = read_config(arguments.trained, arguments.overrides)
    uses_tools, start = config.tools.use or config.environment.use, config.adapter.start_from
    raise_where(
        "evaluating",
        [
            (
                not METHODS[config.method].samples or not config.rewards or uses_tools,
                f"{arguments.trained} is no run whose base can be asked: that takes a method that samples, with "
                "rewards, and without tools or environments. `qlora-rl data` shows its rows.",
            ),
            (start, f"{arguments.trained} goes on from {start}. Evaluate that: qlora-rl eval {start}"),
        ],
        UsageError,
    )
    check_model(config)
    args = trl_config(config)
    begin("reading the data")
    train, held_out = load_data(config.data, has_template_field=hasattr(args, TEMPLATE_COLUMN))
    rows = train if held_out is None else held_out
    rows = rows.select(range(min(len(rows), arguments.limit or 16)))
    if config.data.format == "chat":
        check_talks(config, load_tokenizer(config), rows)
    check_prompts(args, rows)
    rewards = [load_reward(each.use, each.arguments) for each in config.rewards]
    for each in rewards:
        check_signature(each, rows.column_names)
    asked = {"temperature": arguments.temperature, "top_p": arguments.top_p, "max_tokens": arguments.max_tokens}
    chosen = {name: value for name, value in asked.items() if value is not None}
    sampling = replace(sampling_spec(args), seed=arguments.seed, **chosen)
    found = look_at_base(
        make_base(config),
        list(rows),
        _by_name(rewards),
        sampling,
        samples=arguments.samples or 8,
        template=config.data.chat_template_kwargs,
        weights=[each.weight for each in config.rewards],
        max_model_length=args.vllm_max_model_length,
    )
    print(json.dumps(asdict(found), indent=1, default=str) if arguments.json else found)
    return 0


def _own_rows(trained: Any, limit: int | None) -> tuple[list[dict[str, Any]], str]:
    """Rows of [data] eval of the run's file, as training has them, and their name."""
    from qlora_rl.data.files import is_file
    from qlora_rl.data.load import load_eval

    data = trained.data
    if data is None or data.eval is None:
        raise UsageError(
            f"evaluating: {trained.path} has no file that names [data] eval. Pass the rows to ask: --data FILE, any "
            "data file of the form that the run was trained on (.jsonl, .json, .csv, .parquet)."
        )
    loaded = load_eval(data)
    files = [data.eval] if isinstance(data.eval, str) else list(data.eval)
    name = ", ".join(Path(each).name for each in files) if is_file(files[0]) else f"{files[0]} ({data.eval_split})"
    return list(loaded.select(range(min(len(loaded), limit or len(loaded))))), name


def _by_name(rewards: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Under their names in training; of equal ones the second is "name (2)"."""
    found: dict[str, Callable[..., Any]] = {}
    for each in rewards:
        name = reward_name(each)
        same = 1 + sum(other.rpartition(" (")[0] == name or other == name for other in found)
        found[name if same == 1 else f"{name} ({same})"] = each
    return found
