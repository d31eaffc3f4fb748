"""Live tensors of a step, and the memory estimate against them."""

import pytest
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
