"""The alarm on real vLLM: a sync that is broken behind the canary's back stops a run within two steps, with the right
diagnosis."""

import dataclasses

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from test_training import config, lines, make, reward_digits

from qlora_rl import LocalEngine, PolicyMismatchError, QLoRAAsyncGRPOTrainer

MODULE = "model.layers.1.mlp.up_proj"
HONEST = [(0, 1.0, 1e-2), (1, 1.4, 1e-3)]
MORE = [
    (2, 0.7, 1e-2),
    (3, 1.0, 3e-2),
    (4, 0.3, 1e-3),
    (5, 1.0, 1e-4),
    (6, 2.0, 1e-2),
    (7, 0.7, 3e-2),
    (8, 1.2, 3e-3),
    (9, 1.5, 3e-2),
]


@pytest.fixture(scope="module")
def engine(base):
    with LocalEngine(base, max_lora_rank=8, max_model_length=32, max_num_seqs=64) as engine:
        yield engine


@pytest.fixture
def trainer_on(base, engine, tmp_path):
    """A trainer on the module's engine."""
    made = []

    def on(**fields):
        engine.drop_adapter()
        fields = {"max_steps": 8, "per_device_train_batch_size": 16, "canary_every": 0, **fields}
        made.append(make(base, tmp_path / str(len(made)), rollout=engine, vllm_max_model_length=None, **fields))
        return made[-1]

    yield on
    for trainer in made:
        trainer.close()


def places(strategy, back=0):
    """The buffers that serve; with `back=1` those of the version before."""
    placed = strategy.transport._live[-1 - back]
    return placed.slots.places[placed.slot]


def double_alpha(strategy):
    for name, place in places(strategy).items():
        if "lora_B" in name:
            place.mul_(2.0)


def go_back(strategy):
    _, before = strategy.transport.before()
    for name, place in places(strategy).items():
        place.copy_(before[name])


def lose_a_layer(strategy):
    for matrix in "AB":
        places(strategy)[f"base_model.model.{MODULE}.lora_{matrix}.weight"].zero_()


FAULTS = {"scale": double_alpha, "stale": go_back, "layer": lose_a_layer}
SAID = {"scale": "2 times as strongly", "stale": "version {}, which is not the newest", "layer": MODULE}


def break_after(trainer, pushes, fault, *, hidden=False):
    """Let `fault` have its way with the engine's buffers after every push but the first few, when the push was
    verified."""
    strategy, real, count = trainer.bridge.strategy, trainer.bridge.strategy.push, []
    held = trainer.engine.held_adapter

    def push():
        report = real()
        count.append(report.version)
        if len(count) > pushes:
            digests = held(8)
            fault(strategy)
            if hidden:  # as if the buffers were right, and the multiplication wrong
                trainer.engine.held_adapter = lambda rank: digests
        return report

    strategy.push = push


@pytest.mark.parametrize("hidden", [False, True], ids=["in the buffers", "in the multiplication"])
@pytest.mark.parametrize("cause", FAULTS)
def test_a_broken_sync_stops_the_run_within_two_steps_and_is_named(trainer_on, monkeypatch, cause, hidden):
    trainer = trainer_on()
    monkeypatch.setattr(trainer.engine, "held_adapter", trainer.engine.held_adapter)
    break_after(trainer, 3, FAULTS[cause], hidden=hidden)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    with pytest.raises(PolicyMismatchError) as stopped:
        trainer.train()
    print(stopped.value)
    assert trainer.state.global_step in (3, 4)  # three honest steps, then one or two
    assert stopped.value.cause == cause
    assert SAID[cause].format(trainer.state.global_step) in str(stopped.value)
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if n in before)
    trainable = [p for p in trainer.model.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 for p in trainable)  # what was exchanged is back


# Each is a training; by default two.
@pytest.mark.parametrize(
    ("seed", "temperature", "rate"), [*HONEST, *(pytest.param(*m, marks=pytest.mark.full) for m in MORE)]
)
def test_an_honest_run_raises_no_alarm(trainer_on, seed, temperature, rate, caplog):
    trainer = trainer_on(seed=seed, temperature=temperature, learning_rate=rate, max_steps=12, canary_every=2)
    trainer.train()
    found = trainer.alarm.diagnoses
    rows = lines(trainer.run.path)
    print([(f"{r['scaled_diff']:.1e}", f"{r.get('mismatch_threshold', 0):.1e}") for r in rows], found)
    assert {d.cause for d in found.values()} <= {"noise", "dropout"}
    assert not [r for r in caplog.records if "trainer and engine are" in r.message and r.levelname == "WARNING"]
    assert len(rows) == 12


@pytest.mark.parametrize(
    "truncated", [{"top_p": 0.8, "temperature": 0.7}, {"top_k": 8}, {"min_p": 0.1, "top_p": 0.9}], ids=str
)
def test_truncated_sampling_is_what_the_trainer_scores(trainer_on, truncated, caplog):
    """Random models are sure of nothing: these keep less than half of the probability."""
    trainer = trainer_on(max_steps=4, canary_every=2, **truncated)
    trainer.train()
    rows = lines(trainer.run.path)
    print([f"{r['mismatch_kl']:.1e}" for r in rows], [f"{r['ratio_p50']:.4f}" for r in rows])
    assert max(r["mismatch_kl"] for r in rows) < 2e-3
    assert all(abs(r["ratio_p50"] - 1) < 1e-2 for r in rows)
    assert not [r for r in caplog.records if "trainer and engine are" in r.message and r.levelname == "WARNING"]


def test_truncated_sampling_hides_no_fault(trainer_on, monkeypatch):
    trainer = trainer_on(top_p=0.8)
    monkeypatch.setattr(trainer.engine, "held_adapter", trainer.engine.held_adapter)
    break_after(trainer, 3, double_alpha, hidden=True)
    with pytest.raises(PolicyMismatchError):
        trainer.train()
    assert trainer.state.global_step in (3, 4)


def test_another_temperature_and_a_changed_base_are_named(trainer_on):
    trainer = trainer_on()
    trainer.bridge.sampling = dataclasses.replace(trainer.bridge.sampling, temperature=0.5)
    with pytest.raises(PolicyMismatchError, match=r"temperature=0\.5"):
        trainer.train()
    trainer = trainer_on()
    executor = trainer.engine.llm.llm_engine.model_executor
    norm = next(
        p
        for n, p in executor.driver_worker.model_runner.get_model().named_parameters()
        if "layers.1.post_attention_layernorm" in n
    )
    kept = norm.data.clone()
    norm.data.mul_(1.5)
    try:
        with pytest.raises(PolicyMismatchError, match="post_attention_layernorm"):
            trainer.train()
    finally:
        norm.data.copy_(kept)


def test_a_side_that_computes_another_function_stops_the_run_in_its_second_batch(trainer_on):
    """Begins after the comparison at the start: weights, adapter and versions stay right."""
    trainer = trainer_on()
    rotary = trainer.model.get_base_model().model.rotary_emb
    rotary.inv_freq.mul_(0.5)
    with pytest.raises(PolicyMismatchError, match="compute different functions of them") as stopped:
        trainer.train()
    assert stopped.value.cause == "function"
    assert trainer.state.global_step == 1


def test_rounding_that_is_larger_than_usual_is_measured_and_no_warning(trainer_on, caplog):
    """As of a deep model: half of the threshold that a first batch has."""
    trainer = trainer_on(max_steps=3)
    trainer.alarm._bounds = {**trainer.alarm._bounds, "usual": 1e-5}
    trainer.train()
    first = trainer.alarm.diagnoses[1]
    assert first.cause == "noise"
    assert not [r for r in caplog.records if "trainer and engine are" in r.message and r.levelname == "WARNING"]


def test_on_mismatch_warn_goes_on(trainer_on, caplog):
    trainer = trainer_on(on_mismatch="warn", max_steps=6)
    break_after(trainer, 3, double_alpha)
    trainer.train()
    assert "2 times as strongly" in caplog.text
    assert "going on" in caplog.text
    assert [row.get("mismatch_cause") for row in lines(trainer.run.path)][3] == "scale"


@pytest.mark.parametrize("cause", [None, "scale", "layer"])
def test_a_broken_sync_is_found_behind_staleness_and_staleness_is_no_fault(base, engine, tmp_path, monkeypatch, cause):
    """As if the buffers were right, and the multiplication wrong; rollouts are sampled and scored at the same time."""
    engine.drop_adapter()
    fields = {"max_steps": 8, "per_device_train_batch_size": 16, "vllm_max_model_length": None, "learning_rate": 3e-2}
    with QLoRAAsyncGRPOTrainer(
        model=base,
        reward_funcs=reward_digits,
        train_dataset=Dataset.from_list([{"prompt": f"{a}+{a}="} for a in range(10, 42)]),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        args=config(tmp_path, **fields),
        rollout=engine,
        canary_every=0,
        max_staleness=1,
    ) as trainer:
        if cause is None:
            trainer.train()
            steps = lines(tmp_path)
            print([(s["staleness_max"], f"{s['scaled_diff']:.1e}", f"{s.get('rescored_diff', 0):.1e}") for s in steps])
            assert {d.cause for d in trainer.alarm.diagnoses.values()} <= {"noise"}
            assert max(s["scaled_diff"] for s in steps if s["staleness_max"]) > trainer.alarm.threshold
            return
        monkeypatch.setattr(engine, "held_adapter", engine.held_adapter)
        break_after(trainer, 3, FAULTS[cause], hidden=True)
        with pytest.raises(PolicyMismatchError) as stopped:
            trainer.train()
        print(stopped.value)
        assert stopped.value.cause == cause
        assert trainer.state.global_step in (4, 5)
