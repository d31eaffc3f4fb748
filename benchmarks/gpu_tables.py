"""The tables of benchmarks/results/gpu.json, which scripts/gpu_check.py writes (until then: not run yet), and the
sentences that it decides."""

from __future__ import annotations

import re
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SENTENCES = Path(__file__).with_name("gpu_sentences.toml")
BAD = ("failed", "timed out")
NOT_YET = "| GPU | |\n|---|---|\n| none | **not run yet** |"


def stacks(result: dict[str, Any]) -> str:
    """A GPU with its versions to a line: how many pieces passed, and which did not."""
    if not result:
        return NOT_YET
    lines = [
        "| GPU | Python, torch, vLLM | commit | passed | did not pass | not run, or left |",
        "|---|---|---|---|---|---|",
    ]
    for check in result.values():
        pieces, packages = check["pieces"], check["packages"]
        bad = [f"{name} ({', '.join([p['status'], *_wrong(p)])})" for name, p in pieces.items() if p["status"] in BAD]
        other = [n for n in check["planned"] if n not in pieces or pieces[n]["status"] in ("not run", "cut off")]
        passed = sum(p["status"] == "passed" for p in pieces.values())
        stack = f"{check['python']}, {packages.get('torch')}, {packages.get('vllm')}"
        lines.append(
            f"| {check['gpu']} | {stack} | `{check['commit']}` | {passed} of {len(check['planned'])} | "
            f"{', '.join(bad) or 'none'} | {', '.join(other) or 'none'} |"
        )
    return "\n".join(lines)


def _wrong(piece: Mapping[str, Any]) -> list[str]:
    """The facts and tests of a piece that are not as they should be."""
    facts = [fact["fact"] for fact in piece.get("facts", []) if not fact["ok"]]
    return [*facts, *(f"`{test}`" for test, said in piece.get("tests", {}).items() if said in ("FAILED", "ERROR"))]


def sentences() -> list[dict[str, Any]]:
    """What gpu_sentences.toml has."""
    return tomllib.loads(SENTENCES.read_text())["sentence"]


def say(page: str, text: str, result: dict[str, Any]) -> str:
    """`text` of `page` with what the newest check decides, in which the pieces of a sentence have ended."""
    for sentence in sentences():
        outcome = decided(sentence["pieces"], result)
        if sentence["page"] == page and outcome and (there := place(sentence, text)):
            text = text[: there.start()] + sentence[outcome] + text[there.end() :]
    return text


def place(sentence: Mapping[str, Any], text: str) -> re.Match[str] | None:
    """Where a page says it, in one of its three forms; a break of lines is a space."""
    forms = (r"\s+".join(map(re.escape, sentence[key].split())) for key in ("now", "passed", "failed"))
    return next((found for form in forms if (found := re.search(form, text))), None)


def decided(names: Sequence[str], result: dict[str, Any]) -> str | None:
    """ "passed" or "failed", or None where that is open."""
    for check in reversed(result.values()):
        ends = [check["pieces"].get(name, {}).get("status") for name in names]
        if any(end in BAD for end in ends):
            return "failed"
        if all(end == "passed" for end in ends):
            return "passed"
    return None


def numbers(result: dict[str, Any]) -> str:
    """What the demo and the benches gave, per GPU."""
    if not result:
        return NOT_YET
    lines = ["| GPU, vLLM | what | here |", "|---|---|---|"]
    for check in result.values():
        where = f"{check['gpu']}, {check['packages'].get('vllm')}"
        lines += [f"| {where} | {what} | {shown} |" for what, shown in _figures(check["pieces"])]
    return "\n".join(lines)


def _figures(pieces: dict[str, Any]) -> Iterator[tuple[str, str]]:
    held = {name: piece["numbers"] for name, piece in pieces.items() if "numbers" in piece}
    if "demo" in held:
        run = held["demo"]
        yield "demo, right before and after", f"{run['accuracy_before']:.1%}, {run['accuracy_after']:.1%}"
        yield "demo, mismatch KL, median and worst", f"{run['mismatch_kl_median']:.1e}, {run['mismatch_kl_max']:.1e}"
        yield "demo, one push", f"{1e3 * run['sync_seconds_median']:.1f} ms"
    for name, piece in pieces.items():
        for fact in piece.get("facts", []):
            if fact["fact"].startswith(("copy", "bf16", "mismatch", "push 3")) and fact["value"] is not None:
                yield f"{name}, {fact['fact']}", _shown(fact["value"])
    for name, found in held.items():
        if name.startswith("memory"):
            for facts in found.values():
                for length, row in facts["lengths"].items():
                    real = row["measured"].get("peak of the allocator", row["measured"]["peak"])
                    shown = (
                        f"{real / 2**30:.2f} GiB, planned {row['planned']['peak'] / real:.2f}x, {row['seconds']:.2f} s"
                    )
                    yield f"a step of {length} tokens, {facts['size']}, {facts['layers']} layers", shown
        elif name.startswith("gemm"):
            for check in found.values():
                by_tokens: dict[str, list[float]] = {}
                for shape in check["shapes"].values():
                    for tokens, row in shape["tokens"].items():
                        ways = [ratio for way, ratio in row["ratio"].items() if way != "bf16"]
                        by_tokens.setdefault(tokens, []).append(max(ways))
                shown = ", ".join(f"{tokens}: {statistics.median(best):.2f}x" for tokens, best in by_tokens.items())
                yield f"{name}, the fastest way against bitsandbytes' parts, by tokens", shown
        elif name.startswith("bench-sync"):
            ratio = found["ratio"]["float32"]
            pushed = f"{1e3 * found['seconds']['in_place_float32']['median']:.1f} ms"
            yield (
                f"a push in place, {found['size']}, TRL's merge against it",
                f"{pushed}, {ratio['trl_merge_to_in_place']:.0f}x",
            )
        elif name.startswith("bench-rollout"):
            for shape, facts in found.items():
                for way, row in facts["modes"].items():
                    yield f"rollout, {shape}, `{way}` / stock vLLM", f"{row['ratio']:.2f}x, {row['ours']:.0f} tokens/s"
        elif name.startswith("bench-step"):
            for shape, facts in found.items():
                row = facts["modes"]["step"]
                yield f"a step, {shape}, against TRL", f"{row['ratio']:.2f}x as fast, {1e3 * row['ours']:.0f} ms"
        elif name.startswith("field-"):
            for contender in found["contenders"].values():
                run = next(iter(contender["runs"].values()), None)
                if run is None:
                    yield contender["title"], f"{contender['status']}: `{contender['why']}`"
                elif "accuracy_after" in run:
                    yield contender["title"], f"right {run['accuracy_after']:.1%}, {run['steps_per_s']:.2f} steps/s"
                else:
                    yield contender["title"], f"{run['tokens_per_s']:.0f} tokens/s"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    return f"{value:.2g}" if isinstance(value, float) else str(value)
