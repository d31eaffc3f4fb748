"""Every `vllm_*` field of GRPOConfig is honoured or rejected, and the caller's config is not changed."""

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from recorded import Recorded
from support import make_model
from trl import GRPOConfig

from qlora_rl import QLoRAGRPOTrainer
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError
from qlora_rl.train.ranks import zero
from qlora_rl.train.setup import settings
from qlora_rl.train.setup.config_checks import check, contradictions
from qlora_rl.train.setup.processes import check_processes

# field -> a value that is not the default, and the argument of LocalEngine in which it arrives
ARRIVES = {
    "vllm_model_impl": ("transformers", "model_impl"),
    "vllm_enable_sleep_mode": (True, "enable_sleep"),
    "vllm_gpu_memory_utilization": (0.7, "gpu_memory_utilization"),
    "vllm_max_model_length": (48, "max_model_length"),
    "vllm_tensor_parallel_size": (2, "tensor_parallel_size"),
}
# field -> a value, and the trainer's attribute that TRL reads it from in every step
READ_BY_TRL = {
    "vllm_importance_sampling_correction": (False, "vllm_importance_sampling_correction"),
    "vllm_importance_sampling_mode": ("token_mask", "vllm_importance_sampling_mode"),
    "vllm_importance_sampling_clip_max": (2.5, "vllm_importance_sampling_clip_max"),
    "vllm_importance_sampling_clip_min": (0.5, "vllm_importance_sampling_clip_min"),
    "vllm_importance_sampling_cap": (2.5, "vllm_importance_sampling_clip_max"),
}
# test_rejections.py has a row for each.
REJECTED = {
    "vllm_mode",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_group_port",
}
SAMPLED = {"vllm_structured_outputs_regex": "[0-9]+"}


def test_no_vllm_field_of_trl_is_unknown_here():
    fields = {f.name for f in dataclasses.fields(GRPOConfig) if f.name.startswith("vllm_")}
    known = [ARRIVES, READ_BY_TRL, REJECTED, SAMPLED]
    assert fields == set().union(*known)
    assert len(fields) == sum(len(table) for table in known)


@pytest.mark.parametrize("field", ARRIVES)
def test_a_field_about_the_engine_arrives_in_its_options(field, make_trainer, config, colocate):
    value, option = ARRIVES[field]
    make_trainer(rollout="colocate", args=config(**{field: value}))
    assert colocate[0].options[option] == value


@pytest.mark.parametrize("rollout", ["colocate", "server"])
def test_a_length_without_room_for_a_prompt_is_rejected_in_python_and_in_a_file(rollout, make_trainer, config):
    args = config(vllm_max_model_length=128, max_completion_length=128)
    said = "vllm_max_model_length=128"
    with pytest.raises(ConfigConflictError, match=said):
        make_trainer(model="/nowhere", rollout=rollout, args=args)
    assert any(said in each for each in contradictions("grpo", args, rollout))


def test_a_length_beyond_the_models_positions_is_rejected_before_anything_is_loaded(
    make_trainer, config, colocate, tmp_path, monkeypatch
):
    model = make_model(tmp_path / "model")
    monkeypatch.setattr("qlora_rl.train.setup.model_source.prepare_base", None)  # nothing comes so far
    with pytest.raises(ConfigConflictError, match="vllm_max_model_length=100000"):
        make_trainer(model=str(model), rollout="colocate", args=config(vllm_max_model_length=100_000))
    assert not colocate


@pytest.mark.parametrize("field", READ_BY_TRL)
def test_a_field_that_trl_reads_is_where_trl_reads_it(field, make_trainer, config):
    value, attribute = READ_BY_TRL[field]
    trainer = make_trainer(args=config(**{field: value}))
    assert getattr(trainer, attribute) == value


def test_the_regex_and_all_other_sampling_fields_reach_every_request(make_trainer, config, colocate):
    fields = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    trainer = make_trainer(
        rollout="colocate",
        args=config(
            vllm_structured_outputs_regex=SAMPLED["vllm_structured_outputs_regex"],
            generation_kwargs={"stop": ["="]},
            max_steps=2,
            **fields,
        ),
    )
    trainer.train()
    first, second = colocate[0].specs
    assert (first.regex, first.max_tokens, first.extra) == ("[0-9]+", 3, {"stop": ["="]})
    assert {name: getattr(first, name) for name in fields} == fields
    assert first.seed != second.seed


def test_the_corrections_bounds_act_on_the_loss(make_trainer, config):
    bounds = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 0.5}
    trainer = make_trainer(args=config(**bounds))
    trainer.train()
    assert trainer.state.log_history[0]["sampling/importance_sampling_ratio/max"] == 0.5


def test_the_engine_is_sized_for_the_adapter_and_the_batch_and_engine_options_win(make_trainer, config, colocate):
    args = config(gradient_accumulation_steps=2, seed=7, trust_remote_code=True)
    make_trainer(rollout="colocate", args=args, engine_options={"kv_cache_gib": 1.0, "gpu_memory_utilization": 0.5})
    expected = {"max_lora_rank": 4, "max_num_seqs": 8, "seed": 7, "trust_remote_code": True, "max_model_length": None}
    expected |= {"kv_cache_gib": 1.0, "gpu_memory_utilization": 0.5}
    options = colocate[0].options
    assert {name: options[name] for name in expected} == expected


def test_the_engine_sleeps_between_rollouts_when_the_config_says_so(make_trainer, config, colocate):
    make_trainer(rollout="colocate", args=config(vllm_enable_sleep_mode=True, max_steps=2)).train()
    assert colocate[0].naps == 2


def test_an_engine_that_cannot_sleep_is_reported(make_trainer, config, colocate, monkeypatch, caplog):
    original = Recorded.capabilities
    monkeypatch.setattr(Recorded, "capabilities", lambda self: dataclasses.replace(original(self), can_sleep=False))
    make_trainer(rollout="colocate", args=config(vllm_enable_sleep_mode=True)).train()
    assert colocate[0].naps == 0
    assert "cannot sleep" in caplog.text


# --- what TRL checks only under use_vllm=True -----------------------------------------------------------------------


@pytest.mark.parametrize("rollout", ["colocate", "http://127.0.0.1:1", "an engine of vLLM"])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"generation_kwargs": {"stopp": ["x"]}}, "stopp"),
        ({"generation_kwargs": {"structured_outputs": {"regexx": "a"}}}, "regexx"),
        ({"generation_kwargs": {"min_tokens": -1}}, "min_tokens"),
        ({"top_p": 95.0}, "top_p"),
    ],
)
def test_sampling_that_vllm_does_not_take_is_rejected_before_anything_is_loaded(
    fields, named, rollout, make_trainer, config, colocate, engine, monkeypatch
):
    pytest.importorskip("vllm")
    if rollout == "an engine of vLLM":
        held = engine.capabilities()
        monkeypatch.setattr(engine, "capabilities", lambda: replace(held, name="vllm 0.31.0 (cpu)"), raising=False)
        rollout = engine
    elif "top_p" in fields and rollout != "colocate":
        pytest.skip("looked at where vLLM is loaded anyway")
    with pytest.raises(ConfigConflictError, match=rf"reading the config: vLLM .*{named}"):
        make_trainer(model="/nowhere", rollout=rollout, args=config(**fields))


def test_all_contradictions_are_said_at_once(make_trainer, config):
    with pytest.raises(ConfigConflictError) as caught:
        make_trainer(args=config(vllm_mode="server", vllm_server_port=8001, vllm_max_model_length=48))
    assert len(caught.value.reasons) == 3


@pytest.fixture
def two_processes(config):
    class TwoProcesses(GRPOConfig):
        world_size = 2

    return TwoProcesses(output_dir=config().output_dir, use_cpu=True, num_generations=2, report_to=[])


@pytest.mark.parametrize("shared", [{"rollout": "http://127.0.0.1:9"}, {"engine_options": {"tensor_parallel_size": 2}}])
def test_tools_on_an_engine_that_processes_share_are_rejected_before_anything_is_loaded(
    shared, two_processes, base, plain, lora
):
    given = {"model": base, "reward_funcs": print, "train_dataset": plain, "peft_config": lora, "args": two_processes}
    with pytest.raises(NotYetSupportedError, match="rollout_func"):
        QLoRAGRPOTrainer(**given, **shared, rollout_func=print)


@pytest.mark.parametrize(
    ("processes", "stated", "named"),
    [
        (2, {"zero_optimization": {"stage": 1}}, "zero1"),
        (1, {"zero_optimization": {"stage": 3}}, "one process under DeepSpeed"),
        (
            2,
            {
                "optimizer": {"type": "AdamW"},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zero_hpz_partition_size": 8},
            },
            "optimizer, offload_optimizer, zero_hpz_partition_size",
        ),
    ],
)
def test_a_way_to_spread_a_trainer_that_is_not_verified_is_rejected_by_name(
    processes, stated, named, two_processes, config, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    args = two_processes if processes == 2 else config()
    args.deepspeed_plugin = SimpleNamespace(
        zero_stage=stated["zero_optimization"]["stage"], deepspeed_config=stated if "optimizer" in stated else {}
    )
    with pytest.raises(NotYetSupportedError, match=named):
        check_processes(args, "choosing the engine")


def test_what_deepspeeds_config_leaves_open_is_trls(two_processes, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    stated = {"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}
    two_processes.deepspeed_plugin = SimpleNamespace(zero_stage=3, deepspeed_config=stated)
    two_processes.max_grad_norm = 0.25
    check_processes(two_processes, "choosing the engine")
    assert stated["gradient_clipping"] == 0.25
    assert stated["zero_optimization"]["memory_efficient_linear"] is False


def test_under_deepspeed_bf16_would_cast_another_base(two_processes):
    two_processes.bf16 = True
    zero.check_dtype(two_processes, "bfloat16")
    with pytest.raises(ConfigConflictError, match="float32"):
        zero.check_dtype(two_processes, "float32")


def test_an_engine_that_each_of_several_processes_would_own_is_rejected(two_processes, engine, monkeypatch):
    check(two_processes, engine)
    monkeypatch.setattr(type(engine), "url", "http://127.0.0.1:8000", raising=False)
    with pytest.raises(ConfigConflictError):
        check(two_processes, engine)


# --- the caller's config --------------------------------------------------------------------------------------------


def test_the_callers_config_is_not_changed(make_trainer, config, plain, model_dir, colocate):
    args = config(
        use_vllm=True,
        generation_kwargs={"stop": ["="]},
        model_init_kwargs={"attn_implementation": "eager"},
        dataloader_num_workers=1,
    )
    before = args.to_dict() | {"accelerator": args.accelerator_config.to_dict()}
    stream = plain.to_iterable_dataset()
    trainer = make_trainer(model=str(model_dir), args=args, train_dataset=stream, rollout="colocate")
    trainer.train()
    assert args.to_dict() | {"accelerator": args.accelerator_config.to_dict()} == before
    assert trainer.args is not args
    # What the trainer keeps says the same where the two are about the same thing.
    assert trainer.args.use_vllm is True
    assert trainer.args.generation_kwargs == {"stop": ["="]}


def test_without_a_config_the_run_has_trls_defaults(make_trainer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(args=None)
    assert trainer.args.num_generations == GRPOConfig("x", report_to=[], use_cpu=trainer.args.use_cpu).num_generations
    assert (tmp_path / "qlora-grpo" / "config.json").is_file()


# --- steps ----------------------------------------------------------------------------------------------------------


def pushes(trainer):
    return len((trainer.run.path / "sync.jsonl").read_text().splitlines())


def test_num_iterations_uses_a_rollout_twice_and_pushes_once(make_trainer, config):
    trainer = make_trainer(args=config(num_iterations=2, max_steps=2))
    trainer.train()
    assert trainer.state.global_step == 2
    assert pushes(trainer) == 1


def test_gradient_accumulation_generates_once_per_step_for_the_whole_batch(make_trainer, config):
    trainer = make_trainer(args=config(gradient_accumulation_steps=2, max_steps=2))
    trainer.train()
    assert pushes(trainer) == 2
    assert 8 <= trainer._record.last["rollout_tokens"] <= 8 * 3


@pytest.mark.parametrize("kind", ["train_dataset", "eval_dataset"])
def test_a_dataset_without_prompts_is_rejected_with_the_columns_it_has(make_trainer, plain, kind):
    renamed = plain.rename_column("prompt", "question")
    with pytest.raises(ConfigConflictError, match="answer, question"):
        make_trainer(**{kind: {"one": renamed} if kind == "eval_dataset" else renamed})


@pytest.mark.parametrize(
    "name",
    ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"],
)
def test_columns_that_reward_functions_cannot_be_given_are_rejected(name, make_trainer, plain, config):
    named = plain.rename_column("answer", name)
    with pytest.raises(ConfigConflictError, match=rf"rename_column\('{name}'"):
        make_trainer(train_dataset=named)
    make_trainer(train_dataset=named, args=config(remove_unused_columns=True)).train()


def test_a_row_without_a_prompt_is_named(make_trainer, plain):
    rows = [*plain, {"prompt": None, "answer": "1"}, *plain]
    with pytest.raises(ConfigConflictError, match="row 8"):
        make_trainer(train_dataset=Dataset.from_list(rows))
    chats = [row | {"prompt": row["prompt"] and [{"role": "user", "content": row["prompt"]}]} for row in rows]
    with pytest.raises(ConfigConflictError, match="row 2"):
        make_trainer(eval_dataset={"one": Dataset.from_list(chats).select(range(6, 12))})


def test_a_seed_gives_the_same_adapter_again(make_trainer, config, tmp_path):
    def train(name):
        trainer = make_trainer(args=config(output_dir=str(tmp_path / name), max_steps=2, seed=3))
        trainer.train()
        return [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]

    assert all(torch.equal(a, b) for a, b in zip(train("a"), train("b"), strict=True))


def test_without_a_config_a_trainer_runs_on_the_processor_that_there_is(
    base, engine, plain, lora, tmp_path, monkeypatch
):
    import qlora_rl

    monkeypatch.chdir(tmp_path)
    pairs = Dataset.from_list([{"prompt": "1+1=", "chosen": "2", "rejected": "3", "completion": "2"}] * 2)
    online = {"reward_funcs": lambda completions, **_: [0.0] * len(completions), "train_dataset": plain}
    online["rollout"] = engine
    for name, arguments in {
        "GRPO": online, "RLOO": online, "OnlineDPO": online, "AsyncGRPO": online,
        "SFT": {"train_dataset": pairs.select_columns(["prompt", "completion"])}, "DPO": {"train_dataset": pairs},
        "KTO": {"train_dataset": pairs.select_columns(["prompt", "chosen", "rejected"])},
    }.items():  # fmt: skip
        with getattr(qlora_rl, f"QLoRA{name}Trainer")(base, peft_config=lora, **arguments) as trainer:
            assert trainer.args.use_cpu == (not torch.cuda.is_available()), name


def test_without_a_config_the_correction_is_ours_and_a_config_that_is_given_is_never_changed(
    make_trainer, config, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    ours = make_trainer(args=None).args
    assert (ours.vllm_importance_sampling_mode, ours.vllm_importance_sampling_clip_max) == ("token_truncate", 2.0)
    given = config()
    assert (
        given.vllm_importance_sampling_mode == settings.own_copy(given).vllm_importance_sampling_mode == "sequence_mask"
    )
    assert settings.own_copy(given).vllm_importance_sampling_clip_max == 3.0


def test_an_engine_of_several_ranks_is_rejected_where_there_is_none(monkeypatch):
    from types import SimpleNamespace

    from qlora_rl.train.rollouts import engine_link

    size = {"tensor_parallel_size": 2}
    engine_link.EngineChoice("ray", size)
    full = SimpleNamespace(spec=SimpleNamespace(is_4bit=True))
    with pytest.raises(NotYetSupportedError, match="tensor_parallel_size=2 takes adapters"):
        engine_link.EngineChoice("colocate", size).start_dense(full)
    monkeypatch.setattr(engine_link, "ranks", lambda: SimpleNamespace(size=6))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigConflictError, match=r"and 3 processes on this machine.* a divisor of 3, or use"):
        engine_link.EngineChoice("colocate", size)
    engine_link.EngineChoice("colocate", {"tensor_parallel_size": 3})
    engine_link.EngineChoice("server", size)
    engine_link.EngineChoice("colocate", {"tensor_parallel_size": 1})
