"""`qlora-rl eval`: rewards before and after."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qlora_rl.commands.codes import COUNT, NOT_NEGATIVE, SHARE, UsageError, existing


def add(commands: Any) -> None:
    """The command's arguments."""
    evaluate = commands.add_parser("eval", help="compare the rewards of base and policy on the same prompts")
    evaluate.add_argument("trained", type=existing, metavar="RUN", help="run directory, or a checkpoint in it")
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
        help="exact, numeric, program, or path.py:function; one or more (default: those of the run's file)",
    )
    evaluate.add_argument(
        "--column", metavar="NAME", help="column with the references, for built-in rewards (default: theirs)"
    )
    evaluate.add_argument("--samples", type=COUNT, default=1, metavar="G", help="completions per prompt (default: 1)")
    evaluate.add_argument("--limit", type=COUNT, metavar="N", help="only the first N prompts")
    evaluate.add_argument(
        "--max-tokens",
        type=COUNT,
        metavar="N",
        help="longest completion, in tokens (default: as in the run's training; 256 where it sampled nothing)",
    )
    evaluate.add_argument("--temperature", type=NOT_NEGATIVE, default=0.0, metavar="T", help="(default: 0, greedy)")
    evaluate.add_argument("--top-p", type=SHARE, default=1.0, metavar="P", help="(default: %(default)s)")
    evaluate.add_argument("--seed", type=int, default=0, metavar="N", help="sampling seed (default: %(default)s)")
    evaluate.add_argument("--base", type=existing, metavar="DIR", help="the base directory, if it was moved")
    evaluate.add_argument("--no-save", action="store_true", help="write no eval.json into the run directory")
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    evaluate.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, leave eval.json for the report."""
    import json

    from qlora_rl.contracts import SamplingSpec
    from qlora_rl.rewards.load import built_in, load_reward

    columns = {"column": arguments.column} if arguments.column else {}
    rewards = [load_reward(name, columns if built_in(name) else None) for name in arguments.reward or []]
    if columns and not rewards:
        raise UsageError("evaluating: --column is for a --reward. Name one, or leave it out.")
    from qlora_rl.demo.job import quieten
    from qlora_rl.engine.loading import loading

    with loading("qlora_rl.adapter.initialization"):
        quieten()
        from qlora_rl.inference.evaluation import evaluate, read_rows, save
        from qlora_rl.inference.rows import open_images
        from qlora_rl.inference.trained import open_trained

    given = None if arguments.data is None else read_rows(arguments.data, arguments.limit)
    trained = open_trained(arguments.trained, base=arguments.base)
    rewards = rewards or [load_reward(each.use, each.arguments) for each in trained.rewards]
    if not rewards:
        raise UsageError(f"evaluating: {trained.path} has no file with rewards. Name one: --reward numeric.")
    if given is None:
        rows, source = _own_rows(trained, arguments.limit)
    else:
        rows, source = open_images(given, trained.data, arguments.data.parent), arguments.data.name
    named = _by_name(rewards)
    max_tokens = arguments.max_tokens or trained.max_tokens
    sampling = SamplingSpec(max_tokens, arguments.temperature, arguments.top_p, seed=arguments.seed)
    found = evaluate(trained, rows, named, samples=arguments.samples, sampling=sampling, are_as_trained=given is None)
    if not arguments.no_save:
        save(found, trained, {"data": source, "rewards": list(named)})
    print(json.dumps(found.as_dict(), indent=1) if arguments.json else found)
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
    from qlora_rl.rewards.load import reward_name

    found: dict[str, Callable[..., Any]] = {}
    for each in rewards:
        name = reward_name(each)
        same = 1 + sum(other.rpartition(" (")[0] == name or other == name for other in found)
        found[name if same == 1 else f"{name} ({same})"] = each
    return found
