"""One adapter multiplied without detours: every token gets its own adapter and no other, out of the live buffers."""

import pytest
import torch

from qlora_rl.engine.linear import AdapterProducts, group

SIZES, RANK, IN = (24, 8, 8), 4, 16


def refuse(*_, **__):
    raise AssertionError("vLLM's own way was taken")


@pytest.fixture(params=["joined", "apart"])
def layer(request):
    """Products, and the buffers of a fused linear with three slots."""
    generator = torch.Generator().manual_seed(0)
    products = AdapterProducts(refuse)
    a = tuple(torch.randn(3, 1, RANK, IN, generator=generator) for _ in SIZES)
    b = tuple(torch.randn(3, 1, size, RANK, generator=generator) for size in SIZES)
    return products, products.join(a) if request.param == "joined" else a, b


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
    x, y = torch.randn(5, IN), torch.randn(5, sum(SIZES))
    before = y.clone()
    products.note(torch.tensor(slots))
    products(y, x, a, b, 1.0, SIZES)
    assert torch.allclose(y.double(), expected(before, x, a, b, slots), atol=1e-4)
    bare = torch.tensor(slots) < 0
    assert torch.equal(y[bare], before[bare])


def test_what_is_written_into_a_slot_counts_from_the_next_product_on(layer):
    products, a, b = layer
    x = torch.randn(5, IN)
    products.note(torch.tensor([1] * 5))
    for _ in range(3):
        for i in range(len(SIZES)):
            a[i][1, 0].copy_(torch.randn(RANK, IN))
            b[i][1, 0].copy_(torch.randn(SIZES[i], RANK))
        y = torch.zeros(5, sum(SIZES))
        products(y, x, a, b, 1.0, SIZES)
        assert torch.allclose(y.double(), expected(torch.zeros_like(y), x, a, b, [1] * 5), atol=1e-4)


def test_an_adapter_that_is_not_finite_spoils_no_other_token(layer):
    products, a, b = layer
    a[0][0].fill_(float("nan"))
    b[2][0].fill_(float("inf"))
    x, y = torch.randn(4, IN), torch.randn(4, sum(SIZES))
    before = y.clone()
    products.note(torch.tensor([0, -1, 1, -1]))
    products(y, x, a, b, 1.0, SIZES)
    assert not y[0].isfinite().all()
    assert torch.equal(y[[1, 3]], before[[1, 3]])
    assert y[2].isfinite().all()


def test_buffers_that_were_replaced_are_not_taken_for_the_joined_ones():
    products = AdapterProducts(refuse)
    a = products.join(tuple(torch.randn(1, 1, RANK, IN) for _ in SIZES))
    b = tuple(torch.randn(1, 1, size, RANK) for size in SIZES)
    other = tuple(part.clone() * 2 for part in a)
    x, y = torch.randn(2, IN), torch.zeros(2, sum(SIZES))
    products.note(torch.tensor([0, 0]))
    products(y, x, other, b, 1.0, SIZES)
    assert torch.allclose(y.double(), expected(torch.zeros_like(y), x, other, b, [0, 0]), atol=1e-4)


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
