"""What KTO asks of its config and of its rows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from qlora_rl.errors import ConfigConflictError, collected

# How CSV spells labels of KTO.
_LABELS = {word: True for word in ("true", "True", "TRUE", "1")} | {
    word: False for word in ("false", "False", "FALSE", "0")
}


def kto_contradictions(args: Any) -> list[str]:
    """What TRL's KTOTrainer finds in its config when the model is loaded already."""
    if args.loss_type == "apo_zero_unpaired":
        return []
    found, way = [], "or use loss_type='apo_zero_unpaired', which has no KL"
    if args.per_device_train_batch_size < 2:
        found.append(
            f"per_device_train_batch_size={args.per_device_train_batch_size}: KTO pairs each prompt with the "
            f"completion of another row of its micro-batch to measure a KL. Use 2 or more, {way}"
        )
    if args.train_sampling_strategy != "sequential":
        found.append(
            f"train_sampling_strategy={str(args.train_sampling_strategy)!r}: KTO measures its KL over neighbouring "
            f"rows. Leave it out, {way}"
        )
    return found


def kto_row_problems(dataset: Any, labels: Collection[Any] = (True, False)) -> list[str]:
    """What KTO cannot learn from in the columns and labels of a dataset; a stream may not say which columns it has.

    Args:
        dataset: of the trainer.
        labels: what the column label may hold; 0 and 1 are truth values.
    """
    there = getattr(dataset, "column_names", None) or ()
    if {"chosen", "rejected"} <= set(there):
        # TRL copies these over the ones that it makes of a pair.
        if own := [name for name in ("completion", "label") if name in there]:
            are = "is a column" if len(own) == 1 else "are columns"
            return [
                f"{', '.join(own)} {are} besides chosen and rejected, of which KTO makes a completion and a label. "
                "Rename what is not meant (in a run's file: [data] columns), or remove it"
            ]
        return []
    if there and (missing := [name for name in ("prompt", "completion", "label") if name not in there]):
        columns = f"column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        return [f"there is no {columns}, nor chosen and rejected; there are {', '.join(there)}"]
    if not there or not hasattr(dataset, "__len__"):
        return []
    held = dataset.select_columns(["label"]).with_format("arrow")[:]["label"].to_pylist()
    wrong = next((row for row, value in enumerate(held) if value not in labels), None)
    if wrong is None:
        return []
    return [f"the label of row {wrong} is {held[wrong]!r}. Write true for a good completion, false for one to avoid"]


def mixed_completions(dataset: Any, seed: int) -> Any:
    """Rows for KTO, which TRL takes in their order: pairs are taken apart, and all rows are shuffled; `None` stays.

    Labels that are text, as all cells of CSV are, are read: true, false, 1, 0.

    Raises:
        ConfigConflictError: columns that are not KTO's, or a label that is none.
    """
    if dataset is None:
        return None
    from datasets import Value
    from trl.data_utils import maybe_extract_prompt, unpair_preference_dataset

    is_text = dataset.features.get("label") == Value("string")
    if found := kto_row_problems(dataset, _LABELS if is_text else (True, False)):
        raise collected("loading the data", found, ConfigConflictError)
    if "label" not in dataset.column_names:
        dataset = unpair_preference_dataset(dataset.map(maybe_extract_prompt))
    elif is_text:
        labels = [_LABELS[each] for each in dataset["label"]]
        dataset = dataset.remove_columns("label").add_column("label", labels)
    return dataset.shuffle(seed=seed)
