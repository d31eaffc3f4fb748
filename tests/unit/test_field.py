"""The comparison with others, and the sources of numbers: what they do without an engine."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_path():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def module(name):
    return importlib.import_module(name)


def run(accuracy, step, *, kl=1e-5, drift=0.0, push=0.002):
    return {
        "accuracy_after": accuracy, "mismatch_kl_median": kl, "base_drift": drift, "steps_per_s": 1 / step,
        "sync_seconds": push,
        "rollout_tokens_per_s": 1000.0, "peak_gib": 1.0, "process_seconds": 30.0,
    }  # fmt: skip


RESULT = {
    "steps": 50, "seeds": [0, 1, 2], "is_short": False,
    "contenders": {
        "qlora_rl": {"title": "**ours**", "status": "ran", "runs": {"0": run(0.9, 0.5), "1": run(1.0, 0.5),
            "2": run(0.95, 0.7)}},
        "trl-4bit": {"title": "TRL", "status": "ran", "runs": {"0": run(0.1, 0.4, kl=1.0, drift=0.02, push=0.1)}},
        "torchrl-own": {"title": "own", "status": "failed", "why": "ImportError: a | b", "runs": {}},
        "draw-stock": {"title": "stock", "status": "ran", "runs": {"0": {"tokens_per_s": 5.0, "peak_gib": 2.0}}},
    }
}  # fmt: skip


def test_the_best_of_a_column_is_bold_whosever_it_is_and_failures_are_rows():
    table = module("field_tables").training(RESULT).splitlines()
    ours, trl, own = table[2:]
    assert "**95.0% (90.0% to 100.0%)**" in ours
    assert "| 2.00 |" in ours
    assert "| **2.50** |" in trl
    assert "10.0%" in trl
    assert "**10.0%**" not in trl
    assert "failed: `ImportError: a \\| b`" in own
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert "| 50 steps of GRPO, 3 seeds |" in table[0]
    assert "short run" in module("field_tables").training({**RESULT, "is_short": True})
    assert "own" not in module("field_tables").short(RESULT)
    assert "stock" in module("field_tables").samplers(RESULT)


def test_who_lacks_something_or_fails_is_written_down_with_the_reason(tmp_path):
    """In processes of their own, as in a real run; the second one finds no base."""
    import torch

    field = module("field")
    found = field.compete(["unsloth", "qlora_rl"], [0, 1], 4, tmp_path)
    if not torch.cuda.is_available():
        assert (found["unsloth"]["status"], found["unsloth"]["why"]) == ("not run", "Unsloth needs an NVIDIA GPU")
    assert found["qlora_rl"]["status"] == "failed"
    assert "Error" in found["qlora_rl"]["why"]
    assert str(tmp_path) not in found["qlora_rl"]["why"]
    assert found["qlora_rl"]["runs"] == {}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Traceback\n  File x\nImportError: cannot import name 'A' (/a/b/c.py)\n",
            "ImportError: cannot import name 'A'"),
        ("[rank0]: Traceback\n[rank0]: torch.cuda.OutOfMemoryError: much\nwarning: bye\n",
            "torch.cuda.OutOfMemoryError: much"),
        ("Killed\n", "Killed"),
        ("", "it said nothing"),
    ],
)  # fmt: skip
def test_the_reason_of_a_failure_is_its_last_error_without_paths(said, why):
    assert module("field").reason(said) == why


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("a push takes 8.2 ms, 1.7% of a step, 3x as fast, 1,619 tokens/s, 30 MiB", ["8.2", "1.7", "3", "1,619", "30"]),
        ("a KL of 1.3e-5 and a ratio of 0.97", ["1.3e-5", "0.97"]),
        ("vLLM 0.28 to 0.31, TRL 1.16, Python 3.11 or 3.12, a shape of 0.4 B, 16 x 32 tokens, 300 pushes", []),
        ("`7 ms`, [9 ms](of-9.5-ms.md)\n```\n5 ms\n```\n<!-- table: x -->\n| 4 ms |\n<!-- end -->", ["9"]),
        ("from 0.004 to 0.010", ["0.004", "0.010"]),
        ("| 12 s | 3 times |", ["12", "3"]),
    ],
)  # fmt: skip
def test_which_numbers_count(text, counted):
    assert [value for _, _, value in module("claims").numbers(text)] == counted


@pytest.mark.parametrize(
    ("shown", "value", "how", "right"),
    [
        ("4.4e-5", 4.41e-05, "is", True),
        ("4.4e-5", 4.46e-05, "is", False),
        ("0.71", 0.7115, "is", True),
        ("0.71", 0.716, "is", False),
        ("1,619", 1619.2, "is", True),
        ("0.001", 0.00014, "below", True),
        ("0.001", 0.0014, "below", False),
        ("3", 3.4, "above", True),
    ],
)
def test_a_number_agrees_with_its_json_to_the_digits_that_are_shown(shown, value, how, right):
    assert module("claims").agrees(shown, value, how) is right


def problems(text, *claims, log=""):
    pages = {"docs/a.md": text, "docs/development-log.md": log}
    return module("claims").problems(
        [{"page": "docs/a.md", **claim} for claim in claims], pages, BENCHMARKS / "results"
    )


MEASURED = {"file": "base_proof.json", "values": [["largest_relative_scale_error"]], "scale": 100}


SET = {"code": "qlora_rl/engine/linears/gpu_compute.py"}
SOURCE = """
A, B = 2 * 2**3, 0.5
BOUNDS = {"float32": {"least": 1e-6}}
@dataclass
class Spec:
    temperature: float = 0.7
    def draw(self, x, often: int = 3, *, wait_s=4.0): ...
def draw(often=5): ...
"""


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["A"], 16.0),
        (["B"], 0.5),
        (["BOUNDS", "float32", "least"], 1e-6),
        (["Spec.temperature"], 0.7),
        (["Spec.often"], 3.0),
        (["Spec.wait_s"], 4.0),
    ],
    ids=str,
)
def test_a_constant_is_read_where_it_is_given(place, value):
    assert module("claims").constant(SOURCE, place) == value


@pytest.mark.parametrize(
    ("text", "claim", "said"),
    [
        ("off by 0.71 %", {"says": "off by 0.71 %", **MEASURED}, None),
        ("off by\n0.71 %", {"says": "off by 0.71 %", **MEASURED}, None),
        ("off by 0.72 %", {"says": "off by 0.72 %", **MEASURED}, "0.72, but base_proof.json has 0.71"),
        ("off by 0.71 %", {"says": "off by 0.7 %", **MEASURED}, "does not say this"),
        ("off by 0.71 %; 5 ms", {"says": "off by 0.71 %", **MEASURED}, "docs/a.md:1: 5 has no source"),
        ("off by 0.71 %", {"says": "off by 0.71 %", **MEASURED, "values": [["gone"]]}, "has nothing at"),
        ("off by 0.71 %", {"says": "off by 0.71 %", **MEASURED, "values": []}, "0 places"),
        ("off by 0.71 %", {"says": "off by 0.71 %", **MEASURED, "file": "gone.json"}, "there is no gone.json"),
        ("off by 0.71 %", {"says": "off by 0.71 %", "setting": "x"}, "say what it is"),
        ("3 % faster", {"says": "3 % faster", **SET, "values": [["MARGIN"]], "scale": 100}, None),
        ("4 % faster", {"says": "4 % faster", **SET, "values": [["MARGIN"]], "scale": 100},
            "4, but qlora_rl/engine/linears/gpu_compute.py has 3"),
        ("3 % faster", {"says": "3 % faster", **SET, "values": [["GONE"]]}, "has nothing at"),
        ("off by 0.71 %", {"says": "off by 0.71 %"}, "no source"),
        ("off by 0.71 %", {"says": "off by 0.71 %", "log": "2026-01-01"}, None),
        ("off by 0.72 %", {"says": "off by 0.72 %", "log": "2026-01-01"}, "0.72 is not in"),
        ("off by 0.71 %", {"says": "off by 0.71 %", "log": "2026-01-02"}, "has no day"),
    ],
)  # fmt: skip
def test_a_claim_holds_or_says_what_is_wrong(text, claim, said):
    found = problems(text, claim, log="## 2026-01-01\n\noff by 0.71 %\n")
    assert (found == []) if said is None else any(said in one for one in found), found


def test_a_number_that_is_changed_in_a_page_is_found():
    import tomllib

    claims = module("claims")
    pages = claims.pages()
    pages["docs/fidelity.md"] = pages["docs/fidelity.md"].replace(
        "at most 4.4e-5 in our run", "at most 4.3e-5 in our run"
    )
    listed = tomllib.loads((BENCHMARKS / "claims.toml").read_text())["claim"]
    found = claims.problems(listed, pages, BENCHMARKS / "results")
    assert any("4.3e-5 has no source" in one for one in found)
