"""A 4-bit weight decoded slice by slice, or kept decoded: bitsandbytes' numbers bit for bit, and never stale ones."""

from types import SimpleNamespace

import pytest
import torch
from support import BUILDS, built, fused

from qlora_rl.base.decode import decode_plainly
from qlora_rl.base.quant import dequantize_exactly, require_bitsandbytes
from qlora_rl.engine.linears import decoded
from qlora_rl.engine.linears.base_compute import BaseCompute, check_wish, choose
from qlora_rl.engine.linears.decoded import DecodedLinear
from qlora_rl.errors import ConfigConflictError

IN = 128
LAYER = SimpleNamespace()


def pack(weight):
    return lambda x, bias: torch.nn.functional.linear(x, weight, bias)


def plain(weight, x):
    """What vLLM's plugin computes: one product per part."""
    functional = require_bitsandbytes().functional
    offsets = weight.bnb_shard_offsets.tolist()
    parts = [
        functional.dequantize_4bit(weight.data[offsets[i] : offsets[i + 1]], state)
        for i, state in weight.bnb_quant_state.items()
    ]
    return torch.cat([x.to(torch.bfloat16) @ part.to(torch.bfloat16).t() for part in parts], dim=-1).to(x.dtype)


def close(one, other):
    """Both are sums of the same bf16 products, rounded once: the order of the sums may differ."""
    return torch.allclose(one.float(), other.float(), rtol=2**-7, atol=2**-6)


KERNELS = {f"by the kernel for {name}": name for name in BUILDS}


@pytest.fixture(params=["in bf16", "in float32", "in float32, by table", *KERNELS], autouse=True)
def way(request, monkeypatch):
    """How this processor, one without bf16 instructions, and one without AVX-512 either make a product; and both of our
    kernels."""
    monkeypatch.setattr(decoded, "uses_avx512", lambda: "table" not in request.param)
    if request.param in KERNELS and built(KERNELS[request.param]) is None:
        pytest.skip("this processor lacks the instructions")
    return request.param


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def linear_of(weight, slice_size=2**12, way="in bf16"):
    kernel = built(KERNELS[way]) if way in KERNELS else None
    lifted = torch.empty(slice_size) if "float32" in way or "avx2" in way else None
    linear = DecodedLinear(weight, torch.empty(slice_size, dtype=torch.bfloat16), lifted, kernel)
    assert linear.has_kernel == (kernel is not None)
    return linear


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [64, 128])
@pytest.mark.parametrize("slice_size", [IN, 2**12, 2**20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_are_multiplied_as_one(quant, blocksize, slice_size, dtype, way):
    weight = fused(quant=quant, blocksize=blocksize)
    linear = linear_of(weight, slice_size, way)
    for shape in ((1, IN), (5, IN), (2, 3, IN)):
        x, bias = torch.randn(shape).to(dtype), torch.randn(160).to(dtype)
        out = linear(LAYER, x, bias)
        assert out.dtype == dtype
        assert close(out, plain(weight, x) + bias)


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
def test_decoded_and_baked_are_bitsandbytes_own_weights_bit_for_bit(quant, way, threads):
    """Multiplied with the identity, a product is the weight itself."""
    weight = fused(quant=quant)
    linear, eye = linear_of(weight, way=way), torch.eye(IN, dtype=torch.bfloat16)
    wanted = plain(weight, eye)
    assert torch.equal(linear(LAYER, eye), wanted)
    assert linear.bake(pack) == (4 if "float32" in way else 2) * 160 * IN
    assert torch.equal(linear(LAYER, eye), wanted)
    linear.unbake()
    assert torch.equal(linear(LAYER, eye), wanted)


@pytest.mark.parametrize("columns", [IN, 768])
def test_a_token_gives_the_same_bits_in_any_company(columns, threads, way):
    """torch's bf16 kernels keep their own rules."""
    if way == "in bf16":
        return
    linear = linear_of(fused(columns=columns), 2**15, way)
    x = torch.randn(150, columns).to(torch.bfloat16)
    together = linear(LAYER, x)
    for count in (1, 2, 7, 8, 9, 16, 17, 33):
        found = linear(LAYER, x[30 : 30 + count])
        assert torch.equal(found, together[30 : 30 + count]), count
        assert found.is_contiguous()


def with_second_zero_negative(codes, state):
    """FP4's code 8 as bitsandbytes decodes it without AVX-512: -0, where its table and its AVX-512 kernel have 0."""
    weight = decode_plainly(codes, state)
    nibbles = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], dim=1).view(weight.shape)
    return torch.where(nibbles == 8, -0.0, weight)


def test_a_zero_of_the_other_sign_is_the_same_weight(way, monkeypatch):
    """The faster decoder is taken for FP4 as for NF4, on a processor where bitsandbytes gives FP4's second zero a
    sign."""
    weight = fused(quant="fp4")
    linear = linear_of(weight, way=way)
    monkeypatch.setattr(decoded, "decode_plainly", with_second_zero_negative)
    again = linear_of(weight, way=way)
    assert type(again._decode) is type(linear._decode)
    assert torch.signbit(with_second_zero_negative(*again._joined.part(0))).sum() > 0
    eye = torch.eye(IN, dtype=torch.bfloat16)
    assert torch.equal(again(LAYER, eye), plain(weight, eye))


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
def test_codes_in_plain_torch_are_bitsandbytes_weights_but_for_the_sign_of_fp4s_second_zero(quant):
    codes, state = require_bitsandbytes().functional.quantize_4bit(
        torch.randn(64, IN, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16), quant_type=quant
    )
    ours = dequantize_exactly(codes, state.absmax, state.code, 64, (64, IN)).to(torch.bfloat16)
    theirs = decode_plainly(codes, state)
    assert torch.equal(ours, theirs)
    differ = ours.view(torch.int16) != theirs.view(torch.int16)
    nibbles = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], dim=1).view(64, IN)
    second_zero = nibbles == 8 if quant == "fp4" else torch.zeros_like(differ)
    assert not (differ & ~second_zero).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_baked_weight_takes_any_shape_and_a_bias(dtype, way):
    weight = fused()
    linear = linear_of(weight, way=way)
    linear.bake(pack)
    for shape in ((5, IN), (2, 3, IN)):
        x, bias = torch.randn(shape).to(dtype), torch.randn(160).to(dtype)
        out = linear(LAYER, x, bias)
        assert out.dtype == dtype
        assert close(out, plain(weight, x) + bias)


def test_joining_the_scales_changes_none_of_them(way):
    weight, other = fused(), fused()
    linear_of(weight, way=way)
    for i, state in weight.bnb_quant_state.items():
        assert torch.equal(state.absmax, other.bnb_quant_state[i].absmax.flatten())


@pytest.mark.parametrize("change", ["scales in place", "other scales", "codes in place", "other codes"])
def test_what_is_changed_in_the_base_counts_from_the_next_product_on(change, way):
    weight = fused()
    linear, eye = linear_of(weight, way=way), torch.eye(IN, dtype=torch.bfloat16)
    before = linear(LAYER, eye)
    state = weight.bnb_quant_state[1]
    if change == "scales in place":
        state.absmax.mul_(1.5)
    elif change == "other scales":
        state.absmax = state.absmax * 1.5
    elif change == "codes in place":
        weight.data[:100].bitwise_xor_(17)
    else:
        weight.data = weight.data.bitwise_xor(17)
    assert not torch.equal(linear(LAYER, eye), before)
    assert torch.equal(linear(LAYER, eye), plain(weight, eye))


def test_a_baked_weight_follows_when_it_is_refreshed(way):
    weight = fused()
    linear, eye = linear_of(weight, way=way), torch.eye(IN, dtype=torch.bfloat16)
    linear.bake(pack)
    weight.bnb_quant_state[0].absmax.mul_(1.25)
    linear.refresh()
    assert torch.equal(linear(LAYER, eye), plain(weight, eye))


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (lambda: fused(columns=96), "blocks of scales span rows"),
        (lambda: fused(blocksize=2048, columns=2048, sizes=(4,)), "no kernel"),
        (lambda: _nested(fused()), "scales are quantised"),
        (lambda: _mixed(fused()), "quantised differently"),
    ],
)
def test_what_cannot_be_decoded_exactly_is_left_to_vllm(weight, why):
    with pytest.raises(ValueError, match=why):
        linear_of(weight())


def test_a_kernel_that_decodes_something_else_is_not_used(monkeypatch):
    real = decoded.decoder

    def off(quant_type, blocksize):
        decode = real(quant_type, blocksize)

        def wrong(codes, absmax, out):
            decode(codes, absmax, out)
            out[0, 0] += 1

        return wrong

    monkeypatch.setattr(decoded, "decoder", off)
    with pytest.raises(ValueError, match="bitsandbytes' own"):
        linear_of(fused())


def _nested(weight):
    weight.bnb_quant_state[0].nested = True
    return weight


def _mixed(weight):
    weight.bnb_quant_state[0].blocksize = 128
    return weight


FAST = {"vllm": 3.0, "nf4": 2.0, "baked": 1.0}


@pytest.mark.parametrize(
    ("seconds", "baked", "planned", "limit", "way", "said"),
    [
        (FAST, 4, 12, 20, "baked", "leave 20% of 20.00 GiB free"),
        (FAST, 5, 12, 20, "nf4", "leave 15% of 20.00 GiB free, less than 20%"),
        (FAST, 50, 12, 20, "nf4", "leave 0% of"),
        (FAST | {"vllm": 1.5}, 5, 12, 20, "vllm", "less than 20%"),
        ({"vllm": 3.0, "nf4": 1.0, "baked": 2.0}, 1, 1, 20, "nf4", "it is the fastest here"),
        ({"vllm": 0.5, "nf4": 1.0, "baked": 2.0}, 1, 1, 20, "vllm", "it is the fastest here"),
    ],
)
def test_auto_bakes_only_where_it_is_faster_and_a_fifth_of_the_memory_stays_free(
    seconds, baked, planned, limit, way, said
):
    chosen, reason = choose(seconds, baked_gib=baked, planned_gib=planned, limit_gib=limit)
    assert chosen == way
    assert said in reason


def test_another_word_is_rejected_with_those_that_there_are():
    with pytest.raises(ConfigConflictError, match=r"base_compute='int8' is not one of .*baked.*auto"):
        check_wish("int8")


def test_what_was_installed_is_said_in_one_line():
    found = BaseCompute("baked", "direct", "asked for", 2**30, {"lm_head": "no kernel"})
    assert str(found) == (
        "linears multiply with: baked, 1.00 GiB of copies (asked for); adapters: direct; lm_head is left to vLLM: no "
        "kernel"
    )


def test_a_copy_that_is_not_what_the_codes_say_is_found_whichever_of_them_was_written_to(way):
    weight = fused()
    linear = linear_of(weight, way=way)
    assert linear.wrong_column() is None  # no copy yet
    copies = []
    linear.bake(lambda decoded: copies.append(decoded) or pack(decoded))
    assert [linear.wrong_column(start) for start in range(0, IN, decoded.CHECKED_COLUMNS)] == [None] * 4
    kept = copies[0][100, 70].clone()
    copies[0][100, 70] += 1  # a row of the second part
    assert [linear.wrong_column(start) for start in range(0, IN, decoded.CHECKED_COLUMNS)] == [None, None, 70, None]
    assert linear.wrong_column(IN + 64) == 70
    copies[0][100, 70] = kept
    weight.data.view(-1)[0] ^= 0xF0  # the code of the first weight
    assert linear.wrong_column() == 0
    linear.refresh()
    assert linear.wrong_column() is None
    weight.bnb_quant_state[2].absmax[-1] *= 2
    assert linear.wrong_column(IN - 32) == IN - 32


@pytest.mark.parametrize("library", ["did not load", "lacks the kernel"])
def test_without_the_kernel_there_is_no_decoder(monkeypatch, library):
    """bitsandbytes has a function for every name, which raises when it is called."""
    import ctypes

    from bitsandbytes import cextension

    from qlora_rl.base.decode import decoder

    if library == "did not load":
        found = cextension.ErrorHandlerMockBNBNativeLibrary("no such file")
    else:
        found = cextension.BNBNativeLibrary(ctypes.CDLL(None))
    monkeypatch.setattr(cextension, "lib", found)
    assert decoder("nf4", 64) is None
