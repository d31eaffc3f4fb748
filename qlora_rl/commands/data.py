"""`qlora-rl data`: the rows of a run as the model will see them."""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qlora_rl.commands.codes import add_overrides, ranged
from qlora_rl.contracts import IMAGES
from qlora_rl.data.rows import TEACHER_COLUMN
from qlora_rl.errors import ConfigConflictError
from qlora_rl.stages import begin, count

_SHOWN = 300  # characters of another column
_LOOKED_AT = 1000  # rows with images


def add(commands: Any) -> None:
    """The command's arguments."""
    data = commands.add_parser(
        "data", help="rows of a run's file as the model will see them, and their lengths in tokens"
    )
    data.add_argument("file", type=Path, metavar="run.toml")
    add_overrides(data)
    data.add_argument(
        "--rows", type=ranged(int, at_least=0), default=3, metavar="N", help="rows to print (default: %(default)s)"
    )
    data.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Load the tokenizer and the data, nothing else."""
    from qlora_rl.engine.loading import loading

    with loading(quietly=True, has_bars=False):  # and TRL's config classes
        from qlora_rl.config.launch import check_talks, load_tokenizer, trl_config
        from qlora_rl.config.read import read_config
        from qlora_rl.data.load import TEMPLATE_COLUMN, load_data
        from qlora_rl.methods import METHODS

        config = read_config(arguments.file, arguments.overrides)
        args = trl_config(config)
    begin("reading the data")
    tokenizer = load_tokenizer(config)
    loaded = load_data(config.data, has_template_field=hasattr(args, TEMPLATE_COLUMN), teacher=config.teacher)
    if config.data.format == "chat":
        check_talks(config, tokenizer, *loaded)
    begin("")
    given, samples = _template_arguments(config, tokenizer), METHODS[config.method].samples
    for name, dataset in zip(("train", "eval"), loaded, strict=True):
        if dataset is None:
            continue
        print(f"{name}: {len(dataset)} rows; columns: {', '.join(dataset.column_names)}")
        for number, row in enumerate(dataset.select(range(min(arguments.rows, len(dataset))))):
            print(f"\nrow {number}")
            for line in _shown(tokenizer, row, given(row), samples):
                print(line)
        print(flush=True)
        begin(f"counting the tokens of {len(dataset)} rows")
        said = _lengths(dataset, tokenizer, given, samples, _limit(args))
        begin("")
        print(said)
    if config.environment.use:
        print("an environment may add to a prompt when it begins a completion; that is not shown here")
    return 0


def _template_arguments(config: Any, tokenizer: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Further arguments of the chat template for a row: those of the run, and its tools' schemas."""
    from qlora_rl.train.setup.tools import check_template, schemas

    given = config.data.chat_template_kwargs
    if not (config.tools.use or config.environment.use):
        return lambda row: given
    template = check_template(tokenizer, config.base.model)
    of_row = schemas(config.tools.use or [], config.environment.use)
    return lambda row: given | {"tools": of_row(row) or None, "chat_template": template}


def _sequences(row: Mapping[str, Any], samples: bool = False) -> dict[str, Any]:
    """What of a row becomes tokens, by name: what the policy is asked (where it `samples`, that alone), or what it is
    trained on.

    Raises:
        ConfigConflictError: it holds nothing of that.
    """
    if "input_ids" in row:
        return {"input_ids": row["input_ids"]}
    answers = [name for name in ("completion", "chosen", "rejected") if row.get(name) is not None]
    prompt = row.get("prompt")
    if answers and not samples:
        return {name: row[name] if prompt is None else _joined(prompt, row[name]) for name in answers}
    names = ("prompt",) if samples else ("prompt", "messages", "text")
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise ConfigConflictError(
            f"reading the rows: one has nothing in {' or '.join(names)}: {str(dict(row))[:_SHOWN]}. Fill it in, or "
            "remove it."
        )
    return {name: row[name]}


def _joined(prompt: Any, answer: Any) -> Any:
    if isinstance(prompt, str) != isinstance(answer, str):
        raise ConfigConflictError(
            "reading the rows: one has text and messages. Set [data] format = 'chat', which makes messages of the text."
        )
    return prompt + answer


def _ids(
    tokenizer: Any, name: str, value: Any, given: Mapping[str, Any], images: Sequence[Any] | None = None
) -> list[int]:
    from qlora_rl.engine.images import token_ids
    from qlora_rl.inference.prompts import encode, with_images

    if name == "input_ids":
        return list(value)
    if name in ("prompt", TEACHER_COLUMN) or isinstance(value, str):
        return token_ids(encode(tokenizer, with_images(value, images) if images else value, **given))
    try:
        made = tokenizer.apply_chat_template(list(value), tokenize=True, return_dict=True, **given)
    except Exception as error:  # jinja's, or whatever else a template comes to
        raise ConfigConflictError(
            f"reading the rows: the chat template does not take the {name}: {type(error).__name__}: {error}. "
            "Change the messages to what it "
            "takes, or use another template."
        ) from error
    return list(made["input_ids"])


def _shown(tokenizer: Any, row: Mapping[str, Any], given: Mapping[str, Any], samples: bool) -> Iterator[str]:
    sequences = _sequences(row, samples)
    if row.get(TEACHER_COLUMN) is not None:
        sequences[TEACHER_COLUMN] = row[TEACHER_COLUMN]
    for name, value in sequences.items():
        ids = _ids(tokenizer, name, value, given, row.get(IMAGES))
        yield f"  {name}, {len(ids)} tokens:"
        yield from (f"    {line}" for line in _text(tokenizer, ids).splitlines())
    for number, image in enumerate(row.get(IMAGES) or []):
        yield f"  image {number}: {image.width} x {image.height} pixels"
    for name, value in row.items():
        if name not in sequences and name not in ("prompt", IMAGES):
            text = str(value)
            yield f"  {name}: {text[:_SHOWN]}{' ...' if len(text) > _SHOWN else ''}"


def _text(tokenizer: Any, ids: list[int]) -> str:
    """The tokens of an image as one, and how many they are."""
    image = getattr(tokenizer, "image_token", None)
    text = str(tokenizer.decode(ids))
    if not isinstance(image, str):
        return text
    return re.sub(f"(?:{re.escape(image)})+", lambda found: f"{image} x {len(found[0]) // len(image)}", text)


class _Limit(NamedTuple):
    """Tokens that a row may have (`most`), of which `field` holds `whole`, and a completion the rest."""

    field: str
    whole: int
    rest: int = 0
    of_rest: str = ""

    @property
    def most(self) -> int:
        return self.whole - self.rest

    def __str__(self) -> str:
        return f"{self.field}={self.whole}" + (f" - {self.of_rest}={self.rest}" if self.of_rest else "")

    def advice(self, counts: Sequence[int]) -> str:
        """What becomes of the rows that have more, and what to do; empty where there are none."""
        if not any(count > self.most for count in counts):
            return ""
        if not self.of_rest:
            return f"\n  What is beyond is cut off. To learn all of it, raise [train] {self.field}."
        if full := sum(count >= self.whole for count in counts):
            return (
                f"\n  {full} of them leave no room for a completion, and training stops there. Raise [train] "
                f"{self.field}, or remove these rows."
            )
        return (
            f"\n  Their completions are cut off at {self.whole} tokens in all. If these rows matter, raise [train] "
            f"{self.field}."
        )


def _limit(args: Any) -> _Limit | None:
    if hasattr(args, "vllm_max_model_length"):
        field, of_rest = "vllm_max_model_length", "max_completion_length"
    else:
        field, of_rest = "max_length", "max_new_tokens" if hasattr(args, "max_new_tokens") else ""
    whole, rest = getattr(args, field, None), getattr(args, of_rest) if of_rest else 0
    return None if whole is None or rest is None else _Limit(field, whole, rest, of_rest)


def _lengths(
    dataset: Any,
    tokenizer: Any,
    given: Callable[[Mapping[str, Any]], dict[str, Any]],
    samples: bool,
    limit: _Limit | None,
) -> str:
    whole, has_images = len(dataset), IMAGES in dataset.column_names
    if has_images:  # each of which is decoded
        dataset = dataset.select(range(min(_LOOKED_AT, whole)))
    counts = []
    for number, row in enumerate(dataset):
        count("row", number, len(dataset))
        sequences = _sequences(row, samples).items()
        counts.append(max(len(_ids(tokenizer, name, value, given(row), row.get(IMAGES))) for name, value in sequences))
    counts.sort()
    said = f"tokens of a row: {counts[0]} to {counts[-1]}, median {statistics.median(counts):.0f}"
    said += f" (of the first {len(counts)})" if len(counts) < whole else ""
    if limit is None:
        return said
    over = sum(count > limit.most for count in counts)
    return f"{said}; {over} of {len(counts)} rows have more than {limit.most} ({limit}){limit.advice(counts)}"
