"""What is rejected, each with what was wrong and the way out: docs/trl-arguments.md."""

import functools
import re

import numpy
import peft
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
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


def test_a_rank_above_the_engines_is_rejected_with_the_rank_to_start_it_with(make_trainer):
    with pytest.raises(ConfigConflictError, match="max_lora_rank=100"):
        make_trainer(peft_config=LoraConfig(r=100, target_modules=["q_proj"]))


@pytest.mark.parametrize("rollout", ["colocate", "engine"])
def test_an_adapter_that_finds_no_module_is_rejected_before_a_base_is_made(
    rollout, make_trainer, engine, model_dir, monkeypatch
):
    monkeypatch.setattr(
        "qlora_rl.train.setup.model_source.prepare_base", lambda *_, **__: pytest.fail("a base was made")
    )
    wish = LoraConfig(r=4, target_modules=["q_prj"])
    with pytest.raises(ConfigConflictError, match=r"Target modules .*q_prj.* not found"):
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
        with pytest.raises(ConfigConflictError, match="the base has no chat template"):
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


def test_without_any_adapter_there_is_nothing_to_train(make_trainer, base):
    for model in (base, load_base(base)):
        with pytest.raises(ConfigConflictError, match="peft_config=LoraConfig"):
            make_trainer(model=model, peft_config=None)


def test_a_peft_model_and_a_peft_config_are_two_adapters(make_trainer, adapted, lora):
    with pytest.raises(ConfigConflictError, match="Leave peft_config out"):
        make_trainer(model=adapted, peft_config=lora)


def test_a_peft_model_that_was_loaded_frozen_is_rejected(make_trainer, peft_model, base, tmp_path):
    peft_model().save_pretrained(tmp_path / "adapter")
    with pytest.raises(AdapterRejectedError, match="is_trainable=True"):
        make_trainer(model=PeftModel.from_pretrained(load_base(base), tmp_path / "adapter"), peft_config=None)


def test_with_beta_a_peft_models_adapter_must_be_the_default_one(make_trainer, peft_model, config):
    with pytest.raises(ConfigConflictError, match=r"'mine'.*'default'"):
        make_trainer(model=peft_model(adapter_name="mine"), peft_config=None, args=config(beta=0.1))


def test_with_beta_a_reference_that_an_earlier_trainer_left_is_named(make_trainer, peft_model, config, tmp_path):
    model = peft_model()
    make_trainer(model=model, peft_config=None, args=config(beta=0.1))
    again = config(beta=0.1, output_dir=str(tmp_path / "again"))
    with pytest.raises(ConfigConflictError, match="delete_adapter"):
        make_trainer(model=model, peft_config=None, args=again)
    model.delete_adapter("ref")
    make_trainer(model=model, peft_config=None, args=again).train()


@pytest.mark.parametrize(
    "value", [{"adapter_dtype": "float16"}, {"sync": "merge"}, {"existing_run": "maybe"}, {"share_base": "maybe"}]
)
def test_an_unknown_word_is_rejected_with_the_known_ones(value, make_trainer):
    (name,) = value
    with pytest.raises(ConfigConflictError, match=rf"{name}='\w+' is not one of"):
        make_trainer(**value)


def test_a_wrong_word_is_found_before_anything_is_loaded(make_trainer, tmp_path):
    with pytest.raises(ConfigConflictError, match="sync='merge'"):
        make_trainer(model=str(tmp_path / "absent"), sync="merge")


def test_full_weights_for_an_engine_that_cannot_take_them_are_rejected_with_the_way_out(make_trainer):
    with pytest.raises(ConfigConflictError, match="bake_base"):
        make_trainer(sync="weights")


# --- models ---------------------------------------------------------------------------------------------------------

IN_8_BIT = BitsAndBytesConfig(load_in_8bit=True)
IN_4_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def test_eight_bits_are_rejected(make_trainer, model_dir):
    with pytest.raises(UnsupportedQuantError, match="use quant='nf4'"):
        make_trainer(model=str(model_dir), quantization_config=IN_8_BIT)


def test_four_bits_that_compute_in_float32_are_rejected_before_anything_is_quantised(make_trainer, config):
    with pytest.raises(ConfigConflictError, match=r"bnb_4bit_compute_dtype=torch\.bfloat16"):
        make_trainer(model="/nowhere", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    with pytest.raises(ConfigConflictError, match="Set dtype='bfloat16'"):
        make_trainer(model="/nowhere", args=config(model_init_kwargs={"dtype": "float32"}))


def test_a_quantization_config_for_what_is_quantised_already_is_rejected(make_trainer, base, model_dir, config):
    for model in (base, load_base(base)):
        with pytest.raises(ConfigConflictError, match="quantised already"):
            make_trainer(model=model, quantization_config=IN_4_BIT)
    twice = config(model_init_kwargs={"quantization_config": IN_4_BIT})
    with pytest.raises(ConfigConflictError, match="given twice"):
        make_trainer(model=str(model_dir), quantization_config=IN_4_BIT, args=twice)


def test_a_quantization_config_that_contradicts_a_quantised_checkpoint_is_rejected(make_trainer, model_dir, tmp_path):
    AutoModelForCausalLM.from_pretrained(model_dir, quantization_config=IN_4_BIT).save_pretrained(tmp_path / "nf4")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path / "nf4")
    fp4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.bfloat16)
    with pytest.raises(ConfigConflictError, match=r"fp4.*is nf4-64 already"):
        make_trainer(model=str(tmp_path / "nf4"), quantization_config=fp4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"low_cpu_mem_usage": True}, "low_cpu_mem_usage"),
        ({"device_map": "balanced"}, "device_map='balanced'"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"revision": "v2"}, "revision='v2'"),
    ],
)
def test_model_init_kwargs_that_a_base_does_not_take_are_rejected_by_name(options, named, make_trainer, config):
    with pytest.raises(ConfigConflictError, match=named):
        make_trainer(args=config(model_init_kwargs=options))


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
    with pytest.raises(ConfigConflictError, match=r"bf16=True multiplies in bfloat16 .* float16"):
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


def test_model_init_kwargs_beside_a_model_object_are_rejected(make_trainer, base, config):
    with pytest.raises(ConfigConflictError, match="loaded already"):
        make_trainer(model=load_base(base), args=config(model_init_kwargs={"attn_implementation": "eager"}))


def test_a_model_that_is_nowhere_is_rejected(make_trainer):
    for name in ("/nowhere/at/all", "nobody/nothing"):
        with pytest.raises(QloraRLError, match=name):
            make_trainer(model=name)


@pytest.mark.parametrize("token", ["<think>", "[PAD]"])
def test_a_tokenizer_with_tokens_that_the_base_has_no_row_for_is_rejected_by_name(make_trainer, base, token):
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    tokenizer.add_special_tokens({"pad_token": token} if token == "[PAD]" else {"additional_special_tokens": [token]})
    with pytest.raises(ConfigConflictError, match=f"reading processing_class: the embedding has .*{re.escape(token)}"):
        make_trainer(processing_class=tokenizer)


def test_a_model_object_without_any_tokenizer_is_rejected(make_trainer, model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    model.config._name_or_path = ""
    with pytest.raises(ConfigConflictError, match="processing_class"):
        make_trainer(model=model)


def test_an_optimizer_for_other_parameters_is_rejected(make_trainer, base):
    model = load_base(base)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ConfigConflictError, match="none of the adapter's parameters"):
        make_trainer(model=model, optimizers=(optimizer, None))


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
    assert f"reading the reward functions: '{reward.__name__}' {UNCALLABLE[reward]}" in str(caught.value)
    assert "It gets prompts, completions, completion_ids and the dataset's columns as keyword lists" in str(
        caught.value
    )


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
        with pytest.raises(RewardFunctionError, match="It got no column: with remove_unused_columns=True"):
            trainer.train()
        with pytest.raises(RewardFunctionError, match="The columns that it got: solution"):
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
        (("system", "user"), r"row 3, whose roles are system, user: .*System role not supported.*prompt_template"),
        (("user", "user"), r"row 3, whose roles are user, user: .*roles must alternate"),
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


def test_prompts_that_are_lists_of_texts_are_rejected(make_trainer, base):
    rows = Dataset.from_list([{"prompt": ["1+1=", "2+2="]}] * 4)
    told = r"prompt of row 0 is a list, but not of messages: \['1\+1=', '2\+2='\]\. Pass a text"
    tokenizer = AutoTokenizer.from_pretrained(base.path, padding_side="left")
    for template in (tokenizer.chat_template, None):
        tokenizer.chat_template = template
        with pytest.raises(ConfigConflictError, match=told):
            make_trainer(train_dataset=rows, processing_class=tokenizer)


def test_tokens_that_somebody_has_added_are_rejected(make_trainer, base):
    tokenizer = AutoTokenizer.from_pretrained(base.path, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "<|mine|>"})
    with pytest.raises(
        ConfigConflictError, match=r"reading processing_class: the embedding has 128 rows.*'<\|mine\|>' \(128\)"
    ):
        make_trainer(processing_class=tokenizer)


def test_without_any_reward_there_is_nothing_to_learn(make_trainer):
    with pytest.raises(ValueError, match="No reward source"):
        make_trainer(reward_funcs=None)


def test_a_missing_weight_is_rejected(make_trainer, config):
    with pytest.raises(ValueError, match="reward weights"):
        make_trainer(args=config(reward_weights=[1.0, 2.0]))


# --- prompts, runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset"])
def test_a_dataset_with_images_is_rejected_before_anything_is_loaded(argument, make_trainer):
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}], "image": "x"}] * 4)
    with pytest.raises(NotYetSupportedError, match="column image holds images"):
        make_trainer(model="/nowhere", **{argument: {"a": rows} if argument == "eval_dataset" else rows})


def test_a_list_is_no_dataset(make_trainer):
    with pytest.raises(TypeError, match="must be a `Dataset`"):
        make_trainer(train_dataset=[{"prompt": "1+1="}])


def test_images_inside_messages_are_rejected_when_they_are_met(make_trainer):
    content = [{"type": "image", "image": "x"}, {"type": "text", "text": "1+1="}]
    trainer = make_trainer(train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": content}]}] * 4))
    with pytest.raises(NotYetSupportedError, match="or text prompts"):
        trainer.train()


def test_a_prompt_that_the_engine_cannot_hold_is_named(make_trainer, engine):
    long = Dataset.from_list([{"prompt": "1" * engine.max_model_length}] * 4)
    with pytest.raises(PromptTooLongError, match="max_model_length=64"):
        make_trainer(train_dataset=long).train()


def test_tools_need_a_template_that_can_call_them(make_trainer):
    def tool(x: int) -> int:
        """Double. Args: x: a number."""
        return 2 * x

    with pytest.raises(ValueError, match="does not support tool calling"):
        make_trainer(tools=[tool])


def test_an_output_directory_that_holds_another_run_is_rejected(make_trainer, config):
    first = make_trainer()
    first.train()
    lines = (first.run.path / "metrics.jsonl").read_text()
    with pytest.raises(RunDirectoryError, match="existing_run='overwrite', 'continue' or 'resume'"):
        make_trainer()
    assert (first.run.path / "metrics.jsonl").read_text() == lines
    make_trainer(existing_run="continue").train()
    assert len((first.run.path / "metrics.jsonl").read_text().splitlines()) == 2
    make_trainer(existing_run="overwrite").train()
    assert len((first.run.path / "metrics.jsonl").read_text().splitlines()) == 1


def test_an_output_directory_that_is_a_file_is_rejected(make_trainer, config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="is a file"):
        make_trainer(args=config(output_dir=str(tmp_path / "file")))
