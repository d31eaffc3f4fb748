"""Adapters on a mixture's 4-bit experts in real vLLM: served as the trainer computes them, and noticed where they are not."""

from types import SimpleNamespace

import pytest
import torch
from pair import OPTIONS, Pair
from peft import LoraConfig
from support import MIXTURES, make_model

from qlora_rl import (
    LocalEngine,
    bake_base,
    prepare_base,
)
from qlora_rl.base.experts import NAMINGS

SMALL = OPTIONS | {"max_lora_rank": 8}
EXACT = 1e-5  # nats, in float32
KINDS = sorted(set(MIXTURES) - {"qwen3_moe-dense"})


@pytest.fixture(scope="module", params=KINDS)
def source(request, tmp_path_factory):
    """A random mixture."""
    return make_model(tmp_path_factory.mktemp(request.param) / "model", architecture=request.param, tied=False)


@pytest.fixture(scope="module")
def mixture(source):
    """The same with all its matrices in NF4."""
    return prepare_base(source, quantize_experts=True, out=source.parent / "base")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """One of them."""
    root = tmp_path_factory.mktemp("qwen")
    model = make_model(root / "model", architecture="qwen3_moe", tied=False)
    return prepare_base(model, quantize_experts=True, out=root / "base")


def names_of(base_model):
    naming = NAMINGS[base_model.config.model_type]
    return [naming.gate, naming.up, naming.down]


def runner_of(engine):
    return engine.llm.llm_engine.model_executor.driver_worker.model_runner


def code_the_experts(engine, base):
    """Have an engine on the float32 copy of a base multiply the base's 4-bit experts: vLLM's plugin takes no 4-bit base in float32."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    from qlora_rl.engine.worker.coded_experts import CodedExperts
    from qlora_rl.engine.worker.expert_adapters import take_adapters

    runner = runner_of(engine)
    for name, layer in runner.get_model().named_modules():
        if isinstance(layer, RoutedExperts):
            with set_current_vllm_config(runner.vllm_config):
                method = CodedExperts(layer.moe_config, name)
            method._model = SimpleNamespace(model=base.path, dtype=torch.float32)
            method.process_weights_after_loading(layer)
            del layer.quant_method
            layer.quant_method = method
    take_adapters(runner)


def test_in_float32_adapters_on_4bit_experts_are_served_exactly(source, tmp_path):
    base = prepare_base(source, quantize_experts=True, compute_dtype="float32", out=tmp_path / "base")
    with LocalEngine(bake_base(base, "float32"), **SMALL) as engine:
        code_the_experts(engine, base)
        pair = Pair(engine, base, tmp_path)
        names = names_of(pair.base)
        bare = engine.score([[40, 41, 42, 43]])[0]
        assert pair.apart(pair.base.eval()) < EXACT
        for targets in (names, "all-linear", names[1:2], ["experts.2." + names[2]]):
            model = pair.adapted(LoraConfig(r=8, lora_alpha=256, target_modules=targets))
            assert pair.difference(model) < EXACT
            served = engine.score([[40, 41, 42, 43]])[0]
            assert max(abs(a - b) for a, b in zip(bare, served, strict=True)) > 1000 * EXACT
            again = engine.score([[40, 41, 42, 43]], bare=True)[0]
            assert max(abs(a - b) for a, b in zip(bare, again, strict=True)) < EXACT
        # An adapter that leaves the experts out leaves nothing of the one before in them.
        assert pair.difference(pair.adapted(LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj"]))) < EXACT
