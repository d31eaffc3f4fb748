"""What each test costs: `QLORA_RL_TEST_COSTS=build/costs pytest ...`, then `python tests/costs.py build/costs`.

Processor seconds, of this process and of all that it started, and the processes and engines behind them. The clock
would show what else the machine does.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

_started: Counter = Counter()


def _count(event: str, args: tuple) -> None:
    if event == "subprocess.Popen":
        _started["processes"] += 1
    elif event == "os.fork":
        _started["forks"] += 1


def _count_engines() -> None:
    """vLLM is loaded by the tests that need it, so the count begins after that."""
    module = sys.modules.get("vllm.entrypoints.llm")
    if module is None or hasattr(module.LLM, "counted"):
        return
    begin = module.LLM.__init__

    def counted(self, *args, **kwargs):
        _started["engines"] += 1
        begin(self, *args, **kwargs)

    module.LLM.__init__, module.LLM.counted = counted, True


def processor_seconds() -> float:
    """Of this process, of its children that have ended, and of those that have not."""
    import psutil

    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.Error:
            continue
    return total


class Costs:
    """A plugin that writes one line for each phase of each test."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"{os.getpid()}.jsonl").open("a")
        sys.addaudithook(_count)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        """Fixtures, those of the module and of the session with the first test that asks."""
        return (yield from self._measure(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item):
        """The test itself."""
        return (yield from self._measure(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item):
        """The ends of the fixtures."""
        return (yield from self._measure(item, "teardown"))

    def _measure(self, item, phase):
        _count_engines()
        before, clock, cpu = Counter(_started), time.monotonic(), processor_seconds()
        try:
            return (yield)
        finally:
            line = {
                "test": item.nodeid,
                "phase": phase,
                "cpu_s": round(processor_seconds() - cpu, 3),
                "wall_s": round(time.monotonic() - clock, 3),
                **(_started - before),
            }
            if line["cpu_s"] >= 0.02 or line["wall_s"] >= 0.02:
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()


def report(directory: Path, longest: int = 100) -> str:
    """Files, then phases of tests, those with the most processor time first."""
    lines = [json.loads(line) for file in sorted(directory.glob("*.jsonl")) for line in file.read_text().splitlines()]
    files: dict[str, Counter] = defaultdict(Counter)
    for line in lines:
        files[line["test"].partition("::")[0]].update({k: v for k, v in line.items() if k not in ("test", "phase")})
    rows = [f"{'cpu_s':>8}{'wall_s':>8}{'processes':>10}{'forks':>6}{'engines':>8}"]
    for name, all_of in sorted(files.items(), key=lambda each: -each[1]["cpu_s"]):
        rows.append(_row(all_of) + name)
    rows.append("")
    for line in sorted(lines, key=lambda each: -each["cpu_s"])[:longest]:
        rows.append(_row(line) + f"{line['test']} {line['phase']}")
    return "\n".join(rows)


def _row(of) -> str:
    return (
        f"{of['cpu_s']:8.1f}{of['wall_s']:8.1f}{of.get('processes', 0):10d}{of.get('forks', 0):6d}"
        f"{of.get('engines', 0):8d}  "
    )


if __name__ == "__main__":
    print(report(Path(sys.argv[1])))
