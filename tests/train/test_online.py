"""RLOO, online DPO and `attach` with FakeEngine: what they share with GRPO, and what is theirs alone."""

import json
import math
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from online_kinds import KINDS, TINY, by_place
from test_models import NF4, adapter, assert_same, bytes_of_the_base
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import qlora_rl
from qlora_rl import (
    BaseMismatchError,
    ConfigConflictError,
    EngineClosedError,
    NotYetSupportedError,
    PromptTooLongError,
    attach,
    load_base,
    prepare_base,
)
from qlora_rl.contracts import LEAST_TEMPERATURE, SamplingSpec
from qlora_rl.engine.fake import FakeEngine
from qlora_rl.inference.prompts import encode

ROWS = ("completion_ids", "logprobs")  # of a rollout, by completion


def lines(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run.path / name).read_text().splitlines()]


@pytest.mark.parametrize("kind", [*KINDS, "GRPO", "AsyncGRPO"])
def test_a_closed_trainer_says_so_and_leaves_its_run_as_it_is(kind, make_online, base, engine, plain, lora, config):
    if kind in KINDS:
        trainer = make_online(kind)
    else:
        make = getattr(qlora_rl, f"QLoRA{kind}Trainer")
        trainer = make(base, by_place, config(), plain, peft_config=lora, rollout=engine)
    with trainer:
        trainer.args.save_strategy, trainer.args.max_steps = "steps", 2
        trainer.args.save_steps = 1
        trainer.train()
    resume = lambda: trainer.train(resume_from_checkpoint=str(trainer.run.path / "checkpoint-1"))  # noqa: E731
    before = {file: file.read_bytes() for file in trainer.run.path.rglob("*") if file.is_file()}
    for call in (trainer.train, trainer.sync, resume):
        with pytest.raises(EngineClosedError):
            call()
    assert {file: file.read_bytes() for file in trainer.run.path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_whose_callback_raises_is_written_down(kind, make_online):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            raise ZeroDivisionError("planted")

    trainer = make_online(kind, {"max_steps": 2}, callbacks=[Break()])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert [line["step"] for line in lines(trainer.run)] == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_greedy_temperature_is_rejected(kind, make_online):
    with pytest.raises(ConfigConflictError, match="temperature=0"):
        make_online(kind, {"temperature": 0.0})
    with pytest.raises(ConfigConflictError, match="generation_kwargs"):
        make_online(kind, {"generation_kwargs": {"temperature": 0.0}})


@pytest.mark.parametrize("kind", KINDS)
def test_a_temperature_that_vllm_raises_is_rejected(kind, make_online):
    with pytest.raises(ConfigConflictError, match=r"temperature=0\.005 < 0\.01: .*Set it to 0\.01 or more"):
        make_online(kind, {"temperature": 0.005})
    make_online(kind, {"temperature": LEAST_TEMPERATURE})


@pytest.mark.parametrize("asked", [0.005, LEAST_TEMPERATURE, 0.02])
def test_the_least_temperature_is_the_one_that_vllm_raises_others_to(asked):
    pytest.importorskip("vllm")
    from qlora_rl.engine.sampling import sampling_params

    (params,) = sampling_params(SamplingSpec(temperature=asked), [0])
    assert params.temperature == max(asked, LEAST_TEMPERATURE)


# --- both -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_adapter_moves_and_every_step_is_pushed_and_measured(kind, make_online, engine):
    trainer = make_online(kind, {"max_steps": 3})
    base_before, before, version = bytes_of_the_base(trainer.model), adapter(trainer.model), engine.version
    trainer.train()
    assert_same(base_before, bytes_of_the_base(trainer.model))
    assert any(not torch.equal(p, before[n]) for n, p in adapter(trainer.model).items() if "lora_B" in n)
    assert {p.dtype for p in adapter(trainer.model).values()} == {torch.float32}
    assert engine.version == version + 3
    steps = lines(trainer.run)
    assert [s["step"] for s in steps] == [1, 2, 3]
    # Both compute in bf16 here, by the same kernels: what an engine one version behind would differ by is far above.
    assert all(0 <= s["mismatch_kl"] < 1e-4 and s["base_verified"] == 1 for s in steps)
    assert all(s["reward"] == 0.5 and s["rollout_tokens"] > 0 and s["sync_bytes"] > 0 for s in steps)
    assert len(lines(trainer.run, "sync.jsonl")) == 3
    assert trainer.state.log_history[0]["qlora_rl/mismatch_kl"] < 1e-4
    described = json.loads((trainer.run.path / "config.json").read_text())
    assert described["command"] == type(trainer).__name__
    assert described["plan"]["strategy"] == "lora_adapter"
    assert described[kind]["learning_rate"] == 1e-2
    assert json.loads((trainer.run.path / "summary.json").read_text()) == {"status": "finished", "steps": 3}
    assert (trainer.run.path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_sync_sends_the_last_step_and_says_what_it_sent(kind, make_online, engine):
    trainer = make_online(kind, {"max_steps": 1})
    trainer.train()
    version, serving = engine.version, engine.held_adapter(4)
    report = trainer.sync()
    assert (report.version, engine.version) == (version + 1, version + 1)
    assert report.bytes > 0
    assert engine.held_adapter(4) != serving
    assert trainer._last_loaded_step == 1
    assert trainer.bridge.state() == {"version": version + 1, "pushed_in_step": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_fields_reach_every_request(kind, make_online, colocate):
    fields = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1, "use_vllm": True}
    trainer = make_online(kind, {**fields, "generation_kwargs": {"stop": ["x"]}, "max_steps": 1}, rollout="colocate")
    trainer.train()
    (engine,) = colocate
    spec = engine.specs[0]
    assert (spec.max_tokens, spec.temperature, spec.top_p, spec.top_k, spec.min_p) == (3, 0.7, 0.9, 5, 0.05)
    assert (spec.repetition_penalty, dict(spec.extra)) == (1.1, {"stop": ["x"]})
    # 4 rows a step: of RLOO each is a completion, of online DPO two.
    assert engine.options["max_num_seqs"] == {"rloo": 4, "online_dpo": 8}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_several_weighted_rewards_with_columns_and_conversations(kind, make_online):
    seen = []

    def half(completions, answer, **_):
        seen.extend(zip(completions, answer, strict=True))
        return [0.5] * len(completions)

    chats = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"1+{i}="}], "answer": str(i)} for i in range(4)]
    )
    trainer = make_online(
        kind,
        {"max_steps": 1, "reward_weights": [2.0, 4.0]},
        reward_funcs=[half, by_place],
        train_dataset=chats,
    )
    trainer.train()
    assert lines(trainer.run)[0]["reward"] == pytest.approx(3.0)
    assert {completion[0]["role"] for completion, _ in seen} == {"assistant"}
    assert {answer for _, answer in seen} <= {"0", "1", "2", "3"}


# --- RLOO -----------------------------------------------------------------------------------------------------------


async def by_index(completions, **_):
    return [float(i % 2) for i in range(len(completions))]


def test_rloo_awaits_asynchronous_rewards_and_evaluates(make_online, plain):
    trainer = make_online("rloo", reward_funcs=by_index, eval_dataset=plain.select(range(2)))
    trainer.train()
    assert trainer.evaluate()["eval_reward"] >= 0


# --- online DPO -----------------------------------------------------------------------------------------------------


def test_the_pair_is_two_completions_of_each_prompt(make_online):
    rows = []

    def reward(prompts, completions, **_):
        rows.append(list(prompts))
        return by_place(completions)

    make_online("online_dpo", {"max_steps": 1}, reward_funcs=reward).train()
    assert rows[0][:4] == rows[0][4:]
    assert len(set(rows[0][:4])) == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"gradient_checkpointing": True},
        {"gradient_accumulation_steps": 2},
        {"temperature": 1.0, "disable_dropout": False},
    ],
    ids=str,
)
def test_online_dpo_trains_with_checkpointing_accumulation_and_dropout(fields, make_online):
    trainer = make_online("online_dpo", fields)
    before = bytes_of_the_base(trainer.model)
    trainer.train()
    assert trainer.state.global_step == 2
    assert_same(before, bytes_of_the_base(trainer.model))


@pytest.fixture
def gradients(make_online, exact, monkeypatch, plain, tmp_path):
    """Of each optimizer step of online DPO: the gradient and the logged loss. What a prompt is given is the same in any
    batch."""
    base, engine = exact
    real = engine.generate

    def by_prompt(prompts, spec):
        parts = [real([prompt], replace(spec, seed=i % 2, first_place=0)) for i, prompt in enumerate(prompts)]
        return replace(parts[0], **{name: [getattr(part, name)[0] for part in parts] for name in (*ROWS, "has_ended")})

    monkeypatch.setattr(engine, "generate", by_prompt)

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            kept.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]).double())

    kept = []

    def compute(rows=4, **fields):
        kept.clear()
        own = {"max_steps": 1, "learning_rate": 0.0, "max_grad_norm": 0.0, "bf16": False}
        fields = own | {"output_dir": str(tmp_path / "gradients")} | fields
        arguments = {"reward_funcs": fields.pop("reward_funcs", by_content), "existing_run": "overwrite"}
        plan = {"model": base, "rollout": engine, "train_dataset": plain.select(range(rows)), "callbacks": [Keep()]}
        with make_online("online_dpo", fields, **arguments, **plan) as trainer:
            trainer.train()
        return list(kept), [log["loss"] for log in trainer.state.log_history if "loss" in log]

    return compute


def by_content(completion_ids, **_):
    """A reward that is the same in any batch."""
    return [float(sum(ids) % 97) for ids in completion_ids]


def test_an_accumulated_batch_has_the_gradient_and_loss_of_one_batch(gradients):
    """Also at the end of an epoch, with one part of two. Of float32 sums in another order: within 1e-5."""
    whole, of_whole = gradients(3, max_steps=2, per_device_train_batch_size=2)
    parts, of_parts = gradients(3, max_steps=2, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    assert len(whole) == len(parts) == 2
    for one, two in zip(whole, parts, strict=True):
        assert (one - two).norm() < 1e-5 * one.norm()
    assert of_parts == pytest.approx(of_whole, rel=1e-4)


@pytest.mark.parametrize("is_chat", [False, True])
def test_text_begins_with_the_special_tokens_of_the_tokenizer_and_a_chat_with_those_of_its_template(
    is_chat, make_online, base, heard_prompts
):
    tokenizer = AutoTokenizer.from_pretrained(base.path, padding_side="left")
    start = tokenizer.convert_tokens_to_ids("<pad>")  # stands in for a BOS
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", start)]
    )
    prompt = [{"role": "user", "content": "1+1="}] if is_chat else "1+1="
    rows = Dataset.from_list([{"prompt": prompt}] * 4)
    make_online("online_dpo", {"max_steps": 1}, processing_class=tokenizer, train_dataset=rows).train()
    assert {tuple(ids) for ids in heard_prompts} == {tuple(encode(tokenizer, prompt))}
    assert all((ids[0] == start) != is_chat for ids in heard_prompts)


def test_a_prompt_that_leaves_no_room_within_max_length_is_rejected_before_anything_is_sampled(
    make_online, heard_prompts, plain
):
    """Also by an engine that takes longer ones."""
    rows = plain.select(range(4)).add_item({"prompt": "10+11+12=", "answer": "33"})
    trainer = make_online("online_dpo", {"max_length": 7, "per_device_train_batch_size": 5}, train_dataset=rows)
    with pytest.raises(PromptTooLongError, match=r"prompt \d has 9 tokens; max_model_length=7 .* max_length of Online"):
        trainer.train()
    assert heard_prompts == []


def test_max_length_is_the_length_of_the_engine_and_cuts_no_prompt(make_online, colocate):
    """Nor where the longest prompt and the longest completion are of two rows, and longer together."""
    rows = Dataset.from_list([{"prompt": prompt} for prompt in ("1+1=", "12+34+56=", "2+1=", "3+1=")])
    trainer = make_online("online_dpo", {"max_length": 11, "max_steps": 1}, train_dataset=rows, rollout="colocate")
    widths = []
    trainer.model.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    trainer.train()
    (engine,) = colocate
    assert engine.options["max_model_length"] == 11
    assert set(widths) == {9 + 3}  # of the policy; of the reference it is the same module
    assert lines(trainer.run)[0]["mismatch_kl"] < 1e-4


@pytest.fixture
def heard_prompts(engine, monkeypatch):
    """What the engine was given, as token ids."""
    heard, real = [], engine.generate
    monkeypatch.setattr(engine, "generate", lambda prompts, *rest: heard.extend(prompts) or real(prompts, *rest))
    return heard


def test_ties_and_unscored_completions_have_no_gradient(gradients):
    """Each of the four pairs has the gradient that it has in a batch of which it alone is no tie."""

    def only(left, without=0.0):
        def reward(prompts, completion_ids, **_):
            rewards = by_content(completion_ids)
            return [value if prompt in left else without for prompt, value in zip(prompts, rewards, strict=True)]

        return reward

    prompts = [f"{10 + i}+{11 + i}=" for i in range(4)]
    ((whole,), _) = gradients()
    ((first,), _) = gradients(reward_funcs=only(prompts[:2]))
    ((second,), loss) = gradients(reward_funcs=only(prompts[2:]))
    ((unscored,), _) = gradients(reward_funcs=only(prompts[2:], None))
    assert min(first.norm(), second.norm()) > 0.1 * whole.norm()
    assert (first + second - whole).norm() < 1e-5 * whole.norm()  # float32 sums in another order
    assert torch.equal(second, unscored)
    assert loss == [pytest.approx(math.log(2), abs=1e-4)]


def test_a_pair_that_the_penalty_makes_equal_has_no_gradient(gradients):
    """TRL takes it off after the rewards: what offsets it leaves ties, and equal rewards leave none."""
    ends = []

    def offset(completion_ids, **_):
        ends.extend(1 in ids for ids in completion_ids)
        return [0.0 if 1 in ids else 4.0 for ids in completion_ids]

    ((tied,), _) = gradients(reward_funcs=offset, missing_eos_penalty=4.0)
    assert any(one != two for one, two in zip(ends[:4], ends[4:], strict=True))
    assert tied.norm() == 0
    ((apart,), _) = gradients(reward_funcs=lambda completions, **_: [0.0] * len(completions), missing_eos_penalty=4.0)
    assert apart.norm() > 0


@pytest.mark.parametrize(("reward", "said"), [(0.0, "are equal (0)"), (None, "are equal (nan)")])
def test_online_dpo_says_that_nothing_is_learned_from_equal_rewards(reward, said, make_online, caplog):
    rewards = {"reward_funcs": [lambda completions, **_: [reward] * len(completions)] * 2}
    trainer = make_online("online_dpo", {"max_steps": 4}, **rewards)
    trainer.train()
    assert all(not p.any() for n, p in adapter(trainer.model).items() if "lora_B" in n)
    assert [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log] == [0.0] * 4
    assert caplog.text.count(said) == 1
    assert ("no completion of step 1 has a reward" in caplog.text) == (reward is None)


def test_kl_entropy_and_reward_are_of_what_was_sampled_alone(make_online, engine, monkeypatch):
    """Completions of one to three tokens: padding adds nothing. Within what trainer and engine differ by, in bf16."""
    real, heard = engine.generate, []

    def shorter(*args, **kwargs):
        rollout = real(*args, **kwargs)
        cut = {name: [row[: 1 + i % 3] for i, row in enumerate(getattr(rollout, name))] for name in ROWS}
        heard.append(replace(rollout, **cut))
        return heard[-1]

    monkeypatch.setattr(engine, "generate", shorter)
    trainer = make_online("online_dpo", {"max_steps": 2, "temperature": 1.0, "learning_rate": 5e-2})
    trainer.train()
    logs = [log for log in trainer.state.log_history if "objective/entropy" in log]
    for log, rollout in zip(logs, heard, strict=True):
        entropy = -sum(map(sum, rollout.logprobs)) / len(rollout.logprobs)
        assert log["objective/entropy"] == pytest.approx(entropy, rel=1e-2)
        # The two sums that TRL makes of the same differences: all, and those of the chosen and the rejected alone.
        assert log["objective/kl"] == pytest.approx(
            (log["rewards/chosen"] + log["rewards/rejected"]) / 2 / 0.1, abs=1e-5
        )
        assert log["objective/non_score_reward"] == pytest.approx(-0.1 * log["objective/kl"], abs=1e-6)
        assert log["objective/rlhf_reward"] == pytest.approx(0.5 - 0.1 * log["objective/kl"], abs=1e-6)


def test_the_reference_is_the_policy_as_it_came(make_online, adapted):
    trainer = make_online("online_dpo", {"max_steps": 4}, model=adapted, peft_config=None)
    start = adapter(adapted)
    trainer.train()
    assert_same({n.replace(".default.", ".ref."): p for n, p in start.items()}, adapter(adapted, "ref"))
    logs = [log for log in trainer.state.log_history if "objective/kl" in log]
    assert logs[0]["objective/kl"] == pytest.approx(0.0, abs=1e-6)
    assert logs[-1]["objective/kl"] != 0.0
    with pytest.raises(ConfigConflictError, match="delete_adapter"):
        make_online("online_dpo", model=adapted, peft_config=None, existing_run="overwrite")


def test_what_online_dpo_of_trl_cannot_is_said_before_the_first_step(make_online):
    with pytest.raises(ConfigConflictError, match="'by_index' is asynchronous"):
        make_online("online_dpo", reward_funcs=by_index)
    pictures = Dataset.from_list([{"prompt": "a", "image": 1}] * 4)
    with pytest.raises(NotYetSupportedError, match="image"):
        make_online("online_dpo", train_dataset=pictures)


# --- attach ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def built(model_dir, plain, lora, tmp_path):
    """A trainer as somebody builds it who knows TRL alone."""

    def build(kind=GRPOTrainer, **arguments):
        config = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}[kind]
        own = {"num_generations": 2, "max_completion_length": 3, "output_dir": str(tmp_path / "trl"), "beta": 0.0}
        usual = {
            "model": AutoModelForCausalLM.from_pretrained(model_dir, quantization_config=NF4),
            "processing_class": AutoTokenizer.from_pretrained(model_dir, padding_side="left"),
            "reward_funcs": by_place,
            "train_dataset": plain,
            "peft_config": lora,
            "args": config(**TINY | own),
        }
        return kind(**usual | arguments)

    return build


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_attach_gives_an_engine_to_a_trainer_of_trl_and_takes_it_back(kind, built, engine_in_flight):
    trainer = built(kind)
    config, before, version = trainer.args.to_dict(), bytes_of_the_base(trainer.model), engine_in_flight.version
    state = {name: value for name, value in vars(trainer).items() if name not in ("state", "control")}
    dtypes = {n: p.dtype for n, p in trainer.model.named_parameters()}
    with attach(trainer, rollout=engine_in_flight) as held:
        assert isinstance(trainer, kind)
        trainer.train()
        assert engine_in_flight.version == version + 2
        assert held.base_check.is_verified
        assert held.plan.strategy == "lora_adapter"
        assert len(held.fidelity.history) == 2
        assert held.fidelity.last.mismatch_kl < 1e-4
        assert trainer.state.log_history[0]["qlora_rl/mismatch_kl"] < 1e-4
        assert trainer.state.log_history[0]["qlora_rl/sync_bytes"] > 0
        assert held.push().version == engine_in_flight.version == version + 3
    assert trainer.args.to_dict() == config
    assert type(trainer) is kind
    assert not trainer.use_vllm
    assert {n: p.dtype for n, p in trainer.model.named_parameters()} == dtypes
    assert_same(before, bytes_of_the_base(trainer.model))
    assert set(vars(trainer)) >= set(state)
    held.close()
    # It samples by itself again, and what it has learnt is still there.
    version = engine_in_flight.version
    trainer.train()
    assert engine_in_flight.version == version


def test_attach_goes_on_with_a_second_call_of_train(built, engine_in_flight):
    trainer = built()
    with attach(trainer, rollout=engine_in_flight):
        trainer.train()
        version = engine_in_flight.version
        trainer.train()
        assert engine_in_flight.version == version + 2


def test_attach_to_a_peft_model_and_a_rollout_func(built, engine, adapted, base):
    def roll(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        rollout = trainer.engine.generate(ids, max_tokens=3, seed=0)
        return {"prompt_ids": ids, "completion_ids": rollout.completion_ids, "logprobs": rollout.logprobs}

    trainer = built(model=adapted, peft_config=None, rollout_func=roll)
    with attach(trainer, rollout=engine) as held:
        trainer.train()
        assert held.fidelity.last.mismatch_kl < 1e-4


def test_attach_rejects_what_it_cannot_serve(built, engine_in_flight, make_online, model_dir):
    bare = built(model=AutoModelForCausalLM.from_pretrained(model_dir), peft_config=None)
    with_vllm, attached = built(), built()
    with_vllm.use_vllm = True
    with attach(attached, rollout=engine_in_flight):
        for trainer, named in (
            (make_online("rloo"), "already"),
            (attached, "already"),
            ("trainer", "str"),
            (bare, "no adapter"),
            (with_vllm, "use_vllm=False"),
        ):
            with pytest.raises(ConfigConflictError, match=named):
                attach(trainer, rollout=engine_in_flight)


def test_attach_to_an_engine_on_another_base_leaves_the_trainer_as_it_was(built, other_model_dir):
    trainer = built()
    before = dict(vars(trainer))
    with FakeEngine(load_base(prepare_base(other_model_dir))) as other, pytest.raises(BaseMismatchError):
        attach(trainer, rollout=other)
    assert type(trainer) is GRPOTrainer
    assert vars(trainer).keys() == before.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_without_a_logprob_ends_no_training(kind, make_online, engine, monkeypatch):
    """An engine gives None where its own is NaN."""
    real = engine.generate

    def partly(*args, **kwargs):
        rollout = real(*args, **kwargs)
        return replace(rollout, logprobs=[[None, *row[1:]] for row in rollout.logprobs])

    monkeypatch.setattr(engine, "generate", partly)
    trainer = make_online(kind, {"max_steps": 1}, rollout=engine)
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.fidelity.last.tokens > 0
