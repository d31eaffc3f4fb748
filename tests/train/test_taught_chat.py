"""`qlora-rl chat --teacher`: what has taught a run answers next to its student, and reads what it read in training."""

import io
import json
import shutil

import pytest
import torch
from datasets import Dataset
from test_distillation import HINTED, make, saved_adapter, taught  # noqa: F401

from qlora_rl import (
    AdapterRejectedError,
    BaseIncompleteError,
    ConfigConflictError,
    EngineBrokenError,
    EngineUnsupportedError,
    load_base,
)
from qlora_rl.adapter.inspected import bare_model
from qlora_rl.adapter.load import load_adapter
from qlora_rl.cli import main
from qlora_rl.data.rows import reading
from qlora_rl.inference.chat import Conversation
from qlora_rl.inference.trained import open_trained
from qlora_rl.train.setup.linears import apply_linears

USER = [{"role": "user", "content": "12+34="}]
BEFORE = [{"role": "system", "content": "Say 7."}, {"role": "user", "content": "1+1="}]
ASKED = [[{"role": "user", "content": f"1{i}+2="}] for i in range(8)]
TOLD = Dataset.from_list([{"prompt": each, "told": BEFORE + each} for each in ASKED])
WRAPPED = Dataset.from_list([{"prompt": f"1{i}+2=", "told": f"7777 1{i}+2=? 1{i}+2="} for i in range(8)])
TALK = {"temperature": 0.0, "max_tokens": 8}


def said_by(model, tokenizer, prompt):
    """What a model answers greedily."""
    apply_linears(bare_model(model))
    if isinstance(prompt, str):
        ids = tokenizer(prompt).input_ids
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    asked = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
    with torch.autocast("cpu", torch.bfloat16):
        sampled = model.eval().generate(**asked, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(sampled[0, len(ids) :], skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["none", "policy", "adapter", "model"])
def test_the_teacher_answers_as_it_taught_and_the_student_as_alone(
    kind, make, base, taught, other_model_dir, tmp_path, monkeypatch, capsys  # noqa: F811
):  # fmt: skip
    who = {"teacher_model": str(other_model_dir)} if kind == "model" else {"teacher_adapter": kind}
    rows = TOLD if kind == "none" else WRAPPED
    if kind == "adapter":
        who = {"teacher_adapter": taught}
    with make({"max_steps": 2, "learning_rate": 3e-3}, train_dataset=rows, teacher_prompt="told", **who) as trainer:
        trainer.train()
    trained = open_trained(tmp_path / "run")
    talk = Conversation(trained, **TALK, uses_template=kind == "none")
    alone = "".join(talk.answer("12+34="))
    talk.forget()
    teacher = talk.with_teacher()
    alone_model = {
        "none": lambda: load_base(base),
        "policy": trained.load,
        "adapter": lambda: load_adapter(load_base(base), taught, base=base.path),
        "model": lambda: load_base(trained.config["teacher"]["path"]),
    }[kind]()
    prompt = BEFORE + USER if kind == "none" else "7777 12+34=? 12+34="
    expected = said_by(alone_model, talk.tokenizer, prompt)
    assert "".join(teacher.answer("12+34=")) == expected != alone
    assert "".join(talk.answer("12+34=")) == alone  # and is still the student
    assert teacher.lacks == ""
    if kind == "none":
        assert teacher._said[:2] == BEFORE  # the talk goes on from what it reads
        assert talk._said[0]["role"] == "user"
        monkeypatch.setattr("sys.stdin", io.StringIO())
        assert main(["chat", str(tmp_path / "run"), "--teacher", "--system", "X"]) == 0
        assert "the teacher reads what it read in training, without --system" in capsys.readouterr().err


def test_a_hint_that_is_in_the_rows_alone_is_missed_aloud(make, tmp_path, monkeypatch, capsys):  # noqa: F811
    with make({"max_steps": 1}, teacher_adapter="none", teacher_prompt="hinted") as trainer:
        trainer.train()
    run = str(tmp_path / "run")
    assert "reads" not in open_trained(run).config["teacher"]
    monkeypatch.setattr("sys.stdin", io.StringIO("12+34=\n1+1=\n"))
    capsys.readouterr()
    words = ["chat", run, "--teacher", "--raw", "--temperature", "0", "--max-tokens", "4"]
    assert main([*words, "--json"]) == 0
    shown = capsys.readouterr()
    assert "in training it also read what stood in hinted besides the question" in shown.err
    found = [json.loads(line) for line in shown.out.splitlines()]
    assert [each["prompt"] for each in found] == ["12+34=", "1+1="]
    typed = iter(["12+34=", "/new", "1+1=", "/quit"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    assert main(words) == 0
    lines = [each for each in capsys.readouterr().out.splitlines() if not each.startswith("[cut off")][1:]
    sides = [(f"student: {each['answer']}", f"teacher: {each['teacher_answer']}") for each in found]
    assert lines == [line for side in sides for line in side]
    typed = iter(["12+34=", "1+1=", "/quit"])

    def unsupported(talk, *_):
        raise EngineUnsupportedError("asking the teacher: it does not say which tokens it samples.")
        yield

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Conversation, "_stream", unsupported)
        assert main(words) == 0
    assert capsys.readouterr().out.count("it does not say which tokens it samples") == 2
    assert main([*words, "--base-only"]) == 2
    assert "which is no student" in capsys.readouterr().err


def test_a_teacher_that_is_another_or_nowhere_is_said(make, base, taught, tmp_path):  # noqa: F811
    run, directory = tmp_path / "run", shutil.copytree(taught, tmp_path / "longer")
    with make({"max_steps": 1}, teacher_adapter=directory) as trainer:
        trainer.train()
    talk = Conversation(open_trained(run), **TALK)
    shutil.rmtree(directory)
    with pytest.raises(AdapterRejectedError, match="no such directory"):
        talk.with_teacher()
    saved_adapter(base, directory, 2)
    with pytest.raises(ConfigConflictError, match="longer is another adapter"):
        Conversation(open_trained(run), **TALK).with_teacher()

    def with_facts(**facts):
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(config | {"teacher": facts}))
        return Conversation(open_trained(run), **TALK)

    with pytest.raises(ConfigConflictError, match="stored"):
        with_facts(kind="model", digest="0").with_teacher()
    with pytest.raises(BaseIncompleteError):
        with_facts(kind="model", digest="0", path=str(tmp_path / "nowhere")).with_teacher()
    with pytest.raises(ConfigConflictError, match="distillation"):
        with_facts().with_teacher()
    monkey = with_facts(kind="server", url="http://127.0.0.1:9", digest="0")  # an earlier version names no model
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("qlora_rl.inference.chat._WAIT_S", 0.1)
        with pytest.raises(EngineBrokenError, match="stayed away"):
            monkey.with_teacher()


def test_what_a_teacher_reads_is_known_where_all_rows_make_it_alike():
    asked = ["1+1=", "2+2="]
    assert reading(asked, [f"So: {each} {each}" for each in asked]) == {"before": [], "text": ["So: ", " ", ""]}
    assert reading(asked, ["1+1=2\n1+1=", "2+2=4\n2+2="]) is None
    assert reading(asked, ["other", "rows"]) is None
    assert reading([[], []], [BEFORE, BEFORE]) is None
    assert reading(asked[:1], ["Hint: 1+1="]) is None  # of one row nobody knows
    talks = [[{"role": "system", "content": "Own."}, {"role": "user", "content": each}] for each in asked]
    told = [[*BEFORE, {"role": "user", "content": f"{each} (shortly)"}] for each in asked]
    assert reading(talks, told) == {"before": BEFORE, "text": ["", " (shortly)"]}
    told[1] = told[1][1:]
    assert reading(talks, told) is None
    assert reading([[{"role": "user", "content": [{"type": "text", "text": "1"}]}]] * 2, talks) is None
