"""One adapter multiplied without detours: every token gets its own adapter and no other, out of the live buffers."""

import pytest
import torch
from support import BUILDS, built

from qlora_rl.engine.linears.linear import AdapterProducts, group

SIZES, RANK, IN = (48, 16, 16), 4, 32
WAYS = {"torch": torch.float32} | dict.fromkeys(BUILDS, torch.bfloat16)


def reject(*_, **__):
    raise AssertionError("vLLM's own way was taken")


@pytest.fixture(params=WAYS)
def layer(request):
    """Products, and the buffers of a fused linear with three slots."""
    generator, kernel, dtype = torch.Generator().manual_seed(0), None, WAYS[request.param]
    if dtype == torch.bfloat16:
        kernel = built(request.param)
        if kernel is None:
            pytest.skip("this processor lacks the instructions")
    products = AdapterProducts(reject, kernel)
    a = tuple(torch.randn(3, 1, RANK, IN, generator=generator).to(dtype) for _ in SIZES)
    b = tuple(torch.randn(3, 1, size, RANK, generator=generator).to(dtype) for size in SIZES)
    return products, a, b


def near(found, wanted, dtype):
    """In float32 as far as sums in another order go; in bf16 each of three roundings may be off by half a unit of the
    last place."""
    return torch.allclose(
        found.double(), wanted, **({"atol": 1e-4} if dtype == torch.float32 else {"atol": 0.3, "rtol": 0.01})
    )


def expected(y, x, a, b, slots):
    out = y.clone().double()
    for t, slot in enumerate(slots):
        if slot >= 0:
            parts = [b[i][slot, 0].double() @ (a[i][slot, 0].double() @ x[t].double()) for i in range(len(SIZES))]
            out[t] += torch.cat(parts)
    return out


@pytest.mark.parametrize("slots", [[0] * 5, [2] * 5, [-1] * 5, [1, -1, 1, -1, -1], [0, 2, -1, 1, 0]])
def test_every_token_gets_its_own_adapter(layer, slots):
    products, a, b = layer
    x, y = torch.randn(5, IN).to(a[0].dtype), torch.randn(5, sum(SIZES)).to(a[0].dtype)
    before = y.clone()
    products.note(torch.tensor(slots))
    products(y, x, a, b, 1.0, SIZES)
    assert near(y, expected(before, x, a, b, slots), x.dtype)
    bare = torch.tensor(slots) < 0
    assert torch.equal(y[bare], before[bare])


WRITES = {
    "copy_": lambda place, new: place.copy_(new),
    "set": lambda place, new: place.__setitem__(slice(None), new),
    "batched": lambda place, new: torch._foreach_copy_([place], [new]),
    "out=": lambda place, new: torch.mul(new, 1, out=place),
    "detached": lambda place, new: place.detach().zero_().add_(new),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_written_into_a_slot_counts_from_the_next_product_on(layer, write, mode):
    """Through a view that was cut before, as a push has them; whichever matrix it is."""
    products, a, b = layer
    places = [place for i in range(len(SIZES)) for place in (a[i][1, 0, :3], b[i][1, 0, :, :3])]
    x = torch.randn(5, IN).to(a[0].dtype)
    products.note(torch.tensor([1] * 5))
    with mode():
        for place in places:
            write(place, torch.randn(place.shape).to(x.dtype))
            y = x.new_zeros(5, sum(SIZES))
            products(y, x, a, b, 1.0, SIZES)
            assert near(y, expected(torch.zeros_like(y), x, a, b, [1] * 5), x.dtype)


def test_an_adapter_that_is_not_finite_spoils_no_other_token(layer):
    products, a, b = layer
    a[0][0].fill_(float("nan"))
    b[2][0].fill_(float("inf"))
    x, y = torch.randn(4, IN).to(a[0].dtype), torch.randn(4, sum(SIZES)).to(a[0].dtype)
    before = y.clone()
    products.note(torch.tensor([0, -1, 1, -1]))
    products(y, x, a, b, 1.0, SIZES)
    assert not y[0].isfinite().all()
    assert torch.equal(y[[1, 3]], before[[1, 3]])
    assert y[2].isfinite().all()


def doubled(parts):
    return tuple(part * 2 for part in parts)


def under_a_buffer(a, b):
    """Other storage, and in the one before nothing that might be read any more."""
    kept = b[1].data
    b[1].data = b[1] * 2
    kept.zero_()
    return a, b


@pytest.mark.parametrize(
    "replaced", [lambda a, b: (doubled(a), b), lambda a, b: (a, doubled(b)), under_a_buffer], ids=["A", "B", "storage"]
)
def test_buffers_that_were_replaced_are_not_taken_for_those_before(layer, replaced):
    products, a, b = layer
    x = torch.randn(2, IN).to(a[0].dtype)
    products.note(torch.tensor([0, 0]))
    products(x.new_zeros(2, sum(SIZES)), x, a, b, 1.0, SIZES)
    a, b = replaced(a, b)
    y = x.new_zeros(2, sum(SIZES))
    products(y, x, a, b, 1.0, SIZES)
    assert near(y, expected(torch.zeros_like(y), x, a, b, [0, 0]), x.dtype)


@pytest.mark.parametrize("instructions", BUILDS)
def test_an_adapter_that_the_kernel_does_not_take_is_multiplied_by_torch(instructions):
    kernel = built(instructions)
    if kernel is None:
        pytest.skip("this processor lacks the instructions")
    generator = torch.Generator().manual_seed(0)
    a = tuple(torch.randn(1, 1, RANK, IN, generator=generator).to(torch.bfloat16) for _ in SIZES)
    b = tuple(torch.randn(1, 1, size - 8, RANK, generator=generator).to(torch.bfloat16) for size in SIZES)
    products = AdapterProducts(reject, kernel)
    products.note(torch.tensor([0, 0]))
    x, y = torch.randn(2, IN).to(torch.bfloat16), torch.zeros(2, sum(SIZES) - 24, dtype=torch.bfloat16)
    products(y, x, a, b, 1.0, [size - 8 for size in SIZES])
    assert near(y, expected(torch.zeros_like(y), x, a, b, [0, 0]), torch.bfloat16)


def test_an_output_that_is_not_contiguous_gets_its_adapter(layer):
    products, a, b = layer
    x = torch.randn(IN, 5).t().to(a[0].dtype)
    y = x.new_zeros(sum(SIZES), 5).t()
    products.note(torch.tensor([2] * 5))
    products(y, x, a, b, 1.0, SIZES)
    assert near(y, expected(torch.zeros_like(y), x, a, b, [2] * 5), x.dtype)


@pytest.mark.parametrize("change", ["dtype", "tokens", "argument", "before the first step"])
def test_what_is_not_of_the_plain_kind_is_left_to_vllm(change):
    taken = []
    products = AdapterProducts(lambda *_, **more: taken.append(more))
    a, b = (torch.zeros(1, 1, RANK, IN),), (torch.zeros(1, 1, 8, RANK),)
    if change != "before the first step":
        products.note(torch.tensor([0, 0, 0]))
    rows = 2 if change == "tokens" else 3
    x = torch.zeros(rows, IN, dtype=torch.bfloat16 if change == "dtype" else torch.float32)
    more = {"add_inputs": False} if change == "argument" else {}
    products(torch.zeros(rows, 8), x, a, b, 1.0, (8,), **more)
    assert taken == [more]


def test_a_step_without_tokens_has_no_groups():
    assert group(torch.tensor([], dtype=torch.long)) == []
