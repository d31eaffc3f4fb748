"""Each start of LoRA on a base that stays as it is: how exactly real vLLM serves it after three steps of training.

    python benchmarks/starts.py [--json benchmarks/results/starts.json]

The starts are those of the tests (tests/starts.py). Largest difference of trainer and vLLM over fixed sequences, in
nats: on the float32 form of a random two-layer Qwen2, and on its NF4 form as a multiple of plain LoRA's with random
values.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from kinds import lora  # noqa: E402
from pair import OPTIONS, Pair  # noqa: E402
from rounds import measured_at  # noqa: E402
from starts import STARTS, started, steps  # noqa: E402
from support import make_model  # noqa: E402

from qlora_rl import LocalEngine, bake_base, judge_adapter, prepare_base  # noqa: E402
from qlora_rl.engine.loading import quieten  # noqa: E402
from qlora_rl.train.run import describe_machine, describe_versions  # noqa: E402


def measure(work: Path) -> dict[str, dict[str, object]]:
    """One row per start."""
    original = make_model(work / "model")
    base = prepare_base(original, out=work / "base")
    rows: dict[str, dict[str, object]] = {name: {} for name in STARTS}

    def each(pair: Pair, key: str, unit: float = 1.0) -> None:
        for name, row in rows.items():
            before = {n: p.detach().clone() for n, p in pair.base.named_parameters()}
            model = started(copy.deepcopy(pair.base), name, original)
            steps(model.train(), 3, ratio=16.0 if name == "LoRA+" else 1.0)
            row[key] = pair.difference(model.eval()) / unit
            row["rank"] = judge_adapter(model).rank
            held = model.get_base_model().named_parameters()
            after = {n.replace(".base_layer", ""): p for n, p in held if "lora_" not in n}
            row["base_is_untouched"] = row.get("base_is_untouched", True) and all(
                after[n].equal(before[n]) for n in before
            )

    with LocalEngine(bake_base(base, "float32", out=work / "baked"), **OPTIONS) as engine:
        each(Pair(engine, work / "baked", Path(tempfile.mkdtemp(dir=work))), "float32")
    with LocalEngine(base, **OPTIONS) as engine:
        pair = Pair(engine, base, Path(tempfile.mkdtemp(dir=work)))
        plain = max(pair.difference(pair.adapted(lora(), seed=seed)) for seed in range(3))
        each(pair, "of_plain_on_4bit", plain)
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "starts.json")
    arguments = parser.parse_args()
    quieten()
    with tempfile.TemporaryDirectory() as work:
        rows = measure(Path(work))
    result = {"commit": measured_at(), "versions": describe_versions(), "machine": describe_machine(), "starts": rows}
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in rows.items():
        print(name, row)


if __name__ == "__main__":
    main()
