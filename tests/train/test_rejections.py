"""What is rejected, each with what was wrong and the way out: docs/trl-arguments.md."""

import functools
import re

import numpy
import peft
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from support import quantised_in_flight
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from qlora_rl import load_base, prepare_base
from qlora_rl.engine.fake import FakeEngine
from qlora_rl.errors import (
    AdapterRejectedError,
    ConfigConflictError,
    NotYetSupportedError,
    PromptTooLongError,
    QloraRLError,
    RewardFunctionError,
    RunDirectoryError,
    UnsupportedQuantError,
)
from qlora_rl.train.metrics.rewards import check_signature, guard

Q = {"r": 4, "target_modules": ["q_proj"]}


IN_8_BIT = BitsAndBytesConfig(load_in_8bit=True)
IN_4_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
OTHER_4_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.bfloat16)
WITH_IMAGE = Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}], "image": "x"}] * 4)
LISTS = Dataset.from_list([{"prompt": ["1+1=", "2+2="]}] * 4)


def frozen(fixture):
    fixture("peft_model")().save_pretrained(fixture("tmp_path") / "adapter")
    model = PeftModel.from_pretrained(load_base(fixture("base")), fixture("tmp_path") / "adapter")
    return {"model": model, "peft_config": None}


def quantised_otherwise(fixture):
    held = quantised_in_flight(fixture("model_dir"), fixture("tmp_path") / "nf4", "lm_head")
    return {"model": str(held), "quantization_config": OTHER_4_BIT}


def with_tokens(fixture, **tokens):
    tokenizer = AutoTokenizer.from_pretrained(fixture("base").path, padding_side="left")
    tokenizer.add_special_tokens(tokens)
    return {"processing_class": tokenizer}


def nameless(fixture):
    model = AutoModelForCausalLM.from_pretrained(fixture("model_dir"), dtype=torch.bfloat16)
    model.config._name_or_path = ""
    return {"model": model}


def others_optimizer(fixture):
    model = load_base(fixture("base"))
    return {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=1.0), None)}


def without_template(fixture):
    tokenizer = AutoTokenizer.from_pretrained(fixture("base").path, padding_side="left")
    tokenizer.chat_template = None
    return {"train_dataset": LISTS, "processing_class": tokenizer}


def in_a_file(fixture):
    (fixture("tmp_path") / "file").write_text("")
    return {"args": fixture("config")(output_dir=str(fixture("tmp_path") / "file"))}


def tool(x: int) -> int:
    """Double. Args: x: a number."""
    return 2 * x


# The error, what it has to name, and what is asked for: arguments that replace the usual ones (`fields` those of the
# config), or a function that makes them of fixtures.
REJECTED = {
    "a rank above the engine's": (
        ConfigConflictError,
        "max_lora_rank=100",
        {"peft_config": LoraConfig(r=100, target_modules=["q_proj"])},
    ),
    "no adapter": (ConfigConflictError, "peft_config=LoraConfig", {"peft_config": None}),
    "no adapter on a model object": (
        ConfigConflictError,
        "peft_config=LoraConfig",
        lambda fixture: {"model": load_base(fixture("base")), "peft_config": None},
    ),
    "two adapters": (ConfigConflictError, "peft_config", lambda fixture: {"model": fixture("adapted")}),
    "a frozen PeftModel": (AdapterRejectedError, "is_trainable=True", frozen),
    "beta beside an adapter of another name": (
        ConfigConflictError,
        "'mine'",
        lambda fixture: {
            "model": fixture("peft_model")(adapter_name="mine"),
            "peft_config": None,
            "args": fixture("config")(beta=0.1),
        },
    ),
    "an unknown dtype": (ConfigConflictError, "adapter_dtype='float16'", {"adapter_dtype": "float16"}),
    "an unknown sync, before a model is looked for": (
        ConfigConflictError,
        "sync='merge'",
        {"model": "/nowhere", "sync": "merge"},
    ),
    "an unknown word for a run that is there": (ConfigConflictError, "existing_run='maybe'", {"existing_run": "maybe"}),
    "an unknown word for sharing": (ConfigConflictError, "share_base='maybe'", {"share_base": "maybe"}),
    "full weights for an engine that takes none": (ConfigConflictError, "bake_base", {"sync": "weights"}),
    "a rollout by another name": (ConfigConflictError, "'colocate'", {"rollout": "elsewhere"}),
    "a rollout by two ways": (ConfigConflictError, "'colocate'", {"rollout": ["http://a", "colocate"]}),
    "a rollout by none": (ConfigConflictError, "'colocate'", {"rollout": []}),
    "a rollout that is a number": (ConfigConflictError, "'colocate'", {"rollout": 42}),
    "8 bits": (
        UnsupportedQuantError,
        "quant='nf4'",
        lambda fixture: {"model": str(fixture("model_dir")), "quantization_config": IN_8_BIT},
    ),
    "4 bits computed in float32": (
        ConfigConflictError,
        "bnb_4bit_compute_dtype=torch.bfloat16",
        {"model": "/nowhere", "quantization_config": BitsAndBytesConfig(load_in_4bit=True)},
    ),
    "dtype float32": (
        ConfigConflictError,
        "dtype='bfloat16'",
        {"model": "/nowhere", "fields": {"model_init_kwargs": {"dtype": "float32"}}},
    ),
    "a prepared base quantised again": (ConfigConflictError, "quantised", {"quantization_config": IN_4_BIT}),
    "a loaded base quantised again": (
        ConfigConflictError,
        "quantised",
        lambda fixture: {
            "model": load_base(fixture("base")),
            "quantization_config": IN_4_BIT,
        },
    ),
    "quantised twice": (
        ConfigConflictError,
        "twice",
        lambda fixture: {
            "model": str(fixture("model_dir")),
            "quantization_config": IN_4_BIT,
            "args": fixture("config")(model_init_kwargs={"quantization_config": IN_4_BIT}),
        },
    ),
    "quantised otherwise than its checkpoint": (ConfigConflictError, "fp4", quantised_otherwise),
    "low_cpu_mem_usage": (
        ConfigConflictError,
        "low_cpu_mem_usage",
        {"fields": {"model_init_kwargs": {"low_cpu_mem_usage": True}}},
    ),
    "device_map": (
        ConfigConflictError,
        "device_map='balanced'",
        {"fields": {"model_init_kwargs": {"device_map": "balanced"}}},
    ),
    "dtype float16": (ConfigConflictError, "dtype='float16'", {"fields": {"model_init_kwargs": {"dtype": "float16"}}}),
    "revision": (ConfigConflictError, "revision='v2'", {"fields": {"model_init_kwargs": {"revision": "v2"}}}),
    "model_init_kwargs beside a model object": (
        ConfigConflictError,
        "model_init_kwargs",
        lambda fixture: {
            "model": load_base(fixture("base")),
            "args": fixture("config")(model_init_kwargs={"attn_implementation": "eager"}),
        },
    ),
    "a path that is nowhere": (QloraRLError, "/nowhere/at/all", {"model": "/nowhere/at/all"}),
    "a name that is nowhere": (QloraRLError, "nobody/nothing", {"model": "nobody/nothing"}),
    "an added token": (
        ConfigConflictError,
        "<think>",
        lambda fixture: with_tokens(fixture, additional_special_tokens=["<think>"]),
    ),
    "an added pad token": (ConfigConflictError, "<|mine|>", lambda fixture: with_tokens(fixture, pad_token="<|mine|>")),
    "a model object without a tokenizer": (ConfigConflictError, "processing_class", nameless),
    "an optimizer for other parameters": (ConfigConflictError, "parameters", others_optimizer),
    "no reward": (ValueError, "reward", {"reward_funcs": None}),
    "a missing weight": (ValueError, "reward weights", {"fields": {"reward_weights": [1.0, 2.0]}}),
    "a dataset with images": (NotYetSupportedError, "image", {"model": "/nowhere", "train_dataset": WITH_IMAGE}),
    "an evaluation with images": (
        NotYetSupportedError,
        "image",
        {"model": "/nowhere", "eval_dataset": {"a": WITH_IMAGE}},
    ),
    "a list in place of a dataset": (TypeError, "Dataset", {"train_dataset": [{"prompt": "1+1="}]}),
    "prompts that are lists of texts": (ConfigConflictError, "row 0", {"train_dataset": LISTS}),
    "prompts that are lists of texts, without a template": (ConfigConflictError, "row 0", without_template),
    "tools without a template for them": (ValueError, "tool", {"tools": [tool]}),
    "a file in the place of the directory": (RunDirectoryError, "file", in_a_file),
    "vespo by sequences": (
        ConfigConflictError,
        "vespo",
        {"fields": {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}},
    ),
    "an unknown mode": (
        ConfigConflictError,
        "vllm_mode='elsewhere'",
        {"model": "/nowhere", "fields": {"vllm_mode": "elsewhere"}},
    ),
    "an unknown correction": (
        ConfigConflictError,
        "sentence_mask",
        {"model": "/nowhere", "fields": {"vllm_importance_sampling_mode": "sentence_mask"}},
    ),
    "continuous batching": (
        ConfigConflictError,
        "use_transformers_continuous_batching",
        {"model": "/nowhere", "fields": {"use_transformers_continuous_batching": True}},
    ),
    "n of each prompt": (
        ConfigConflictError,
        "num_generations",
        {"model": "/nowhere", "fields": {"generation_kwargs": {"n": 2}}},
    ),
    "temperature twice": (
        ConfigConflictError,
        "temperature=0.7",
        {"model": "/nowhere", "fields": {"generation_kwargs": {"temperature": 0.7}}},
    ),
    "length twice": (
        ConfigConflictError,
        "max_completion_length=3",
        {"model": "/nowhere", "fields": {"generation_kwargs": {"max_tokens": 9}}},
    ),
    "seed twice": (
        ConfigConflictError,
        "GRPOConfig(seed",
        {"model": "/nowhere", "fields": {"generation_kwargs": {"seed": 1}}},
    ),
    "TRL's server": (ConfigConflictError, "vllm_mode", {"fields": {"use_vllm": True, "vllm_mode": "server"}}),
    "TRL's server, without vLLM": (
        ConfigConflictError,
        "vllm_mode",
        {"fields": {"use_vllm": False, "vllm_mode": "server"}},
    ),
    "the URL of TRL's server": (
        ConfigConflictError,
        "vllm_server_base_url",
        {"fields": {"vllm_server_base_url": "http://localhost:8000"}},
    ),
    "the host of TRL's server": (ConfigConflictError, "vllm_server_host", {"fields": {"vllm_server_host": "10.0.0.1"}}),
    "the port of TRL's server": (ConfigConflictError, "vllm_server_port", {"fields": {"vllm_server_port": 8001}}),
    "the patience with TRL's server": (
        ConfigConflictError,
        "vllm_server_timeout",
        {"fields": {"vllm_server_timeout": 10.0}},
    ),
    "the group of TRL's server": (ConfigConflictError, "vllm_group_port", {"fields": {"vllm_group_port": 51217}}),
    "another model_impl": (ConfigConflictError, "vllm_model_impl", {"fields": {"vllm_model_impl": "transformers"}}),
    "sleep": (ConfigConflictError, "vllm_enable_sleep_mode", {"fields": {"vllm_enable_sleep_mode": True}}),
    "memory": (ConfigConflictError, "vllm_gpu_memory_utilization", {"fields": {"vllm_gpu_memory_utilization": 0.7}}),
    "a length": (ConfigConflictError, "vllm_max_model_length", {"fields": {"vllm_max_model_length": 48}}),
    "ranks": (ConfigConflictError, "vllm_tensor_parallel_size", {"fields": {"vllm_tensor_parallel_size": 2}}),
}


@pytest.mark.parametrize("what", REJECTED)
def test_what_a_trainer_cannot_do_is_rejected_with_what_was_wrong(what, make_trainer, config, request):
    error, named, asked = REJECTED[what]
    arguments = dict(asked if isinstance(asked, dict) else asked(request.getfixturevalue))
    args = config(**arguments.pop("fields", {}))
    with pytest.raises(error, match=re.escape(named)):
        make_trainer(**{"args": args} | arguments)


@pytest.fixture
def peft_model(base):
    def make(config=None, **arguments):
        return get_peft_model(load_base(base), config or LoraConfig(**Q), **arguments)

    return make


# --- adapters -------------------------------------------------------------------------------------------------------

NOT_LORA = {
    "IA3": (peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]), "LoraConfig"),
    "PROMPT_TUNING": (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "LoraConfig"),
    "DoRA": (LoraConfig(**Q, use_dora=True), "use_dora=False"),
    "modules_to_save": (LoraConfig(**Q, modules_to_save=["embed_tokens"]), "Leave modules_to_save out"),
    "bias='all'": (LoraConfig(**Q, bias="all"), "bias='none'"),
    "lm_head": (LoraConfig(r=4, target_modules=["q_proj", "lm_head"]), "target_modules"),
    "rank=600 > 512": (LoraConfig(r=600, target_modules=["q_proj"]), "Lower r"),
}


@pytest.mark.parametrize("name", NOT_LORA)
@pytest.mark.parametrize("form", ["peft_config", "PeftModel"])
def test_an_adapter_that_is_not_plain_lora_is_rejected_by_name(name, form, make_trainer, peft_model):
    config, way_out = NOT_LORA[name]
    arguments = {"peft_config": config} if form == "peft_config" else {"peft_config": None, "model": peft_model(config)}
    with pytest.raises((QloraRLError, ValueError)) as caught:
        make_trainer(**arguments)
    assert name in str(caught.value)
    assert way_out in str(caught.value)


@pytest.mark.parametrize("rollout", ["colocate", "engine"])
def test_an_adapter_that_finds_no_module_is_rejected_before_a_base_is_made(
    rollout, make_trainer, engine, model_dir, monkeypatch
):
    monkeypatch.setattr(
        "qlora_rl.train.setup.model_source.prepare_base", lambda *_, **__: pytest.fail("a base was made")
    )
    wish = LoraConfig(r=4, target_modules=["q_prj"])
    with pytest.raises(ConfigConflictError, match="q_prj"):
        make_trainer(model=str(model_dir), peft_config=wish, rollout=engine if rollout == "engine" else rollout)


def test_a_target_that_the_model_does_not_have_is_named(make_trainer, base, caplog):
    make_trainer(peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_prj", "down_proj"]))
    assert "target_modules: the adapter is on no module called v_prj" in caplog.messages
    caplog.clear()
    make_trainer(existing_run="overwrite")
    make_trainer(peft_config=LoraConfig(r=4, target_modules="all-linear"), existing_run="overwrite")
    assert "target_modules" not in caplog.text


def test_messages_without_a_chat_template_are_rejected_before_an_engine_starts(make_trainer, base):
    chats = Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}]}] * 4)
    tokenizer = AutoTokenizer.from_pretrained(base.path, padding_side="left")
    tokenizer.chat_template = None
    for name in ("train_dataset", "eval_dataset"):
        with pytest.raises(ConfigConflictError, match="chat template"):
            make_trainer(**{name: chats}, processing_class=tokenizer)
    # A stream is not looked at; a rollout_func makes of messages what it likes.
    stream = Dataset.from_list([{"prompt": "1+1="}] * 4).to_iterable_dataset()
    make_trainer(train_dataset=stream, eval_dataset={"a": stream}, processing_class=tokenizer)
    make_trainer(train_dataset=chats, rollout_func=lambda *_: {}, processing_class=tokenizer, existing_run="overwrite")


def test_a_dataset_with_fewer_rows_than_a_batch_of_prompts_is_named(make_trainer, plain, config, caplog):
    """TRL's sampler gives no batch then, and the run ends as finished after no step."""
    args = config(num_generations=2, gradient_accumulation_steps=4, per_device_train_batch_size=4)
    make_trainer(args=args, train_dataset=plain.select(range(7))).train()
    assert "the dataset has 7 rows, and a batch takes 8 prompts" in caplog.text
    caplog.clear()
    make_trainer(args=args, train_dataset=plain, existing_run="overwrite").train()
    assert "a batch takes" not in caplog.text


def test_rewards_that_are_all_none_are_said_once(make_trainer, config, caplog):
    trainer = make_trainer(reward_funcs=lambda completions, **_: [None] * len(completions), args=config(max_steps=2))
    trainer.train()
    assert caplog.text.count("has a reward: nothing is learned from it") == 1


def test_a_second_training_of_one_trainer_is_said(make_trainer, caplog):
    trainer = make_trainer()
    trainer.train()
    assert "train() again" not in caplog.text
    trainer.train()
    assert "train() again" in caplog.text


def test_a_second_training_that_resumes_needs_no_warning(make_trainer, config, caplog):
    trainer = make_trainer(args=config(max_steps=2, save_strategy="steps", save_steps=1))
    trainer.train()
    trainer.train(resume_from_checkpoint=True)
    assert "train() again" not in caplog.text


def test_with_beta_a_reference_that_an_earlier_trainer_left_is_named(make_trainer, peft_model, config, tmp_path):
    model = peft_model()
    make_trainer(model=model, peft_config=None, args=config(beta=0.1))
    again = config(beta=0.1, output_dir=str(tmp_path / "again"))
    with pytest.raises(ConfigConflictError, match="delete_adapter"):
        make_trainer(model=model, peft_config=None, args=again)
    model.delete_adapter("ref")
    make_trainer(model=model, peft_config=None, args=again).train()


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["name", "prepared base", "model object", "quantization_config"])
def test_a_4_bit_base_in_another_half_precision_than_autocast_is_rejected_before_it_is_loaded(
    form, make_trainer, model_dir, config, monkeypatch
):
    """On a CPU torch's autocast joins float32 and its own dtype, and raises in the first forward pass where a third one
    meets it."""
    options = {}
    if form == "name":
        model, options = str(model_dir), {"model_init_kwargs": {"dtype": torch.float16}}
    elif form == "quantization_config":
        wish = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float16")
        model, options = str(model_dir), {"model_init_kwargs": {"quantization_config": wish}}
    else:
        model = prepare_base(model_dir, compute_dtype="float16")
        model = str(model.path) if form == "prepared base" else load_base(model)
    args = config(**options, bf16=True)
    if form in ("name", "quantization_config"):
        monkeypatch.setattr(
            "qlora_rl.train.setup.model_source.prepare_base", lambda *a, **k: pytest.fail("the base was prepared")
        )
    monkeypatch.setattr(
        "qlora_rl.train.setup.model_source.load_base", lambda *a, **k: pytest.fail("the base was loaded")
    )
    with pytest.raises(ConfigConflictError, match="bf16=True"):
        make_trainer(model=model, args=args)


@pytest.mark.parametrize(("held", "fields"), [("float32", {"bf16": True}), ("bfloat16", {"fp16": True, "bf16": False})])
def test_a_4_bit_base_in_a_dtype_that_is_joined_trains(held, fields, make_trainer, model_dir, config):
    base = prepare_base(model_dir, compute_dtype=held)
    engine = FakeEngine(load_base(base), max_model_length=64)
    trainer = make_trainer(model=base, rollout=engine, args=config(**fields))
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_4_bit_base_in_half_precision_trains_without_autocast(make_trainer, model_dir, config):
    held = FakeEngine(load_base(prepare_base(model_dir, compute_dtype="float16")), max_model_length=64)
    args = config(model_init_kwargs={"dtype": torch.float16}, bf16=False)
    trainer = make_trainer(model=str(model_dir), rollout=held, args=args)
    trainer.train()
    assert trainer.state.global_step == 1


# --- rewards --------------------------------------------------------------------------------------------------------


def as_async(function):
    async def later(*args, **kwargs):
        return function(*args, **kwargs)

    later.__name__ = function.__name__
    return later


def fails(completions, **_):
    raise KeyError("answer")


def too_few(completions, **_):
    return [1.0] * (len(completions) - 1)


def one_number(completions, **_):
    return 1.0


def words(completions, **_):
    return ["1.0"] * len(completions)


def endless(completions, **_):
    return [float("inf")] * len(completions)


def undefined(completions, **_):
    return [0.5, float("nan"), *[0.0] * (len(completions) - 2)]


def objects(completions, **_):
    return [{}] * len(completions)


BROKEN = {
    fails: "raised KeyError: 'answer'",
    too_few: "returned 3 values for 4 completions",
    one_number: "returned float instead of a list",
    words: "returned '1.0' for completion 0",
    endless: "returned inf for completion 0",
    undefined: "returned nan for completion 1",
    objects: "returned {} for completion 0",
}


@pytest.mark.parametrize("kind", [lambda f: f, as_async], ids=["sync", "async"])
@pytest.mark.parametrize("reward", BROKEN)
def test_a_broken_reward_function_is_named_with_what_it_did(reward, kind, make_trainer):
    trainer = make_trainer(reward_funcs=kind(reward))
    with pytest.raises(RewardFunctionError) as caught:
        trainer.train()
    assert f"reward function '{reward.__name__}' {BROKEN[reward]}" in str(caught.value)
    # The run says so too, and can be read.
    assert '"failed"' in (trainer.run.path / "summary.json").read_text()


def takes_no_others(completions):
    return [1.0] * len(completions)


def takes_positions(completions, /, **_):
    return [1.0] * len(completions)


def takes_a_table(completions, table, **_):
    return [1.0] * len(completions)


UNCALLABLE = {
    takes_no_others: "does not take prompts, completion_ids",
    takes_positions: "needs completions, which it would not get",
    takes_a_table: "needs table, which it would not get",
}


@pytest.mark.parametrize("reward", UNCALLABLE)
def test_a_reward_that_cannot_be_called_is_rejected_before_anything_is_loaded(reward, make_trainer):
    with pytest.raises(RewardFunctionError) as caught:
        make_trainer(model="/nowhere", reward_funcs=[reward])
    assert f"'{reward.__name__}' {UNCALLABLE[reward]}" in str(caught.value)


def test_a_reward_of_which_it_is_not_certain_is_left_to_the_call():
    def named(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer, more=None):
        return [1.0] * len(completions)

    class Scores:
        def __call__(self, completions, **_):
            return [1.0] * len(completions)

    for reward in (named, Scores(), functools.partial(takes_a_table, table=1), "a/model", torch.nn.Linear(1, 1)):
        check_signature(reward, ["prompt", "answer"])
    check_signature(takes_a_table, None)  # a rollout function may give it


@pytest.mark.parametrize(
    "values", [[True, False], [1, 2.5], (1.0, None), torch.ones(2), numpy.ones(2), [torch.tensor(1)] * 2]
)
def test_whatever_holds_numbers_is_a_reward(values):
    assert len(guard(lambda completions: values)(completions=["a", "b"])) == 2


def test_a_reward_that_takes_messages_for_text_is_told_where_the_text_is():
    def reward(completions, **columns):
        return [float(completion.strip()) for completion in completions]

    with pytest.raises(RewardFunctionError, match=r"its text is completion\[0\]\['content'\]"):
        guard(reward)(completions=[[{"role": "assistant", "content": "1"}]])
    with pytest.raises(RewardFunctionError) as caught:
        guard(reward)(completions=["one"])
    assert "messages" not in str(caught.value)


def test_a_reward_whose_column_was_removed_is_told_of_the_switch(make_trainer, config):
    def reward(completions, answer, **_):
        return [float(len(each)) for each in answer]

    def by_name(completions, **columns):
        return [float(len(each)) for each in columns["answer"]]

    for each in (reward, by_name):
        trainer = make_trainer(reward_funcs=each, args=config(remove_unused_columns=True), existing_run="overwrite")
        with pytest.raises(RewardFunctionError, match="remove_unused_columns=True"):
            trainer.train()
        with pytest.raises(RewardFunctionError, match="solution"):
            guard(each)(completions=["a"], solution=["b"], trainer_state=None)


# A template of a model without a system role, whose roles alternate: Gemma 2, Mistral.
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)


@pytest.fixture
def strict(base):
    tokenizer = AutoTokenizer.from_pretrained(base.path, padding_side="left")
    tokenizer.chat_template = STRICT
    return tokenizer


def said(*roles):
    return [{"role": role, "content": "1+1="} for role in roles]


@pytest.mark.parametrize(
    ("roles", "told"),
    [
        (("system", "user"), "row 3.*System role not supported"),
        (("user", "user"), "row 3.*roles must alternate"),
    ],
)
@pytest.mark.parametrize("kind", ["train_dataset", "eval_dataset"])
def test_messages_that_the_chat_template_does_not_take_are_rejected_before_an_engine_starts(
    kind, roles, told, make_trainer, strict, plain
):
    rows = Dataset.from_list([{"prompt": said("user")}] * 3 + [{"prompt": said(*roles)}] * 2)
    with pytest.raises(ConfigConflictError, match=told):
        make_trainer(**{kind: rows}, processing_class=strict, rollout="colocate")
    make_trainer(**{kind: rows.select(range(3))}, processing_class=strict)


# --- prompts, runs --------------------------------------------------------------------------------------------------


def test_images_inside_messages_are_rejected_when_they_are_met(make_trainer):
    content = [{"type": "image", "image": "x"}, {"type": "text", "text": "1+1="}]
    trainer = make_trainer(train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": content}]}] * 4))
    with pytest.raises(NotYetSupportedError, match="text prompts"):
        trainer.train()


def test_a_prompt_that_the_engine_cannot_hold_is_named(make_trainer, engine):
    long = Dataset.from_list([{"prompt": "1" * engine.max_model_length}] * 4)
    with pytest.raises(PromptTooLongError, match="max_model_length=64"):
        make_trainer(train_dataset=long).train()


def test_an_output_directory_that_holds_another_run_is_rejected(make_trainer, config):
    first = make_trainer()
    first.train()
    lines = (first.run.path / "metrics.jsonl").read_text()
    with pytest.raises(RunDirectoryError, match="existing_run="):
        make_trainer()
    assert (first.run.path / "metrics.jsonl").read_text() == lines
    make_trainer(existing_run="continue").train()
    assert len((first.run.path / "metrics.jsonl").read_text().splitlines()) == 2
    make_trainer(existing_run="overwrite").train()
    assert len((first.run.path / "metrics.jsonl").read_text().splitlines()) == 1
