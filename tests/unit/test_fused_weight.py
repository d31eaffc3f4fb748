"""The parts of a 4-bit weight multiplied as one by the kernel: bitsandbytes' numbers bit for bit, never stale ones."""

from types import SimpleNamespace

import pytest
import torch
from support import BUILDS, built, fused

from qlora_rl.base.decode import decode_plainly
from qlora_rl.base.quant import dequantize_exactly, require_bitsandbytes
from qlora_rl.engine.linears import fused_weight
from qlora_rl.engine.linears.base_compute import BaseCompute, check_wish
from qlora_rl.engine.linears.fused_weight import CodedLinear
from qlora_rl.errors import ConfigConflictError

IN = 128
LAYER = SimpleNamespace()


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


@pytest.fixture(params=BUILDS)
def kernel(request):
    found = built(request.param)
    if found is None:
        pytest.skip("this processor lacks the instructions")
    return found


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_are_multiplied_as_one(quant, blocksize, dtype, kernel):
    weight = fused(quant=quant, blocksize=blocksize)
    linear = CodedLinear(weight, kernel)
    for shape in ((1, IN), (5, IN), (2, 3, IN)):
        x, bias = torch.randn(shape).to(dtype), torch.randn(160).to(dtype)
        out = linear(LAYER, x, bias)
        assert out.dtype == dtype
        assert close(out, plain(weight, x) + bias)


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
def test_what_is_multiplied_is_bitsandbytes_own_weight_bit_for_bit(quant, kernel, threads):
    """Multiplied with the identity, a product is the weight itself."""
    weight, eye = fused(quant=quant), torch.eye(IN, dtype=torch.bfloat16)
    assert torch.equal(CodedLinear(weight, kernel)(LAYER, eye), plain(weight, eye))


@pytest.mark.parametrize("columns", [IN, 768])
def test_a_token_gives_the_same_bits_in_any_company(columns, threads, kernel):
    linear = CodedLinear(fused(columns=columns), kernel)
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


def test_a_zero_of_the_other_sign_is_the_same_weight(kernel, monkeypatch):
    """The kernel is taken for FP4 as for NF4, on a processor where bitsandbytes gives FP4's second zero a sign."""
    weight = fused(quant="fp4")
    monkeypatch.setattr(fused_weight, "decode_plainly", with_second_zero_negative)
    linear = CodedLinear(weight, kernel)
    codes = weight.data[: weight.bnb_shard_offsets[1]]
    assert torch.signbit(with_second_zero_negative(codes, weight.bnb_quant_state[0])).sum() > 0
    eye = torch.eye(IN, dtype=torch.bfloat16)
    assert torch.equal(linear(LAYER, eye), plain(weight, eye))


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


def test_joining_the_scales_changes_none_of_them(kernel):
    weight, other = fused(), fused()
    CodedLinear(weight, kernel)
    for i, state in weight.bnb_quant_state.items():
        assert torch.equal(state.absmax, other.bnb_quant_state[i].absmax.flatten())


@pytest.mark.parametrize("change", ["scales in place", "other scales", "codes in place", "other codes"])
def test_what_is_changed_in_the_base_counts_from_the_next_product_on(change, kernel):
    weight = fused()
    linear, eye = CodedLinear(weight, kernel), torch.eye(IN, dtype=torch.bfloat16)
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


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (lambda: fused(columns=96), "blocks of scales span rows"),
        (lambda: _nested(fused()), "scales are quantised"),
        (lambda: _mixed(fused()), "quantised differently"),
    ],
)
def test_what_cannot_be_decoded_exactly_is_left_to_vllm(weight, why, kernel):
    with pytest.raises(ValueError, match=why):
        CodedLinear(weight(), kernel)


@pytest.mark.parametrize("wrong", ["decode", "multiply"])
def test_a_kernel_that_gives_something_else_is_not_used(kernel, wrong, monkeypatch):
    real = getattr(kernel, wrong)

    def off(*given):
        found = real(*given)
        (given[3] if found is None else found)[0, 0] += 1
        return found

    monkeypatch.setattr(kernel, wrong, off)
    with pytest.raises(ValueError, match="bitsandbytes' own"):
        CodedLinear(fused(), kernel)


def _nested(weight):
    weight.bnb_quant_state[0].nested = True
    return weight


def _mixed(weight):
    weight.bnb_quant_state[0].blocksize = 128
    return weight


def test_another_word_is_rejected_with_those_that_there_are():
    with pytest.raises(ConfigConflictError, match=r"base_compute='int8' is not one of .*nf4.*vllm"):
        check_wish("int8")


def test_what_was_installed_is_said_in_one_line():
    found = BaseCompute("nf4", "direct", "asked for", {"lm_head": "no kernel"})
    assert str(found) == (
        "linears multiply with: nf4 (asked for); adapters: direct; lm_head is left to vLLM: no kernel"
    )


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
