"""What a distillation records of student and teacher: their divergence by step and by place."""

import json

import pytest
from online_kinds import TINY
from test_distillation import HINTED, saved_adapter, taught  # noqa: F401
from test_teacher_server import a_teacher, teacher  # noqa: F401
from trl import DistillationConfig

from qlora_rl import QLoRADistillationTrainer
from qlora_rl.report import write_report


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


def test_the_report_shows_it_of_all_of_a_run_that_goes_on(train):
    train(max_steps=2, save_strategy="steps", save_steps=1)
    run, _ = train(max_steps=4, save_strategy="steps", save_steps=1)
    page = write_report(run).read_text()
    assert "Teacher: how far the student is from it" in page
    assert "Reverse KL (student ‖ teacher)" in page
    assert "Teacher, by place in the answer" in page


def test_an_evaluation_is_measured_too(base, engine, lora, tmp_path):
    args = DistillationConfig(**TINY | {"max_completion_length": 4, "output_dir": str(tmp_path / "run")})
    taught_by = {"teacher_adapter": "none", "teacher_prompt": "hinted", "eval_dataset": HINTED.select(range(3))}
    with QLoRADistillationTrainer(
        base, args=args, train_dataset=HINTED, peft_config=lora, rollout=engine, **taught_by
    ) as trainer:
        found = trainer.evaluate()
    assert found["eval_qlora_rl/teacher_divergence"] == pytest.approx(found["eval_loss"], rel=1e-3)


def test_the_divergence_from_a_server_is_that_of_the_loss_too(base, engine, lora, teacher, tmp_path):  # noqa: F811
    args = DistillationConfig(**TINY | {"max_completion_length": 4, "output_dir": str(tmp_path / "run")})
    with QLoRADistillationTrainer(
        base, args=args, train_dataset=HINTED, peft_config=lora, rollout=engine, teacher_url=teacher.url
    ) as trainer:
        trainer.train()
    for line in lines(tmp_path / "run"):
        assert line["teacher_divergence"] == pytest.approx(line["loss"], rel=1e-3)
