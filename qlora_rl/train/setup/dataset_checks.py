"""What the rows of a dataset must hold, as far as it shows before the training begins."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from qlora_rl.base.model_classes import directory_takes_images, load_processor
from qlora_rl.base.writer import check_vocabulary
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError
from qlora_rl.rewards.load import OF_REWARDS

# Columns that hold conversations.
_SAID = ("prompt", "completion", "chosen", "rejected", "messages")
_LOOKED_AT = 10_000  # rows whose messages are looked at


def check_datasets(*datasets: Any, why: str = "this trainer takes text prompts only") -> list[str]:
    """Columns that hold images, as far as they show; what columns do not show, the bridge rejects.

    Args:
        datasets: of the trainer; `None` and dictionaries are fine.
        why: images cannot be sampled from, in words; empty where they can.

    Raises:
        NotYetSupportedError: names the columns.
    """
    columns = {name for part in parts(datasets) for name in (getattr(part, "column_names", None) or [])}
    found = sorted(columns & {"image", "images"})
    if found and why:
        reject_images(found, why)
    return found


def check_prompts(args: Any, *datasets: Any) -> None:
    """Every dataset has the column that all online trainers read, in every row; a stream may not say which columns it
    has.

    Raises:
        ConfigConflictError: names the columns that there are, the row without a prompt, or columns that reward
            functions cannot be given.
    """
    for part in parts(datasets):
        columns = getattr(part, "column_names", None)
        taken = [name for name in OF_REWARDS if name in (columns or ()) and name != "environments"]
        if taken and not args.remove_unused_columns:
            raise ConfigConflictError(
                f"reading the dataset: its columns {', '.join(taken)} have names of arguments that TRL gives reward "
                f"functions itself. Rename them: dataset.rename_column({taken[0]!r}, 'given_{taken[0]}'), or in a "
                "run's file [data] columns."
            )
        if columns and "prompt" not in columns:
            raise ConfigConflictError(
                f"reading the dataset: it has no column prompt, but {', '.join(sorted(columns))}. Rename the one that "
                "holds the prompts: dataset.rename_column(name, 'prompt')."
            )
        if columns and hasattr(part, "select_columns") and hasattr(part, "__len__"):
            prompts = part.select_columns(["prompt"]).with_format("arrow")[:]["prompt"]
            if prompts.null_count:
                raise ConfigConflictError(
                    f"reading the dataset: row {prompts.is_null().to_pylist().index(True)} has no prompt. Fill it in, "
                    "or remove the row: dataset.filter(lambda row: row['prompt'] is not None)."
                )


def check_ids(rows: int, *datasets: Any) -> None:
    """Token ids that rows bring themselves have a row in the embedding; a stream is not looked at.

    Args:
        rows: of the embedding.

    Raises:
        ConfigConflictError: names the row and the id.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    for part in parts(datasets):
        columns = getattr(part, "column_names", None) or ()
        for name, least in {"input_ids": 0, "labels": -100}.items():  # which the loss leaves out
            if name not in columns or not (hasattr(part, "select_columns") and hasattr(part, "__len__")):
                continue
            before = 0
            for chunk in part.select_columns([name]).with_format("arrow")[:][name].chunks:
                if not (pa.types.is_list(chunk.type) and pa.types.is_integer(chunk.type.value_type)):
                    break  # no token ids
                ids = chunk.flatten()
                first = pc.index(pc.or_(pc.less(ids, least), pc.greater_equal(ids, rows)), True).as_py()
                if first >= 0:
                    row = before + pc.list_parent_indices(chunk)[first].as_py()
                    raise ConfigConflictError(
                        f"reading the dataset: {name} of row {row} hold {ids[first].as_py()}, and the embedding of the "
                        f"base has {rows} rows, for ids 0 to {rows - 1}. Make them with the base's tokenizer."
                    )
                before += len(chunk)


def check_template(processing_class: Any, *datasets: Any) -> None:
    """Messages need a chat template; the first row of each dataset is looked at, a stream is not.

    Raises:
        ConfigConflictError: the tokenizer has none.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if getattr(processing_class, "chat_template", None) or getattr(tokenizer, "chat_template", None):
        return
    for part in parts(datasets):
        if hasattr(part, "__len__") and len(part) and _is_talk(part[0].get("prompt")):
            raise ConfigConflictError(
                "reading the dataset: its prompts are messages, and the base has no chat template. Pass text prompts, "
                "or a tokenizer with a template as processing_class."
            )


def rendered(dataset_kwargs: Any, *datasets: Any) -> list[Any]:
    """The datasets of SFT whose messages TRL renders: it leaves those with tokens as they are, and all where
    `dataset_kwargs` say so."""
    if isinstance(dataset_kwargs, Mapping) and dataset_kwargs.get("skip_prepare_dataset"):
        return []
    return [part for part in parts(datasets) if "input_ids" not in (getattr(part, "column_names", None) or ())]


def check_messages(
    processing_class: Any, *datasets: Any, given: Mapping[str, Any] | None = None, is_online: bool = True
) -> None:
    """The chat template takes the messages: those of the first rows are rendered, of each sequence of roles one. A
    stream is not looked at.

    Args:
        processing_class: a tokenizer or a processor.
        given: arguments of the chat template; those of a row come from its columns `chat_template_kwargs` and `tools`,
            as TRL has it.
        is_online: the prompts alone are rendered, and completions sampled.

    Raises:
        ConfigConflictError: names the row, and what the template says.
    """
    for part in parts(datasets):
        if not hasattr(part, "__len__"):
            continue
        seen = set()
        columns = getattr(part, "column_names", None)
        known = [name for name in (*_SAID, "chat_template_kwargs", "tools") if name in (columns or ())]
        rows = part.select_columns(known) if known and hasattr(part, "select_columns") else part
        for number in range(min(len(rows), _LOOKED_AT)):
            row = rows[number]
            if isinstance(prompt := row.get("prompt"), list) and not _is_talk(prompt):
                raise ConfigConflictError(
                    f"reading the dataset: the prompt of row {number} is a list, but not of messages: "
                    f"{reprlib.repr(prompt)}. Pass a text, or messages: "
                    "[{'role': 'user', 'content': '...'}]."
                )
            for name, messages, asks in _talks(row, is_online):
                shape = (name, *(message.get("role") for message in messages))
                if shape in seen:
                    continue
                seen.add(shape)
                tools = json.loads(said) if isinstance(said := row.get("tools"), str) else said
                of_row = {} if is_online else {"tools": tools, **(row.get("chat_template_kwargs") or {})}
                try:
                    processing_class.apply_chat_template(
                        list(messages), tokenize=False, add_generation_prompt=asks, **{**(given or {}), **of_row}
                    )
                except Exception as error:  # jinja's, or whatever else a template comes to
                    roles = ", ".join(map(str, shape[1:]))
                    system = (
                        " A template without a system role takes the instruction in the user's message: in a run's "
                        "file [data] prompt_template in place of system_prompt."
                    )
                    raise ConfigConflictError(
                        f"reading the dataset: the chat template does not take the {name} of row {number}, whose roles "
                        f"are {roles}: {type(error).__name__}: {error}. Change the messages to what it takes, or use "
                        f"another template (processing_class).{system if 'system' in shape else ''}"
                    ) from error


def _talks(row: Mapping[str, Any], is_online: bool) -> Iterator[tuple[str, Sequence[Mapping[str, Any]], bool]]:
    """The conversations of a row that are rendered: name, messages, whether an answer follows."""
    prompt, answers = row.get("prompt"), {name: row.get(name) for name in _SAID[1:]}
    is_talk = _is_talk(prompt)
    if is_talk:
        yield "prompt", prompt, True
    for name, said in answers.items():
        if not is_online and _is_talk(said):
            yield name, [*prompt, *said] if is_talk and name != "messages" else said, False


def _is_talk(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def why_no_step(args: Any, dataset: Any) -> str:
    """Why TRL's sampler, which leaves out a batch of prompts that is not whole, gives none; empty where it gives
    some."""
    size = getattr(args, "generation_batch_size", None)
    if not size or not hasattr(dataset, "__len__") or len(dataset) >= (needed := size // args.num_generations):
        return ""
    return (
        f"the dataset has {len(dataset)} rows, and a batch takes {needed} prompts (generation_batch_size={size}, "
        f"num_generations={args.num_generations}): not one step will be made. Pass more rows, or lower "
        "per_device_train_batch_size or gradient_accumulation_steps"
    )


def lost_rows(given: int, left: int, name: str, max_length: int | None) -> str:
    """That TRL has dropped rows of a dataset, in words; empty where it has not.

    Raises:
        ConfigConflictError: all of them.
    """
    doing, why = f"reading the {name} dataset", f"max_length={max_length} leaves nothing of them to learn from"
    if not left:
        raise ConfigConflictError(
            f"{doing}: all of its {given} rows would be left out: {why}, as where the prompt alone fills it. Raise "
            "max_length, or shorten the prompts."
        )
    if left >= given:
        return ""
    return (
        f"{doing}: {given - left} of its {given} rows are left out: {why}, as where the prompt alone fills it; raise "
        "max_length, or shorten the prompts"
    )


def parts(datasets: Sequence[Any]) -> list[Any]:
    """`None` is left out, and of a dictionary all values are there."""
    return [part for d in datasets if d is not None for part in (d.values() if isinstance(d, dict) else [d])]


def check_processor(processing_class: Any, base: Path, *, is_given: bool) -> None:
    """Reject a tokenizer with tokens that the base has no embedding for, and an image processor that is not the one
    stored with the base, with which the engine processes images.

    Args:
        is_given: it was passed to the trainer; else it is the one stored with the base.

    Raises:
        ConfigConflictError: names the tokens, or what differs.
    """
    config = json.loads((base / "config.json").read_text())
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if rows:
        doing = "reading processing_class" if is_given else f"reading the tokenizer of the base {base}"
        check_vocabulary(processing_class, rows, doing, lambda: load_processor(base) if is_given else processing_class)
    given = getattr(processing_class, "image_processor", None)
    if given is None or not directory_takes_images(base):
        return
    from transformers import AutoProcessor

    ours, theirs = given.to_dict(), AutoProcessor.from_pretrained(base).image_processor.to_dict()
    differs = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    if differs:
        raise ConfigConflictError(
            "reading processing_class: its image processor differs from the one stored with the base in "
            f"{', '.join(differs)}, and the engine uses that. Leave processing_class out, or prepare the base with it: "
            "prepare_base(model, tokenizer=processor)."
        )


def reject_images(columns: Sequence[str], why: str) -> NoReturn:
    """Raise `NotYetSupportedError`."""
    raise NotYetSupportedError(
        f"reading the dataset: its column {', '.join(columns)} holds images, and {why}. Remove the column and use text "
        "prompts."
    )
