"""What the layers multiply with on a CPU is what is read after a push: vLLM's buffers through the kernel, or packed
copies. A wrong one is noticed."""

import pytest
import torch
from support import randomise

from qlora_rl import AdapterSync, Canary, CanaryError, LocalEngine
from qlora_rl.engine.linears import kernels
from qlora_rl.engine.linears.cpu_kernel import Adapter, codes_kernel
from qlora_rl.engine.linears.linear import AdapterProducts, Held, Packed
from qlora_rl.sync.in_place import InPlaceTransport

UP = "base_model.model.model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module", params=[Packed, Adapter])
def engine(base, request):
    if request.param is Adapter and isinstance(codes_kernel(), str):
        pytest.skip(f"no kernel: {codes_kernel()}")
    with pytest.MonkeyPatch.context() as patch:
        if request.param is Packed:
            patch.setattr(kernels, "codes_kernel", lambda: "left out by a test")
        with LocalEngine(base, max_lora_rank=16, max_model_length=32, max_num_seqs=8) as engine:
            engine.expected = request.param
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


def held_slot(engine):
    """What multiplies the serving slot of one layer."""
    manager = engine.llm.llm_engine.model_executor.driver_worker.model_runner.lora_manager._adapter_manager
    layer = next(layer for name, layer in manager.modules.items() if name.endswith("layers.1.mlp.gate_up_proj"))
    slot = manager.lora_index_to_id.index(engine._adapters.served.request.lora_int_id)
    held = layer.punica_wrapper.add_lora_linear._held[id(layer.lora_a_stacked), slot]
    assert type(held.product) is engine.expected
    return held


@pytest.mark.parametrize("part", ["A", "B"])
def test_a_product_that_was_changed_is_noticed_at_the_next_verification(engine, pushed, part, monkeypatch):
    _, strategy = pushed
    strategy.verify()
    product = held_slot(engine).product
    low, add_up = product.low, product.add_up
    if part == "A":
        monkeypatch.setattr(product, "low", lambda x: low(x) * 1.01)
    else:
        monkeypatch.setattr(product, "add_up", lambda y, low, scale: add_up(y, low, scale * 1.01))
    with pytest.raises(CanaryError, match=rf"layers\.1\.mlp\..*lora_{part}"):
        strategy.canary.check(strategy._pushed)  # not scored: what is held is enough


def test_copies_that_are_not_packed_again_are_noticed_at_the_push(engine, pushed, monkeypatch):
    model, strategy = pushed
    if engine.expected is Adapter:
        pytest.skip("there are no copies")
    strategy.push()  # both slots have been packed
    monkeypatch.setattr(Held, "is_current", lambda *_: True)
    with torch.no_grad():  # one step at a learning rate of 1e-5
        for name, weight in model.named_parameters():
            if ".lora_B" in name:
                weight.add_(0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(CanaryError, match="matrices in the engine are not what was pushed"):
        strategy.push()


def test_products_that_are_left_out_are_noticed_at_the_push_without_a_score(engine, pushed, monkeypatch):
    model, strategy = pushed
    randomise(model, 1e-5)
    monkeypatch.setattr(AdapterProducts, "__call__", lambda *_, **__: None)
    with pytest.raises(CanaryError, match=r"14 of 28 matrices .*\(14 are missing"):
        strategy.push()
