"""Where a completion ends: at the trainer's EOS as at the engine's own, and TRL hears from the engine which ones were
cut off."""

import pytest
import torch
from online_kinds import KINDS, by_place
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from qlora_rl import FakeEngine, QLoRAAsyncGRPOTrainer, SamplingSpec, attach, load_base
from qlora_rl.inference.trained import open_trained
from qlora_rl.train.metrics.measure import MeasuredSteps

TOKENS = 8
COLD = 0.1
COLDEST = SamplingSpec(TOKENS, temperature=0.0)


@pytest.fixture(scope="module")
def sampled(engine, plain):
    """What the base says after the prompts of the dataset, nearly as at `COLD`: tokens in the middle of it make good
    ends."""
    engine.drop_adapter()
    return engine.generate([list(prompt.encode()) for prompt in plain["prompt"]], COLDEST).completion_ids


def common(completions):
    """The token that stands in most of them before the last place."""
    counts = {}
    for token in (token for ids in completions for token in set(ids[:-1])):
        counts[token] = counts.get(token, 0) + 1
    return max(counts, key=counts.get)


def with_end(base, token):
    """The base's tokenizer with this token as its end."""
    tokenizer = AutoTokenizer.from_pretrained(base.path, padding_side="left")
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(token)
    return tokenizer


@pytest.fixture
def heard(engine, monkeypatch):
    """All completions that the engine gives, and their ends."""
    found, real = [], FakeEngine.generate

    def generate(self, *args, **kwargs):
        rollout = real(self, *args, **kwargs)
        found.append(rollout)
        return rollout

    monkeypatch.setattr(FakeEngine, "generate", generate)
    return found


def test_a_fake_engine_stops_at_each_of_several_ends(base, plain, sampled):
    end = common(sampled)
    model = load_base(base)
    model.config.eos_token_id = [1, end]
    with FakeEngine(model, max_model_length=64) as engine:
        rollout = engine.generate([list(prompt.encode()) for prompt in plain["prompt"]], COLDEST)
    expected = [ids[: ids.index(end) + 1] if end in ids else ids for ids in sampled]
    assert rollout.completion_ids == expected != sampled
    assert rollout.has_ended == [ids[-1] in (1, end) for ids in expected]


def test_a_fake_engine_bars_the_ends_before_min_tokens_as_vllm_does(engine, plain, sampled):
    engine.drop_adapter()
    prompts, ends = [list(prompt.encode()) for prompt in plain["prompt"]], {common(sampled)}
    asked = {"max_tokens": TOKENS, "seed": 3, "extra": {"stop_token_ids": [*ends], "min_tokens": 4}}
    rollout = engine.generate(prompts, **asked)
    assert min(map(len, rollout.completion_ids)) >= 4
    ends |= {engine.eos_token_id}
    with torch.no_grad():
        for prompt, ids, logprobs in zip(prompts, rollout.completion_ids, rollout.logprobs, strict=True):
            logits = engine.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
            logits[:4, [*ends]] = -torch.inf
            expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-5, rtol=0)  # another length of matmul


def test_min_tokens_is_known_to_set_trainer_and_engine_apart(make, heard):
    """A quarter of the vocabulary ends: unsaid, the run would be stopped as one whose engine computes otherwise."""
    ends, least = list(range(48, 80)), {"min_tokens": 6}
    trainer = make("grpo", {"temperature": 1.0, "max_steps": 3, "generation_kwargs": {"stop_token_ids": ends} | least})
    trainer.train()
    assert trainer.alarm.expected == ("min_tokens=6",)
    assert all(not {*ends} & {*ids[:6]} for rollout in heard for ids in rollout.completion_ids)
    assert {found.cause for found in trainer.alarm.diagnoses.values()} <= {"unknown"}
    assert trainer.fidelity.history[0].scaled_diff > 0.01


@pytest.fixture
def make(make_trainer, make_online, config, base, engine, plain, lora):
    """A trainer of each kind; `fields` of its config, completions of up to `TOKENS`."""
    made = []

    def build(kind, fields=None, **arguments):
        length = "max_new_tokens" if kind == "online_dpo" else "max_completion_length"
        fields = {length: TOKENS, "temperature": COLD} | (fields or {})
        if kind == "grpo":
            return make_trainer(args=config(**fields), **arguments)
        if kind in KINDS:
            return make_online(kind, fields, **arguments)
        usual = {"model": base, "reward_funcs": by_place, "train_dataset": plain, "peft_config": lora}
        if kind == "async":
            made.append(QLoRAAsyncGRPOTrainer(args=config(**fields), rollout=engine, **usual | arguments))
            return made[-1]
        arguments = {name: value for name, value in usual.items() if name != "model"} | arguments
        trainer = GRPOTrainer(model=AutoModelForCausalLM.from_pretrained(base.path), args=config(**fields), **arguments)
        made.append(attach(trainer, rollout=engine))
        return trainer

    yield build
    for each in made:
        each.close()


@pytest.mark.parametrize("kind", ["grpo", "rloo", "online_dpo", "async"])
def test_rollouts_end_at_the_eos_of_the_processing_class(kind, make, base, sampled, heard):
    end = common(sampled)
    make(kind, processing_class=with_end(base, end)).train()
    completions = [ids for rollout in heard for ids in rollout.completion_ids]
    assert any(ids[-1] == end for ids in completions)
    assert not any(end in ids[:-1] for ids in completions)


@pytest.fixture
def batches(monkeypatch):
    """What TRL has made of each rollout."""
    found, real = [], MeasuredSteps._generate_and_score_completions

    def generate(self, inputs):
        found.append(real(self, inputs))
        return found[-1]

    monkeypatch.setattr(MeasuredSteps, "_generate_and_score_completions", generate)
    return found


@pytest.mark.parametrize("kind", ["grpo", "rloo", "async", "attached"])
def test_completions_that_the_engine_has_ended_are_not_masked_as_truncated(kind, make, sampled, heard, batches):
    """TRL looks for the EOS, which a completion does not have that a stop token or text ends."""
    fields = {"mask_truncated_completions": True, "generation_kwargs": {"stop_token_ids": [common(sampled)]}}
    trainer = make(kind, fields)
    trainer.train()
    has_ended = torch.tensor(heard[0].has_ended)
    assert has_ended.any()
    assert not has_ended.all()
    lengths = torch.tensor([len(ids) for ids in heard[0].completion_ids])
    assert batches[0]["completion_mask"].sum(1).tolist() == (lengths * has_ended).tolist()
    if "num_items_in_batch" in batches[0]:
        assert batches[0]["num_items_in_batch"] == (lengths * has_ended).sum()
    step = trainer.state.log_history[0]
    assert step["completions/clipped_ratio"] == 1 - has_ended.float().mean()
    ended = lengths[has_ended].float()
    for name, value in {"mean": ended.mean(), "min": ended.min(), "max": ended.max()}.items():
        assert step[f"completions/{name}_terminated_length"] == pytest.approx(value.item())
    assert step["grad_norm"] > 0
    assert trainer.mask_truncated_completions


def test_what_a_stop_token_has_ended_is_not_missing_its_eos(make, sampled, heard):
    """Online DPO takes `missing_eos_penalty` off what reached the limit, and the loss sees what was sampled alone."""
    scored = []

    def reward(completions, completion_ids, **_):
        scored.extend(completion_ids)
        return [0.0] * len(completions)

    fields = {"missing_eos_penalty": 4.0, "generation_kwargs": {"stop_token_ids": [common(sampled)]}, "max_steps": 1}
    trainer = make("online_dpo", fields, reward_funcs=reward)
    trainer.train()
    ended = torch.tensor(heard[0].has_ended)
    assert ended.any()
    assert not ended.all()
    step = trainer.state.log_history[0]
    assert step["val/contain_eos_token"] == ended.float().mean()
    assert step["objective/scores"] == -4.0 * (1 - ended.float().mean())
    assert step["qlora_rl/mismatch_kl"] < 1e-3
    lengths = [len(ids) for ids in heard[0].completion_ids]
    assert trainer._record.last["completion_length"] == sum(lengths) / len(lengths)


def test_a_rollout_func_is_masked_by_trls_own_rule(make, heard, batches):
    """Nobody says how its completions ended."""

    def roll(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": [[65, 1], [65, 66]] * 2, "logprobs": [[-1.0, -1.0]] * 4}

    make("grpo", {"mask_truncated_completions": True}, rollout_func=roll).train()
    assert batches[0]["completion_mask"].tolist() == [[1, 1], [0, 0]] * 2


def test_a_run_records_its_ends(make, base, sampled):
    end = common(sampled)
    stop = {"stop_token_ids": [end + 1, end]}
    trainer = make("grpo", {"generation_kwargs": stop}, processing_class=with_end(base, end))
    trainer.train()
    assert open_trained(trainer.args.output_dir).ends == [1, end, end + 1]
