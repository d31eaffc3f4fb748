"""The kernel for 4-bit codes: exact, the same bits in any company, and every reason why there is none is said."""

import ctypes
import os

import pytest
import torch
from support import BUILDS, built

from qlora_rl.base.quant import require_bitsandbytes
from qlora_rl.cpu_features import SETTING, Processor, processor
from qlora_rl.engine.linears import cpu_kernel
from qlora_rl.engine.linears.cpu_kernel import CodesKernel, codes_kernel

BF16 = torch.bfloat16
needs_x86 = pytest.mark.skipif(processor().architecture != "x86_64", reason="the kernel is written for x86-64")


@pytest.fixture(params=BUILDS)
def kernel(request):
    found = built(request.param)
    if found is None:
        pytest.skip("this processor lacks the instructions")
    return found


@pytest.fixture
def fresh():
    """Nothing is remembered of other tests."""
    cpu_kernel._built.cache_clear()
    yield
    cpu_kernel._built.cache_clear()


def quantised(rows, columns, blocksize=64, quant="nf4", seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(BF16)
    codes, state = require_bitsandbytes().functional.quantize_4bit(weight, blocksize=blocksize, quant_type=quant)
    exact = require_bitsandbytes().functional.dequantize_4bit(codes, state).to(BF16)
    return codes, state.absmax.float(), state.code.float(), exact


def multiply(kernel, x, weights, starts, blocksize=64):
    codes, absmax = [w[0].data_ptr() for w in weights], [w[1].data_ptr() for w in weights]
    return kernel.multiply(x, codes, absmax, starts, weights[0][2], weights[0][3].shape[0], blocksize)


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 256])
@pytest.mark.parametrize("rows", [1, 3, 4, 37])
def test_what_it_decodes_and_multiplies_with_is_bitsandbytes_weight(kernel, quant, blocksize, rows):
    codes, absmax, values, exact = weight = quantised(rows, 512, blocksize, quant)
    assert kernel.takes(512, blocksize)
    out = torch.empty_like(exact)
    kernel.decode(codes, absmax, values, out, blocksize)
    assert torch.equal(out, exact)
    eye = torch.eye(512, dtype=BF16)
    assert torch.equal(multiply(kernel, eye, [weight], (0, 512), blocksize).t(), exact)


# With up to 30 tokens rows are decoded while the first tokens are multiplied: every number of those, with and without a
# rest.
@pytest.mark.parametrize("tokens", [*range(1, 14), 28, 29, 30, 31, 63, 64, 65, 130])
def test_sums_are_those_of_float32_rounded_once(kernel, tokens):
    """Half a unit of bf16's last place for the rounding, and what float32 sums of 768 products may be off."""
    weight = quantised(70, 768)
    x = torch.randn(tokens, 768, generator=torch.Generator().manual_seed(1)).to(BF16)
    found, exact = multiply(kernel, x, [weight], (0, tokens)), x.double() @ weight[3].double().t()
    room = exact.abs() * 2**-8 + (x.double().abs() @ weight[3].double().abs().t()) * 768 * 2**-24
    assert ((found.double() - exact).abs() <= room).all()


def test_a_token_has_the_same_bits_in_any_company_with_any_number_of_threads(kernel):
    weight = quantised(70, 768)
    x = torch.randn(130, 768, generator=torch.Generator().manual_seed(1)).to(BF16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = multiply(kernel, x, [weight], (0, 130))
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for first, count in ((0, 130), (5, 1), (17, 2), (3, 6), (8, 16), (40, 31), (30, 67), (129, 1)):
                alone = multiply(kernel, x[first : first + count], [weight], (0, count))
                assert torch.equal(alone, together[first : first + count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tokens", [1, 5, 7, 65])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_output_has_the_same_bits_whichever_rows_it_is_multiplied_with(kernel, tokens, threads):
    """257 rows are so many groups of each build that a thread takes several in a row, and a rest of one row."""
    codes, absmax, values, exact = whole = quantised(257, 768)
    x = torch.randn(tokens, 768, generator=torch.Generator().manual_seed(1)).to(BF16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = multiply(kernel, x, [whole], (0, tokens))
        for first, last in ((0, 1), (0, 11), (4, 17), (12, 37), (200, 257), (256, 257)):
            part = codes[first * 384 : last * 384], absmax[first * 12 : last * 12], values, exact[first:last]
            assert torch.equal(multiply(kernel, x, [part], (0, tokens)), together[:, first:last])
    finally:
        torch.set_num_threads(before)


def test_a_long_prompt_is_multiplied_in_chunks_with_the_same_bits(kernel):
    """A chunk is a MiB of tokens: 64 with 8,192 columns in bf16, half of them in float32."""
    weight = quantised(8, 8192)
    x = torch.randn(200, 8192, generator=torch.Generator().manual_seed(1)).to(BF16)
    together = multiply(kernel, x, [weight], (0, 200))
    for first, count in ((0, 20), (31, 2), (63, 5), (190, 10)):
        alone = multiply(kernel, x[first : first + count], [weight], (0, count))
        assert torch.equal(alone, together[first : first + count])


def back(kernel, gradient, weight, blocksize=64):
    codes, absmax, values, exact = weight
    assert kernel.takes_back(*exact.shape, blocksize)
    return kernel.multiply_back(gradient, codes.data_ptr(), absmax.data_ptr(), values, exact.shape[1], blocksize)


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
@pytest.mark.parametrize(("columns", "blocksize"), [(64, 32), (128, 64), (512, 256)])
@pytest.mark.parametrize("rows", [16, 48, 2064])
def test_a_gradient_is_multiplied_with_bitsandbytes_weight(kernel, quant, columns, blocksize, rows):
    """2,064 rows are more than are decoded at a time."""
    weight = quantised(rows, columns, blocksize, quant)
    some = torch.linspace(0, rows - 1, min(rows, 70)).long()
    gradient = torch.nn.functional.one_hot(some, rows).to(BF16)
    assert torch.equal(back(kernel, gradient, weight, blocksize), weight[3][some])


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 64, 130])
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_along_the_rows_are_those_of_float32_rounded_once_for_each_token_alone(kernel, tokens, threads):
    rows = 2064
    weight = quantised(rows, 192)
    gradient = torch.randn(130, rows, generator=torch.Generator().manual_seed(1)).to(BF16)
    whole = back(kernel, gradient, weight)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = back(kernel, gradient[:tokens].contiguous(), weight)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, whole[:tokens])
    exact = gradient[:tokens].double() @ weight[3].double()
    room = exact.abs() * 2**-8 + (gradient[:tokens].double().abs() @ weight[3].double().abs()) * rows * 2**-24
    assert ((found.double() - exact).abs() <= room).all()


def test_many_tokens_of_a_gradient_are_multiplied_in_chunks(kernel):
    """A chunk is 16 MiB: 512 tokens of 16,384 rows in bf16, half of them in float32."""
    weight = quantised(16384, 64)
    gradient = torch.randn(520, 16384, generator=torch.Generator().manual_seed(1)).to(BF16)
    found = back(kernel, gradient, weight)
    for first, count in ((0, 3), (254, 4), (508, 12)):
        own = gradient[first : first + count].contiguous()
        assert torch.equal(back(kernel, own, weight), found[first : first + count])


@pytest.mark.parametrize(
    ("rows", "columns", "blocksize", "takes"),
    [(16, 64, 64, True), (24, 64, 64, False), (16, 96, 32, False), (16, 96, 64, False)],
)
def test_gradients_of_weights_that_fill_no_panel_are_left_to_bitsandbytes(kernel, rows, columns, blocksize, takes):
    assert kernel.takes_back(rows, columns, blocksize) is takes


def adapter(sizes, rank, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = [(torch.randn(rank, columns, generator=generator) / columns**0.5).to(BF16) for _ in sizes]
    return a, [torch.randn(size, rank, generator=generator).to(BF16) for size in sizes]


@pytest.mark.parametrize("tokens", [1, 5, 6, 50, 130])
@pytest.mark.parametrize(
    ("sizes", "rank", "columns"), [((48,), 4, 32), ((64, 16, 16), 16, 256), ((80, 144), 64, 96), ((32,), 20, 64)]
)
def test_an_adapter_is_added_as_two_products_that_are_rounded(kernel, sizes, rank, columns, tokens):
    """A sum in another order may cross the border between two numbers of bf16: a unit of its last place."""
    a, b = adapter(sizes, rank, columns)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, columns, generator=generator).to(BF16)
    y = torch.randn(tokens, sum(sizes), generator=generator).to(BF16)
    assert kernel.takes_adapter(a, b)
    low = [(x.double() @ part.double().t()).to(BF16).double() for part in a]
    parts = torch.cat([one @ part.double().t() for one, part in zip(low, b, strict=True)], 1)
    wanted = (y.double() + 0.5 * parts.to(BF16).double()).to(BF16)
    kernel.add_adapter(y, x, a, b, 0.5)
    assert torch.allclose(y.double(), wanted.double(), rtol=2**-7, atol=2**-5)
    assert (y == wanted).double().mean() > 0.98


def test_an_adapters_matrices_come_out_exactly_and_writes_into_them_count(kernel):
    """One of the two is the identity, so that the product is the other one."""
    a, b = adapter((64, 32), 16, 128)
    for _ in range(2):
        y = torch.zeros(128, 32, dtype=BF16)
        kernel.add_adapter(y, torch.eye(128, dtype=BF16), a, [torch.eye(16, dtype=BF16)] * 2, 1.0)
        assert torch.equal(y.t(), torch.cat(a))
        y = torch.zeros(32, 96, dtype=BF16)
        kernel.add_adapter(y, torch.eye(32, dtype=BF16), list(torch.eye(32, dtype=BF16).split(16)), b, 1.0)
        assert torch.equal(y.t(), torch.block_diag(*b))
        for part in (*a, *b):
            part.copy_(torch.randn(part.shape))


def test_a_token_gets_the_same_adapter_in_any_company_with_any_number_of_threads(kernel):
    a, b = adapter((256, 80), 16, 768)
    x = torch.randn(130, 768, generator=torch.Generator().manual_seed(1)).to(BF16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = torch.zeros(130, 336, dtype=BF16)
        kernel.add_adapter(together, x, a, b, 1.0)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for first, count in ((0, 130), (5, 1), (17, 2), (30, 67), (129, 1)):
                alone = torch.zeros(count, 336, dtype=BF16)
                kernel.add_adapter(alone, x[first : first + count], a, b, 1.0)
                assert torch.equal(alone, together[first : first + count])
    finally:
        torch.set_num_threads(before)


def test_a_width_that_is_not_the_adapters_is_an_error(kernel):
    a, b = adapter((64, 32), 16, 128)
    x, y = (torch.zeros(3, width, dtype=BF16) for width in (128, 96))
    kernel.add_adapter(y, x, a, b, 1.0)
    for wrong in ((y, x[:, :64].contiguous()), (y[:, :64].contiguous(), x)):
        with pytest.raises(ValueError, match="multiplying an adapter"):
            kernel.add_adapter(*wrong, a, b, 1.0)


def test_adapters_that_it_does_not_take(kernel):
    def takes(sizes=(64,), rank=16, columns=64, change=lambda part: part):
        a, b = adapter(sizes, rank, columns)
        return kernel.takes_adapter([*map(change, a)], [*map(change, b)])

    assert takes()
    assert not takes(sizes=(64, 24))
    assert not takes(rank=6)
    assert not takes(columns=48)
    assert not takes(change=torch.Tensor.float)
    assert not takes(change=lambda part: part.t().contiguous().t())


def test_several_weights_each_take_their_own_tokens(kernel):
    weights = [quantised(37, 256, seed=seed) for seed in range(5)]
    x = torch.randn(80, 256, generator=torch.Generator().manual_seed(1)).to(BF16)
    starts = (0, 3, 3, 4, 79, 80)  # one has none
    found = multiply(kernel, x, weights, starts)
    for i, weight in enumerate(weights):
        own = slice(starts[i], starts[i + 1])
        assert torch.equal(found[own], multiply(kernel, x[own].contiguous(), [weight], (0, starts[i + 1] - starts[i])))


def test_infinity_and_nan_stay_with_their_token(kernel):
    weight = quantised(40, 128)
    x = torch.ones(5, 128, dtype=BF16)
    clean = multiply(kernel, x, [weight], (0, 5))
    x[2, 7] = float("nan")
    found = multiply(kernel, x, [weight], (0, 5))
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def normed(x, weight, residual=None):
    """vLLM's operators, and the model's of the trainer: rounded before the weight and after it."""
    whole = x.float() if residual is None else x.float() + residual.float()
    scaled = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-6)
    return scaled.to(BF16) * weight, whole.to(BF16)


@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (16, 768), (130, 256), (5, 4, 64)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_a_norm_is_torchs_rounded_twice(kernel, shape, has_residual):
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(shape, generator=generator).mul(3).to(BF16) for _ in range(2))
    weight = torch.randn(shape[-1], generator=generator).to(BF16)
    expected, total = normed(x, weight, residual if has_residual else None)
    before = x.clone()
    found = kernel.norm(x, weight, 1e-6, residual if has_residual else None)
    # One sum has another order, which can move a number over the edge of a rounding.
    assert (found != expected).float().mean() < 1e-3
    assert torch.allclose(found.float(), expected.float(), rtol=2**-6, atol=0)
    assert torch.equal(x, before)
    if has_residual:
        assert torch.equal(residual, total)


def test_a_norm_of_a_token_has_the_same_bits_in_any_company_with_any_number_of_threads(kernel):
    x, weight = torch.randn(70, 512).to(BF16), torch.randn(512).to(BF16)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([kernel.norm(row[None], weight, 1e-6) for row in x])
        torch.set_num_threads(3)
        assert torch.equal(kernel.norm(x, weight, 1e-6), alone)
        assert torch.equal(kernel.norm(x.t().contiguous().t(), weight, 1e-6), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("columns", "blocksize", "takes"), [(96, 64, False), (128, 64, True), (64, 16, False)])
def test_blocks_must_fill_rows_and_vectors(kernel, columns, blocksize, takes):
    assert kernel.takes(columns, blocksize) is takes


@pytest.mark.parametrize(
    ("architecture", "kernels", "native_dtypes", "setting", "found"),
    [
        ("x86_64", "AVX2", (), "auto", "avx2"),
        ("x86_64", "AVX2", (), "native", ""),
        ("x86_64", "DEFAULT", (), "auto", ""),
        ("x86_64", "AVX512", ("bfloat16",), "float32", "avx2"),
        ("x86_64", "AVX512", (), "auto", "avx2"),
        ("aarch64", "DEFAULT", ("bfloat16",), "auto", ""),
    ],
)
def test_which_kernel_a_processor_takes(architecture, kernels, native_dtypes, setting, found):
    assert Processor("some", architecture, kernels, native_dtypes, setting).codes_kernel == found


@pytest.mark.parametrize(("has_instructions", "found"), [(True, "avx512_bf16"), (False, "avx2")])
def test_avx512_alone_is_not_enough_for_bf16(monkeypatch, has_instructions, found):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    assert Processor("some", "x86_64", "AVX512", ("bfloat16",)).codes_kernel == found


@needs_x86
def test_it_is_built_once_and_loaded_afterwards(tmp_path, monkeypatch, fresh):
    monkeypatch.setenv("QLORA_RL_CACHE", str(tmp_path))
    assert isinstance(cpu_kernel._built("avx2"), CodesKernel)
    (path,) = (tmp_path / "kernels").iterdir()
    written = path.stat().st_mtime_ns
    cpu_kernel._built.cache_clear()
    assert isinstance(cpu_kernel._built("avx2"), CodesKernel)
    assert path.stat().st_mtime_ns == written


@needs_x86
@pytest.mark.parametrize(
    ("compiler", "said"),
    [("no-such-compiler", "no-such-compiler could not build it"), ("false", "false could not build it: exit status 1")],
)
def test_a_compiler_that_fails_is_named(tmp_path, monkeypatch, fresh, compiler, said):
    monkeypatch.setenv("QLORA_RL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    found = cpu_kernel._built("avx2")
    assert isinstance(found, str)
    assert said in found
    assert not list((tmp_path / "kernels").iterdir())


def test_without_a_compiler_the_reason_is_said(tmp_path, monkeypatch, fresh):
    monkeypatch.setenv("QLORA_RL_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert cpu_kernel._built("avx2") == "there is no C++ compiler; install g++, or set CXX"


@needs_x86
def test_a_directory_that_others_may_write_into_is_not_loaded_from(tmp_path, monkeypatch, fresh):
    monkeypatch.setenv("QLORA_RL_CACHE", str(tmp_path))
    (tmp_path / "kernels").mkdir()
    os.chmod(tmp_path / "kernels", 0o777)
    found = cpu_kernel._built("avx2")
    assert isinstance(found, str)
    assert "chmod 700" in found


def test_the_setting_that_leaves_products_to_torch_leaves_it_out(monkeypatch):
    monkeypatch.setenv(SETTING, "native")
    assert isinstance(codes_kernel(), str)


@needs_x86
def test_it_has_torchs_threads(kernel):
    """Two OpenMP would each have threads that wait for the other's; that of scikit-learn may be loaded as well."""
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "/" in line}
    (torchs,) = (path for path in loaded if "/torch/lib/libgomp" in path)
    kernels = [path for path in loaded if "/codes-" in path]
    assert kernels
    for path in [torchs, *kernels]:
        assert _address(path) == _address(torchs)


def _address(path):
    return ctypes.cast(ctypes.CDLL(path).omp_get_max_threads, ctypes.c_void_p).value
