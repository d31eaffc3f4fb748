"""`verify_base`: training starts only when both sides hold the same base, bit for bit; what can be repaired is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qlora_rl.base.fingerprint import Diff, compare, fingerprint_base, recorded_fingerprint
from qlora_rl.contracts import BaseFingerprint, BaseHolder
from qlora_rl.errors import BaseMismatchError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseCheck:
    """The result of the base verification.

    Attributes:
        ours: fingerprint of the trainer's base.
        theirs: of the engine's, after the repair.
        repaired: largest relative error of the scales of each weight that was repaired.
        diff: what still differs.
    """

    ours: BaseFingerprint
    theirs: BaseFingerprint
    repaired: Mapping[str, float]
    diff: Diff

    @property
    def is_verified(self) -> bool:
        """Both sides hold the same base."""
        return self.diff.state == "equal"

    def as_dict(self) -> dict[str, Any]:
        """For the run directory's fingerprints.json."""
        return {
            "verified": self.is_verified,
            "repaired": dict(self.repaired),
            "differences": [str(entry) for entry in self.diff.entries],
            "ours": self.ours.as_dict(),
            "theirs": self.theirs.as_dict(),
        }


def verify_base(
    model: Any | BaseFingerprint, engine: BaseHolder, *, allow_base_mismatch: bool = False, repair: bool = True
) -> BaseCheck:
    """Compare the trainer's base with the engine's; repair rounded scales and compare again.

    A model that borrows the engine's tensors (`borrow_base`) is compared with the base directory's fingerprint too.

    Args:
        model: the trainer's (bare or PeftModel; only read), or its fingerprint.
        engine: whose weights are read, and whose scales are written where they were rounded.
        allow_base_mismatch: go on, with a warning, when the bases differ.
        repair: write exact scales back.

    Raises:
        BaseMismatchError: they differ; names the first weight, both values and the way out.
    """
    ours = model if isinstance(model, BaseFingerprint) else fingerprint_base(model)
    theirs = engine.describe_base()
    diff = compare(ours, theirs)
    bare: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    loan = getattr(bare, "qlora_loan", None)
    if loan is not None and not diff.entries:
        # Both sides read one storage, so that they agree says little: the directory is what they must agree with.
        diff = compare(recorded_fingerprint(bare.qlora_base), theirs)
    dense = {leaf.kind for leaf in theirs.leaves.values()}
    if not isinstance(model, BaseFingerprint) and len(dense) == 1 and any(e.how == "type" for e in diff.entries):
        # The engine may serve the baked form of this very base: then it holds the weights that our codes stand for.
        baked = fingerprint_base(model, baked=getattr(torch, dense.pop()))
        found = compare(baked, theirs)
        if found.state == "equal":
            return BaseCheck(baked, theirs, {}, Diff())
        if len(found.modules) < len(diff.modules):  # that it is, and something is wrong in it
            ours, diff = baked, found
    repaired: Mapping[str, float] = {} if loan is None else loan.repaired
    if repair and diff.state == "repairable":
        repaired = engine.repair_base()
        theirs = engine.describe_base()
        diff = compare(ours, theirs)
    if repaired:
        logger.info("scales of %d weights were rounded by the engine's loader and are exact again", len(repaired))
    base_check = BaseCheck(ours, theirs, repaired, diff)
    if base_check.is_verified:
        return base_check
    other_form = _is_another_form(ours, theirs, diff)
    message = explain(diff, engine.capabilities().name, same=_same_directory(bare, engine), is_other_form=other_form)
    if not allow_base_mismatch:
        raise BaseMismatchError(message, reasons=[str(entry) for entry in diff.entries], module=diff.modules[0])
    logger.warning("%s (allow_base_mismatch=True: going on, every metric is marked)", message)
    return base_check


def _same_directory(model: Any, engine: BaseHolder) -> str:
    """The base directory that both sides have loaded, where that is known and one."""
    ours, theirs = getattr(model, "qlora_base", None), getattr(engine, "base", None)
    is_one = isinstance(theirs, Path) and ours is not None and theirs.resolve() == ours.path.resolve()
    return str(theirs) if is_one else ""


def _is_another_form(ours: BaseFingerprint, theirs: BaseFingerprint, diff: Diff) -> bool:
    """Two forms of one base: all facts of it and some plain weights are equal, and others differ in name, shape or
    dtype alone."""
    is_one_model = "config" in ours.facts and "config" in theirs.facts
    plain = (leaf == theirs.leaves.get(name) for name, leaf in ours.leaves.items() if leaf.scales is None)
    forms = {"missing", "unexpected", "shape", "type"}
    is_coded = any(
        entry.how == "type" and not {entry.ours, entry.theirs}.isdisjoint({"nf4", "fp4"}) for entry in diff.entries
    )
    return is_one_model and any(plain) and not is_coded and forms.issuperset(entry.how for entry in diff.entries)


def explain(diff: Diff, engine: str, *, same: str = "", is_other_form: bool = False) -> str:
    """The sentence for people: what differs first, how much more does, and what to do.

    Args:
        same: directory that both sides have loaded, if it is one.
        is_other_form: vLLM holds the same base, and some of it otherwise than transformers.
    """
    first, more = diff.entries[0], len(diff.modules) - 1
    facts = [entry.how for entry in diff.entries if entry.name == f"({entry.how})"]
    also = f", and so do {more} more" if more else ""
    also += f", among them {', '.join(facts)}" if more and facts else ""
    hint = "Let both sides load one base made by `qlora-rl prepare`"
    types = {entry.how for entry in diff.entries}
    if same:
        hint = (
            f"Both sides have loaded {same}: something has written to one of them, or vLLM holds this weight in "
            "another form. Start the engine again; if they differ again, models of this type are not supported: use "
            "one of another type"
        )
    elif is_other_form:
        hint = (
            "Both sides hold the same base, and vLLM some of it in a form of its own: models of this type are not "
            "supported. Use one of another type"
        )
    elif "type" in types:
        hint += " (vLLM's own in-flight quantisation is always NF4 with double quantisation, whatever the trainer uses)"
    elif "blocksize" in types or "table" in types:
        hint += "; they were quantised with other settings"
    elif "scales" in types and not types & {"codes", "values", "shape", "missing", "unexpected"}:
        hint = (
            "Only scales differ, and the engine's base directory has them so: the base of each side was quantised "
            "apart. Copy the directory of one side to the other, or prepare both with this version; in the place of a "
            "model that bitsandbytes has quantised while it was loaded, pass load_base(the engine's directory)"
        )
    return (
        f"verifying the base: {first}{also} on {engine}. {hint}, or pass allow_base_mismatch=True to go on with "
        "other weights."
    )
