"""What a distillation records of student and teacher: their divergence by step and by place, and the tokens at which
they disagree most."""

import json
import math

import pytest
import torch
from online_kinds import TINY
from test_distillation import HINTED, saved_adapter, taught  # noqa: F401
from test_teacher_server import a_teacher, teacher  # noqa: F401
from trl import DistillationConfig

from qlora_rl import QLoRADistillationTrainer
from qlora_rl.adapter.inspected import bare_model
from qlora_rl.report import write_report
from qlora_rl.sync.forward import evaluating


@pytest.fixture
def train(base, engine, lora, tmp_path):
    """A run of two micro-batches a step, with the base and a hint as teacher; its directory and trainer."""

    def run(**fields):
        own = {"max_completion_length": 6, "output_dir": str(tmp_path / "run"), "gradient_accumulation_steps": 2}
        trainer = QLoRADistillationTrainer(
            base, args=DistillationConfig(**TINY | own | fields), train_dataset=HINTED, peft_config=lora,
            rollout=engine, teacher_adapter="none", teacher_prompt="hinted", existing_run="resume",
        )  # fmt: skip
        with trainer:
            trainer.train()
        return tmp_path / "run", trainer

    return run


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_divergence_is_that_of_the_loss_in_each_step_and_place(beta, train):
    run, _ = train(beta=beta, max_steps=3)
    for line in lines(run):
        assert line["teacher_divergence"] == pytest.approx(line["loss"], rel=1e-4)
        places = line["teacher_divergence_by_position"]
        assert len(places) == 8
        known = [each for each in places if each is not None]
        assert min(known) <= line["teacher_divergence"] <= max(known)


def test_the_tokens_that_are_told_of_are_those_at_which_the_two_differ_most(train):
    run, trainer = train(beta=1.0, max_steps=1)
    told = json.loads((run / "teacher.json").read_text())
    assert told["first"] == told["last"]
    assert told["last"]["step"] == 1
    tokens = told["last"]["tokens"]
    assert len(tokens) == 8
    values = [each["divergence"] for each in tokens]
    assert values == sorted(values, reverse=True)
    assert values[0] > lines(run)[0]["teacher_divergence"]
    model, tokenizer = bare_model(trainer.model), trainer.processing_class
    for each in tokens:
        asked = next(row for row in HINTED if each["before"].startswith(row["prompt"]))
        seen = {"student": each["before"], "teacher": asked["hinted"] + each["before"].removeprefix(asked["prompt"])}
        for side, text in seen.items():
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            # As it was in that step: the adapter did nothing yet.
            with torch.no_grad(), evaluating(trainer.model), trainer.model.disable_adapter():
                chances = model(ids).logits[0, -1].float().softmax(-1)
            likeliest = chances.topk(3)
            assert [chance for _, chance in each[side]] == pytest.approx(likeliest.values.tolist(), rel=0.05)
            assert each[side][0][0] == tokenizer.decode([likeliest.indices[0]])


def test_the_first_step_is_kept_when_a_run_goes_on_and_the_report_shows_all_of_it(train):
    run, _ = train(max_steps=2, save_strategy="steps", save_steps=1)
    first = json.loads((run / "teacher.json").read_text())["first"]
    train(max_steps=4, save_strategy="steps", save_steps=1)
    told = json.loads((run / "teacher.json").read_text())
    assert told["first"] == first
    assert told["last"]["step"] == 4
    page = write_report(run).read_text()
    assert "Teacher: how far the student is from it" in page
    assert "Reverse KL (student ‖ teacher)" in page
    assert "Teacher, by place in the answer" in page
    assert "Where student and teacher disagree most" in page
    assert page.count("The teacher expects") == 2


def test_an_evaluation_is_measured_too_and_writes_no_tokens(base, engine, lora, tmp_path):
    args = DistillationConfig(**TINY | {"max_completion_length": 4, "output_dir": str(tmp_path / "run")})
    taught_by = {"teacher_adapter": "none", "teacher_prompt": "hinted", "eval_dataset": HINTED.select(range(3))}
    with QLoRADistillationTrainer(
        base, args=args, train_dataset=HINTED, peft_config=lora, rollout=engine, **taught_by
    ) as trainer:
        found = trainer.evaluate()
    assert found["eval_qlora_rl/teacher_divergence"] == pytest.approx(found["eval_loss"], rel=1e-3)
    assert not (tmp_path / "run" / "teacher.json").exists()


def test_a_server_says_what_its_teacher_expects(base, engine, lora, teacher, tmp_path):  # noqa: F811
    args = DistillationConfig(**TINY | {"max_completion_length": 4, "output_dir": str(tmp_path / "run")})
    with QLoRADistillationTrainer(
        base, args=args, train_dataset=HINTED, peft_config=lora, rollout=engine, teacher_url=teacher.url
    ) as trainer:
        trainer.train()
    for line in lines(tmp_path / "run"):
        assert line["teacher_divergence"] == pytest.approx(line["loss"], rel=1e-3)
    tokenizer = trainer.processing_class
    for each in json.loads((tmp_path / "run" / "teacher.json").read_text())["last"]["tokens"]:
        said = teacher.said_of(each["before"] + each["token"], 3)[-1]
        best = max(said, key=lambda token: said[token]["logprob"])
        assert each["teacher"][0] == [
            tokenizer.decode([int(best)]),
            pytest.approx(math.exp(said[best]["logprob"]), rel=0.05),
        ]


def test_an_adapter_teaches_with_tokens_of_its_own(base, engine, lora, tmp_path):
    directory = saved_adapter(base, tmp_path / "teacher", 1)
    args = DistillationConfig(**TINY | {"max_completion_length": 4, "output_dir": str(tmp_path / "run")})
    with QLoRADistillationTrainer(
        base, args=args, train_dataset=HINTED, peft_config=lora, rollout=engine, teacher_adapter=directory
    ) as trainer:
        trainer.train()
    tokens = json.loads((tmp_path / "run" / "teacher.json").read_text())["last"]["tokens"]
    assert any(each["student"] != each["teacher"] for each in tokens)
