"""`Finding`: one line of an examination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """What was found about one thing.

    Attributes:
        part: section of the screen.
        name: of the thing.
        found: what is here.
        state: "ok"; "note" for what some runs lack; "problem" for what keeps a run on this machine from working.
        advice: what to do, where the state is not "ok".
    """

    part: str
    name: str
    found: str
    state: State = "ok"
    advice: str = ""
