"""Products with 4-bit weights on an NVIDIA GPU: `make gpu`. Written on machines without one; not yet seen to pass."""

import pytest
import torch
from support import program

from qlora_rl.engine.linears.gpu_compute import (
    TOKENS,
    RuledLinear,
    gpu_seconds,
    measure,
    multiply_by,
    read_out,
    ways_for,
)

Linear = program("benchmarks/products.py").Linear
make_weight = program("benchmarks/products.py").make_weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch built for it"),
]

QKV = Linear("qkv", (896, 128, 128), 896)
ODD = Linear("odd", (200, 56), 320)
ALL_WAYS = sorted({way for tokens in TOKENS for way in ways_for(tokens, with_triton=True)})


def product(way, x, joined):
    return multiply_by(
        way, x, joined.codes, joined.absmax, joined.values, joined.sizes, joined.blocksize, joined.quant_type
    )


def decoded(joined):
    """Float32 [O, I], by bitsandbytes' own function, part by part."""
    from qlora_rl.base.decode import decode_plainly

    return torch.cat([decode_plainly(*joined.part(i)) for i in range(len(joined.sizes))]).float()


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("linear", [QKV, ODD])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_every_way_gives_the_product_with_the_decoded_weight(way, linear, quant_type):
    joined = make_weight(linear, "cuda", quant_type=quant_type)
    weight = decoded(joined)
    torch.backends.cuda.matmul.allow_tf32 = False
    for tokens in (1, 3, 17, 64, 130):
        x = torch.randn(tokens, linear.inputs, device="cuda").to(torch.bfloat16)
        right = x.float() @ weight.t()
        assert (product(way, x, joined).float() - right).norm() < 4e-3 * right.norm()


@pytest.mark.parametrize("way", [way for way in ALL_WAYS if way.startswith("triton")])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [64, 128, 256])
def test_our_kernel_decodes_every_weight_as_bitsandbytes_does(way, quant_type, blocksize):
    linear = Linear("qkv", (896, 128, 128), 1024)
    joined = make_weight(linear, "cuda", quant_type=quant_type, blocksize=blocksize)
    assert read_out(joined, f"256={way}") == ""


def test_our_kernel_gives_the_same_bits_again():
    joined = make_weight(QKV, "cuda")
    x = torch.randn(7, QKV.inputs, device="cuda").to(torch.bfloat16)
    for way in ALL_WAYS:
        if way.startswith("triton"):
            assert torch.equal(product(way, x, joined), product(way, x, joined)), way


@pytest.mark.parametrize("way", [ways_for(16, with_triton=True)[-1], "joined", "decoded", "parts"])
def test_a_captured_graph_follows_repaired_scales(way):
    joined = make_weight(QKV, "cuda")
    linear, layer = RuledLinear(joined, f"16={way}"), torch.nn.Module()
    x = torch.randn(5, QKV.inputs, device="cuda").to(torch.bfloat16)
    linear(layer, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(layer, x)
    for factor in (1.0, 1.5):
        for state in joined.states:
            state.absmax.mul_(factor)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, linear(layer, x))


def test_the_clock_measures_every_way():
    seconds = measure([make_weight(QKV, "cuda", seed=i) for i in range(4)], 16, gpu_seconds, with_triton=True)
    assert set(seconds) == set(ways_for(16, with_triton=True))
    assert all(1e-7 < value < 1e-1 for value in seconds.values())
