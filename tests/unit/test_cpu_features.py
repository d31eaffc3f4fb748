"""What the processor multiplies fast, and products in float32 where it does not multiply bf16."""

import gc
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from qlora_rl import cpu_features as module
from qlora_rl import cpu_matmul
from qlora_rl.cpu_features import (
    SETTING,
    Processor,
    keep_few_kernels,
    processor,
    tell_compiled_code_apart,
)
from qlora_rl.cpu_matmul import Float32Products, are_replaced, lifted_rows, torchs_own
from qlora_rl.errors import ConfigConflictError

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """The branch of a processor without bf16 instructions, on any."""
    monkeypatch.setenv(SETTING, "float32")
    # Engines and trainers of other files, which the traceback of a failed test keeps alive.
    of_others = {dtype: set(claims) for dtype, claims in cpu_matmul._claims.items()}
    for claims in cpu_matmul._claims.values():
        claims.clear()
    yield
    assert not are_replaced()
    for dtype, claims in of_others.items():
        cpu_matmul._claims[dtype] |= {claim for claim in claims if claim.dtypes}


def randn(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("native", "setting", "dtype", "expected"),
    [
        (("bfloat16",), "auto", BF16, BF16),
        ((), "auto", BF16, torch.float32),
        (("bfloat16",), "auto", torch.float16, torch.float32),
        (("bfloat16", "float16"), "float32", BF16, torch.float32),
        ((), "native", BF16, BF16),
        ((), "auto", torch.float32, torch.float32),
        ((), "float32", torch.float64, torch.float64),
    ],
)
def test_a_dtype_without_instructions_is_multiplied_in_float32(native, setting, dtype, expected):
    assert Processor("some", "x86_64", "AVX2", native, setting).multiplies_in(dtype) is expected


COMPILED = """
import torch
from qlora_rl.cpu_features import tell_compiled_code_apart

tell_compiled_code_apart()
ids = torch.arange(1000)
held = (ids >= 500) & (ids < 900)
part = torch.compile(lambda x, first, end: ((x >= first) & (x < end)) * (x - first), dynamic=True)
is_right = torch.equal(part(ids, 500, 900), held * (ids - 500))
print(is_right, torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.full  # two processes compile; by default the tag is read, below
@pytest.mark.skipif(
    shutil.which("c++") is None or processor().torch_kernels != "AVX512",
    reason="needs a C++ compiler, and two kinds of vectors",
)
def test_what_was_compiled_for_wider_vectors_is_not_taken_for_narrower_ones(tmp_path):
    """torch's cache does not distinguish them: AVX2 would read eight numbers into vectors of four."""
    told = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    for kernels in ("avx512", "avx2"):
        command, environment = [sys.executable, "-c", COMPILED], {**told, "ATEN_CPU_CAPABILITY": kernels}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.stdout.split() == ["True", "0"], (kernels, done.stdout, done.stderr[-2000:])


def test_a_tag_of_the_users_stays_and_ours_is_added_once(monkeypatch):
    from torch.compiler import config

    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "mine")
    monkeypatch.setattr(config, "cache_key_tag", "mine")
    tag = tell_compiled_code_apart()
    assert tag.startswith("mine; ")
    assert tag.endswith(processor().torch_kernels)
    assert tell_compiled_code_apart() == tag == os.environ["TORCH_COMPILE_CACHE_KEY_TAG"]


def test_what_the_processor_is_said_to_multiply_is_what_it_multiplies_fast(monkeypatch):
    """The question is put to torch; a stop-watch must agree, whatever this processor is."""
    monkeypatch.setenv(SETTING, "auto")
    a, b = randn(512, 512), randn(512, 512, dtype=torch.float32)

    def seconds(x):
        found = []
        for _ in range(7):
            started = time.perf_counter()
            torch.mm(x, x)
            found.append(time.perf_counter() - started)
        return min(found)

    is_native = processor().multiplies_in(BF16) is BF16
    # Measured: 0.4 with AVX-512 and bf16 instructions, 60 to 100 without either.
    assert (seconds(a) < 8 * seconds(b)) == is_native


def test_an_unknown_setting_is_rejected(monkeypatch):
    monkeypatch.setenv(SETTING, "fast")
    with pytest.raises(ConfigConflictError, match="QLORA_RL_CPU_PRODUCTS='fast'"):
        processor()


def test_the_processor_is_said_in_one_line(monkeypatch):
    assert "in float32 and rounded once (QLORA_RL_CPU_PRODUCTS=float32)" in str(processor())
    assert processor().as_dict()["multiplies_bf16_in"] == "float32"
    monkeypatch.setenv(SETTING, "native")
    assert "computed natively" in str(processor())
    assert "\n" not in str(processor())


# Every operator that is replaced, with factors that lie in every way.
def _calls():
    a, b, c = randn(5, 24), randn(24, 7, seed=1), randn(5, 7, seed=2)
    stack, other, added = randn(3, 5, 24), randn(3, 24, 7, seed=1), randn(3, 5, 7, seed=2)
    row, few = randn(7, seed=3), randn(2, 24)
    yield "mm", lambda f: torch.mm(f(a), f(b))
    yield "mm, transposed", lambda f: torch.mm(f(b).t(), f(a).t())
    yield "mm, few rows", lambda f: torch.mm(f(few), f(b).t().contiguous().t())
    yield "mm, no rows", lambda f: torch.mm(f(a)[:0], f(b))
    yield "mm, nothing to sum", lambda f: torch.mm(f(a)[:, :0], f(b)[:0])
    yield "mm, out", lambda f: torch.mm(f(a), f(b), out=f(torch.zeros(5, 9))[:, 1:8])
    yield "mm, empty out", lambda f: torch.mm(f(a), f(b), out=f(torch.zeros(0)))
    yield "linear with a bias", lambda f: torch.nn.functional.linear(f(stack), f(b).t(), f(row))
    yield "addmm", lambda f: torch.addmm(f(c), f(a), f(b), beta=0.5, alpha=-2)
    yield "addmm, beta 0", lambda f: torch.addmm(f(torch.full_like(c, torch.nan)), f(a), f(b), beta=0)
    yield "addmm, out", lambda f: torch.addmm(f(row), f(a), f(b), out=f(torch.zeros(5, 7)))
    yield "addmm, in place", lambda f: f(c).clone().addmm_(f(a), f(b), alpha=3)
    yield "mv", lambda f: torch.mv(f(a), f(b)[:, 0])
    yield "addmv", lambda f: torch.addmv(f(row)[:5], f(a), f(b)[:, 0], beta=0.5, alpha=-2)
    yield "addmv, out", lambda f: torch.addmv(f(row)[:1], f(a), f(b)[:, 0], out=f(torch.zeros(5)))
    yield "addmv, in place", lambda f: f(row)[:5].clone().addmv_(f(a), f(b)[:, 0], beta=2)
    yield "linear of a vector", lambda f: torch.nn.functional.linear(f(a)[0], f(b).t(), f(row))
    yield "bmm", lambda f: torch.bmm(f(stack), f(other))
    yield "bmm, out", lambda f: torch.bmm(f(stack), f(other), out=f(torch.zeros(3, 5, 7)))
    yield "baddbmm", lambda f: torch.baddbmm(f(added), f(stack), f(other), beta=2)
    yield "baddbmm, out", lambda f: torch.baddbmm(f(added), f(stack), f(other), out=f(torch.zeros(3, 5, 7)))
    yield "baddbmm, in place", lambda f: f(added).clone().baddbmm_(f(stack), f(other))


CALLS = dict(_calls())


@pytest.fixture(params=["whole", "in slices"])
def slices(request, monkeypatch):
    if request.param == "in slices":
        monkeypatch.setattr(cpu_matmul, "SLICE", 16)
        monkeypatch.setattr(cpu_matmul, "LEFT_SLICE", 40)
        monkeypatch.setattr(cpu_matmul, "FEWEST_ROWS", 2)
        monkeypatch.setattr(cpu_matmul, "FEWEST_COLUMNS", 3)


@pytest.mark.parametrize("name", CALLS)
def test_a_product_is_the_float32_one_rounded_once(name, slices, monkeypatch):
    asked = []
    call = cpu_matmul._call
    monkeypatch.setattr(
        cpu_matmul, "_call", lambda name, *given, **named: asked.append(given) or call(name, *given, **named)
    )
    exact = CALLS[name](lambda t: t.double())
    single = CALLS[name](lambda t: t.float())
    with Float32Products(BF16):
        assert are_replaced()
        found = CALLS[name](lambda t: t.to(BF16))
    assert found.dtype is BF16
    assert found.shape == exact.shape
    assert found.numel() == 0 or asked
    assert all(x.dtype is torch.float32 for given in asked for x in given)
    # The order of a sum may move the float32 result across a tie of bf16, but not by more than that.
    near = single.to(BF16)
    assert ((found == near) | near.isnan() | (found.double() - exact).abs().le(exact.abs() * 2**-8 + 1e-6)).all()
    assert (found == near).double().mean() > 0.9 or near.isnan().all() or found.numel() == 0
    assert torch.equal(found.isnan(), exact.isnan())


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 256), (768, 96)])
def test_a_row_gives_the_same_bits_in_any_company(inputs, outputs, threads, slices, monkeypatch):
    """So rollouts do not depend on which sequences are sampled together, nor on how replicas share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    if inputs > cpu_matmul.SLICE:  # slices of one column are vectors, which MKL adds up in another order
        monkeypatch.setattr(cpu_matmul, "SLICE", 24 * inputs)
        monkeypatch.setattr(cpu_matmul, "FEWEST_ROWS", 64)
    try:
        x, w = randn(130, inputs), randn(outputs, inputs, seed=1)
        with Float32Products(BF16):
            whole = torch.nn.functional.linear(x, w)
            for rows in (*range(1, 20), 31, 33, 64, 100):
                assert torch.equal(torch.nn.functional.linear(x[:rows], w), whole[:rows]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
def test_other_dtypes_keep_torchs_own_kernels(dtype):
    a, b = randn(5, 24).to(dtype), randn(24, 7, seed=1).to(dtype)
    own = torch.mm(a, b)
    with Float32Products(BF16):
        assert torch.equal(torch.mm(a, b), own)
        for mixed in (
            lambda: torch.mm(a, b.to(BF16)),
            lambda: torch.mm(a.to(BF16), b.to(BF16), out=torch.empty(5, 7, dtype=dtype)),
        ):
            with pytest.raises(RuntimeError, match="dtype"):
                mixed()


def test_autograd_and_autocast_go_through_them():
    x, w = randn(6, 24, dtype=torch.float32).requires_grad_(), randn(7, 24, dtype=torch.float32).requires_grad_()
    with Float32Products(BF16), torch.autocast("cpu", BF16):
        out = torch.nn.functional.linear(x, w)
    assert out.dtype is BF16
    with Float32Products(BF16):
        out.sum().backward()
    ones = torch.ones(6, 7, dtype=torch.float64)
    torch.testing.assert_close(x.grad.double(), ones @ w.detach().to(BF16).double(), rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(w.grad.double(), ones.t() @ x.detach().to(BF16).double(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_attention_are_those_of_float32(masked, monkeypatch):
    asked = []
    call = cpu_matmul._call
    monkeypatch.setattr(
        cpu_matmul, "_call", lambda name, *given, **named: asked.append((name, given)) or call(name, *given, **named)
    )
    inputs = [randn(1, 2, 9, 32, seed=i) for i in range(3)]
    mask = randn(1, 1, 9, 9, seed=4) if masked else None
    leaves = [t.clone().requires_grad_() for t in inputs]
    how = {"attn_mask": mask} if masked else {"is_causal": True}
    with Float32Products(BF16):
        scaled_dot_product_attention(*leaves, **how).sum().backward()
    [(_, given)] = [each for each in asked if "flash_attention" in each[0]]
    assert all(x.dtype is torch.float32 for x in given[:6])
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    expected = backward(*given, attn_mask=None if mask is None else mask.float())
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, gradient.to(BF16))


def test_the_last_claim_that_closes_gives_the_kernels_back():
    first, second = Float32Products(BF16), Float32Products(BF16, torch.float16)
    first.close()
    first.close()  # harmless
    assert are_replaced()
    assert set(second.dtypes) == {BF16, torch.float16}
    with torchs_own():
        assert not are_replaced()
    assert are_replaced()
    second.close()
    assert not are_replaced()
    with Float32Products(torch.float32):
        assert not are_replaced()
    with Float32Products():
        assert not are_replaced()


def test_nothing_is_replaced_where_the_processor_is_left_alone(monkeypatch):
    monkeypatch.setenv(SETTING, "native")
    with Float32Products(BF16, torch.float16):
        assert not are_replaced()


def test_claims_of_many_threads_leave_nothing_behind():
    a, wrong = randn(64, 64), []
    with Float32Products(BF16):
        expected = a @ a

    def work():
        for _ in range(50):
            with Float32Products(BF16):
                if not torch.equal(a @ a, expected):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


WRONG = {
    "inner sizes": lambda a, b: torch.mm(a, b.t()),
    "a vector": lambda a, b: torch.mm(a[0], b),
    "a stack": lambda a, b: torch.mm(a[None], b),
    "what is added": lambda a, b: torch.addmm(a, a, b),
    "what is added times 0": lambda a, b: torch.addmm(a, a, b, beta=0),
    "in place": lambda a, b: a[0, :7].clone().addmm_(a, b),
    "batches": lambda a, b: torch.bmm(a[None].repeat(2, 1, 1), b[None]),
    "a long vector": lambda a, b: torch.mv(a, b.flatten()),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_rejected_in_torchs_words(name):
    a, b = randn(5, 24), randn(24, 7, seed=1)
    with pytest.raises(RuntimeError) as own:
        WRONG[name](a, b)
    with Float32Products(BF16), pytest.raises(RuntimeError) as found:
        WRONG[name](a, b)
    assert str(found.value) == str(own.value)


def test_scales_of_other_types_are_left_to_torch():
    a, b, c = randn(5, 24), randn(24, 7, seed=1), randn(5, 7, seed=2)
    own = torch.addmm(c, a, b, beta=True)
    with Float32Products(BF16):
        assert torch.equal(torch.addmm(c, a, b, beta=True), own)


def test_a_claim_ends_with_its_owner():
    class Owner:
        pass

    owner = Owner()
    Float32Products(BF16, owner=owner)
    assert are_replaced()
    del owner
    gc.collect()
    assert not are_replaced()


def test_the_default_dtype_does_not_matter():
    """vLLM loads a model with the model's dtype as the default."""
    x, w = randn(5, 24), randn(7, 24, seed=1)
    with Float32Products(BF16):
        expected = torch.nn.functional.linear(x, w)
        torch.set_default_dtype(BF16)
        try:
            assert torch.equal(torch.nn.functional.linear(x, w), expected)
            assert lifted_rows(x).dtype is torch.float32
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_large_left_factor_is_lifted_in_slices():
    """Of 256 MiB in float32 no more than a slice of the left factor and of the result is there at a time."""
    code = (
        "import resource, torch\n"
        "from qlora_rl.cpu_matmul import Float32Products\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "x, w = (torch.ones(*size, dtype=torch.bfloat16) for size in ((2**19, 128), (128, 128)))\n"
        "with Float32Products(torch.bfloat16):\n"
        "    x[:300] @ w\n"
        "    before = peak()\n"
        "    x @ w\n"
        "print((peak() - before) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 128 + 60  # MiB: the result, slices, and what malloc keeps


def test_a_claim_that_the_garbage_collector_closes_stops_nobody():
    """A finalizer may run in the middle of another claim's registration or closing, in the same thread."""
    code = (
        "import threading, torch\n"
        "from qlora_rl import cpu_matmul\n"
        "first = cpu_matmul.Float32Products()\n"
        "first.dtypes = (torch.bfloat16,)\n"
        "impl = torch.library.Library.impl\n"
        "torch.library.Library.impl = lambda *a, **k: (first.close(), impl(*a, **k))[1]\n"
        "cpu_matmul.Float32Products(torch.bfloat16)\n"
        "print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "went on\n", done.stderr


# Other threads multiply all the while.
IN_USE = """
import sys, threading, torch
from qlora_rl.cpu_matmul import Float32Products, torchs_own
sys.setswitchinterval(1e-6)
x = torch.ones(32, 32, dtype=torch.bfloat16)
ended, wrong = threading.Event(), []
def multiply():
    while not ended.is_set():
        if (x @ x)[0, 0] != 32: wrong.append(1)
threads = [threading.Thread(target=multiply) for _ in range(4)]
for thread in threads: thread.start()
for _ in range(300):
    with Float32Products(torch.bfloat16):
        x @ x
        with torchs_own(): x @ x
ended.set()
for thread in threads: thread.join()
assert not wrong
print("whole")
"""


def test_products_of_other_threads_go_on_while_claims_come_and_go():
    done = subprocess.run([sys.executable, "-c", IN_USE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


def test_nothing_is_said_and_nothing_is_done_at_import():
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "import torch, qlora_rl.cpu_matmul as p\n"
        "assert not p.are_replaced()\n"
        "with p.Float32Products(torch.bfloat16): "
        "torch.ones(2, 2, dtype=torch.bfloat16).mm(torch.ones(2, 2, dtype=torch.bfloat16))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Float32Products(BF16):
            pass


def test_an_arm_processor_is_told_by_its_numbers(monkeypatch, tmp_path):
    """There /proc/cpuinfo has no name, and the tiny model's digest must differ all the same."""

    def named(text):
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(module, "Path", lambda _: tmp_path / "cpuinfo")
        return module._name_and_identity.__wrapped__()

    arm = "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU variant\t: 0x1\nCPU part\t: 0xd40\n"
    assert named(arm)[0] == "implementer 0x41, part 0xd40, variant 0x1"
    assert named(arm.replace("0xd40", "0xd4f"))[0] != named(arm)[0]
    revised = named(arm + "CPU revision\t: 1\n")
    assert (revised[0], revised[1]) == (named(arm)[0], f"{named(arm)[0]}, revision 1")
    assert named("model name\t: AMD EPYC: 2\nmodel name\t: other\n") == ("AMD EPYC: 2", "")


def test_processors_of_one_name_have_identities_of_their_own(monkeypatch, tmp_path):
    """In clouds several generations are an "AMD EPYC"; the line that a run prints stays short."""
    (tmp_path / "cpuinfo").write_text("model name\t: AMD EPYC\ncpu family\t: 25\nmodel\t\t: 17\nstepping\t: 1\n")
    monkeypatch.setattr(module, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(module, "_name_and_identity", module._name_and_identity.__wrapped__)
    one = processor()
    assert (one.name, one.identity) == ("AMD EPYC", "family 25, model 17, stepping 1")
    assert one.as_dict()["identity"] == one.identity
    assert str(one).startswith("AMD EPYC, ")
    assert "stepping" not in str(one)


def test_a_process_of_its_own_multiplies_in_float32_for_its_life():
    code = (
        "from qlora_rl.engine.worker import BaseExtension\n"
        "from qlora_rl.cpu_matmul import are_replaced\n"
        "said = BaseExtension().qlora_multiply_in_float32(['bfloat16'])\n"
        "print(said, are_replaced())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True True\n", done.stderr


KEPT = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
SHAPES = """
import sys, torch
from qlora_rl.cpu_features import keep_few_kernels

def held():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))

if sys.argv[1:]:
    keep_few_kernels()
x, w = torch.ones(900, 256, dtype=torch.bfloat16), torch.ones(768, 256, dtype=torch.bfloat16)
x @ w.t()
before = held()
for rows in range(100, 900):
    x[:rows] @ w.t()
print(held() - before)
"""


def test_products_of_many_shapes_leave_few_kernels_behind(monkeypatch):
    monkeypatch.setenv(SETTING, "auto")
    if processor().multiplies_in(BF16) != BF16:
        pytest.skip("this processor lacks the instructions")
    environment = {name: value for name, value in os.environ.items() if name not in KEPT}

    def grown(*told):
        return int(subprocess.check_output([sys.executable, "-c", SHAPES, *told], env=environment)) / 1024

    # Of two processes each: once, beside other tests, a process of one had held what it usually does not, or the other
    # way round.
    many, few = max(grown(), grown()), min(grown("few"), grown("few"))
    assert few < 0.6 * many, f"MiB for 800 shapes: {few}, {many}"


@pytest.mark.parametrize(("setting", "expected"), [("native", ["256", "64"]), ("float32", [None, None])])
def test_few_kernels_are_kept_where_torch_multiplies_16_bits(monkeypatch, setting, expected):
    for name in KEPT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(SETTING, setting)
    keep_few_kernels()
    assert [os.environ.pop(name, None) for name in KEPT] == expected
    monkeypatch.setenv(KEPT[0], "7")
    keep_few_kernels()
    assert os.environ.pop(KEPT[0]) == "7"
    os.environ.pop(KEPT[1], None)
