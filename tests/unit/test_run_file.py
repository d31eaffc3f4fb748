"""`recommend --toml`: a whole run's file from a model, a card and a dataset."""

import json

import pytest
from runfile import ROOT

from qlora_rl.advice import tables_for
from qlora_rl.cli import main
from qlora_rl.config.data import _known_datasets
from qlora_rl.config.read import read_config
from qlora_rl.config.schema import METHODS
from qlora_rl.contracts import LEARNING_RATES
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError

GSM8K = ROOT / "tests" / "data" / "gsm8k" / "train-128.jsonl"
MODEL = ["Qwen/Qwen3-8B", "--gpu-memory", "24"]


def rows(directory, *rows):
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def made(capsys, tmp_path, *arguments):
    assert main(["recommend", *arguments, "--toml"]) == 0
    file = tmp_path / "run.toml"
    file.write_text(capsys.readouterr().out)
    return file


def test_the_example_is_what_the_command_prints(capsys, tmp_path):
    file = made(capsys, tmp_path, *MODEL, "--task", "grpo", "--data", "openai/gsm8k")
    assert file.read_text() == (ROOT / "examples" / "gsm8k.toml").read_text()
    config = read_config(file)  # TRL and vLLM agree
    assert (config.run.gpu_memory, config.data.subset, config.data.format) == (24, "main", "chat")
    assert config.data.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("task", ["grpo", "rloo", "sft"])
def test_every_task_makes_a_file_that_train_takes(task, capsys, tmp_path):
    for data in ("openai/gsm8k", str(GSM8K)):
        config = read_config(made(capsys, tmp_path, *MODEL, "--task", task, "--data", data))
        assert config.method == task
        assert config.train["learning_rate"] == LEARNING_RATES[task]
        assert bool(config.rewards) is METHODS[task].scores


def test_dpo_makes_one_of_pairs(capsys, tmp_path):
    pairs = rows(tmp_path, {"question": "1+1=", "chosen": "2", "rejected": "3"})
    config = read_config(made(capsys, tmp_path, *MODEL, "--task", "dpo", "--data", pairs))
    assert (config.method, config.data.prompt_template, config.data.format) == ("dpo", "{question}", "chat")
    with pytest.raises(ConfigConflictError, match="is for --task sft or grpo; it has no columns that dpo learns from"):
        tables_for("openai/gsm8k", "dpo")


def test_a_model_without_a_template_gets_plain_text_with_the_same_instruction(capsys, tmp_path):
    file = made(capsys, tmp_path, "Qwen/Qwen3-8B-Base", "--gpu-memory", "24", "--data", "openai/gsm8k")
    data = read_config(file).data
    assert (data.format, data.system_prompt, data.chat_template_kwargs) == ("plain", None, {})
    assert data.prompt_template.startswith("Solve the problem step by step.")
    assert data.prompt_template.endswith("\n\n{question}\n")


@pytest.mark.parametrize(
    ("task", "row", "data", "rewards"),
    [
        ("grpo", {"prompt": "1+1=", "answer": "2"}, {}, [{"use": "numeric_match"}]),
        ("grpo", {"problem": "1+1=", "solution": 2}, {"prompt_template": "{problem}"},
         [{"use": "numeric_match", "arguments": {"column": "solution"}}]),
        ("rloo", {"query": "capital?", "answer": "Paris"}, {"prompt_template": "{query}"}, [{"use": "exact_match"}]),
        ("grpo", {"question": "1+1=", "answer": "It is 2.\n#### 2"},
         {"prompt_template": "{question}", "extract": {"answer": r"####\s*(.+)"}}, [{"use": "numeric_match"}]),
        ("sft", {"instruction": "add", "input": "1+1", "output": "2"},
         {"prompt_template": "{instruction}\n\n{input}", "columns": {"completion": "output"}}, []),
        ("sft", {"prompt": "1+1=", "completion": "2"}, {}, []),
        ("sft", {"messages": [{"role": "user", "content": "a"}]}, {}, []),
        ("dpo", {"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]}, {}, []),
    ],
)  # fmt: skip
def test_columns_of_an_unknown_dataset_are_looked_at(task, row, data, rewards, tmp_path):
    file = rows(tmp_path, row)
    found = tables_for(file, task)
    assert found.data == {"train": file, **data, "format": "chat"}
    assert found.rewards == rewards


def test_whole_texts_have_no_template(tmp_path):
    file = rows(tmp_path, {"text": "once upon a time"})
    assert tables_for(file, "sft").data == {"train": file}


@pytest.mark.parametrize(
    ("task", "row", "error", "said"),
    [
        ("grpo", {"answer": "2"}, ConfigConflictError, "no column with a prompt .*there are answer"),
        ("grpo", {"prompt": "a"}, ConfigConflictError, "an answer to compare with .*--reward path.py:function"),
        ("grpo", {"prompt": "a", "answer": "b" * 50}, ConfigConflictError, "answers of up to 50 characters"),
        ("sft", {"question": "a"}, ConfigConflictError, "no column with an answer"),
        ("dpo", {"prompt": "a", "chosen": "b"}, ConfigConflictError, "no column with chosen and rejected"),
        ("grpo", {"prompt": "a", "image": "b"}, NotYetSupportedError, "holds images"),
    ],
)
def test_what_is_missing_is_said_with_the_columns_that_are_there(task, row, error, said, tmp_path):
    with pytest.raises(error, match=said):
        tables_for(rows(tmp_path, row), task)


def test_a_reward_of_ones_own_takes_the_place_of_the_chosen_one(tmp_path):
    file = rows(tmp_path, {"prompt": "a", "answer": "b" * 50})
    assert tables_for(file, "grpo", reward="mine.py:score").rewards == [{"use": "mine.py:score"}]


def test_messages_need_a_model_with_a_template(tmp_path):
    file = rows(tmp_path, {"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(ConfigConflictError, match="holds messages, and the model has no chat template"):
        tables_for(file, "sft", is_chat=False)


@pytest.mark.parametrize("name", list(_known_datasets()))
def test_what_is_known_of_a_dataset_makes_a_right_file(name, capsys, tmp_path):
    for task in ("grpo", "sft", "dpo"):
        if task in _known_datasets()[name]:
            read_config(made(capsys, tmp_path, *MODEL, "--task", task, "--data", name), asks_trl=False)
            split = ["--split", "other"]
            assert (
                read_config(made(capsys, tmp_path, *MODEL, "--task", task, "--data", name, *split)).data.split
                == "other"
            )


def test_a_file_needs_its_data(capsys):
    assert main(["recommend", *MODEL, "--toml"]) == 2
    assert "--toml and --data belong together" in capsys.readouterr().err
    assert main(["recommend", "Qwen/Qwen3-8B", "--gpu-memory", "4", "--data", "openai/gsm8k", "--toml"]) == 3
    assert "does not fit" in capsys.readouterr().out
