"""Live tensors of a step, and the memory estimate against them."""

import pytest
import torch
from support import program

from qlora_rl.base.checkpoint import prepare_base

live_memory = program("benchmarks/live_memory.py")
shapes = program("benchmarks/shapes.py")
Shape, make_model = shapes.Shape, shapes.make_model
Live, Step, line_of = live_memory.Live, live_memory.Step, live_memory.line_of

LINES = (
    "gradients", "adapter, autocast", "activations", "attention masks", "one layer's work", "attention mask of a layer",
    "one dequantised weight",
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    work = tmp_path_factory.mktemp("memory")
    return prepare_base(make_model(work / "model", Shape(256, 768, 2, 4, 2), positions=2048), out=work / "base")


def test_live_counts_what_is_made_until_it_is_freed_and_nothing_that_was_there():
    before = torch.zeros(1000)
    with Live(lambda tensor: "half" if tensor.dtype == torch.float16 else "rest") as live:
        view = before.view(10, 100)  # no storage of its own
        one = before + 1
        live.phase = "second"
        two = one.half()
        del one
        three = two * 2
    assert view.shape == (10, 100)
    assert three.shape == (1000,)
    assert live.now == {"rest": 0, "half": 4000}
    assert live.peaks == {"": {"rest": 4000}, "second": {"rest": 4000, "half": 2000}}
    assert live.peak == 6000
    assert live.most == {"rest": 4000, "half": 4000}


@pytest.mark.parametrize(
    ("batch", "length", "padded"), [(1, 700, True), (2, 300, True), (1, 700, False), (2, 300, False), (1, 1500, False)]
)
def test_each_line_of_the_estimate_is_within_5_percent_of_the_live_tensors(base, batch, length, padded):
    """The peak is estimated a little too large: the decoded weight and the gradients, a tenth here, are not all there
    at that moment."""
    step = Step(base, batch, length, padded=padded)
    measured, planned = step.measure(), step.planned()
    for line in LINES if padded else [line for line in LINES if "mask" not in line]:
        assert planned[line] == pytest.approx(measured[line], rel=0.05), line
    assert (measured["attention masks"] > 0) == padded
    assert measured["peak"] <= planned["peak"] <= 1.12 * measured["peak"]


def test_a_line_that_is_next_to_nothing_is_not_compared():
    row = {
        "seconds": 1.0,
        "measured": {"logits": 5 * 2**20, "activations": 2**10, "peak": 10 * 2**20},
        "planned": {"logits": 6 * 2**20, "activations": 2**20, "peak": 11 * 2**20},
    }
    _, logits, activations, peak = line_of(64, row).splitlines()
    assert "+20.0%" in logits
    assert "+10.0%" in peak
    assert "%" not in activations
