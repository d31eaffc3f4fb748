"""`gpu_memory=`: planned and logged before anything is loaded, rejected where it cannot be kept, written down."""

import json
import logging
from types import SimpleNamespace

import pytest
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config

from qlora_rl import ConfigConflictError, MemoryBudgetError, load_base, plan_memory, recommend
from qlora_rl.engine.fake import FakeEngine
from qlora_rl.memory.cards import RESERVE_GIB
from qlora_rl.memory.plan import GIB
from qlora_rl.train.run import recorded_training
from qlora_rl.train.setup.memory_budget import MemoryBudget, expects_full_weights


@pytest.fixture
def colocate(monkeypatch):
    """`rollout="colocate"` without vLLM; what each engine was asked for is in the list."""
    asked = []

    def build(base, **options):
        asked.append(options)
        return FakeEngine(load_base(base), max_lora_rank=options["max_lora_rank"])

    monkeypatch.setattr("qlora_rl.engine.local.LocalEngine", build)
    monkeypatch.setattr("qlora_rl.engine.compat.vllm_version", lambda: "0.31.0")
    return asked


def test_the_estimate_is_logged_and_written_down_before_anything_is_loaded(make_trainer, config, monkeypatch, caplog):
    seen = []
    real = recorded_training.resolve_model
    monkeypatch.setattr(
        recorded_training,
        "resolve_model",
        lambda *a, **k: (seen.append("memory of this run" in caplog.text), real(*a, **k))[1],
    )
    with caplog.at_level(logging.INFO, "qlora_rl"):
        trainer = make_trainer(args=config(output_dir=config().output_dir + "-memory"))
    assert seen == [True]
    written = json.loads((trainer.run.path / "config.json").read_text())["memory"]
    assert written["request"]["gpu_memory_gib"] is None  # no limit on the CPU
    assert {"base, trainer", "adapter", "optimizer"} <= {line["name"] for line in written["lines"]}
    assert not any("engine" in line["name"] for line in written["lines"])  # the engine was passed in


def test_a_wish_that_cannot_be_kept_is_rejected_before_anything_is_loaded(make_trainer, colocate, monkeypatch):
    monkeypatch.setattr(recorded_training, "resolve_model", lambda *a, **k: pytest.fail("something was loaded"))
    with pytest.raises(MemoryBudgetError, match=r"gpu_memory=0.00 GiB") as caught:
        make_trainer(rollout="colocate", gpu_memory=0.001)
    assert "base, shared" in str(caught.value)
    with pytest.raises(MemoryBudgetError) as caught:
        make_trainer(rollout="colocate", gpu_memory=0.001, share_base=False)
    assert "base, trainer" in str(caught.value)
    assert "base, engine" in str(caught.value)


@pytest.mark.parametrize("wrong", ["all", "24TB", 0, -3, True, None])
def test_a_word_that_is_no_amount_of_memory_is_rejected(wrong, make_trainer):
    with pytest.raises(ConfigConflictError, match="gpu_memory="):
        make_trainer(gpu_memory=wrong)


def test_the_kv_cache_gets_what_the_step_leaves_and_no_more_than_is_sampled_at_once(make_trainer, config, colocate):
    trainer = make_trainer(rollout="colocate", gpu_memory=2.0, args=config(vllm_max_model_length=64))
    estimate = trainer.memory.estimate
    assert estimate.fits
    assert colocate[0]["kv_cache_gib"] == estimate.cache_gib
    assert estimate.cache_sequences >= 4  # the batch
    # Two layers, two key heads of 32: 512 bytes a token; 4 sequences of one block of 128, and one block.
    assert estimate.cache_bytes == 512 * 128 * 5
    tight = (estimate.held_bytes + max(estimate.step_bytes, estimate.rollout_bytes) + 512 * 128 * 3) / GIB
    other = make_trainer(
        rollout="colocate",
        gpu_memory=tight,
        args=config(vllm_max_model_length=64, output_dir=config().output_dir + "-2"),
    )
    assert other.memory.estimate.cache_sequences == 2


def test_a_limit_beside_an_engine_that_was_passed_in_counts_the_trainer_alone(make_trainer):
    trainer = make_trainer(gpu_memory=2.0)
    estimate = trainer.memory.estimate
    assert estimate.fits
    assert not any("engine" in line.name or "cache" in line.name for line in estimate.lines)
    assert trainer.memory.engine_options() == {}  # its cache is not ours to size
    with pytest.raises(MemoryBudgetError, match="base, trainer"):
        make_trainer(gpu_memory=estimate.held_bytes / GIB / 2)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"kv_cache_gib": 0.5}),
        ({}, {"gpu_memory_utilization": 0.5}),
        ({"vllm_gpu_memory_utilization": 0.5}, {}),
    ],
)
def test_a_kv_cache_of_the_users_own_stays_his(fields, options, make_trainer, config, colocate):
    make_trainer(rollout="colocate", gpu_memory=2.0, engine_options=options, args=config(**fields))
    assert colocate[0].get("kv_cache_gib") == options.get("kv_cache_gib")


def budget_on_a_card(
    reported_gib, gpu_memory, base, args, monkeypatch, host_gib=200.0, vllm="0.31.0", rests=True, **options
):
    """The budget of a run on a card that reports so much memory, in a machine of which so much is free."""
    monkeypatch.setattr("qlora_rl.engine.compat.vllm_version", lambda: vllm)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (int((reported_gib - 1) * GIB), int(reported_gib * GIB)))
    monkeypatch.setattr("qlora_rl.train.setup.memory_budget.memory_gib", lambda: (host_gib, host_gib))
    args.use_cpu = False
    wanted = {"quantization_config": None, "engine_options": options, "optimizer": None}
    wanted |= {"adapter_dtype": "float32", "shared": True, "has_engine": True, "rests": rests}
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return MemoryBudget(gpu_memory, str(base.path), args, peft_config=lora, **wanted)


@pytest.mark.parametrize("reported_gib", [21.95, 23.64])
def test_the_size_of_a_card_is_planned_on_that_card_as_beforehand(reported_gib, base, config, monkeypatch):
    beforehand = recommend(base.path, "grpo", 24)
    memory_budget = budget_on_a_card(reported_gib, beforehand.trainer["gpu_memory"], base, config(), monkeypatch)
    assert memory_budget.estimate.budget_bytes == beforehand.estimate.budget_bytes


def test_a_card_that_has_less_than_others_of_its_size_gets_what_it_has(base, config, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "qlora_rl"):
        memory_budget = budget_on_a_card(21.6, 24, base, config(), monkeypatch)
    assert memory_budget.estimate.budget_bytes == pytest.approx((21.6 - RESERVE_GIB) * GIB, abs=2)
    assert "21.6" in caplog.text


@pytest.mark.parametrize(
    ("fields", "options", "set_to"),
    [
        ({}, {}, (True, {"offload": True})),
        (
            {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
            {},
            (True, {"use_reentrant": False, "offload": True}),
        ),
        ({"gradient_checkpointing_kwargs": {"offload": True}}, {}, (True, {"offload": True})),
        ({"vllm_enable_sleep_mode": True}, {}, (True, {"offload": True})),
        ({"gradient_checkpointing_kwargs": {"offload": False}}, {}, MemoryBudgetError),
        ({}, {"enable_sleep": False}, MemoryBudgetError),
    ],
)
def test_the_plan_turns_on_what_is_not_set_and_what_is_set_stays(
    fields, options, set_to, config, tmp_path, monkeypatch
):
    wanted, args = long_run(config, tmp_path, **fields)
    if set_to is MemoryBudgetError:
        with pytest.raises(MemoryBudgetError, match="turned on to save memory"):
            budget_on_a_card(23.64, 24, wanted, args, monkeypatch, **options)
        return
    memory_budget = budget_on_a_card(23.64, 24, wanted, args, monkeypatch, **options)
    memory_budget.set_chosen(args)
    assert (args.vllm_enable_sleep_mode, args.gradient_checkpointing_kwargs) == set_to
    assert memory_budget.as_dict()["choice"].startswith("turned on to save memory: ")


@pytest.mark.parametrize("field", [{}, {"vllm_enable_sleep_mode": True}])
@pytest.mark.parametrize("why", [{"vllm": "0.30.0"}, {"rests": False}])
def test_the_plan_does_not_count_on_a_sleep_that_will_not_be(why, field, config, tmp_path, monkeypatch):
    """Before vLLM 0.31 an engine that lends its base stays awake, and one that samples meanwhile always does."""
    wanted, args = long_run(config, tmp_path, **field)
    with pytest.raises(MemoryBudgetError, match="layer inputs") as caught:
        budget_on_a_card(23.64, 24, wanted, args, monkeypatch, **why)
    assert "vllm_enable_sleep_mode" not in str(caught.value)
    memory_budget = budget_on_a_card(23.64, "auto", wanted, args, monkeypatch, **why)
    assert not memory_budget.estimate.request.sleeps
    assert "sleeps" not in {way.field for way in memory_budget.estimate.chosen}


def long_run(config, tmp_path, **fields):
    """Qwen3-8B, and the config of a run with one sequence of 65,536 tokens, which a card of 24 GB holds only with all
    that may be turned on."""
    shape = Qwen3Config(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072,
    )  # fmt: skip
    (tmp_path / "8b").mkdir()
    (tmp_path / "8b" / "config.json").write_text(shape.to_json_string())
    args = config(
        vllm_max_model_length=65_536,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        gradient_checkpointing=True,
        **fields,
    )
    return SimpleNamespace(path=tmp_path / "8b"), args


def test_layer_inputs_have_the_host_memory_that_is_free(config, tmp_path, monkeypatch, caplog):
    """36 of 512 MiB each, and as much for shorter ones; two processes have half of it each."""
    wanted, args = long_run(config, tmp_path)
    with pytest.raises(MemoryBudgetError, match=r"36.00 GiB > 32.00 GiB"):
        budget_on_a_card(23.64, 24, wanted, args, monkeypatch, host_gib=32.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(MemoryBudgetError, match=r"36.00 GiB > 24.00 GiB"):
        budget_on_a_card(23.64, 24, wanted, args, monkeypatch, host_gib=48.0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    args.gradient_checkpointing_kwargs = {"offload": True}
    with pytest.raises(MemoryBudgetError, match=r"36.00 GiB of host memory > 32.00 GiB"):
        budget_on_a_card(23.64, 24, wanted, args, monkeypatch, host_gib=32.0)
    budget_on_a_card(23.64, "auto", wanted, args, monkeypatch, host_gib=32.0)
    assert "the run may not fit: layer inputs of 1 x 65536 tokens need 36.00 GiB of host memory" in caplog.text


def test_an_engine_sleeps_in_a_run_that_fits_only_so(make_trainer, config, colocate, monkeypatch):
    """The memory is planned as for a GPU whose memory is just enough with an engine that sleeps."""
    from qlora_rl.train.setup import memory_budget

    def planned(*args, **request):
        wide = plan_memory(*args, **request | {"device": "cuda", "sleeps": None, "offload": None})
        return wide.changed(gpu_memory_gib=(wide.changed(sleeps=True).least_bytes + 1000) / GIB)

    monkeypatch.setattr(memory_budget, "plan_memory", planned)
    trainer = make_trainer(rollout="colocate", gpu_memory="auto", args=config(max_steps=2))
    assert colocate[0]["enable_sleep"] is True
    trainer.train()
    written = json.loads((trainer.run.path / "config.json").read_text())
    assert written["memory"]["chosen"] == {"sleeps": "vllm_enable_sleep_mode=True"}
    assert "turned on to save memory: the KV cache" in written["memory"]["choice"]
    assert trainer.args.vllm_enable_sleep_mode is True
    assert trainer.engine.naps == 2
    steps = [json.loads(line) for line in (trainer.run.path / "metrics.jsonl").read_text().splitlines()]
    assert all(step["wake_seconds"] >= 0 and step["sleep_seconds"] >= 0 for step in steps)


@pytest.mark.parametrize("asked", [24, 20.5])
def test_more_than_the_card_has_is_rejected(asked, base, config, monkeypatch):
    with pytest.raises(ConfigConflictError, match=rf"gpu_memory={asked}.* > 20.0 GiB"):
        budget_on_a_card(20.0, asked, base, config(), monkeypatch)


def test_a_peft_model_is_counted_as_it_is(make_trainer, base, config):
    import torch

    model = get_peft_model(
        load_base(base), LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={"layers.0.self_attn.q_proj": 2})
    )
    trainer = make_trainer(model=model, peft_config=None, args=config(optim="sgd"))
    lines = {line.name: line.nbytes for line in trainer.memory.estimate.lines}
    held = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    assert lines["adapter"] == held
    assert lines["optimizer"] == 0
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters() if p.requires_grad)


def test_a_run_that_cannot_be_planned_says_why_and_goes_on(make_trainer, monkeypatch):
    import qlora_rl.train.setup.memory_budget as planning

    def fail(*args, **kwargs):
        raise ConfigConflictError("no such shape")

    monkeypatch.setattr(planning, "plan_memory", fail)
    trainer = make_trainer()
    assert trainer.memory.as_dict() == {"reason": "ConfigConflictError: no such shape"}
    with pytest.raises(ConfigConflictError, match="no such shape"):
        make_trainer(gpu_memory=2.0)


@pytest.mark.parametrize(
    ("fields", "sync", "expected"),
    [
        ({}, "auto", False), ({}, "lora_adapter", False), ({}, "weights", True), ({"use_dora": True}, "auto", True),
        ({"modules_to_save": ["norm"]}, "auto", True), ({"target_modules": ["no_such_layer"]}, "auto", False),
    ],
)  # fmt: skip
def test_the_baked_base_is_counted_where_full_weights_will_travel(fields, sync, expected, base):
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **fields})
    assert expects_full_weights(base, config, sync) is expected
    model = load_base(base)
    assert expects_full_weights(model, config, sync) is expected
    if "no_such_layer" not in str(fields):
        assert expects_full_weights(get_peft_model(model, config), None, sync) is expected


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)}),
        ({"vllm_tensor_parallel_size": 2}, {}),
    ],
    ids=["DoRA", "several ranks"],
)
def test_the_plan_of_an_engine_on_the_baked_base_holds_it_beside_the_4_bit_one(make_trainer, config, fields, arguments):
    with pytest.raises(MemoryBudgetError) as caught:
        make_trainer(rollout="colocate", gpu_memory=0.001, args=config(**fields), **arguments)
    assert "base, engine" in str(caught.value)
    assert "baked" in str(caught.value)
