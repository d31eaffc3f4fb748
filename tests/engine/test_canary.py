"""The canary on real vLLM: planted faults are noticed, honest pushes are not."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import make_model, randomise

from qlora_rl import AdapterSync, Canary, CanaryError, LocalEngine, load_base, prepare_base, verify_base
from qlora_rl.engine import compat
from qlora_rl.sync.in_place import InPlaceTransport
from qlora_rl.sync.transports import DirectoryTransport


@pytest.fixture
def pair(base, adapted):
    """Trainer, engine and a strategy whose canary is calibrated."""
    with LocalEngine(base, max_lora_rank=16, max_model_length=32, max_num_seqs=8) as engine:
        verify_base(adapted, engine)
        canary = Canary(adapted, engine)
        canary.calibrate()
        strategy = AdapterSync(adapted, engine, DirectoryTransport(), canary)
        yield adapted, engine, strategy
        strategy.close()


def tamper(monkeypatch, strategy, change):
    """Let `change(directory)` have its way with every version between writing and loading."""
    real = strategy.transport.store.publish

    def publish(bundle, version):
        directory = real(bundle, version)
        change(directory)
        return directory

    monkeypatch.setattr(strategy.transport.store, "publish", publish)


def double_alpha(directory):
    file = directory / "adapter_config.json"
    config = json.loads(file.read_text())
    config["lora_alpha"] *= 2
    file.write_text(json.dumps(config))


def rewrite(directory, change):
    from safetensors.torch import load_file, save_file

    file = directory / "adapter_model.safetensors"
    tensors = change(load_file(file))
    save_file(tensors, file)


def zero_one_b(directory):
    def change(tensors):
        tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"].zero_()
        return tensors

    rewrite(directory, change)


def rename_all(directory):
    rewrite(directory, lambda tensors: {n.replace("model.layers", "model.floors"): t for n, t in tensors.items()})


@pytest.mark.parametrize(
    ("fault", "named"),
    [(double_alpha, "lora_B"), (zero_one_b, r"layers\.1\.mlp\.up_proj\.lora_B")],
    ids=["alpha doubled", "one B zeroed"],
)
def test_a_changed_adapter_is_noticed_and_the_old_version_serves(pair, monkeypatch, prompts, fault, named):
    model, engine, strategy = pair
    strategy.push()
    before = engine.generate(prompts, max_tokens=6, seed=1)
    randomise(model, 0.1, seed=4)
    with monkeypatch.context() as patch:
        tamper(patch, strategy, fault)
        with pytest.raises(CanaryError, match=named):
            strategy.push()
    after = engine.generate(prompts, max_tokens=6, seed=1)
    assert (after.version, after.logprobs) == (before.version, before.logprobs)
    report = strategy.push()
    assert report.version == 2
    assert engine.generate(prompts, max_tokens=6, seed=1).logprobs != before.logprobs


def test_names_that_match_nothing_are_noticed(pair, monkeypatch, prompts):
    _, engine, strategy = pair
    bare = engine.generate(prompts, max_tokens=6, seed=1)
    monkeypatch.setattr(compat, "unreached_modules", lambda *_: [])  # as if vLLM could not be asked
    tamper(monkeypatch, strategy, rename_all)
    with pytest.raises(CanaryError, match=r"28 of 28 matrices .*\(28 are missing"):
        strategy.push()
    after = engine.generate(prompts, max_tokens=6, seed=1)
    assert (after.version, after.logprobs) == (0, bare.logprobs)  # it was the first push: the bare base serves


def test_an_interrupted_proof_leaves_no_unverified_version_serving(pair, monkeypatch, prompts):
    model, engine, strategy = pair
    strategy.push()
    before = engine.generate(prompts, max_tokens=6, seed=1)
    randomise(model, 0.2, seed=8)

    def interrupted(bundle):
        raise KeyboardInterrupt

    monkeypatch.setattr(strategy.canary, "check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        strategy.push()
    after = engine.generate(prompts, max_tokens=6, seed=1)
    assert (after.version, after.logprobs) == (1, before.logprobs)


def test_the_previous_version_served_is_noticed_even_if_it_is_nearly_the_same(pair, monkeypatch):
    model, engine, strategy = pair
    strategy.push()
    old = next(strategy.transport.store.root.iterdir())
    with torch.no_grad():  # one element of one B, by one step of bf16
        weight = model.get_base_model().model.layers[0].self_attn.q_proj.lora_B["default"].weight
        weight[0, 0] *= 1.01
    real = engine.load_adapter
    monkeypatch.setattr(engine, "load_adapter", lambda directory, version: real(old, version))
    with pytest.raises(CanaryError, match=r"1 of 28 matrices .*layers\.0\.self_attn\.q_proj\.lora_B"):
        strategy.push()


def test_an_adapter_that_is_held_but_applied_to_another_base_is_noticed(pair):
    _, engine, strategy = pair
    strategy.push()
    vllm_model = engine.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
    norm = next(
        p for n, p in vllm_model.named_parameters() if n.endswith("model.norm.weight") or n == "model.norm.weight"
    )
    norm.data.mul_(1.5)
    with pytest.raises(CanaryError, match="logprobs differ"):
        strategy.push()


def test_a_pair_that_differs_from_the_start_is_not_calibrated_away(base, adapted):
    with LocalEngine(base, max_lora_rank=8, max_model_length=32, max_num_seqs=8) as engine:
        vllm_model = engine.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
        next(p for n, p in vllm_model.named_parameters() if "model.norm" in n).data.mul_(2.0)
        with pytest.raises(CanaryError, match="qlora-rl verify"):
            Canary(adapted, engine).calibrate()


def test_two_hundred_honest_pushes_raise_no_alarm(pair):
    model, _, strategy = pair
    generator = torch.Generator().manual_seed(0)
    randomise(model, 0.0)
    reports = []
    for _ in range(200):
        with torch.no_grad():  # a walk from a new adapter to one larger than that of the demo
            for name, parameter in model.named_parameters():
                if ".lora_B" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.004)
        reports.append(strategy.push())
    assert [r.version for r in reports] == list(range(1, 201))
    assert all(r.canary_difference < strategy.canary.threshold for r in reports)
    print("largest difference", max(r.canary_difference for r in reports), "threshold", strategy.canary.threshold)


def untrained(model, seed):
    """A random, B zero: as PEFT makes an adapter."""
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.reset_lora_parameters("default", init_lora_weights=True)


def step(model, generator, rate):
    """What Adam does to B in its first step: every entry moves by the learning rate."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.add_(rate * (torch.randint(2, parameter.shape, generator=generator) * 2 - 1))


def honest(model, engine, pushes):
    """Pushes of an adapter that starts at nothing and stays small: each second one is probed."""
    engine.drop_adapter()
    untrained(model, 0)
    canary = Canary(model, engine)
    canary.calibrate()
    strategy = AdapterSync(model, engine, InPlaceTransport(), canary)
    generator, probed, check = torch.Generator().manual_seed(0), [], canary.check_probe
    canary.check_probe = lambda probe: probed.append(check(probe)) or probed[-1]
    found = []
    for _ in range(pushes):
        found.append(strategy.push().canary_difference)
        step(model, generator, 1e-5)
    strategy.close()
    assert len(probed) == pushes // 2
    assert max(probed) < 0.5 * canary.threshold
    print(f"{pushes} pushes: {max(found):.3g} scored, {max(probed):.3g} probed, threshold {canary.threshold:.3g}")


def unnoticed(model, engine, seeds, monkeypatch):
    """Of so many seeds those in which an adapter after one step at 1e-5 may be left out by every layer for two
    pushes."""
    passed = []
    for seed in seeds:
        engine.drop_adapter()
        untrained(model, seed)
        canary = Canary(model, engine)
        canary.calibrate()
        strategy = AdapterSync(model, engine, InPlaceTransport(), canary)
        for _ in range(2 + seed % 2):
            strategy.push()
        step(model, torch.Generator().manual_seed(seed), 1e-5)
        # Requests lose their adapter on the way: what lies in the slots, and what their products give, is right.
        own = engine._policy
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_policy", lambda version, *, bare, own=own: (None, own(version, bare=bare)[1]))
            errors = []
            for _ in range(2):
                try:
                    strategy.push()
                except CanaryError as error:
                    errors.append(str(error))
        if not any("does not multiply" in error for error in errors):
            passed.append(seed)
        strategy.close()
    return passed


def test_a_small_adapter_that_is_held_and_not_multiplied_is_noticed_within_two_pushes(pair, monkeypatch):
    model, engine, _ = pair
    honest(model, engine, 20)
    assert unnoticed(model, engine, range(3), monkeypatch) == []


@pytest.mark.full  # above three seeds and 20 pushes
def test_that_in_twenty_of_twenty_seeds_and_not_in_five_hundred_honest_pushes(pair, monkeypatch):
    model, engine, _ = pair
    honest(model, engine, 500)
    assert unnoticed(model, engine, range(20), monkeypatch) == []


def test_dropout_does_not_alarm_and_the_mode_comes_back(base):
    model = get_peft_model(
        load_base(base), LoraConfig(r=8, lora_alpha=16, lora_dropout=0.5, target_modules="all-linear")
    )
    randomise(model, 0.1)
    model.train()
    with LocalEngine(base, max_lora_rank=8, max_model_length=32, max_num_seqs=8) as engine:
        canary = Canary(model, engine)
        canary.calibrate()
        strategy = AdapterSync(model, engine, DirectoryTransport(), canary)
        for _ in range(3):
            strategy.push()
        strategy.close()
    assert model.training
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma", "mistral"])
def test_the_canary_works_on_every_architecture(tmp_path, architecture):
    """vLLM wraps embeddings and head of some of them for LoRA, and then fails at prompt logprobs on a CPU."""
    base = prepare_base(make_model(tmp_path / "model", architecture=architecture))
    model = get_peft_model(load_base(base), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    with LocalEngine(base, max_lora_rank=8, max_model_length=32, max_num_seqs=8) as engine:
        verify_base(model, engine)
        canary = Canary(model, engine)
        canary.calibrate()
        strategy = AdapterSync(model, engine, DirectoryTransport(), canary)
        for seed in range(3):
            randomise(model, 0.1, seed=seed)
            assert strategy.push().canary_difference < canary.threshold
        strategy.close()


def test_calibration_is_about_the_bare_base_whatever_serves(pair):
    model, engine, strategy = pair
    randomise(model, 0.5)
    strategy.push()
    frozen = [p for n, p in model.named_parameters() if ".lora_A" in n]
    for parameter in frozen:
        parameter.requires_grad_(False)
    second = Canary(model, engine)
    assert second.calibrate() == strategy.canary.threshold
    assert second.sequences == strategy.canary.sequences
    assert not any(p.requires_grad for p in frozen)
