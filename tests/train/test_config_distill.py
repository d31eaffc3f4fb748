"""`method = "distill"` of a run's file, with FakeEngine in vLLM's place: which teacher the trainer gets, and what it
reads."""

import json
from pathlib import Path

import pytest
from test_distillation import saved_adapter, taught  # noqa: F401
from test_teacher_server import a_teacher, teacher  # noqa: F401
from transformers import AutoTokenizer

from qlora_rl import load_base
from qlora_rl.adapter.inspected import bare_model
from qlora_rl.cli import main
from qlora_rl.config.launch import launch, load_tokenizer
from qlora_rl.config.read import read_config
from qlora_rl.config.schema import Data, Teacher
from qlora_rl.config.text import to_toml
from qlora_rl.data.load import load_data
from qlora_rl.data.rows import as_conversation
from qlora_rl.errors import ConfigConflictError, MemoryBudgetError
from qlora_rl.train.distillation import QLoRADistillationTrainer

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["train.max_steps=1", "train.per_device_train_batch_size=2", "train.gradient_checkpointing=false"]


@pytest.fixture
def run(model_dir, colocate, tmp_path, monkeypatch):
    """Train the example with other settings; config.json, and a batch with what the teacher reads in it."""
    seen, compute = [], QLoRADistillationTrainer._compute_loss

    def watched(self, student, inputs, count):
        seen.append(inputs)
        return compute(self, student, inputs, count)

    monkeypatch.setattr(QLoRADistillationTrainer, "_compute_loss", watched)

    def start(*overrides):
        settings = [*SMALL, f"base.model={model_dir}", f"run.dir={tmp_path / 'run'}", *overrides]
        out = launch(read_config(ROOT / "examples" / "distill.toml", settings))
        (line,) = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
        assert line["loss"] > 1e-4
        return json.loads((out / "config.json").read_text()), seen[0]

    return start


def read_by(inputs, model_dir):
    """The texts that the teacher reads before the completions."""
    rows = zip(inputs["teacher_prompt_ids"], inputs["teacher_prompt_mask"], strict=True)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return [tokenizer.decode(ids[mask.bool()]) for ids, mask in rows]


def test_the_example_has_the_solved_sum_read_first(run, model_dir):
    described, inputs = run()
    assert described["teacher"] == {"kind": "policy", "prompt": "teacher_prompt"}
    rows = [json.loads(line) for line in (ROOT / "examples" / "data" / "sums.jsonl").read_text().splitlines()]
    known = {f"{row['prompt']}{row['answer']}\n{row['prompt']}" for row in rows}
    assert set(read_by(inputs, model_dir)) <= known


def test_a_run_teaches_the_next_and_reads_what_the_student_reads(run, base, model_dir, tmp_path):
    adapter = saved_adapter(base, tmp_path / "longer" / "adapter", 1)
    text = (ROOT / "examples" / "distill.toml").read_text()
    text = text.replace('adapter = "policy"', 'adapter = "longer"')
    text = "\n".join(line for line in text.splitlines() if not line.startswith("prompt_template"))
    (tmp_path / "student.toml").write_text(text.replace('"data/', f'"{ROOT}/examples/data/'))
    settings = [*SMALL, f"base.model={model_dir}", f"run.dir={tmp_path / 'student'}"]
    out = launch(read_config(tmp_path / "student.toml", settings))
    described = json.loads((out / "config.json").read_text())
    assert (described["teacher"]["kind"], described["teacher"]["path"]) == ("adapter", str(adapter))
    assert "prompt" not in described["teacher"]


def test_a_second_model_is_held_in_4_bits(run, other_model_dir, monkeypatch):
    held = []

    def load(*args, **given):
        held.append(load_base(*args, **given))
        return held[-1]

    monkeypatch.setattr("qlora_rl.train.distillation.load_base", load)
    settings = ["teacher={}", f"teacher.model={other_model_dir}"]
    described, inputs = run(*settings)
    assert described["teacher"]["kind"] == "model"
    assert bare_model(held[0]).is_loaded_in_4bit
    assert "teacher_prompt_ids" not in inputs


@pytest.mark.parametrize("line", ["base, teacher", "adapter, teacher", "teacher's candidates"])
def test_the_teacher_is_planned_before_a_base_is_made(line, run, base, other_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("qlora_rl.config.launch.make_base", lambda _: pytest.fail("a base was made"))
    whom = {
        "base, teacher": f"teacher.model={other_model_dir}",
        "adapter, teacher": f"teacher.adapter={saved_adapter(base, tmp_path / 'longer', 1)}",
        "teacher's candidates": "teacher.url=http://127.0.0.1:9",
    }[line]
    with pytest.raises(MemoryBudgetError, match=line):
        run("teacher={}", whom, "run.gpu_memory=0.001")


def test_a_server_is_asked_by_its_url(run, teacher):  # noqa: F811
    described, inputs = run("teacher={}", f"teacher.url={teacher.url}", "teacher.top_k=5")
    assert described["teacher"]["url"] == teacher.url
    assert teacher.asked[-1][0]["prompt_logprobs"] == 5
    assert inputs["teacher_ids"].shape[-1] >= 5


def chat(tmp_path, model_dir, said_by, **data):
    rows = [{"prompt": f"1+{n}=", "hint": f"Say {1 + n}."} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "method": "distill", "base": {"model": str(model_dir)}, "run": {"dir": str(tmp_path / "run")},
        "data": {"train": "rows.jsonl", "format": "chat", **data}, "teacher": {"adapter": "policy", **said_by},
        "train": {"max_steps": 1, "max_completion_length": 4},
    }  # fmt: skip
    (tmp_path / "run.toml").write_text(to_toml(document))
    return read_config(tmp_path / "run.toml")


def said(config):
    train, _ = load_data(config.data, teacher=config.teacher)
    assert [row["prompt"][-1] for row in train] == [{"role": "user", "content": f"1+{n}="} for n in range(3)]
    return [[(each["role"], each["content"]) for each in row["teacher_prompt"]] for row in train]


def test_in_a_chat_the_teacher_gets_a_system_message_of_its_own(model_dir, tmp_path):
    config = chat(tmp_path, model_dir, {"system_prompt": "Count."}, system_prompt="Be short.")
    assert said(config) == [[("system", "Count."), ("user", f"1+{n}=")] for n in range(3)]


def test_a_system_message_of_the_teacher_takes_the_place_of_one_in_the_rows(model_dir, tmp_path):
    rows = [{"prompt": [{"role": "system", "content": "Own."}, {"role": "user", "content": "1+1="}]}]
    for system in ("Count.", ""):
        read = as_conversation(rows[0] | {"teacher_prompt": rows[0]["prompt"]}, "Be short.", system, has_teacher=True)
        assert [each["content"] for each in read["prompt"]] == ["Own.", "1+1="]
        assert [each["content"] for each in read["teacher_prompt"]] == [system, "1+1="]


def test_in_a_chat_a_column_is_what_a_teacher_reads_only_where_one_reads(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "1+1=", "teacher_prompt": "2"}')
    for table in (None, Teacher(adapter="none")):
        train, _ = load_data(Data(train=str(tmp_path / "own.jsonl"), format="chat"), teacher=table)
        assert train["teacher_prompt"] == ["2"]


def test_in_a_chat_a_column_or_a_template_is_what_the_user_asks(model_dir, tmp_path):
    hinted = chat(tmp_path, model_dir, {"prompt": "hint"}, system_prompt="Be short.")
    assert said(hinted) == [[("system", "Be short."), ("user", f"Say {1 + n}.")] for n in range(3)]
    built = chat(tmp_path, model_dir, {"prompt_template": "{prompt} {hint}"})
    assert said(built) == [[("user", f"1+{n}= Say {1 + n}.")] for n in range(3)]


def test_the_data_command_shows_what_the_teacher_reads(model_dir, tmp_path, capsys):
    config = chat(tmp_path, model_dir, {"system_prompt": "Count."})
    ids = load_tokenizer(config).apply_chat_template(
        [{"role": "system", "content": "Count."}, {"role": "user", "content": "1+0="}],
        add_generation_prompt=True, tokenize=True, return_dict=True,
    )["input_ids"]  # fmt: skip
    assert main(["data", str(tmp_path / "run.toml"), "--rows", "1"]) == 0
    assert f"teacher_prompt, {len(ids)} tokens:" in capsys.readouterr().out


def test_a_template_that_rejects_what_the_teacher_reads_is_said_before_a_base_is_made(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("qlora_rl.config.launch._model", lambda *_: pytest.fail("a base was made"))
    config = chat(tmp_path, model_dir, {"system_prompt": "Count."})
    tokenizer = load_tokenizer(config)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m['content'] }}"
        "{% endfor %}"
    )
    monkeypatch.setattr("qlora_rl.config.launch.load_tokenizer", lambda _: tokenizer)
    with pytest.raises(ConfigConflictError, match="whose roles are system, user"):
        launch(config)
