"""An engine whose linears go by measured rules, as on a GPU, in real vLLM on the CPU: all but the clock and the GPU's
kernels."""

import pytest
import torch
from support import randomise

from qlora_rl import AdapterSync, Canary, LocalEngine, borrow_base, load_base, verify_base
from qlora_rl.engine.linears.gpu_compute import RuledLinear
from qlora_rl.sync.in_place import InPlaceTransport

OPTIONS = {"max_lora_rank": 8, "max_model_length": 64, "max_num_seqs": 8}
MEASURED = {**OPTIONS, "base_compute": "auto", "worker_cls": "measured_worker.Worker"}


PROMPTS = [[40 + i, 41, 42, 43 + i] for i in range(8)]


@pytest.fixture(scope="module")
def wanted(base):
    """Scores by vLLM's own way, from an engine with vLLM's own worker in this process."""
    with LocalEngine(base, **OPTIONS, base_compute="vllm") as engine:
        return torch.tensor(engine.score(PROMPTS))


@pytest.fixture(scope="module")
def measured(base, wanted):  # after the other one: vLLM mixes our extension into its own worker's class for good
    with LocalEngine(base, **MEASURED) as engine:
        yield engine


def layers(engine):
    model = engine.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
    # An adapted linear hands on its base's weight; before vLLM 0.31 it has no `quant_method`.
    coded = [layer for layer in model.modules() if hasattr(getattr(layer, "weight", None), "bnb_quant_state")]
    return [layer for layer in coded if hasattr(layer, "quant_method")]


def test_the_linears_are_changed_before_vllm_warms_up_and_it_is_said(measured):
    found = measured.base_compute
    assert found.base == "measured"
    assert len(found.ways) == 4  # qkv, o, gate and up, down
    assert set(found.ways.values()) == {"8=joined"}
    assert "joined" in str(found)
    linears = layers(measured)
    assert linears
    assert all(isinstance(layer.quant_method.apply, RuledLinear) for layer in linears)
    # Part of the key under which vLLM keeps what it compiles: the rules are constants in it.
    assert measured.llm.llm_engine.vllm_config.additional_config["qlora_rl"]["ways"] == found.ways


def test_it_holds_the_trainers_base_with_repaired_scales_and_scores_as_vllms_own_way(measured, base, wanted):
    assert verify_base(load_base(base), measured).is_verified
    assert torch.allclose(torch.tensor(measured.score(PROMPTS)), wanted, atol=0.05)
    with LocalEngine(base, **OPTIONS, base_compute="vllm") as engine:  # and the other way round
        assert torch.equal(torch.tensor(engine.score(PROMPTS)), wanted)


def test_the_trainer_may_borrow_the_base_of_such_an_engine_and_push_to_it(measured, base):
    from peft import LoraConfig, get_peft_model

    model = borrow_base(measured)
    assert not model.qlora_loan.copied
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    randomise(model, seed=1)
    canary = Canary(model, measured)
    canary.calibrate()
    sync = AdapterSync(model, measured, InPlaceTransport(), canary)
    assert sync.push().version == 1
    sync.close()
    del model


@pytest.mark.full  # vLLM compiles the model; above it does not
def test_vllms_compiler_takes_the_changed_linears(base, wanted, tmp_path, monkeypatch):
    """As it does on a GPU by default. On the CPU vLLM compiles only without adapters."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    options = {**MEASURED, "max_lora_rank": 0, "enforce_eager": False, "compilation_config": {"mode": 3}}
    with LocalEngine(base, **options) as engine:
        assert engine.llm.llm_engine.vllm_config.compilation_config.mode != 0
        assert engine.base_compute.base == "measured"
        assert torch.allclose(torch.tensor(engine.score(PROMPTS)), wanted, atol=0.05)
