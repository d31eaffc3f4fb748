"""Every adapter that PEFT can build: what is said of it, and how exactly real vLLM serves what is accepted.

    python benchmarks/adapters.py [--json benchmarks/results/adapters.json]

The table is the one of the tests (tests/kinds.py). Largest difference of trainer and vLLM over fixed sequences, in
nats: on the float32 baked form of a random two-layer Qwen2, on its NF4 form (as a multiple of plain LoRA's), and with
the directory that PEFT itself writes instead of the canonical form. What only full weights carry is sent as full
weights, on the float32 form of such a model whose head is not tied; and on its 16-bit form beside a 4-bit trainer,
where the difference is given as a multiple of the bare base's (mean and largest). One minute.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from kinds import KINDS, lora  # noqa: E402
from pair import OPTIONS, Noisy, Pair, trained  # noqa: E402
from rounds import measured_at  # noqa: E402
from support import make_model  # noqa: E402

from qlora_rl import DenseSync, LocalEngine, SyncError, bake_base, prepare_base  # noqa: E402
from qlora_rl.demo.job import quieten  # noqa: E402
from qlora_rl.train.run import describe_machine, describe_versions  # noqa: E402


def measure(work: Path) -> dict[str, dict[str, object]]:
    """One row per kind."""
    base = prepare_base(make_model(work / "model"), out=work / "base")
    rows: dict[str, dict[str, object]] = {
        name: {"title": kind.title, "verdict": kind.verdict} for name, kind in KINDS.items()
    }
    accepted = {name: kind for name, kind in KINDS.items() if kind.verdict == "adapter"}
    with LocalEngine(bake_base(base, "float32", out=work / "baked"), **OPTIONS) as engine:
        pair = Pair(engine, work / "baked", Path(tempfile.mkdtemp(dir=work)))
        for name, kind in accepted.items():
            model = pair.adapted(kind.config(), kind.prepare)
            rows[name]["float32"] = pair.difference(model)
            own = Path(tempfile.mkdtemp(dir=work))
            active = model.active_adapters[0]
            model.save_pretrained(own, selected_adapters=[active])
            try:
                rows[name]["pefts_own"] = pair.difference(model, directory=own if active == "default" else own / active)
            except SyncError as error:
                rows[name]["pefts_own"] = None
                rows[name]["pefts_own_rejected"] = str(error)
    with LocalEngine(base, **OPTIONS) as engine:
        pair = Pair(engine, base, Path(tempfile.mkdtemp(dir=work)))
        plain = max(pair.difference(pair.adapted(lora(), seed=seed)) for seed in range(3))
        for name, kind in accepted.items():
            if kind.on_4bit:
                rows[name]["of_plain_on_4bit"] = pair.difference(pair.adapted(kind.config(), kind.prepare)) / plain
    untied = prepare_base(make_model(work / "untied", tied=False), out=work / "untied-base")
    with LocalEngine(
        bake_base(untied, "float32", out=work / "untied-baked"), **{**OPTIONS, "max_lora_rank": 0}
    ) as engine:
        pair = Pair(engine, work / "untied-baked", work)
        for name, kind in KINDS.items():
            if kind.verdict == "full_weights" and (not kind.needs or importlib.util.find_spec(kind.needs)):
                model = trained(pair.base, kind)
                DenseSync(model, engine).push()
                rows[name]["weights"] = pair.apart(model)
    with LocalEngine(bake_base(untied, out=work / "untied-16"), **{**OPTIONS, "max_lora_rank": 0}) as engine:
        noisy = Noisy(engine, untied, work / "untied-16")
        for name, kind in KINDS.items():
            if "weights" in rows[name]:
                model = noisy.start(kind)
                DenseSync(model, engine).push()
                rows[name]["weights_16_bit_of_bare"] = noisy.share(model)
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "adapters.json")
    arguments = parser.parse_args()
    quieten()
    with tempfile.TemporaryDirectory() as work:
        rows = measure(Path(work))
    commit = measured_at()
    result = {"commit": commit, "versions": describe_versions(), "machine": describe_machine(), "kinds": rows}
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in rows.items():
        print(name, {k: v for k, v in row.items() if k != "title"})


if __name__ == "__main__":
    main()
