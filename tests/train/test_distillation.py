"""Distillation with FakeEngine: the loss is TRL's own, the teacher costs no second model, and the student learns."""

import json
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from datasets import Dataset
from online_kinds import TINY
from peft import LoraConfig, get_peft_model
from resumed import assert_same_run
from support import program, randomise
from test_models import adapter, assert_same, bytes_of_the_base
from test_resume import KillAt, Killed
from transformers import AutoTokenizer
from trl import DistillationConfig, DistillationTrainer

from qlora_rl import (
    AdapterRejectedError,
    ConfigConflictError,
    MemoryBudgetError,
    NotYetSupportedError,
    PromptTooLongError,
    QLoRADistillationTrainer,
    load_base,
)
from qlora_rl.adapter.load import load_adapter
from qlora_rl.base.source_digest import digest_file, digest_parts
from qlora_rl.engine.fake import FakeEngine
from qlora_rl.report import write_report
from qlora_rl.sync.forward import bare_model, evaluating, tail_logprobs
from qlora_rl.train.scoring.divergence import from_hidden
from qlora_rl.train.scoring.logprobs import TOKENS, score
from qlora_rl.train.setup.linears import apply_linears
from qlora_rl.train.teacher import Teacher

Live = program("benchmarks/live_memory.py").Live

BETAS = [0.0, 0.3, 1.0]
NAMES = ("ids", "mask")
TILE = TOKENS // 4
HINTED = Dataset.from_list(
    [
        {"prompt": f"{10 + i}+{11 + i}=", "hinted": f"{21 + 2 * i} is what we say of {10 + i}+{11 + i}="}
        for i in range(8)
    ]
)


def saved_adapter(base, directory, seed, scale=0.3):
    """An adapter far from the base, on other modules than the student's."""
    torch.manual_seed(seed)
    model = get_peft_model(load_base(base), LoraConfig(r=2, lora_alpha=4, target_modules=["v_proj", "down_proj"]))
    randomise(model, scale=scale, seed=seed)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def taught(base, tmp_path_factory):
    """The directory of a teacher's adapter."""
    return saved_adapter(base, tmp_path_factory.mktemp("teacher") / "one", 1)


@pytest.fixture
def make(base, engine, lora, tmp_path):
    """QLoRADistillationTrainer with FakeEngine; `fields` are those of its config."""
    made = []

    def build(fields=None, **arguments):
        usual = {"model": base, "train_dataset": HINTED, "peft_config": lora, "rollout": engine}
        own = {"max_completion_length": 4, "output_dir": str(tmp_path / "run")}
        args = DistillationConfig(**TINY | own | (fields or {}))
        made.append(QLoRADistillationTrainer(**usual | arguments, args=args))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()


def lines(trainer, name="metrics.jsonl"):
    return [json.loads(line) for line in (trainer.run.path / name).read_text().splitlines()]


def losses(trainer):
    return [line["loss"] for line in lines(trainer)]


def batch_of(trainer, rows=4):
    """A batch as the trainer makes it, and what one process would divide its loss by."""
    trainer.model.train()
    return trainer._prepare_inputs([HINTED[i] for i in range(rows)])


def loss_and_gradients(trainer, model, inputs):
    model.zero_grad()
    loss = trainer.compute_loss(model, dict(inputs))
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", ["none", "adapter", "policy", "model"])
def test_loss_and_gradients_are_those_of_trls_trainer_with_two_models(kind, beta, make, base, lora, taught, tmp_path):
    """With "policy" the teacher, a copy of the student, reads more than the student does."""
    student = get_peft_model(load_base(base), lora)
    randomise(student, 0.3)
    whom = {
        "none": {"teacher_adapter": "none"},
        "adapter": {"teacher_adapter": taught},
        "policy": {"teacher_adapter": "policy", "teacher_prompt": "hinted"},
        "model": {"teacher_model": load_adapter(load_base(base), taught, base=base.path)},
    }[kind]
    ours = make({"beta": beta, "bf16": False}, model=student, peft_config=None, **whom)
    inputs = batch_of(ours)
    second = load_base(base)
    if kind == "policy":
        second = get_peft_model(second, lora)
        with torch.no_grad():
            for parameter, value in zip(second.parameters(), student.parameters(), strict=True):
                if value.requires_grad:
                    parameter.copy_(value)
    elif kind != "none":
        second = load_adapter(second, taught, base=base.path)
    apply_linears(bare_model(second))
    twin = get_peft_model(load_base(base), lora)
    apply_linears(bare_model(twin))
    fields = TINY | {"output_dir": str(tmp_path / "trl"), "beta": beta, "bf16": False}
    trl = DistillationTrainer(
        twin, second, DistillationConfig(**fields), train_dataset=HINTED, processing_class=ours.processing_class
    )
    with torch.no_grad():  # TRL rounds a 4-bit model's adapter
        values = [p for n, p in student.named_parameters() if ".teacher." not in n]
        for parameter, value in zip(twin.parameters(), values, strict=True):
            if parameter.requires_grad:
                parameter.data = value.clone()
    trl.model.train()
    if kind == "policy":
        read = {name: torch.cat([inputs[f"teacher_prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in NAMES}
        hidden_of = trl._get_last_hidden_state
        trl._get_last_hidden_state = lambda model, ids, mask, *rest: (
            hidden_of(model, *read.values(), *rest) if model is second else hidden_of(model, ids, mask, *rest)
        )
    found, gradients = loss_and_gradients(ours, ours.model, inputs)
    expected, theirs = loss_and_gradients(trl, trl.model, inputs)
    print(kind, beta, found, expected)
    assert found == pytest.approx(expected, abs=1e-5)
    assert found > 1e-3
    assert gradients.keys() == theirs.keys()
    assert all(torch.allclose(gradients[name], theirs[name], atol=1e-5) for name in theirs)


@pytest.mark.parametrize("beta", BETAS)
def test_logits_of_two_models_take_no_more_memory_than_those_that_grpo_scores(beta):
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 32_768, bias=False).requires_grad_(False)
    teacher_NH, targets_N = torch.randn(512, 64), torch.randint(32_768, (512,))
    peaks = []
    for scores in (
        lambda hidden_NH: score(hidden_NH, head.weight, None, targets_N, 1.0),
        lambda hidden_NH: from_hidden((hidden_NH, head, None, 1.0), (teacher_NH, head, None, 1.0), beta, 1.0, TILE),
    ):
        hidden_NH = torch.randn(512, 64, requires_grad=True)
        with Live() as live:
            scores(hidden_NH)[0].sum().backward()
        peaks.append(live.peak)
    assert peaks[1] < peaks[0] < 512 * 32_768 * 4 * 3


def test_a_teacher_that_computes_nan_ends_the_run_before_anything_is_learnt(make, base):
    second = load_base(base)
    trainer = make({"save_strategy": "steps", "save_steps": 1, "max_steps": 3}, teacher_model=second)
    norm, kept = bare_model(second).model.norm, trainer._after_generation

    def spoil():
        kept()
        if trainer.state.global_step == 1:
            norm.weight.data[3] = torch.nan

    trainer._after_generation = spoil
    with pytest.raises(ConfigConflictError, match=r"rows \[0, 1, 2, 3\] of 4 .* NaN"):
        trainer.train()
    assert trainer.run.last_checkpoint().name == "checkpoint-1"
    assert all(p.isfinite().all() for p in trainer.model.parameters() if p.is_floating_point())


@pytest.mark.parametrize("teacher", ["none", "adapter"])
def test_the_teacher_is_the_base_bit_for_bit_and_leaves_the_student_as_it_was(teacher, make, base, taught):
    student = get_peft_model(load_base(base), LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "down_proj"]))
    randomise(student, 0.3)
    trainer = make(model=student, peft_config=None, teacher_adapter=taught if teacher == "adapter" else teacher)
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    trainer.model.train()
    alone = load_base(base) if teacher == "none" else load_adapter(load_base(base), taught, base=base.path)
    apply_linears(bare_model(alone))
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    with torch.no_grad(), evaluating(alone):
        expected = bare_model(alone).base_model(**inputs).last_hidden_state
        own = bare_model(trainer.model).base_model(**inputs).last_hidden_state
    found = trainer.teacher_model.base_model(**inputs).last_hidden_state
    assert torch.equal(found, expected)
    assert not torch.equal(found, own)
    assert trainer.teacher_model.get_output_embeddings() is bare_model(trainer.model).get_output_embeddings()
    assert [name for name, p in trainer.model.named_parameters() if p.requires_grad] == trained
    assert trainer.model.active_adapter == "default"
    assert all(module.training for module in trainer.model.modules())
    if teacher == "none":  # no second model
        assert isinstance(trainer.teacher_model, Teacher)
        assert list(trainer.teacher_model.parameters()) == []


def test_the_student_comes_closer_and_only_its_adapter_is_pushed(make, engine, taught):
    trainer = make({"max_steps": 12, "gradient_accumulation_steps": 2}, teacher_adapter=taught)
    frozen = {n: p.clone() for n, p in trainer.model.named_parameters() if ".teacher." in n}
    before, version = bytes_of_the_base(trainer.model), engine.version
    trainer.train()
    found = losses(trainer)
    print(found, [line["mismatch_kl"] for line in lines(trainer)])
    assert sum(found[-3:]) < 0.5 * sum(found[:3])
    assert_same(before, bytes_of_the_base(trainer.model))
    assert frozen
    assert all(torch.equal(p, frozen[n]) for n, p in trainer.model.named_parameters() if n in frozen)
    # The engine is the student at each step; the teacher is thousands of times further off.
    assert len(lines(trainer)) == 12 == engine.version - version
    assert max(line["mismatch_kl"] for line in lines(trainer)) < 1e-4
    trainer.sync()
    ids = [5, 6, 7, 8, 9, 10]
    scored = torch.tensor(engine.score([ids])[0][-3:])
    with evaluating(trainer.model):
        assert torch.allclose(scored, tail_logprobs(trainer.model, [ids], 3), atol=0.05)
        trainer.model.set_adapter("teacher")
        assert not torch.allclose(scored, tail_logprobs(trainer.model, [ids], 3), atol=0.1)
    saved = sorted(file.name for file in (trainer.run.path / "adapter").iterdir())
    assert "teacher" not in saved
    assert "adapter_model.safetensors" in saved


@pytest.mark.parametrize("teacher", ["policy", "none"])
def test_a_teacher_with_more_in_its_prompt_scores_the_same_tokens(teacher, make, base):
    trainer = make({"beta": 0.0, "bf16": False}, teacher_adapter=teacher, teacher_prompt="hinted")
    inputs = batch_of(trainer)
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, dict(inputs)).item()
    model, tokenizer = bare_model(trainer.model), trainer.processing_class
    terms = []
    with torch.no_grad(), evaluating(model):
        for row, mask, prompt, seen in zip(
            inputs["completion_ids"],
            inputs["completion_mask"],
            inputs["prompt_ids"],
            inputs["prompt_mask"],
            strict=True,
        ):
            answer, asked = row[mask.bool()].tolist(), prompt[seen.bool()].tolist()
            hinted = next(each["hinted"] for each in HINTED if tokenizer(each["prompt"])["input_ids"] == asked)
            logprobs = [
                (
                    model.base_model(torch.tensor([ids + answer])).last_hidden_state[0, -len(answer) - 1 : -1].float()
                    @ model.get_output_embeddings().weight.float().t()
                ).log_softmax(-1)
                for ids in (asked, tokenizer(hinted)["input_ids"])
            ]
            terms += [p.exp() @ (p - q) for q, p in zip(*logprobs, strict=True)]
    assert len(terms) == int(inputs["completion_mask"].sum())
    # The fresh adapter changes nothing yet, so both teachers are one; padding has other roundings of bf16.
    assert loss == pytest.approx(torch.stack(terms).mean().item(), rel=0.03)
    assert loss > 1e-2


def test_a_hint_is_learnt_and_the_teacher_that_is_the_policy_moves_along(make):
    trainer = make({"max_steps": 12}, teacher_adapter="none", teacher_prompt="hinted")
    trainer.train()
    fixed = losses(trainer)
    trainer = make({"max_steps": 12}, teacher_adapter="policy", teacher_prompt="hinted", existing_run="overwrite")
    trainer.train()
    moving = losses(trainer)
    print(fixed, moving)
    assert fixed[0] == moving[0]  # nothing was learnt yet
    assert fixed[-1] != moving[-1]
    assert sum(fixed[-3:]) < 0.5 * sum(fixed[:3])
    assert sum(moving[-3:]) < 0.7 * sum(moving[:3])


def test_messages_are_taken_and_evaluated(make):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"1+{i}="}],
            "told": [{"role": "system", "content": "Say 7."}, {"role": "user", "content": f"1+{i}="}],
        }
        for i in range(4)
    ]
    talks = Dataset.from_list(rows)
    fields = {"max_steps": 1, "remove_unused_columns": True, "log_completions": True}
    arguments = {"train_dataset": talks, "eval_dataset": talks.select(range(3))}
    trainer = make(fields, teacher_adapter="policy", teacher_prompt="told", **arguments)
    trainer.train()
    found = trainer.evaluate()
    assert found["eval_loss"] > 0
    assert found["eval_qlora_rl/mismatch_kl"] < 1e-4


def test_the_run_directory_says_who_taught_and_the_report_shows_it(make, taught):
    trainer = make(teacher_adapter=taught, teacher_prompt="hinted")
    trainer.train()
    described = json.loads((trainer.run.path / "config.json").read_text())
    assert described["teacher"] == trainer._taught_by
    assert described["teacher"] | {"digest": ""} == {
        "kind": "adapter",
        "digest": "",
        "path": str(taught),
        "prompt": "hinted",
    }
    assert described["command"] == "QLoRADistillationTrainer"
    assert described["distillation"]["beta"] == 1.0
    (rollout,) = json.loads((trainer.run.path / "rollouts.json").read_text())["last"]["rollouts"]
    assert isinstance(rollout["completion"], str)
    page = write_report(trainer.run.path).read_text()
    assert "the loss" in page
    assert "Teacher: how far the student is from it" in page
    assert "Reward: how good" not in page


def test_a_run_goes_on_bit_for_bit_and_not_with_another_teacher(make, base, taught, tmp_path):
    fields = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}

    def own():  # which counts its versions from 1
        return FakeEngine(load_base(base), max_model_length=64)

    make(fields | {"output_dir": str(tmp_path / "straight")}, teacher_adapter=taught, rollout=own()).train()
    trainer = make(fields, teacher_adapter=taught, callbacks=[KillAt(5)], rollout=own())
    with pytest.raises(Killed):
        trainer.train()
    trainer.close()
    other = saved_adapter(base, tmp_path / "other", 2)
    first, second = (make_digest(directory) for directory in (taught, other))
    with pytest.raises(ConfigConflictError, match=rf"teacher was .*{first}.* and is .*{second}"):
        make(fields, teacher_adapter=other, existing_run="resume")
    with pytest.raises(ConfigConflictError, match=r"teacher was .*adapter.* and is .*prompt hinted"):
        make(fields, teacher_adapter=taught, teacher_prompt="hinted", existing_run="resume")
    make(fields, teacher_adapter=taught, existing_run="resume", rollout=own()).train()
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def make_digest(directory):
    return digest_parts(
        [digest_file(directory / name) for name in ("adapter_config.json", "adapter_model.safetensors")]
    )[:16]


def test_a_second_model_teaches_and_one_with_other_tokens_is_rejected(make, base, other_model_dir, tmp_path):
    trainer = make({"max_steps": 1}, teacher_model=str(other_model_dir))
    trainer.train()
    assert losses(trainer)[0] > 1e-2
    held = trainer.teacher_model._held[0]
    assert any(isinstance(module, bnb.nn.Linear4bit) for module in held.modules())  # as the plan counts it
    digest = trainer._taught_by["digest"]
    trainer = make({"max_steps": 1}, teacher_model=base, teacher_prompt="hinted", existing_run="overwrite")
    trainer.train()
    assert losses(trainer)[0] > 1e-2
    assert trainer._taught_by["kind"] == "model"
    assert trainer._taught_by["digest"] != digest
    AutoTokenizer.from_pretrained(other_model_dir).save_pretrained(tmp_path / "swapped")
    file = tmp_path / "swapped" / "tokenizer.json"
    told = json.loads(file.read_text())
    vocabulary = told["model"]["vocab"]
    one, two = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(told))
    with pytest.raises(ConfigConflictError, match="another tokenizer"):
        make(teacher_model=str(tmp_path / "swapped"), existing_run="overwrite")


def test_a_checkpoint_does_not_hold_the_teacher(make, taught, caplog):
    trainer = make({"max_steps": 4, "save_strategy": "steps", "save_steps": 1}, teacher_adapter=taught)
    trainer.train()
    assert "rewards so far are equal" not in caplog.text  # there are none
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"
    assert [each.parent for each in checkpoint.rglob("adapter_model.safetensors")] == [checkpoint]


SAME = Dataset.from_list([{"prompt": row["prompt"], "hinted": row["prompt"]} for row in HINTED])
GAPS = Dataset.from_list([*HINTED.to_list()[:7], {"prompt": "1+1=", "hinted": None}])
HINTS = {"teacher_adapter": "none", "teacher_prompt": "hinted"}


def itself(taught, base):
    student = load_base(base)
    return {"model": student, "teacher_model": student}


def of_a_teachers_name(taught, base):
    model = get_peft_model(load_base(base), LoraConfig(r=4, target_modules=["q_proj"]), adapter_name="teacher")
    return {"model": model, "peft_config": None, "teacher_adapter": taught}


@pytest.mark.parametrize(
    ("asked", "error", "named"),
    [
        (lambda *_: {}, ConfigConflictError, "one teacher"),
        (
            lambda taught, _: {"teacher_adapter": taught, "teacher_model": "/nowhere"},
            ConfigConflictError,
            "one teacher",
        ),
        (lambda *_: {"teacher_adapter": "none"}, ConfigConflictError, "nothing can be learned"),
        (lambda *_: {"teacher_adapter": "policy"}, ConfigConflictError, "nothing can be learned"),
        (lambda *_: HINTS | {"teacher_prompt": "hint"}, ConfigConflictError, "teacher_prompt='hint'"),
        (lambda *_: {"teacher_adapter": "/nowhere/at/all"}, AdapterRejectedError, "/nowhere/at/all"),
        (itself, ConfigConflictError, "the model that is trained"),
        (lambda *_: HINTS | {"teacher_adapter": "policy", "train_dataset": SAME}, ConfigConflictError, "every row"),
        (lambda *_: HINTS | {"train_dataset": GAPS}, ConfigConflictError, r"1 rows \(7\)"),
        (lambda *_: HINTS | {"eval_dataset": GAPS}, ConfigConflictError, r"1 rows \(7\)"),
        (
            lambda *_: HINTS
            | {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], bias="lora_only"), "sync": "weights"},
            NotYetSupportedError,
            "bias='lora_only'",
        ),
        (of_a_teachers_name, ConfigConflictError, "'teacher'"),
    ],
)
def test_what_cannot_teach_is_rejected(make, base, taught, asked, error, named):
    with pytest.raises(error, match=named):
        make(**asked(taught, base))


def test_a_row_of_a_stream_without_what_the_teacher_reads_is_named(make):
    trainer = make({"max_steps": 2}, **HINTS, train_dataset=GAPS.to_iterable_dataset())
    with pytest.raises(ConfigConflictError, match=r"'1\+1='"):
        trainer.train()


def test_what_the_teacher_has_no_room_for_is_an_error_with_its_row(make, base, other_model_dir):
    """The tiny model has 128 positions, and the engine of the tests gives the student 64."""
    rows = [dict(row) for row in HINTED]
    rows[5]["hinted"] = "7" * 124 + "="
    who = {"teacher_adapter": "none", "teacher_prompt": "hinted"}
    with pytest.raises(PromptTooLongError) as caught:
        make(**who, train_dataset=Dataset.from_list(rows), existing_run="overwrite")
    assert "row 5: hinted has 125 tokens and max_completion_length=4, and the teacher reads 128" in str(caught.value)
    stream = Dataset.from_list(rows).to_iterable_dataset()  # which nobody can read before
    trainer = make({"max_steps": 2, "shuffle_dataset": False}, **who, train_dataset=stream, existing_run="overwrite")
    with pytest.raises(PromptTooLongError, match=r"whose prompt is '15\+16=': 125 tokens and an answer of up to 4"):
        trainer.train()
    assert trainer.state.global_step == 1  # the first batch had room


def test_the_memory_is_planned_with_the_teacher_and_a_limit_is_kept(make, taught, other_model_dir):
    with pytest.raises(MemoryBudgetError, match=r"gpu_memory=0\.00 GiB") as caught:
        make(teacher_adapter=taught, gpu_memory=0.001)
    assert "adapter, teacher" in str(caught.value)
    named = {line.name: line.nbytes for line in make(teacher_adapter=taught).memory.estimate.lines}
    frozen = [p for n, p in make(teacher_adapter=taught, existing_run="overwrite").model.named_parameters()
              if ".teacher." in n]  # fmt: skip
    assert named["adapter, teacher"] == sum(p.nbytes for p in frozen)
    reads = make(teacher_adapter="none", teacher_prompt="hinted", existing_run="overwrite").memory.estimate.request
    assert reads.method == "distill"
    assert 5 <= reads.teacher_more <= 10  # "21 is what we say of " is 21 bytes
    second = make(teacher_model=str(other_model_dir), existing_run="overwrite").memory.estimate
    assert second.request.teacher.hidden == second.shape.hidden
    held = {line.name: line.nbytes for line in second.lines}
    assert held["base, teacher"] == held["base, trainer"]


def test_the_adapter_of_a_run_teaches_the_next(make, taught, tmp_path):
    make({"output_dir": str(tmp_path / "first"), "max_steps": 2}, teacher_adapter=taught).train()
    trainer = make(teacher_adapter=tmp_path / "first")
    assert trainer._taught_by["path"] == str(tmp_path / "first" / "adapter")
    assert len(adapter(trainer.model, "teacher")) == len(adapter(trainer.model)) > 0
