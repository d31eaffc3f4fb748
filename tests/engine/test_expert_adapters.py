"""Adapters on a mixture's 4-bit experts in real vLLM: served as the trainer computes them, and noticed where they are
not."""

from types import SimpleNamespace

import pytest
import resumed
import torch
from pair import OPTIONS, Pair
from peft import LoraConfig, get_peft_model
from support import MIXTURES, make_model

from qlora_rl import (
    AdapterSync,
    Canary,
    CanaryError,
    ConfigConflictError,
    LocalEngine,
    SyncError,
    bake_base,
    export_adapter,
    load_base,
    plan_sync,
    prepare_base,
)
from qlora_rl.adapter.export import read_adapter
from qlora_rl.adapter.load import load_adapter
from qlora_rl.adapter.store import write_adapter
from qlora_rl.adapter.verdict import judge_adapter
from qlora_rl.base.experts import NAMINGS
from qlora_rl.base.fingerprint import digest_bytes
from qlora_rl.engine.worker.expert_adapters import take_adapters
from qlora_rl.engine.worker.experts_4bit import CodedExperts
from qlora_rl.sync.in_place import InPlaceTransport
from qlora_rl.train.metrics.routing import Routers

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
    """Have an engine on the float32 copy of a base multiply the base's 4-bit experts: vLLM's plugin takes no 4-bit base
    in float32."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import RoutedExperts

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


def adapted(base, seed=0, targets="all-linear", size=0.05):
    """A PeftModel with values in B, on the experts too."""
    model = get_peft_model(load_base(base), LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    change(model, seed, size)
    return model.eval()


def change(model, seed, size=0.05):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)


def test_in_bf16_with_routing_replayed_they_add_no_more_than_rounding(mixture, tmp_path):
    prompts = torch.randint(3, 60, (32, 8), generator=torch.Generator().manual_seed(0)).tolist()
    with LocalEngine(mixture, **SMALL | {"max_model_length": 64, "max_num_seqs": 32}) as engine:
        pair = Pair(engine, mixture, tmp_path)
        for targets in (names_of(pair.base), "all-linear"):
            model = pair.adapted(LoraConfig(r=8, lora_alpha=16, target_modules=targets))
            pair.difference(model)
            rollout = engine.generate(prompts, max_tokens=32, seed=0, extra={"ignore_eos": True})
            routers, apart = Routers(model.get_base_model(), replays=True), []
            for prompt, ids, logprobs, chosen, weights in zip(
                prompts,
                rollout.completion_ids,
                rollout.logprobs,
                rollout.routing,
                rollout.routing_weights,
                strict=True,
            ):
                row = torch.tensor([prompt + ids])
                with (
                    torch.no_grad(),
                    torch.autocast("cpu", torch.bfloat16),
                    routers.given(torch.ones_like(row), [chosen], [weights]),
                ):
                    own_TV = model(row).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
                apart.append(own_TV.gather(1, torch.tensor(ids)[:, None])[:, 0] - torch.tensor(logprobs))
            routers.close()
            d = torch.cat(apart)
            # A dense model of this size with the same adapters: 3e-5 and 0.035.
            assert float((d.expm1() - d).mean()) < 6e-5
            assert float(d.abs().max()) < 0.07


@pytest.fixture(scope="module")
def pushed(qwen):
    """An engine, its trainer's model, and the strategy between them, verified."""
    with LocalEngine(qwen, **SMALL) as engine:
        model = adapted(qwen)
        canary = Canary(model, engine)
        canary.calibrate()
        strategy = AdapterSync(model, engine, InPlaceTransport(), canary)
        yield model, engine, strategy
        strategy.close()


def test_pushes_in_place_hold_what_the_trainer_has_and_a_wrong_expert_is_noticed(pushed, monkeypatch):
    model, engine, strategy = pushed
    for seed in range(3):  # through the directory, into the other slot, and back into the first
        change(model, seed)
        report = strategy.push()
        assert report.transport == "in_place"
        assert report.canary_difference < strategy.canary.threshold
        held = engine.held_adapter(8)
        assert sum(".experts." in name for name in held) == 2 * 3 * 2 * 8
        tensors = export_adapter(model, dtype=torch.bfloat16).tensors
        assert held == {name: digest_bytes(tensor) for name, tensor in tensors.items()}
    sequence = [[40, 41, 42, 43]]
    before, version = engine.score(sequence), engine.version
    layers = [
        layer.quant_method
        for layer in runner_of(engine).get_model().modules()
        if isinstance(getattr(layer, "quant_method", None), CodedExperts)
    ]
    held = layers[1]._adapters[2].held[1]
    write = model.base_model.model.model.layers[1].mlp.experts.get_submodule("3.down_proj").lora_B["default"].weight

    # Two experts of one layer in each other's place, after the copy.
    own = InPlaceTransport.deliver

    def swapped(self, *arguments):
        found = own(self, *arguments)
        for slot in range(2):
            held[slot, [2, 3]] = held[slot, [3, 2]]
        return found

    change(model, 9)
    assert bool(write.any())
    with monkeypatch.context() as patch:
        patch.setattr(InPlaceTransport, "deliver", swapped)
        with pytest.raises(CanaryError, match=r"layers\.1\.mlp\.experts\.[23]\.down_proj"):
            strategy.push()
    assert engine.version == version
    for slot in range(2):
        held[slot, [2, 3]] = held[slot, [3, 2]]
    assert engine.score(sequence) == before
    assert strategy.push().version == version + 1


@pytest.mark.parametrize("how", ["left out", "of the next expert"])
def test_an_engine_that_does_not_apply_them_is_noticed(qwen, monkeypatch, how):
    model = adapted(qwen, targets=["gate_proj", "up_proj", "down_proj"], size=1e-4)  # the first steps of a run
    right = CodedExperts._adapted_expert

    def wrong(self, activation, slot, number, x):
        if how == "left out":
            return right(self, activation, -1, number, x)
        experts, self._experts = self._experts, [self._experts[number]] * 8  # the base's part stays right
        try:
            return right(self, activation, slot, (number + 1) % 8, x)
        finally:
            self._experts = experts

    with LocalEngine(qwen, **SMALL) as engine:
        canary = Canary(model, engine)
        canary.calibrate()
        strategy = AdapterSync(model, engine, InPlaceTransport(), canary)
        strategy.push()
        monkeypatch.setattr(CodedExperts, "_adapted_expert", wrong)
        change(model, 1, 1e-4)
        canary.doubt()
        with pytest.raises(CanaryError):
            strategy.push()
        assert engine.version == 1
        strategy.close()


def test_sequences_of_two_versions_and_of_none_are_computed_together(pushed):
    """As asynchronous rollouts have them: each token gets the adapter of its own sequence."""
    model, engine, strategy = pushed
    change(model, 20)
    strategy.push()
    prompts = [[40, 41, 42], [7, 8, 9, 10]]
    sampling = {"max_tokens": 8, "temperature": 0.0}
    old = engine.generate(prompts, **sampling)
    change(model, 21)
    strategy.push()
    new = engine.generate(prompts, **sampling)
    layer = next(
        layer.quant_method
        for layer in runner_of(engine).get_model().modules()
        if isinstance(getattr(layer, "quant_method", None), CodedExperts)
    )
    assert engine.generate(prompts, version=old.version, **sampling).completion_ids == old.completion_ids
    x = torch.randn(6, layer._adapters[0].sizes[0], generator=torch.Generator().manual_seed(0)).bfloat16()
    chosen = torch.tensor([[0, 1], [2, 3], [0, 2], [4, 5], [1, 0], [7, 6]])
    weights = torch.full((6, 2), 0.5, dtype=torch.bfloat16)
    slots = torch.tensor([0, 1, -1, 0, 1, -1])
    kept, owner = layer._tokens, SimpleNamespace(activation=SimpleNamespace(value="silu"))
    apart = []
    try:
        for which in (slots, *(torch.full((6,), slot) for slot in (0, 1, -1))):
            layer._tokens = type(kept)(SimpleNamespace(token_lora_indices=which))
            apart.append(layer.apply(owner, x, weights, chosen))
    finally:
        layer._tokens = kept
    together, *alone = apart
    for row, slot in enumerate(slots.tolist()):
        torch.testing.assert_close(
            together[row], alone[slot][row], rtol=0.02, atol=2e-3
        )  # other rows, other blocks of a product
    assert not torch.equal(alone[0], alone[1])
    assert not torch.equal(alone[0], alone[2])
    assert new.version == old.version + 1


def test_an_engine_whose_experts_are_16_bit_rejects_them_by_name(qwen, tmp_path):
    model = adapted(qwen)
    sixteen = prepare_base(make_model(tmp_path / "model", architecture="qwen3_moe", tied=False), out=tmp_path / "base")
    write_adapter(export_adapter(model, dtype=torch.bfloat16), tmp_path)
    with LocalEngine(sixteen, **SMALL) as engine:
        assert not engine.capabilities().adapts_experts
        with pytest.raises(ConfigConflictError, match="also on experts of a mixture"):
            plan_sync(judge_adapter(model), engine.capabilities())
        with pytest.raises(SyncError, match=r"no layer of the engine multiplies with .*experts"):
            engine.load_adapter(tmp_path, 1)
        assert engine.version == 0


def test_an_adapter_on_experts_comes_back_from_its_directories(mixture, tmp_path):
    base = load_base(mixture)
    naming = NAMINGS[base.config.model_type]
    targets = ["q_proj", naming.gate, naming.up, naming.down]
    model = adapted(mixture, targets=targets)
    bundle = export_adapter(model)
    model.save_pretrained(tmp_path / "own")
    (tmp_path / "canonical").mkdir()
    write_adapter(bundle, tmp_path / "canonical")
    ids = torch.tensor([[40, 41, 42, 43]])
    with torch.no_grad():
        ours = model(ids).logits
    for name in ("own", "canonical"):
        for where in (mixture.path, None):
            verdict = judge_adapter(tmp_path / name, base=where)
            assert verdict.kind == "adapter", verdict.reasons
            assert verdict.on_experts
        again = read_adapter(tmp_path / name, base=mixture.path)
        assert again.tensors.keys() == bundle.tensors.keys()
        assert all(torch.equal(again.tensors[key], bundle.tensors[key]) for key in bundle.tensors)
        loaded = load_adapter(load_base(mixture), tmp_path / name, base=mixture.path)
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, ours) or name == "canonical"
            torch.testing.assert_close(loaded(ids).logits, ours, rtol=0.02, atol=0.02)


def begin(base, out, **fields):
    """A run with adapters on the experts alone that is rewarded for digits."""
    batch = {"per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": 8}
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["gate_proj", "up_proj", "down_proj"])
    options = {"save_steps": 8, "lr_scheduler_type": "constant", "peft_config": lora}
    return resumed.make(base, out, "colocate", **batch | options | fields)


def test_grpo_learns_with_adapters_on_the_experts_alone_and_resumes_bit_for_bit(qwen, tmp_path):
    with begin(qwen, tmp_path / "straight", max_steps=16) as trainer:
        trainer.train()
        trained = {name: tensor.clone() for name, tensor in export_adapter(trainer.model).tensors.items()}
    steps = resumed.lines(tmp_path / "straight")
    rewards = [step["reward"] for step in steps]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1
    # Where the sides choose different experts, a token of so random a model is far apart.
    assert sorted(step["mismatch_kl"] for step in steps)[8] < 5e-3
    with begin(qwen, tmp_path / "two", max_steps=8) as trainer:
        trainer.train()
    with begin(qwen, tmp_path / "two", max_steps=16) as trainer:
        trainer.train()
        again = export_adapter(trainer.model).tensors
    assert again.keys() == trained.keys()
    assert all(torch.equal(again[name], trained[name]) for name in trained)
    assert [step["reward"] for step in resumed.lines(tmp_path / "two")] == rewards


def test_a_server_takes_them(qwen, tmp_path):
    with begin(qwen, tmp_path / "run", max_steps=2, save_steps=2, rollout="server") as trainer:
        assert trainer.engine.capabilities().adapts_experts
        trainer.train()
        held = trainer.engine.held_adapter(8)
    for part, rest in (("lora_A", 0), ("lora_B", 3 * 8)):  # B of an expert that no token has chosen is zero: not named
        count = sum(".experts." in name and part in name for name in held)
        assert 3 * 2 * 8 - rest <= count <= 3 * 2 * 8
    assert [step["policy_version"] for step in resumed.lines(tmp_path / "run")] == [1, 2]
