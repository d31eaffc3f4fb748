"""Mixtures whose experts are 4-bit, too, in real vLLM: held once, verified, served and trained."""

import gc
import json

import pytest
import torch
from datasets import Dataset
from pair import OPTIONS, Pair
from peft import LoraConfig
from support import BUILDS, MIXTURES, built, fused, make_model, program, tiny_training
from torch.utils._python_dispatch import _disable_current_modes
from trl import GRPOConfig
from vllm.v1.utils import CpuGpuBuffer

from qlora_rl import (
    EngineUnsupportedError,
    LocalEngine,
    QLoRAGRPOTrainer,
    bake_base,
    borrow_base,
    compare,
    export_adapter,
    fingerprint_base,
    load_base,
    prepare_base,
    verify_base,
)
from qlora_rl.base.experts import ATTENTION, mix, mixtures_in
from qlora_rl.engine.linears.fused_weight import CodedLinear
from qlora_rl.engine.options import start_options
from qlora_rl.engine.worker.experts_4bit import TogetherExperts
from qlora_rl.memory.lines import engine_base
from qlora_rl.memory.shape import read_config, read_shape

Live = program("benchmarks/live_memory.py").Live

SHAPES = ((64, 64), 128), ((128,), 64)  # gate and up, down
SMALL = OPTIONS | {"max_lora_rank": 8}
EXACT = 1e-5  # nats, in float32
STEPS = 3


@pytest.fixture(scope="module", params=sorted(set(MIXTURES) - {"qwen3_moe-dense"}))
def mixture(request, tmp_path_factory):
    """A random mixture with all its matrices in NF4."""
    root = tmp_path_factory.mktemp(request.param)
    source = make_model(root / "model", architecture=request.param, tied=False)
    return prepare_base(source, quantize_experts=True, out=root / "base")


def test_the_base_is_held_once_and_a_flipped_bit_of_an_expert_is_named(mixture):
    with LocalEngine(mixture, **SMALL) as engine:
        own = load_base(mixture)
        base_check = verify_base(own, engine)
        count = getattr(own.config, "num_experts", None) or own.config.num_local_experts
        experts = {name: leaf.kind for name, leaf in base_check.theirs.leaves.items() if ".experts." in name}
        assert len(experts) == 3 * count * len(mixtures_in(own))
        assert set(experts.values()) == {"nf4"}
        model = borrow_base(engine)
        assert {name.split(".")[-2] for name in model.qlora_loan.copied} == {"gate"}
        planned = engine_base(read_shape(read_config(mixture.path)), mixture.spec)
        assert model.qlora_loan.shared_bytes == pytest.approx(planned, rel=0.05)
        ids = torch.tensor([[40, 41, 42, 43]])
        with torch.no_grad():
            assert torch.equal(model.train()(ids).logits, own.train()(ids).logits)
        # In the trainer's own copy.
        naming = own.model.layers[1].mlp.experts._names
        getattr(own.model.layers[1].mlp.experts.get_submodule("2"), naming[1]).weight.data.view(-1)[5] ^= 1
        [name] = compare(fingerprint_base(own), engine.describe_base()).modules
        assert name.startswith("model.layers.1.")
        assert name.endswith(f".experts.2.{naming[1]}.weight")
        # In what both hold.
        getattr(model.model.layers[0].mlp.experts.get_submodule("3"), naming[2]).weight.data.view(-1)[5] ^= 1
        [name] = compare(base_check.ours, engine.describe_base()).modules
        assert name.startswith("model.layers.0.")
        assert name.endswith(f".experts.3.{naming[2]}.weight")
        del model


@pytest.mark.parametrize("instructions", BUILDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_chosen_experts_at_once_give_the_bits_of_one_after_another(instructions, dtype):
    """Weights of the choice in either dtype, as the architectures have them."""
    kernel = built(instructions)
    if kernel is None:
        pytest.skip("this processor lacks the instructions")
    pairs = [
        [CodedLinear(fused(sizes, columns=columns, seed=seed), kernel) for sizes, columns in SHAPES]
        for seed in range(7)
    ]

    def one(number, x):
        gate, up = pairs[number][0].multiply(x).chunk(2, dim=-1)
        return pairs[number][1].multiply(torch.nn.functional.silu(gate) * up)

    together = TogetherExperts(kernel, *([pair[i] for pair in pairs] for i in (0, 1)))
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 2, 37, 300):
        x = torch.randn(tokens, 128, generator=generator).to(torch.bfloat16)
        logits = torch.randn(tokens, 7, generator=generator)
        logits[:, 3] = -100  # nobody chooses this one
        weights, chosen = logits.softmax(dim=-1).topk(3)
        found = together(x, chosen, weights.to(dtype), torch.nn.functional.silu)
        assert torch.equal(found, mix(x, chosen, weights.to(dtype), one))


def test_in_float32_their_dequantised_copy_is_served_exactly(mixture, tmp_path):
    baked = bake_base(mixture, "float32")
    with LocalEngine(baked, **SMALL) as engine:
        verify_base(load_base(baked), engine)
        pair = Pair(engine, baked, tmp_path)
        assert pair.apart(pair.base.eval()) < EXACT
        assert pair.difference(pair.adapted(LoraConfig(r=8, lora_alpha=32, target_modules=list(ATTENTION)))) < EXACT


def test_experts_in_fp4_are_verified_and_served_exactly_too(tmp_path):
    source = make_model(tmp_path / "model", architecture="qwen3_moe", tied=False)
    base = prepare_base(source, "fp4", quantize_experts=True, out=tmp_path / "base")
    with LocalEngine(base, **SMALL) as engine:
        own = load_base(base)
        leaves = verify_base(own, engine).theirs.leaves
        assert {leaf.kind for name, leaf in leaves.items() if ".experts." in name} == {"fp4"}
        own.model.layers[1].mlp.experts.get_submodule("2").up_proj.weight.data.view(-1)[5] ^= 1
        [name] = compare(fingerprint_base(own), engine.describe_base()).modules
        assert name == "model.layers.1.mlp.experts.2.up_proj.weight"
    baked = bake_base(base, "float32")
    with LocalEngine(baked, **SMALL) as engine:
        verify_base(load_base(baked), engine)
        pair = Pair(engine, baked, tmp_path)
        assert pair.difference(pair.adapted(LoraConfig(r=8, lora_alpha=32, target_modules=list(ATTENTION)))) < EXACT


@pytest.mark.parametrize("targets", [list(ATTENTION), "all-linear"], ids=["attention", "experts"])
def test_grpo_trains_with_one_copy_of_the_experts(mixture, targets, tmp_path):
    options = tiny_training(
        output_dir=str(tmp_path / "run"), num_generations=4, max_steps=STEPS, per_device_train_batch_size=8
    )
    with QLoRAGRPOTrainer(
        model=mixture,
        args=GRPOConfig(**options | {"max_completion_length": 16}),
        peft_config=LoraConfig(r=8, target_modules=targets),
        rollout="colocate",
        engine_options={"max_model_length": 64},
        reward_funcs=lambda completions, **_: [float(len(completion) % 3) for completion in completions],
        train_dataset=Dataset.from_list([{"prompt": f"{i}+1="} for i in range(16)]),
    ) as trainer:
        loan = trainer.model.get_base_model().qlora_loan
        assert {name.split(".")[-2] for name in loan.copied} == {"gate"}
        trainer.train()
        held, live = trainer.engine.held_adapter(8), export_adapter(trainer.model).modules
        assert any(".experts." in name for name in live) == (targets == "all-linear")
        # A seldom expert may have no gradient yet: its B is zero, and it is left out.
        assert {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in held} == set(live)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["policy_version"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["base_verified"] for step in steps)
    assert max(step["mismatch_kl"] for step in steps) < 5e-3


LENGTH = 320  # four of them fill a tile


# By default one of three architectures.
@pytest.mark.parametrize(
    "architecture", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.full) for name in ("olmoe", "mixtral"))]
)
def test_trainer_and_engine_in_one_process_hold_what_was_planned(architecture, tmp_path, monkeypatch):
    """All tensors that they made but for buffers of fixed size: a second copy of the experts would be at least a tenth
    more."""
    fields = {"head_dim": 128, "positions": LENGTH, "num_hidden_layers": 3}
    width = "moe_intermediate_size" if architecture == "qwen3_moe" else "intermediate_size"
    tied = architecture != "olmoe"  # which the plugin of vLLM does not load tied
    source = make_model(tmp_path / "model", architecture=architecture, tied=tied, **fields, **{width: 512})
    base = prepare_base(source, quantize_experts=True, out=tmp_path / "base")
    before = _storages()
    options = tiny_training(output_dir=str(tmp_path / "run"), num_generations=4, gradient_checkpointing=True)
    with QLoRAGRPOTrainer(
        model=base,
        args=GRPOConfig(
            **options
            | {
                "max_completion_length": LENGTH - 8,
                "optim": "adamw_torch",
                "max_steps": 1,
                "generation_kwargs": {"ignore_eos": True},
            }
        ),
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
        rollout="colocate",
        engine_options={"max_model_length": LENGTH, "base_compute": "nf4", "kv_cache_gib": 1 / 64},
        reward_funcs=lambda completions, **_: [float(len(completion) % 3) for completion in completions],
        train_dataset=Dataset.from_list([{"prompt": f"{10 + i}+11="} for i in range(4)]),
    ) as trainer:
        step, sample, peaks = trainer.training_step, trainer._prepare_inputs, []

        def prepare(*given):
            with _disable_current_modes():
                return sample(*given)

        def counted(*given):
            with Live() as live:
                loss = step(*given)
            peaks.append(live.peak)
            return loss

        monkeypatch.setattr(trainer, "_prepare_inputs", prepare)
        monkeypatch.setattr(trainer, "training_step", counted)
        trainer.train()
        estimate, held = trainer.memory.estimate, _storages()
        runner = trainer.engine.llm.llm_engine.model_executor.driver_worker.model_runner
        # Buffers of fixed size, whatever the model is: vLLM's for a batch.
        own = [each.cpu for each in vars(runner).values() if isinstance(each, CpuGpuBuffer)]
        own += [each for each in vars(runner).values() if isinstance(each, torch.Tensor)]
        keys = held.keys() - before.keys()
        buffers = keys & {each.untyped_storage()._cdata for each in own}
        found = sum(held[key].nbytes() for key in keys - buffers)
        del own
    assert sum(held[key].nbytes() for key in buffers) < 20 * 2**20
    assert estimate.held_bytes + estimate.cache_bytes == pytest.approx(found, rel=0.02)
    assert estimate.peak_bytes == pytest.approx(found + peaks[0], rel=0.05)


def _storages():
    """Of all tensors that Python knows, by address; held, so that no address is taken twice."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = [each.untyped_storage() for each in tensors if each.device.type != "meta"]
    return {storage._cdata: storage for storage in storages}


def test_on_a_gpu_it_runs_without_graphs(mixture, monkeypatch):
    monkeypatch.setattr("qlora_rl.engine.compat.platform_is_cpu", lambda: False)
    assert start_options(mixture).arguments["enforce_eager"]
    with pytest.raises(EngineUnsupportedError, match="no CUDA graph can hold that"):
        start_options(mixture, enforce_eager=False)
