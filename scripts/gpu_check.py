"""Everything that needs an NVIDIA GPU, in pieces of at most nine minutes; what was done is not done again.

    python scripts/gpu_check.py [--wheels DIR] [--budget SECONDS] [--only WORD ...] [--retry] [--out DIR] [--state DIR]
                                [--json FILE]
    python scripts/gpu_check.py --plan           the pieces and their limits; nothing is run

Each piece is a process of its own with a time limit: first the stack, then one test marked `gpu` after the other, the
demo, the benches. Its outcome is a file in the state directory the moment it ends, and counts for this commit, GPU and
versions alone. A check that was stopped, by whatever, goes on with the piece that it was in. Nothing is downloaded.

On a machine that is lent for minutes: --budget says how long the whole check may take. A piece starts while a minute is
left, with what is left as its limit; what the budget cuts off has not failed, and starts again only where more time is
left than it had. --out DIR takes what to bring back, written after each piece: gpu.json, and log.txt with what every
piece printed.

Exit code: 0 no piece failed; 1 some did; 2 bad usage, or the packages do not fit; 3 no NVIDIA GPU, or torch without
CUDA: nothing was run or written; 4 pieces are left, run it again; 130 stopped. `make` turns every code but 0 into 2.

On a machine without network: `make gpu-check ARGS="--wheels DIR --budget 540"`. DIR holds wheels or archives (.tar.xz,
.tar.gz) of site-packages. They are unpacked into runs/gpu-check/site, before the machine's own packages, and `make
setup-dev` is not needed. Fetch them elsewhere, with the dependencies that the machine lacks:

    pip download -d DIR --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
        vllm==0.26.0 bitsandbytes==0.50.2 trl==1.16.0 datasets==5.2.0 pytest iniconfig pluggy

`.venv` is used if there is one, else `python3` (`PYTHON=python3.12 make gpu-check`). Without git, delete
runs/gpu-check/ when the code has changed. FlashInfer's sampler, which needs a compiler, and DeepGEMM are off.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LONGEST_S = 540
LEAST_S = 60  # with less no piece begins: interpreter, torch and vLLM alone take half of it
ENDING_S = 15  # of a budget, for killing what still runs and for writing
PASSED, FAILED, TIMED_OUT, LACKS, CUT_OFF = "passed", "failed", "timed out", "not run", "cut off"
OK, SOME_FAILED, NO_GPU, LEFT, STOPPED = 0, 1, 3, 4, 130
NEEDED = (
    "torch",
    "transformers",
    "peft",
    "trl",
    "accelerate",
    "bitsandbytes",
    "datasets",
    "safetensors",
    "httpx",
    "pydantic",
    "tqdm",
    "vllm",
)
PACKAGES = (*NEEDED[:7], "vllm", "vllm-bnb-plugin", "triton", "qlora-rl")
# Nothing is fetched, nothing reported; the sampler that vLLM would build with a compiler is off.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0",
}  # fmt: skip
PROBE = """
import importlib.metadata as metadata, importlib.util, json, platform, sys
found = {"python": platform.python_version(), "packages": {}, "missing": [], "gpu": None, "why": ""}
for name in sys.argv[1].split(","):
    try: found["packages"][name] = metadata.version(name)
    except metadata.PackageNotFoundError: pass
found["missing"] = [n for n in sys.argv[2].split(",") if importlib.util.find_spec(n) is None]
if "torch" not in found["missing"]:
    import torch
    if torch.cuda.is_available():
        found["gpu"], found["capability"] = torch.cuda.get_device_name(), list(torch.cuda.get_device_capability())
        found["memory_gib"] = torch.cuda.get_device_properties(0).total_memory / 2**30
        found["cuda"] = torch.version.cuda
    else:
        why = "finds no NVIDIA GPU" if torch.version.cuda else "is built without CUDA"
        found["why"] = f"torch {torch.__version__} {why}"
else:
    found["why"] = "torch is not installed"
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Piece:
    """One process.

    Attributes:
        name: also of its directory.
        command: `{python}` is the interpreter, `{out}` the piece's directory; `numbers.json` there is kept.
        limit_s: after which it is killed, with all its children.
        needs: modules besides those that all need.
        lacks_code: the exit code with which it says that something is missing.
    """

    name: str
    command: tuple[str, ...]
    limit_s: int = LONGEST_S
    needs: tuple[str, ...] = ()
    lacks_code: int | None = None


def _is_gpu_mark(node: ast.AST) -> bool:
    return any(
        isinstance(n, ast.Attribute) and n.attr == "gpu" and ast.unparse(n).endswith("mark.gpu") for n in ast.walk(node)
    )


def gpu_tests(tests: Path) -> list[str]:
    """`tests/gpu/test_x.py::test_y` of every function that is marked, or stands in a marked file; read, not
    imported."""
    found = []
    for file in sorted(tests.rglob("test_*.py")):
        tree = ast.parse(file.read_text())
        marks = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
        whole = any(map(_is_gpu_mark, marks))
        for node in tree.body:
            is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            if is_test and (whole or any(map(_is_gpu_mark, node.decorator_list))):
                found.append(f"{file.relative_to(tests.parent)}::{node.name}")
    return found


def plan(tests: Path = ROOT / "tests") -> list[Piece]:
    """All pieces, what tells most first."""
    python = "{python}"

    def bench(what: str, size: str, *options: str) -> Piece:
        command = (
            python,
            "-m",
            "qlora_rl.cli",
            "bench",
            what,
            "--size",
            size,
            *options,
            "--json",
            "{out}/numbers.json",
        )
        return Piece(f"bench-{what}-{size}", command)

    demo = ("demo", "--quiet", "--steps", "100", "--out", "{out}/run")
    pieces = [Piece("demo", (python, "-m", "qlora_rl.cli", *demo), limit_s=300)]
    for test in gpu_tests(tests):
        name = "test-" + test.rpartition("::")[2].removeprefix("test_").replace("_", "-")
        command = (python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", test)
        pieces.append(Piece(name, command, limit_s=300, needs=("pytest",)))
    pieces += [
        bench("sync", "0.4b"),
        bench("rollout", "0.4b", "--minutes", "2"),
        bench("step", "0.1b", "--rounds", "1"),
        bench("step", "0.4b", "--rounds", "1"),
    ]
    for model in ("qwen2.5-0.5b", "qwen2.5-7b", "llama-3.1-8b"):
        command = (python, "benchmarks/nf4_gemm.py", "--models", model, "--json", "{out}/numbers.json")
        pieces.append(Piece(f"products-{model}", command))
    for name in ("qlora_rl", "trl-4bit", "trl-16bit", "torchrl", "unsloth", "draw-nf4", "draw-stock"):
        command = (python, "benchmarks/field.py", "--seeds", "0", "--only", name, "--json", "{out}/numbers.json")
        pieces.append(Piece(f"field-{name}", command, limit_s=300, lacks_code=3))
    assert len({piece.name for piece in pieces}) == len(pieces), "two pieces have one name"
    return pieces


def probe(environment: Mapping[str, str], modules: Iterable[str]) -> dict[str, Any]:
    """GPU, versions and what is missing, asked in a process of its own: this one holds no CUDA context."""
    command = [sys.executable, "-c", PROBE, ",".join(PACKAGES), ",".join(modules)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environment))
    if done.returncode:
        return {"gpu": None, "why": f"asking torch failed: {done.stderr.strip()[-500:]}", "packages": {}, "missing": []}
    return json.loads(done.stdout.splitlines()[-1])


def wrong_plugin(packages: Mapping[str, str]) -> str:
    """What is wrong with vLLM's bitsandbytes: inside of it up to 0.27, a plugin from 0.28 on."""
    parts = re.match(r"(\d+)\.(\d+)", packages.get("vllm", ""))
    if parts is None:
        return ""
    needs_plugin, there = (int(parts[1]), int(parts[2])) >= (0, 28), "vllm-bnb-plugin" in packages
    if needs_plugin and not there:
        return f"vLLM {packages['vllm']} needs vllm-bnb-plugin beside it"
    if there and not needs_plugin:
        return f"vLLM {packages['vllm']} has bitsandbytes inside; vllm-bnb-plugin beside it collides: uninstall it"
    return ""


def unpack(wheels: Path, site: Path) -> list[str]:
    """Wheels (by pip, without their dependencies) and .tar.xz of site-packages into a directory; once each. Names of
    what is new."""
    marks = site / ".unpacked"
    marks.mkdir(parents=True, exist_ok=True)
    files = sorted(f for f in wheels.rglob("*") if f.name.endswith((".whl", ".tar.xz", ".tar.gz")))
    if not files:
        raise SystemExit(f"gpu-check: {wheels} holds no wheel and no archive of site-packages.")
    new = []
    for file in files:
        mark = marks / f"{file.name}-{file.stat().st_size}"
        if mark.exists():
            continue
        if file.suffix == ".whl":
            options = ["--no-index", "--no-deps", "--upgrade", "--quiet", "--target", str(site)]
            subprocess.run(
                [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, str(file)], check=True
            )
        else:
            with tarfile.open(file) as archive:
                archive.extractall(site, filter="data")
        mark.touch()
        new.append(file.name)
    return new


def commit(root: Path = ROOT) -> str:
    """Of the checkout, with a digest of what differs from it; "unknown" without git or in a plain copy."""
    if shutil.which("git") is None:
        return "unknown"

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=root).stdout.strip()

    head, changes = git("rev-parse", "--short=12", "HEAD"), git("diff", "HEAD", "--", ".", ":!benchmarks/results")
    return (head + (f"+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else "")) or "unknown"


def stack_key(stack: Mapping[str, Any], at: str) -> str:
    """What an outcome holds for."""
    packages = stack["packages"]
    parts = [
        stack["gpu"],
        f"python{stack['python']}",
        f"torch{packages.get('torch')}",
        f"vllm{packages.get('vllm')}",
        at,
    ]
    return re.sub(r"[^\w.+-]+", "-", " ".join(map(str, parts)))


def run_piece(
    piece: Piece, home: Path, environment: Mapping[str, str], cwd: Path = ROOT, at_most_s: float = float("inf")
) -> dict[str, Any]:
    """Run it; its outcome is written whole, as `outcome.json`, or not at all when this process is stopped."""
    limit_s = min(piece.limit_s, at_most_s)
    shutil.rmtree(home, ignore_errors=True)  # what a stopped one has left
    home.mkdir(parents=True)
    command = [part.replace("{python}", sys.executable).replace("{out}", str(home)) for part in piece.command]
    started = time.monotonic()
    with (home / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=cwd, env=dict(environment),
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # vLLM's children too, however this ends
            _kill_group(process)
    text = (home / "log.txt").read_text(errors="replace")
    status = FAILED if code else PASSED
    if code is None:
        status = TIMED_OUT if limit_s == piece.limit_s else CUT_OFF
    if code is not None and code == piece.lacks_code:
        status = LACKS
    if status == PASSED and "pytest" in command and not re.search(r"\b\d+ passed", text):
        status = LACKS  # skipped: it needs two GPUs, or a package; pytest says which
    outcome = {"status": status, "code": code, "seconds": round(time.monotonic() - started, 1), "limit_s": limit_s}
    if status != PASSED:
        outcome["tail"] = text[-3000:]
    for name in ("numbers.json", "run/summary.json"):
        if (home / name).exists():
            outcome["numbers"] = json.loads((home / name).read_text())
    _write(home / "outcome.json", outcome)
    return outcome


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    for number, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and _is_alive(process):
            time.sleep(0.05)
    process.wait()


def _is_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(file.name + ".new")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(file)


def _shortened(log: Path, most: int = 400_000) -> str:
    text = log.read_text(errors="replace")
    return text if len(text) <= most else f"{text[: most // 4]}\n[...]\n{text[-3 * most // 4 :]}"


def outcomes(pieces: Sequence[Piece], state: Path) -> dict[str, dict[str, Any]]:
    """Of the pieces that have ended."""
    files = {piece.name: state / piece.name / "outcome.json" for piece in pieces}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def todo(pieces: Sequence[Piece], done: Mapping[str, Mapping[str, Any]], *, retry: bool) -> list[Piece]:
    """Those without an outcome, or cut off by a budget; with `retry` also those that did not pass."""
    again = {
        name
        for name, outcome in done.items()
        if outcome["status"] == CUT_OFF
        or outcome.get("tail", "").startswith("not installed: ")  # it may be by now
        or (retry and outcome["status"] != PASSED)
    }
    return [p for p in pieces if p.name not in done or p.name in again]


def needed_s(piece: Piece, outcome: Mapping[str, Any] | None) -> float:
    """What must be left of a budget for this piece to begin: less than its limit, but more than it had when a budget
    cut it off."""
    had = outcome["limit_s"] + LEAST_S if outcome and outcome["status"] == CUT_OFF else LEAST_S
    return min(piece.limit_s, had)


def run_all(
    pieces: Sequence[Piece],
    state: Path,
    environment: Mapping[str, str],
    *,
    missing: Sequence[str] = (),
    retry: bool = False,
    ends_at: float = float("inf"),
    record: Callable[[], object] = lambda: None,
    cwd: Path = ROOT,
) -> int:
    """Run what is to be done until `ends_at`, of `time.monotonic`; no piece has more time than is left then.

    `record` is called after each piece: what a machine that is taken away has found is not lost.
    """
    left: list[str] = []
    before = outcomes(pieces, state)
    for piece in todo(pieces, before, retry=retry):
        lacking = [name for name in piece.needs if name in missing]
        remaining = ends_at - ENDING_S - time.monotonic()
        if lacking:
            _write(
                state / piece.name / "outcome.json", {"status": LACKS, "tail": f"not installed: {', '.join(lacking)}"}
            )
            print(f"{piece.name}: {LACKS}, not installed: {', '.join(lacking)}", flush=True)
        elif remaining < needed_s(piece, before.get(piece.name)):
            left.append(piece.name)
        else:
            print(f"{piece.name} (at most {min(piece.limit_s, remaining):.0f} s) ...", end=" ", flush=True)
            outcome = run_piece(piece, state / piece.name, environment, cwd, remaining)
            print(f"{outcome['status']} after {outcome['seconds']} s", flush=True)
            if outcome["status"] == CUT_OFF:
                left.append(piece.name)
            record()
    done = outcomes(pieces, state)
    counts = {
        status: sum(o["status"] == status for o in done.values()) for status in (PASSED, FAILED, TIMED_OUT, LACKS)
    }
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if left:
        print(f"the budget left out {len(left)}: {', '.join(left)}. Run this again.")
    return LEFT if left else SOME_FAILED if counts[FAILED] or counts[TIMED_OUT] else OK


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """A scheduler's SIGTERM ends the piece's children too, as Ctrl-C does."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--wheels",
        type=Path,
        metavar="DIR",
        help="packages for a machine without network: wheels, or .tar.xz of site-packages",
    )
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="SECONDS", help="end by then, whatever runs"
    )
    parser.add_argument("--only", nargs="+", metavar="WORD", help="pieces with one of these words in their name")
    parser.add_argument("--retry", action="store_true", help="also what has failed before")
    parser.add_argument("--plan", action="store_true", help="print the pieces and end")
    parser.add_argument("--out", type=Path, metavar="DIR", help="gpu.json and log.txt there, after each piece")
    parser.add_argument("--state", type=Path, default=ROOT / "runs" / "gpu-check", help="(default: runs/gpu-check)")
    parser.add_argument(
        "--json",
        type=Path,
        help="(default: benchmarks/results/gpu.json, or gpu.json in --out)",
    )
    arguments = parser.parse_args(argv)
    ends_at = time.monotonic() + arguments.budget
    result = arguments.json or (arguments.out or ROOT / "benchmarks" / "results") / "gpu.json"
    state = arguments.state.resolve()
    pieces = [p for p in plan() if arguments.only is None or any(word in p.name for word in arguments.only)]
    if not pieces:
        parser.error(f"--only {' '.join(arguments.only)}: no piece is called so; --plan shows them.")
    if arguments.plan:
        print("\n".join(f"{piece.limit_s:4} s  {piece.name}" for piece in pieces))
        return OK
    path = [str(state / "site"), str(ROOT)] if arguments.wheels or (state / "site").exists() else [str(ROOT)]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "QLORA_RL_CACHE": str(state / "cache"),
        "VLLM_CACHE_ROOT": str(state / "vllm-cache"),
    }
    environment["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    if arguments.wheels:
        print(f"unpacked: {', '.join(unpack(arguments.wheels, state / 'site')) or 'nothing new'}")
    stack = probe(environment, [*NEEDED, *sorted({module for piece in pieces for module in piece.needs})])
    if stack["gpu"] is None:
        print(f"gpu-check: not run: {stack['why']}. Nothing was written.", file=sys.stderr)
        return NO_GPU
    lacking = [name for name in stack["missing"] if name in NEEDED]
    wrong = wrong_plugin(stack["packages"])
    if lacking or wrong:
        said = "; ".join(filter(None, [wrong, f"not installed: {', '.join(lacking)}" if lacking else ""]))
        print(
            f"gpu-check: {said}. `make setup-dev`, or --wheels DIR on a machine without network (docs/gpu.md).",
            file=sys.stderr,
        )
        return 2
    at = commit()
    key = stack_key(stack, at)
    print(key)
    everything = plan()
    held = json.loads(result.read_text()) if result.exists() else {}

    def record() -> None:
        found = outcomes(everything, state / key)
        held[key] = {**stack, "commit": at, "planned": [p.name for p in everything], "pieces": found}
        _write(result, dict(sorted(held.items())))
        if arguments.out:
            logs = [state / key / p.name / "log.txt" for p in everything if p.name in found]
            text = "".join(f"===== {log.parent.name}\n{_shortened(log)}\n" for log in logs if log.exists())
            (arguments.out / "log.txt").write_text(text)

    with _stopped_by_sigterm():
        try:
            code = run_all(
                pieces,
                state / key,
                environment,
                missing=stack["missing"],
                retry=arguments.retry,
                ends_at=ends_at,
                record=record,
            )
        except KeyboardInterrupt:
            print("\ngpu-check: stopped; the piece that ran is run again the next time.", file=sys.stderr)
            code = STOPPED
    record()
    print(f"{result}: python benchmarks/tables.py puts benchmarks/results/gpu.json into docs/gpu.md")
    return code


if __name__ == "__main__":
    sys.exit(main())
