"""The chat model that is made on the spot, from the shell."""

import json

import pytest
from transformers import AutoConfig, AutoTokenizer

from qlora_rl.demo import chat_model


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_a_file_of_questions_becomes_a_qwen3_checkpoint_with_its_chat_template(tmp_path, monkeypatch, capsys):
    rows = write(tmp_path / "rows.jsonl", [{"question": f"{n} + {n}?", "answer": f"#### {2 * n}"} for n in range(8)])
    out = tmp_path / "model"
    monkeypatch.setattr("sys.argv", ["chat_model", str(out), rows, "--steps", "2"])
    chat_model.main()
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert AutoConfig.from_pretrained(out).model_type == "qwen3"
    asked = [{"role": "user", "content": "1 + 1?"}]
    text = AutoTokenizer.from_pretrained(out).apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"


def test_conversations_are_taken_as_they_are_and_a_line_without_one_is_named(tmp_path):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    asked = {"question": "hi", "answer": "ho"}
    assert chat_model.read_conversations(write(tmp_path / "a.jsonl", [{"messages": talk}, asked])) == [talk, talk]
    with pytest.raises(ValueError, match="row 1 holds no conversation"):
        chat_model.read_conversations(write(tmp_path / "b.jsonl", [asked, {"question": "hi", "answer": None}]))


def test_what_the_command_cannot_do_is_a_sentence_and_no_traceback(tmp_path, monkeypatch, capsys):
    talk = {"question": "hi", "answer": "ho"}
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    good, empty, broken = write(tmp_path / "a.jsonl", [talk]), tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    empty.write_text("")
    broken.write_text("question: hi\n")
    said = {
        (full, good): "contains other files. Choose a new or an empty directory.",
        (tmp_path / "out", tmp_path / "none.jsonl"): "there is no file",
        (tmp_path / "out", empty): "is empty. Write one JSON object per line",
        (tmp_path / "out", broken): "its first line is no JSON",
    }
    for (out, rows), sentence in said.items():
        monkeypatch.setattr("sys.argv", ["chat_model", str(out), str(rows), "--steps", "1"])
        with pytest.raises(SystemExit) as ended:
            chat_model.main()
        assert ended.value.code == 1
        assert sentence in capsys.readouterr().err
