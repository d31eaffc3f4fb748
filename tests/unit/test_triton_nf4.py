"""The Triton product with a 4-bit weight: in Triton's interpreter, with bitsandbytes' own weights; and compiled for
GPUs.

The interpreter must be chosen before Triton is imported, so one test runs this file again in a process of its own.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from qlora_rl.base.quant import dequantize_exactly, exact_absmax, require_bitsandbytes
from qlora_rl.errors import ConfigConflictError

pytest.importorskip("triton")
is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not is_interpreted, reason="runs in the process that has the interpreter")
compiled = pytest.mark.skipif(is_interpreted, reason="runs without the interpreter")

from qlora_rl.engine.linears.triton_nf4 import Tile, multiply, tiles_for  # noqa: E402

BITS = {torch.bfloat16: 8, torch.float16: 11}
TILES = [Tile(), Tile(16, 32, 128, 4), Tile(32, 128, 32, 2)]
# Few programs: the interpreter runs one after another.
LARGE = [Tile(256, 64, 64), Tile(128, 64, 128, 2), Tile(256, 32, 32)]


@compiled
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "passed" in done.stdout


def quantised(outputs, inputs, *, quant="nf4", blocksize=64, dtype=torch.bfloat16, nested=False, seed=0):
    """Codes, state and the weight that bitsandbytes decodes from them."""
    functional = require_bitsandbytes().functional
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)
    codes, state = functional.quantize_4bit(weight, blocksize=blocksize, quant_type=quant, compress_statistics=nested)
    return codes, state, functional.dequantize_4bit(codes, state)


def assert_rounded_once(out, x, weight, bias=0.0):
    """Half a unit in the last place of the exact sum, and what a float32 sum may lose."""
    exact = x.double() @ weight.double().t() + bias
    terms = x.double().abs() @ weight.double().abs().t()
    allowed = exact.abs() * 2.0 ** -BITS[x.dtype] + terms * x.shape[1] * 2.0**-24
    assert ((out.double() - exact).abs() <= allowed).all()


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quant", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 128, 256])
def test_every_weight_is_bitsandbytes_own_bit_for_bit(dtype, quant, blocksize):
    """Multiplied with the identity, a product is the weight itself."""
    codes, state, weight = quantised(40, 256, quant=quant, blocksize=blocksize, dtype=dtype)
    for tile in LARGE:
        out = multiply(torch.eye(256, dtype=dtype), codes, state.absmax, state.code, 40, blocksize, tile=tile)
        assert torch.equal(out.t(), weight), tile


@interpreted
@pytest.mark.parametrize("inputs", [256, 96])
def test_blocks_of_scales_may_span_rows(inputs):
    """bitsandbytes' CPU kernel reads such weights wrongly, so they are decoded in plain torch."""
    codes, state, _ = quantised(40, inputs, blocksize=1024)
    weight = dequantize_exactly(codes, state.absmax, state.code, 1024, (40, inputs)).to(torch.bfloat16)
    out = multiply(torch.eye(inputs, dtype=torch.bfloat16), codes, state.absmax, state.code, 40, 1024, tile=LARGE[0])
    assert torch.equal(out.t(), weight)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "blocksize"),
    [(1, 97, 64, 64), (3, 40, 192, 64), (17, 130, 320, 64), (33, 33, 768, 256)],
)
def test_sums_are_rounded_once_whatever_the_tile(dtype, tokens, outputs, inputs, blocksize):
    codes, state, weight = quantised(outputs, inputs, blocksize=blocksize, dtype=dtype)
    x, bias = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs).to(dtype)
    for tile in TILES:
        arguments = (codes, state.absmax, state.code, outputs, blocksize)
        out = multiply(x, *arguments, tile=tile)
        assert out.dtype == dtype
        assert_rounded_once(out, x, weight)
        assert_rounded_once(multiply(x, *arguments, bias, tile=tile), x, weight, bias.double())
        assert torch.equal(multiply(x, *arguments, tile=tile), out)  # the parts of a sum are added in one order


@interpreted
@pytest.mark.parametrize("sizes", [(96, 32, 32), (72, 72)])
@pytest.mark.parametrize("nested", [False, True])
def test_parts_with_scales_of_their_own_are_multiplied_as_one(sizes, nested):
    made = [quantised(size, 128, nested=nested, seed=i) for i, size in enumerate(sizes)]
    codes = torch.cat([codes for codes, _, _ in made])
    absmax = torch.cat([exact_absmax(state) for _, state, _ in made])
    weight = torch.cat([weight for _, _, weight in made])
    out = multiply(torch.eye(128, dtype=torch.bfloat16), codes, absmax, made[0][1].code, sum(sizes), 64)
    assert torch.equal(out.t(), weight)


@interpreted
def test_tokens_do_not_touch_each_other_and_their_rows_may_lie_apart():
    codes, state, weight = quantised(40, 192)
    x = torch.randn(5, 400).to(torch.bfloat16)[:, 100:292]
    x[2] = float("nan")
    out = multiply(x, codes, state.absmax, state.code, 40, 64)
    assert out[2].isnan().all()
    others = [0, 1, 3, 4]
    assert_rounded_once(out[others], x[others], weight)
    assert multiply(x[:0], codes, state.absmax, state.code, 40, 64).shape == (0, 40)


@interpreted
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"x": torch.zeros(2, 64)}, "x is torch.float32"),
        ({"x": torch.zeros(64, 2, dtype=torch.bfloat16).t()}, "columns of x are not contiguous"),
        ({"x": torch.zeros(2, 63, dtype=torch.bfloat16)}, "in-features 63 are odd: .*; 1280 bytes of codes"),
        ({"absmax": torch.zeros(41)}, "41 scales are not 2560 weights / blocksize 64"),
        ({"absmax": torch.zeros(40, dtype=torch.bfloat16)}, "not contiguous float32"),
        ({"codes": torch.zeros(1280, dtype=torch.int8)}, "not contiguous uint8"),
        ({"values": torch.zeros(16, dtype=torch.float16)}, r"not float32 \[16\]"),
        ({"bias": torch.zeros(40)}, r"bias is not \[40\]"),
    ],
)
def test_what_would_be_read_wrongly_is_rejected(change, why):
    codes, state, _ = quantised(40, 64)
    given = {
        "x": torch.zeros(2, 64, dtype=torch.bfloat16),
        "codes": codes,
        "absmax": state.absmax,
        "values": state.code,
    }
    given |= change
    with pytest.raises(ValueError, match=why):
        multiply(given["x"], given["codes"], given["absmax"], given["values"], 40, 64, given.get("bias"))


def model_of(*weights):
    """Layers as vLLM's plugin leaves them, each with a method of its own."""
    model = torch.nn.Module()
    for i, weight in enumerate(weights):
        layer = torch.nn.Module()
        layer.weight, layer.quant_method = weight, SimpleNamespace(apply=None)
        model.add_module(f"layer{i}", layer)
    return model


@interpreted
def test_an_engine_takes_the_kernel_where_the_clock_says_so(tmp_path):
    from test_fused_weight import close, fused, plain

    from qlora_rl.engine.linears.gpu_compute import Table, install_on_gpu

    weights = [fused(seed=0), fused(seed=1), fused((96,), seed=2)]
    model, asked = model_of(*weights), []

    def clock(calls):
        for call in calls:
            call()
        asked.append(len(calls))
        return 1.0 / len(asked)  # whatever comes last is the fastest: the last tile

    table = Table.open("a card", {}, tmp_path / "card.json")
    done = install_on_gpu(model, 4, table=table, stopwatch=clock, with_triton=True, device="cpu")
    assert set(asked) == {2, 1}  # the two of one shape take turns
    last = f"triton {tiles_for(4)[-1]}"
    assert done.ways == {"160x128 nf4/64 96+32+32": f"4={last}", "96x128 nf4/64 96": f"4={last}"}
    for i, weight in enumerate(weights):
        layer = getattr(model, f"layer{i}")
        for tokens in (1, 3, 40):  # 40: more than was measured, vLLM's own way
            x = torch.randn(tokens, 128).to(torch.bfloat16)
            assert close(layer.quant_method.apply(layer, x), plain(weight, x))


@interpreted
def test_a_kernel_that_decodes_otherwise_is_not_used(tmp_path):
    from test_fused_weight import fused

    from qlora_rl.engine.linears.fused_weight import Joined
    from qlora_rl.engine.linears.gpu_compute import read_out

    joined, rules = Joined(fused()), f"4=joined,8=triton {Tile()}"
    assert read_out(joined, rules) == ""
    joined.values[3] += 2.0**-9
    assert "does not decode it as bitsandbytes does" in read_out(joined, rules)
    assert read_out(joined, "4=joined") == ""


def test_a_tile_is_read_as_it_was_written():
    for tokens in (1, 16, 32, 64, 256):
        for tile in tiles_for(tokens):
            assert Tile.read(str(tile)) == tile


def test_another_way_is_rejected():
    from qlora_rl.engine.linears.gpu_compute import multiply_by

    with pytest.raises(ConfigConflictError, match=r"no way 'int3'"):
        multiply_by("int3", torch.zeros(1, 64), None, None, None, [1], 64, "nf4")


@compiled
# By default the newer one: its code has both kinds of instructions.
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.full), 90])
def test_every_tile_compiles_for_gpus_and_uses_their_tensor_cores(capability, tmp_path, monkeypatch):
    """No GPU is needed to compile. What runs on one is not shown by this."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shared = {80: 163 * 1024, 90: 227 * 1024}[capability]
    seen = set()
    for tokens in (16, 256):
        for tile in tiles_for(tokens):
            code = build(tile, capability)
            assert code.metadata.shared <= shared, tile
            assert "LOCAL:0 " in usage(code, tmp_path), tile  # no register is spilled to memory
            seen |= {word for word in ("mma.sync", "wgmma.mma_async") if word in code.asm["ptx"]}
    assert seen == {80: {"mma.sync"}, 90: {"mma.sync", "wgmma.mma_async"}}[capability]


def usage(code, folder):
    """What ptxas has given the kernel: registers, local memory and so on."""
    import triton

    (folder / "kernel.cubin").write_bytes(code.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def build(tile, capability):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qlora_rl.engine.linears.triton_nf4 import _product

    names, is_part = _product.arg_names, tile.parts > 1
    types = {
        "x_ptr": "*bf16", "codes_ptr": "*u8", "absmax_ptr": "*fp32", "values_ptr": "*fp32",
        "out_ptr": "*fp32" if is_part else "*bf16",
        "token_count": "i32", "output_count": "i32", "input_count": "i32", "x_stride": "i32", "span": "i32",
    }  # fmt: skip
    constants = {
        "bias_ptr": None, "BLOCKSIZE": 64, "TOKENS": tile.tokens, "OUTPUTS": tile.outputs, "INPUTS": tile.inputs,
        "ONE_SCALE": tile.inputs <= 64, "IS_PART": is_part, "HAS_BIAS": False, "BY_HAND": False,
    }  # fmt: skip
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in types if name != "token_count"}
    source = ASTSource(
        _product,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
