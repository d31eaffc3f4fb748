"""The ways to multiply on a GPU: rules that are measured, joined parts, a table that is kept. All but the kernels and
the clock."""

import json
from types import SimpleNamespace

import pytest
import torch
from test_fused_weight import LAYER, close, fused, plain

from qlora_rl.engine.linears.fused_weight import Joined
from qlora_rl.engine.linears.gpu_compute import (
    RuledLinear,
    Table,
    choose_rules,
    install_on_gpu,
    key_of,
    measure,
    multiply_by,
    product_4bit,
    summary,
    tokens_up_to,
    way_for,
    ways_for,
)

KEY = "160x128 nf4/64 96+32+32"


@pytest.mark.parametrize(
    ("seconds", "rules"),
    [
        ({1: {"parts": 3.0, "joined": 1.0}, 2: {"parts": 3.0, "joined": 1.0}}, "2=joined"),
        ({1: {"parts": 1.0, "joined": 2.0}}, ""),
        ({1: {"parts": 1.0, "joined": 0.98}}, ""),  # within the noise
        (
            {1: {"parts": 3.0, "joined": 2.0}, 2: {"parts": 1.0, "joined": 2.0}, 4: {"parts": 9.0, "triton t": 1.0}},
            "1=joined,2=parts,4=triton t",
        ),
        ({}, ""),
    ],
)
def test_the_fastest_way_rules_if_it_is_clearly_faster_than_vllms_own(seconds, rules):
    assert choose_rules(seconds) == rules


def test_what_was_not_measured_goes_vllms_own_way():
    rules = "2=joined,16=parts,64=triton 16x64x64/1w4s3"
    found = {tokens: way_for(rules, tokens) for tokens in (1, 2, 3, 16, 17, 64, 65, 4096)}
    assert found == {
        1: "joined", 2: "joined", 3: "parts", 16: "parts", 17: "triton 16x64x64/1w4s3", 64: "triton 16x64x64/1w4s3",
        65: "parts", 4096: "parts",
    }  # fmt: skip
    assert way_for("", 1) == "parts"


@pytest.mark.parametrize(
    ("most", "tokens"), [(1, (1,)), (3, (1, 2, 4)), (16, (1, 2, 4, 8, 16)), (1000, (1, 2, 4, 8, 16, 32, 64, 128, 256))]
)
def test_as_many_tokens_are_measured_as_are_sampled_at_once(most, tokens):
    assert tokens_up_to(most) == tokens


@pytest.mark.parametrize("way", ways_for(1, with_triton=False))
@pytest.mark.parametrize("quant", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [64, 128])
def test_every_way_multiplies_with_bitsandbytes_own_weights(way, quant, blocksize):
    weight = fused(quant=quant, blocksize=blocksize)
    joined, eye = Joined(weight), torch.eye(128, dtype=torch.bfloat16)
    arguments = (joined.codes, joined.absmax, joined.values, joined.sizes, joined.blocksize, joined.quant_type)
    assert torch.equal(multiply_by(way, eye, *arguments), plain(weight, eye))
    for tokens in (1, 5):
        x = torch.randn(tokens, 128).to(torch.bfloat16)
        assert close(multiply_by(way, x, *arguments), plain(weight, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_ruled_linear_takes_any_shape_and_a_bias(dtype):
    weight = fused()
    linear = RuledLinear(Joined(weight), "4=joined,8=decoded")
    for shape in ((3, 128), (6, 128), (2, 3, 128), (20, 128)):
        x, bias = torch.randn(shape).to(dtype), torch.randn(160).to(dtype)
        out = linear(LAYER, x, bias)
        assert out.dtype == dtype
        assert close(out, plain(weight, x) + bias)


def test_scales_that_are_repaired_and_codes_that_are_replaced_count():
    weight = fused()
    linear, eye = RuledLinear(Joined(weight), "256=joined"), torch.eye(128, dtype=torch.bfloat16)
    before = linear(LAYER, eye)
    weight.bnb_quant_state[1].absmax.mul_(1.5)
    repaired = linear(LAYER, eye)
    assert not torch.equal(repaired, before)
    assert torch.equal(repaired, plain(weight, eye))
    weight.data = weight.data.bitwise_xor(17)
    assert torch.equal(linear(LAYER, eye), plain(weight, eye))


def test_the_product_is_one_operator_for_torchs_compiler():
    """vLLM compiles the whole model; the number of tokens stays open in it."""
    joined = Joined(fused())
    linear = RuledLinear(joined, "4=joined")
    whole = torch.compile(lambda x: linear(LAYER, x) * 2, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (3, 9):
        x = torch.randn(tokens, 128).to(torch.bfloat16)
        assert torch.equal(whole(x), linear(LAYER, x) * 2)
    x = torch.randn(3, 128).to(torch.bfloat16)
    arguments = (joined.codes, joined.absmax, joined.values, [96, 32, 32], 64, "nf4", "4=joined")
    torch.library.opcheck(product_4bit, (x, *arguments), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda weight: setattr(weight.bnb_quant_state[0], "nested", True), "scales are quantised"),
        (lambda weight: setattr(weight.bnb_quant_state[1], "blocksize", 128), "quantised differently"),
        (lambda weight: setattr(weight.bnb_quant_state[1], "quant_type", "fp4"), "quantised differently"),
        (lambda weight: weight.bnb_shard_offsets.add_(1), "not contiguous"),
    ],
)
def test_parts_that_are_not_one_weight_are_left_alone(change, why):
    weight, untouched = fused(), fused()
    change(weight)
    with pytest.raises(ValueError, match=why):
        Joined(weight)
    for i, state in weight.bnb_quant_state.items():
        assert torch.equal(state.absmax, untouched.bnb_quant_state[i].absmax)


def model_of(*weights):
    """Layers as vLLM's plugin leaves them, each with a method of its own."""
    model = torch.nn.Module()
    for i, weight in enumerate(weights):
        layer = torch.nn.Module()
        layer.weight, layer.quant_method = weight, SimpleNamespace(apply="vLLM's")
        model.add_module(f"layer{i}", layer)
    return model


class Clock:
    """The ways come in the order of `ways_for`; `seconds` of each."""

    def __init__(self, *seconds):
        self.seconds, self.asked = seconds, 0

    def __call__(self, calls):
        outs = [call() for call in calls]
        assert all(out.isfinite().all() for out in outs)
        self.asked += 1
        return self.seconds[(self.asked - 1) % len(self.seconds)]


def test_a_start_measures_says_what_it_chose_and_the_next_one_measures_nothing(tmp_path):
    file, versions = tmp_path / "deep" / "card.json", {"torch": "1"}
    model, clock = model_of(fused(seed=0), fused(seed=1)), Clock(3.0, 1.0, 2.0)
    done = install_on_gpu(
        model, 2, table=Table.open("a card", versions, file), stopwatch=clock, with_triton=False, device="cpu"
    )
    assert clock.asked == 6  # three ways, one shape, 1 and 2 tokens
    assert (done.base, dict(done.ways)) == ("measured", {KEY: "2=joined"})
    assert [type(layer.quant_method.apply) for layer in model.children()] == [RuledLinear] * 2
    assert str(done) == f"linears multiply with: measured (measured on a card); {KEY}: 2=joined; adapters: vllm"
    x = torch.randn(2, 128).to(torch.bfloat16)
    assert close(model.layer1.quant_method.apply(model.layer1, x), plain(model.layer1.weight, x))
    assert json.loads(file.read_text())["seconds"][KEY]["2"] == {"parts": 3.0, "joined": 1.0, "decoded": 2.0}
    assert list(file.parent.iterdir()) == [file]

    def broken(calls):
        raise AssertionError("nothing is to be measured")

    again = model_of(fused())
    done = install_on_gpu(
        again, 2, table=Table.open("a card", versions, file), stopwatch=broken, with_triton=False, device="cpu"
    )
    assert done.ways == {KEY: "2=joined"}
    # More sequences at once than then: only what is missing is measured.
    clock = Clock(1.0, 1.0, 1.0)
    table = Table.open("a card", versions, file)
    done = install_on_gpu(model_of(fused()), 4, table=table, stopwatch=clock, with_triton=False, device="cpu")
    assert clock.asked == 3
    assert done.ways == {KEY: "2=joined"}


@pytest.mark.parametrize(("gpu", "versions"), [("another", {"torch": "1"}), ("a card", {"torch": "2"})])
def test_a_table_of_another_gpu_or_version_is_not_used(tmp_path, gpu, versions):
    file = tmp_path / "card.json"
    Table("a card", {"torch": "1"}, {KEY: {"1": {"parts": 2.0, "joined": 1.0}}}, file).save()
    assert Table.open("a card", {"torch": "1"}, file).rules(KEY, 1) == "1=joined"
    assert Table.open(gpu, versions, file).seconds == {}


def test_where_nothing_is_faster_the_layers_stay_as_they_are(tmp_path):
    odd = fused(seed=2)
    odd.bnb_quant_state[0].nested = True
    model = model_of(fused(seed=0), fused((96,), seed=1), odd)
    table = Table.open("a card", {}, None)
    done = install_on_gpu(model, 1, table=table, stopwatch=Clock(1.0, 1.0, 2.0), with_triton=False, device="cpu")
    assert done.base == "vllm"
    assert done.reason == "nothing is faster than vLLM's own way on a card"
    assert done.left == {"layer2": "its scales are quantised"}
    assert done.ways == {KEY: "parts", "96x128 nf4/64 96": "parts"}
    assert [layer.quant_method.apply for layer in model.children()] == ["vLLM's"] * 3


def test_weights_of_one_key_have_one_shape():
    assert key_of(Joined(fused())) == KEY
    assert key_of(Joined(fused((96, 64)))) == "160x128 nf4/64 96+64"
    assert key_of(Joined(fused(quant="fp4", blocksize=128))) == "160x128 fp4/128 96+32+32"


def test_the_clock_is_asked_for_each_way_and_the_result_can_be_read():
    times = measure([Joined(fused())], 4, Clock(3.0, 1.0, 2.0), with_triton=False)
    assert times == {"parts": 3.0, "joined": 1.0, "decoded": 2.0}
    seconds = {"4": {name: 1e-6 * value for name, value in times.items()} | {"triton a": 9e-6, "triton b": 6e-6}}
    assert summary(seconds) == (
        "    4 | parts 3.0 us (1.00x), joined 1.0 us (3.00x), decoded 2.0 us (1.50x), triton b 6.0 us (0.50x)"
    )


@pytest.mark.parametrize(
    ("wish", "is_cpu", "changed"), [("auto", False, True), ("nf4", False, False), ("auto", True, False)]
)
def test_vllm_gets_the_measuring_worker_only_on_a_gpu_that_was_told_so(base, monkeypatch, wish, is_cpu, changed):
    from qlora_rl.engine import compat, options

    monkeypatch.setattr(compat, "platform_is_cpu", lambda: is_cpu)
    arguments = options.start_options(base.path, base_compute=wish).arguments
    assert (arguments.get("worker_cls") == "qlora_rl.engine.worker.workers.MeasuringWorker") is changed
    assert ("additional_config" in arguments) is changed
