"""The trainer's 4-bit linears on a CPU: the engine's bits forward, bitsandbytes' weight backward, and what is left to
bitsandbytes."""

import copy
import json
import pickle

import pytest
import torch
from support import fused, make_model

from qlora_rl import load_base, prepare_base
from qlora_rl.base.quant import dequantised_weight, require_bitsandbytes
from qlora_rl.cpu_features import SETTING, processor
from qlora_rl.engine.linears import cpu_kernel
from qlora_rl.engine.linears.cpu_kernel import codes_kernel
from qlora_rl.engine.linears.fused_weight import CodedLinear
from qlora_rl.train.setup.linears import apply_linears, coded_weight, has_kernel

BF16 = torch.bfloat16
# Where it is written for the processor and cannot be built, the tests fail.
needs_kernel = pytest.mark.skipif(not processor().codes_kernel, reason="the kernel is not written for this processor")


def linear(rows=96, columns=128, blocksize=64, nested=False, bias=True, quant="nf4", dtype=BF16, seed=0):
    bnb = require_bitsandbytes()
    torch.manual_seed(seed)
    made = bnb.nn.Linear4bit(
        columns, rows, bias=bias, compute_dtype=dtype, compress_statistics=nested, quant_type=quant
    )
    made.weight = bnb.nn.Params4bit(
        torch.randn(rows, columns).to(BF16), requires_grad=False, quant_type=quant, blocksize=blocksize,
        compress_statistics=nested
    ).to("cpu")  # fmt: skip
    if bias:
        made.bias = torch.nn.Parameter(torch.randn(rows).to(BF16), requires_grad=False)
    made.support_avx512bf16_for_cpu = False
    return made


def settled(made):
    return apply_linears(torch.nn.Sequential(made))


@needs_kernel
@pytest.mark.parametrize("quant", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_are_the_engines_bits_and_gradients_those_of_bitsandbytes_weight(quant, nested, bias):
    made = linear(quant=quant, nested=nested, bias=bias)
    assert settled(made) == {"kernel": codes_kernel().instructions, "linears": 1, "of": 1}
    exact = dequantised_weight(made.weight).to(BF16)
    x = torch.randn(2, 9, 128).to(BF16).requires_grad_()
    found = made(x)
    alone = torch.cat([made(row[None]) for row in x.detach().flatten(0, 1)]).view(2, 9, 96)
    assert torch.equal(found, alone)  # as when the engine samples token by token
    product = (x.double() @ exact.double().t()).detach()
    expected = product + (made.bias.double() if bias else 0)
    assert ((found.double() - expected).abs() <= 2**-7 * (product.abs() + expected.abs()) + 1e-3).all()
    gradient = torch.randn_like(found)
    found.backward(gradient)
    wanted = gradient.double() @ exact.double()
    assert ((x.grad.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-3).all()


@needs_kernel
def test_a_float32_input_is_multiplied_in_the_compute_dtype_and_comes_back_in_its_own():
    made = linear()
    settled(made)
    x = torch.randn(5, 128, requires_grad=True)
    found = made(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, made(x.to(BF16)).float())
    found.sum().backward()
    assert x.grad.dtype == torch.float32


@needs_kernel
def test_the_engine_has_the_same_bits_for_a_fused_linear():
    """q, k and v side by side, as vLLM holds them, multiplied by the engine's own layer."""
    sizes = (96, 32, 32)
    weight = fused(sizes)
    engine = CodedLinear(weight, codes_kernel())
    x = torch.randn(9, 128).to(BF16)
    parts = []
    for number, size in enumerate(sizes):
        made = linear(rows=size, bias=False)
        start, end = weight.bnb_shard_offsets[number : number + 2].tolist()
        made.weight.data, made.weight.quant_state = weight.data[start:end], weight.bnb_quant_state[number]
        settled(made)
        assert has_kernel(made)
        parts.append(made(x))
    assert torch.equal(engine(None, x), torch.cat(parts, dim=1))


@needs_kernel
@pytest.mark.parametrize("rows", [44, 96])
def test_a_gradient_of_rows_that_fill_no_vector_takes_bitsandbytes_own_way(rows):
    """44 rows are no multiple of 16."""
    made = linear(rows=rows)
    settled(made)
    assert codes_kernel().takes_back(rows, 128, 64) is (rows == 96)
    gradient = torch.randn(7, rows).to(BF16)
    exact = gradient.double() @ dequantised_weight(made.weight).to(BF16).double()
    found = coded_weight(made).multiply_back(gradient)
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-3).all()


@needs_kernel
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_an_output_may_be_changed_where_it_is(bias, trained):
    """Falcon adds to one, OLMo clamps one."""
    made = linear(bias=bias)
    settled(made)
    x = torch.randn(2, 3, 128).to(BF16).requires_grad_(trained)
    out = made(x)
    expected = out.detach() + 1
    out += 1
    assert torch.equal(out, expected)
    if trained:
        out.sum().backward()
        assert x.grad.any()


@needs_kernel
def test_a_gradient_of_a_gradient_is_an_error_and_not_zero():
    made = linear()
    settled(made)
    x = torch.randn(3, 128).to(BF16).requires_grad_()
    (gradient,) = torch.autograd.grad(made(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.float().square().sum().backward()


@needs_kernel
def test_the_weight_of_the_forward_pass_is_the_one_of_its_backward_pass():
    made = linear(bias=False)
    settled(made)
    x = torch.randn(3, 128).to(BF16).requires_grad_()
    wanted = torch.ones(3, 96).double() @ dequantised_weight(made.weight).to(BF16).double()
    out = made(x)
    made.weight.data = torch.empty(0, dtype=torch.uint8)
    out.sum().backward()
    assert ((x.grad.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-3).all()


@needs_kernel
def test_a_pickled_linear_is_read_back_as_bitsandbytes_own():
    made = linear()
    settled(made)
    again = pickle.loads(pickle.dumps(made))
    x = torch.randn(3, 128).to(BF16)
    assert torch.equal(again(x), type(made).forward(made, x))


@needs_kernel
def test_the_forward_of_somebody_else_stays():
    class Doubled(require_bitsandbytes().nn.Linear4bit):
        def forward(self, x):
            return 2 * super().forward(x)

    own, other = linear(), linear(seed=1)
    own.__class__ = Doubled
    other.forward = mine = lambda x: "mine"
    assert apply_linears(torch.nn.Sequential(own, other))["linears"] == 0
    assert other.forward is mine
    assert not has_kernel(own)


@needs_kernel
@pytest.mark.parametrize(
    "fault",
    [
        "columns",
        "compute dtype",
        "packed",
        "trained bias",
        "not whole",
        "no state",
        "nothing to multiply",
        "elsewhere",
        "traced",
    ],
)
def test_what_the_kernel_does_not_take_bitsandbytes_multiplies(fault, monkeypatch):
    made = linear(columns=160, blocksize=32) if fault == "columns" else linear()
    x = torch.randn(0 if fault == "nothing to multiply" else 3, made.in_features).to(BF16)
    if fault == "columns":
        made.weight.quant_state.blocksize = 64  # 160 columns are two and a half of them
        assert settled(made)["linears"] == 0
        return
    settled(made)
    assert has_kernel(made)
    seen = []
    monkeypatch.setattr(type(made), "forward", lambda self, given: seen.append(given))
    if fault == "compute dtype":
        made.compute_dtype = torch.float32
    elif fault == "packed":
        made.weight.quant_state.packing_format_for_cpu = True
    elif fault == "trained bias":
        made.bias.requires_grad_()
    elif fault == "not whole":
        made.weight.data = made.weight.data[:8]
    elif fault == "no state":
        del made.weight.quant_state
    elif fault == "elsewhere":
        x = x.to("meta")
    elif fault == "traced":
        monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    made(x)
    assert len(seen) == 1


@needs_kernel
@pytest.mark.parametrize("wrong", ["multiply", "multiply_back"])
def test_a_kernel_that_is_wrong_for_a_shape_is_not_used(monkeypatch, wrong):
    right = getattr(cpu_kernel.CodesKernel, wrong)
    monkeypatch.setattr(cpu_kernel.CodesKernel, wrong, lambda self, *given: torch.zeros_like(right(self, *given)))
    made = linear()
    assert settled(made) == {"kernel": codes_kernel().instructions, "linears": 0, "of": 1}
    assert not has_kernel(made)
    assert coded_weight(made) is None  # nor for the gradient of a tile


def test_every_reason_why_there_is_no_kernel_is_told(monkeypatch):
    assert apply_linears(torch.nn.Linear(4, 4)) == {"reason": "the base has no 4-bit linears"}
    made = linear()
    settled(made)
    monkeypatch.setenv(SETTING, "native")
    assert "its setting says that torch multiplies" in settled(made)["reason"]
    assert torch.equal(made(torch.ones(1, 128, dtype=BF16)), type(made).forward(made, torch.ones(1, 128, dtype=BF16)))


@needs_kernel
def test_a_copy_of_a_model_multiplies_its_own_codes():
    made = linear()
    settled(made)
    other = copy.deepcopy(made)
    assert other.forward.__self__ is other
    other.weight.data.zero_()
    x = torch.randn(3, 128).to(BF16)
    assert not torch.equal(made(x), other(x))


@needs_kernel
def test_all_linears_of_a_base_have_it_and_its_logits_differ_by_the_order_of_sums(tmp_path):
    model = load_base(prepare_base(make_model(tmp_path / "model"), out=tmp_path / "base"))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(ids).logits.float()
        found = apply_linears(model)
        after = model(ids).logits.float()
    assert found["linears"] == found["of"] > 0
    assert (after - before).norm() / before.norm() < 2**-6


@needs_kernel
def test_a_trainer_has_them_and_its_run_says_so(make_trainer, tmp_path):
    trainer = make_trainer()
    linears = [m for m in trainer.model.modules() if isinstance(m, require_bitsandbytes().nn.Linear4bit)]
    assert linears
    assert all(has_kernel(made) for made in linears)
    told = json.loads((trainer.run.path / "config.json").read_text())["linears"]
    assert told == {"kernel": codes_kernel().instructions, "linears": len(linears), "of": len(linears)}
