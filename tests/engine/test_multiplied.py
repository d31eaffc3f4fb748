"""A product of an adapter on a CPU that is not that of vLLM's buffers is noticed at the push, by the kernel or by
torch."""

import pytest
from support import randomise

from qlora_rl import AdapterSync, Canary, CanaryError, LocalEngine
from qlora_rl.engine.linears import linear
from qlora_rl.engine.linears.cpu_kernel import codes_kernel
from qlora_rl.engine.linears.linear import AdapterProducts
from qlora_rl.sync.in_place import InPlaceTransport


@pytest.fixture(scope="module", params=["kernel", "torch"])
def engine(base, request):
    if request.param == "kernel" and isinstance(codes_kernel(), str):
        pytest.skip(f"no kernel: {codes_kernel()}")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(linear, "codes_kernel", lambda: "left out by a test")
        with LocalEngine(base, max_lora_rank=16, max_model_length=32, max_num_seqs=8) as engine:
            yield engine


@pytest.fixture
def pushed(engine, adapted, tmp_path):
    """Two honest pushes of an adapter that is larger than the noise; nothing is scored any more."""
    engine.drop_adapter()
    canary = Canary(adapted, engine, every=1000)
    canary.calibrate()
    strategy = AdapterSync(adapted, engine, InPlaceTransport(tmp_path), canary)
    for _ in range(2):
        strategy.push()
    yield adapted, strategy
    strategy.close()


def test_a_product_that_was_changed_is_noticed_at_the_next_verification(engine, pushed, monkeypatch):
    _, strategy = pushed
    strategy.verify()
    add = AdapterProducts._add
    monkeypatch.setattr(AdapterProducts, "_add", lambda *given: add(*given[:-1], 1.1 * given[-1]))
    with pytest.raises(CanaryError, match="14 of 28 matrices"):
        strategy.canary.check(strategy._pushed)  # not scored: what is held is enough


def test_products_that_are_left_out_are_noticed_at_the_push_without_a_score(engine, pushed, monkeypatch):
    model, strategy = pushed
    randomise(model, 1e-5)
    monkeypatch.setattr(AdapterProducts, "__call__", lambda *_, **__: None)
    with pytest.raises(CanaryError, match=r"14 of 28 matrices .*\(14 are missing"):
        strategy.push()
