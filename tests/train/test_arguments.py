"""Datasets, rewards, tools, rollout functions and environments of TRL: docs/trl-arguments.md, row by row."""

import functools
import json
import shutil

import pytest
import torch
from datasets import Dataset
from support import make_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from qlora_rl import SamplingSpec, attach, load_base, prepare_base
from qlora_rl.contracts import Rollout
from qlora_rl.engine.fake import FakeEngine
from qlora_rl.errors import RewardFunctionError

pytestmark = pytest.mark.filterwarnings("ignore:You are using '(rollout_func|environment_factory)'")


def first_log(trainer):
    return trainer.state.log_history[0]


# --- datasets -------------------------------------------------------------------------------------------------------


def test_plain_prompts_reach_the_reward_as_text_with_the_datasets_columns(make_trainer, plain):
    seen = {}

    def reward(prompts, completions, completion_ids, answer, **_):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answers=answer)
        return [float(i) for i in range(len(prompts))]

    make_trainer(reward_funcs=reward).train()
    rows = {row["prompt"]: row["answer"] for row in plain}
    assert [rows[p] for p in seen["prompts"]] == seen["answers"]
    assert all(isinstance(c, str) for c in seen["completions"])
    assert all(1 <= len(ids) <= 3 for ids in seen["ids"])


def test_conversational_prompts_go_through_the_chat_template(make_trainer):
    seen = []

    def reward(completions, **_):
        seen.extend(completions)
        return [float(i) for i in range(len(completions))]

    chats = Dataset.from_list([{"prompt": [{"role": "user", "content": f"1+{i}="}]} for i in range(4)])
    make_trainer(train_dataset=chats, reward_funcs=reward).train()
    assert [c[0]["role"] for c in seen] == ["assistant"] * 4


def test_an_iterable_dataset_is_streamed(make_trainer, plain):
    trainer = make_trainer(train_dataset=plain.to_iterable_dataset())
    trainer.train()
    assert trainer.state.global_step == 1


def test_evaluation_generates_with_the_policy_of_the_last_step(make_trainer, plain, engine, config):
    trainer = make_trainer(eval_dataset=plain.select(range(2)), args=config(per_device_eval_batch_size=4))
    trainer.train()
    version = engine.version
    metrics = trainer.evaluate()
    assert engine.version == version + 1  # the step after the last rollout is in it
    assert 0.0 <= metrics["eval_reward"] <= 1.0
    assert metrics["eval_qlora_rl/mismatch_kl"] < 1e-4  # the engine samples from what the trainer holds


# --- rewards --------------------------------------------------------------------------------------------------------


def half(completions, **_):
    return [0.5] * len(completions)


async def by_index(completions, **_):
    return [float(i % 2) for i in range(len(completions))]


class AsyncJudge:
    async def __call__(self, completions, scale=1.0, **_):
        return [scale * (i % 2) for i in range(len(completions))]


def test_several_rewards_are_weighted(make_trainer, config):
    trainer = make_trainer(reward_funcs=[half, by_index], args=config(reward_weights=[2.0, 4.0]))
    trainer.train()
    log = first_log(trainer)
    assert (log["rewards/half/mean"], log["rewards/by_index/mean"]) == (0.5, 0.5)
    assert log["reward"] == 2.0 * 0.5 + 4.0 * 0.5


@pytest.mark.parametrize(
    ("reward", "name", "mean"),
    [
        (by_index, "by_index", 0.5),
        (AsyncJudge(), "AsyncJudge", 0.5),
        (functools.partial(AsyncJudge(), scale=2.0), "AsyncJudge", 1.0),
    ],
)
def test_async_rewards_are_awaited_and_keep_the_name_that_trl_gives_them(reward, name, mean, make_trainer):
    trainer = make_trainer(reward_funcs=reward)
    trainer.train()
    assert first_log(trainer)[f"rewards/{name}/mean"] == mean


def test_none_leaves_a_completion_out(make_trainer):
    def some(completions, **_):
        return [None if i == 0 else float(i % 2) for i in range(len(completions))]

    trainer = make_trainer(reward_funcs=[some, half])
    trainer.train()
    assert first_log(trainer)["rewards/some/mean"] == pytest.approx(2 / 3)


@pytest.fixture(scope="module")
def reward_model(base, tmp_path_factory):
    """A random sequence classifier with one label, on disk with its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=64,
    )
    path = tmp_path_factory.mktemp("reward") / "judge"
    Qwen2ForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("form", ["object and its tokenizer", "object", "name"])
def test_a_reward_model_scores_the_completions(form, make_trainer, reward_model, config):
    texts = []

    def collect(prompts, completions, **_):
        texts.extend(p + c for p, c in zip(prompts, completions, strict=True))
        return [0.0] * len(completions)

    model = Qwen2ForSequenceClassification.from_pretrained(reward_model)
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    rewards = [str(reward_model) if form == "name" else model, collect]
    classes = [tokenizer if form == "object and its tokenizer" else None, None]
    given = (list(rewards), list(classes))
    trainer = make_trainer(
        reward_funcs=rewards, reward_processing_classes=classes, args=config(reward_weights=[1.0, 0.0])
    )
    trainer.train()
    assert (rewards, classes) == given  # TRL fills such lists in; the caller's are left alone
    # Each alone, without padding.
    scores = [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
    # The trainer runs it under bf16 autocast: 8 bits of mantissa.
    assert first_log(trainer)["rewards/judge/mean"] == pytest.approx(sum(scores) / len(scores), rel=0.05, abs=0.01)


@pytest.mark.parametrize(
    ("kind", "form"), [("grpo", "name"), ("rloo", "object"), ("online_dpo", "name"), ("attached", "object")]
)
def test_a_reward_model_with_softcapped_attention_scores_with_its_bound(
    kind, form, make_trainer, make_online, config, plain, lora, base, engine, tmp_path
):
    """TRL loads it with SDPA, which leaves the bound out."""
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_labels": 1,
             "pad_token_id": tokenizer.pad_token_id, "attn_logit_softcapping": 2.0}  # fmt: skip
    torch.manual_seed(0)
    judge = Gemma2ForSequenceClassification(Gemma2Config(**shape))
    for parameter in judge.parameters():
        parameter.data.normal_(std=0.4 if parameter.ndim > 1 else 0.0)
    judge.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    reward = str(tmp_path / "judge") if form == "name" else Gemma2ForSequenceClassification.from_pretrained(
        tmp_path / "judge"
    )  # fmt: skip
    if kind == "grpo":
        trainer = make_trainer(reward_funcs=reward)
    elif kind == "attached":
        model = AutoModelForCausalLM.from_pretrained(base.path)
        trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config(), train_dataset=plain, peft_config=lora)
        attach(trainer, rollout=engine).close()
    else:
        trainer = make_online(kind, reward_funcs=reward)
    (found,), asked = trainer.reward_funcs, tokenizer("12+12=24", return_tensors="pt")
    score = found.eval()(**asked).logits.item()
    found.set_attn_implementation("eager")
    assert score == pytest.approx(found(**asked).logits.item(), abs=0.02)  # bf16


# --- rollout_func, tools, environments ------------------------------------------------------------------------------


def test_a_rollout_func_draws_from_the_current_policy_and_hands_fields_to_the_reward(make_trainer, engine, config):
    versions, marks = [], []

    def roll(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        rollout = trainer.engine.generate(ids, SamplingSpec(max_tokens=3, seed=0))
        versions.append(rollout.version)
        return {
            "prompt_ids": ids,
            "completion_ids": rollout.completion_ids,
            "logprobs": rollout.logprobs,
            "mark": [f"m{i}" for i in range(len(ids))],
        }

    def reward(completions, mark, **_):
        marks.extend(mark)
        return [float(i % 2) for i in range(len(completions))]

    start = engine.version
    make_trainer(rollout_func=roll, reward_funcs=reward, args=config(max_steps=2)).train()
    assert versions == [start + 1, start + 2]
    assert marks == ["m0", "m1", "m2", "m3"] * 2


class Scripted(FakeEngine):
    """Says `lines`, one per call of `generate`, whatever it is asked; the last one again and again."""

    lines = ()

    def generate(self, prompts, sampling=None, **fields):
        assert all(len(p) < self.max_model_length for p in prompts)
        self.prompts = [*getattr(self, "prompts", []), [bytes(p).decode() for p in prompts]]
        line = self.lines[min(len(self.prompts), len(self.lines)) - 1]
        ids = [list(line.encode())[: sampling.max_tokens] for _ in prompts]
        return Rollout(ids, [[-1.0] * len(i) for i in ids], self.version, 0.001)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    """A base that holds conversations of 4096 characters, and its tokenizer with Qwen3's template for tools."""
    source = make_model(tmp_path_factory.mktemp("models") / "talking")
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (source / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = qwen3_chat_template
    tokenizer.save_pretrained(source)
    base = prepare_base(source)
    shutil.rmtree(source)
    return base


@pytest.fixture
def talk(talking, make_trainer, config):
    """Train one step with an engine that says `lines`."""

    def run(*lines, limit=4096, fields=None, **arguments):
        engine = Scripted(load_base(talking), max_model_length=limit)
        engine.lines = lines
        chat = Dataset.from_list([{"prompt": [{"role": "user", "content": "3+4?"}]}] * 4)
        args = config(max_completion_length=400, vllm_importance_sampling_correction=False, **fields or {})
        trainer = make_trainer(**{"model": talking, "rollout": engine, "train_dataset": chat, "args": args} | arguments)
        trainer.train()
        return trainer, engine

    return run


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def add_later(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@pytest.mark.parametrize("tool", [add, add_later])
def test_tools_are_called_and_their_answers_go_into_the_next_turn(tool, talk):
    final = []

    def reward(completions, **_):
        final.extend(c[-1]["content"] for c in completions)
        return [float(i % 2) for i in range(len(completions))]

    trainer, engine = talk(call(tool.__name__, a=3, b=4), "7<|im_end|>", tools=[tool], reward_funcs=reward)
    assert first_log(trainer)["tools/call_frequency"] == 1.0
    assert first_log(trainer)["tools/failure_frequency"] == 0.0
    assert all("<tool_response>\n7\n</tool_response>" in prompt for prompt in engine.prompts[1])
    assert final == ["7"] * 4


def test_the_tool_loop_stops_at_the_engines_length_instead_of_failing(talk, tmp_path):
    turn = call("add", a=3, b=4)
    _, engine = talk(turn, tools=[add], fields={"max_tool_calling_iterations": 1})
    asked, answered = len(engine.prompts[0][0]), len(engine.prompts[1][0])
    assert answered > asked + len(turn)
    _, short = talk(turn, tools=[add], limit=answered - 1, fields={"output_dir": str(tmp_path / "short")})
    assert len(short.prompts) == 1  # the second turn would not have fitted


class Counter:
    """An environment with a reward of its own."""

    def reset(self, **_):
        self.total = 0
        return " Go."

    def increment(self, by: int) -> str:
        """
        Adds to the counter.

        Args:
            by: How much.
        """
        self.total += by
        return f"now {self.total}"

    def get_reward(self):
        return float(self.total)


@pytest.mark.parametrize("factory", [Counter, {"counting": Counter}])
def test_an_environment_is_reset_stepped_and_asked_for_its_reward(factory, talk):
    rows = [{"prompt": [{"role": "user", "content": "3+4?"}], "environment": "counting"}] * 4
    trainer, engine = talk(
        call("increment", by=3),
        "done<|im_end|>",
        environment_factory=factory,
        reward_funcs=None,
        train_dataset=Dataset.from_list(rows),
    )
    assert all("3+4? Go." in prompt for prompt in engine.prompts[0])
    assert all("now 3" in prompt for prompt in engine.prompts[1])
    assert first_log(trainer)["rewards/Counter/mean"] == 3.0


class Broken(Counter):
    def get_reward(self):
        raise ZeroDivisionError("no total")


def test_an_environment_whose_reward_fails_is_named(talk):
    with pytest.raises(RewardFunctionError, match="'Broken' raised ZeroDivisionError"):
        talk("done<|im_end|>", environment_factory=Broken, reward_funcs=None)
