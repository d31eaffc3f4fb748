"""`recommend --toml`: a whole run's file from a model, a card and a dataset."""

import json
from pathlib import Path

import pytest
from PIL import Image
from runfile import ROOT
from transformers import AutoTokenizer

from qlora_rl.advice import Chat, chat_of, tables_for
from qlora_rl.cli import main
from qlora_rl.config.read import read_config
from qlora_rl.data.known import _known_datasets
from qlora_rl.data.load import load_data
from qlora_rl.errors import ConfigConflictError
from qlora_rl.methods import METHODS

GSM8K = ROOT / "tests" / "data" / "gsm8k" / "train-128.jsonl"
MODEL = ["Qwen/Qwen3-8B", "--gpu-memory", "24"]

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
DIGITS = "End your answer with the final number in digits."
BARE = "Answer with the final answer only, without explanation."


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


@pytest.mark.parametrize("task", ["grpo", "rloo", "sft", "distill"])
def test_every_task_makes_a_file_that_train_takes(task, capsys, tmp_path):
    for data in ("openai/gsm8k", str(GSM8K)):
        config = read_config(made(capsys, tmp_path, *MODEL, "--task", task, "--data", data))
        assert config.method == task
        assert config.train["learning_rate"] == METHODS[task].learning_rate
        assert bool(config.rewards) is METHODS[task].scores


@pytest.mark.parametrize(
    ("task", "row", "columns"),
    [
        ("dpo", {"question": "1+1=", "chosen": "2", "rejected": "3"}, {}),
        ("kto", {"question": "1+1=", "chosen": "2", "rejected": "3"}, {}),
        ("kto", {"question": "1+1=", "response": "2", "label": True}, {"completion": "response"}),
    ],
)
def test_dpo_makes_one_of_pairs_and_kto_of_pairs_or_labels(task, row, columns, capsys, tmp_path):
    config = read_config(made(capsys, tmp_path, *MODEL, "--task", task, "--data", rows(tmp_path, row)))
    assert (config.method, config.data.prompt_template, config.data.columns) == (task, "{question}", columns)
    assert config.data.format == "chat"


def test_a_student_is_shown_the_answer_unless_another_teacher_is_named(capsys, tmp_path):
    told = [*MODEL, "--task", "distill", "--data", str(GSM8K)]
    config = read_config(made(capsys, tmp_path, *told))
    assert config.teacher.adapter == "policy"
    assert config.run.gpu_memory == 24
    train, _ = load_data(config.data, teacher=config.teacher)
    asked, read = (train[0][name][-1]["content"] for name in ("prompt", "teacher_prompt"))
    assert read == f"{asked}\n\n(The answer is {train[0]['answer']}.)"
    second = read_config(made(capsys, tmp_path, *told, "--teacher", "Qwen/Qwen3-8B"))
    assert (second.teacher.model, second.teacher.adapter) == ("Qwen/Qwen3-8B", None)
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "run" / "adapter" / name).write_text("{}")
    held = read_config(made(capsys, tmp_path, *told, "--teacher", str(tmp_path / "run")))
    assert (held.teacher.model, held.teacher.adapter) == (None, str(tmp_path / "run"))
    with pytest.raises(ConfigConflictError, match="--teacher RUN"):
        tables_for(rows(tmp_path, {"prompt": "a"}), "distill")
    assert main(["recommend", *MODEL, "--task", "sft", "--teacher", "a"]) == 2


@pytest.mark.parametrize("task", ["grpo", "sft"])
def test_a_dataset_with_images_for_a_model_that_takes_them(task, capsys, tmp_path):
    data = rows(tmp_path, {"question": "sum?", "image": "a.png", "answer": "12"})
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    wanted = ("Qwen/Qwen2.5-VL-7B-Instruct", "--gpu-memory", "80", "--task", task, "--data", data)
    config = read_config(made(capsys, tmp_path, *wanted))
    assert (config.data.images, config.data.format, config.data.prompt_template) == ("image", "chat", "{question}")
    dataset, _ = load_data(config.data)
    assert [image.size for image in dataset[0]["images"]] == [(32, 32)]
    assert main(["recommend", *MODEL, "--task", task, "--data", data, "--toml"]) == 1
    assert "Use a vision-language model (docs/images.md)" in capsys.readouterr().err


def test_a_model_without_a_template_gets_plain_text_with_the_same_instruction(capsys, tmp_path):
    file = made(capsys, tmp_path, "Qwen/Qwen3-8B-Base", "--gpu-memory", "24", "--data", "openai/gsm8k")
    data = read_config(file).data
    assert (data.format, data.system_prompt, data.chat_template_kwargs) == ("plain", None, {})
    assert data.prompt_template.startswith("Solve the problem step by step.")
    assert data.prompt_template.endswith("\n\n{question}\n")


@pytest.mark.parametrize(
    ("task", "row", "data", "rewards"),
    [
        ("grpo", {"prompt": "1+1=", "answer": "2"}, {"system_prompt": DIGITS},
         [{"use": "numeric_match"}]),
        ("grpo", {"problem": "1+1=", "solution": 2}, {"prompt_template": "{problem}", "system_prompt": DIGITS},
         [{"use": "numeric_match", "arguments": {"column": "solution"}}]),
        ("rloo", {"query": "capital?", "answer": "Paris"}, {"prompt_template": "{query}", "system_prompt": BARE},
         [{"use": "exact_match"}]),
        ("grpo", {"question": "1+1=", "answer": "It is two.\n#### two"},
         {"prompt_template": "{question}", "extract": {"answer": r"####\s*(.+)"}, "system_prompt": BARE},
         [{"use": "exact_match"}]),
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


@pytest.mark.parametrize("column", ["question", "prompt"])
def test_answers_in_the_form_of_gsm8k_get_its_instruction_and_its_rewards(column, tmp_path):
    file, gsm8k = rows(tmp_path, {column: "1+1=", "answer": "It is 2.\n#### 2"}), tables_for("openai/gsm8k", "grpo")
    found = tables_for(file, "grpo")
    assert [each["use"] for each in found.rewards] == ["numeric_match", "format_match"]
    assert (found.rewards, found.length) == (gsm8k.rewards, gsm8k.length)
    same = ("format", "system_prompt", "extract")
    assert [found.data[name] for name in same] == [gsm8k.data[name] for name in same]
    plain = tables_for(file, "grpo", Chat(is_there=False)).data
    assert plain["prompt_template"] == f"{gsm8k.data['system_prompt']}\n\n{{{column}}}\n"
    talk = rows(tmp_path, {"prompt": [{"role": "user", "content": "1+1="}], "answer": "#### 2"})
    assert "prompt_template" not in tables_for(talk, "grpo", Chat(takes_system=False)).data


def test_whole_texts_have_no_template(tmp_path):
    file = rows(tmp_path, {"text": "once upon a time"})
    assert tables_for(file, "sft").data == {"train": file}


@pytest.mark.parametrize(
    ("task", "row", "error", "said"),
    [
        ("grpo", {"answer": "2"}, ConfigConflictError, "no column with a prompt .*there are answer"),
        (
            "grpo",
            {"q": "1+1=", "a": "2"},
            ConfigConflictError,
            r'columns = { prompt = "q", answer = "a" } into its \[data',
        ),
        ("sft", {"q": "1+1=", "a": "2"}, ConfigConflictError, r'columns = { prompt = "q", completion = "a" }'),
        ("grpo", {"q": "1+1=", "answer": "2"}, ConfigConflictError, r'columns = { prompt = "q" }'),
        (
            "grpo",
            {"messages": TALK},
            ConfigConflictError,
            "messages holds whole conversations.*add --task sft; grpo nee",
        ),
        (
            "rloo",
            {"conversations": [{"from": "human", "value": "a"}]},
            ConfigConflictError,
            "there are messages. messages holds whole conversations .*called conversations.*--task sft; rloo needs",
        ),
        ("grpo", {"conversations": "a"}, ConfigConflictError, "conversations holds whole conversations: to imitate"),
        ("grpo", {"prompt": "a"}, ConfigConflictError, "an answer to compare with .*--reward path.py:function"),
        ("grpo", {"prompt": "a", "answer": "b" * 50}, ConfigConflictError, "answers of up to 50 characters"),
        ("sft", {"question": "a"}, ConfigConflictError, "no column with an answer"),
        ("dpo", {"prompt": "a", "chosen": "b"}, ConfigConflictError, "no column with chosen and rejected"),
        ("kto", {"prompt": "a", "completion": "b"}, ConfigConflictError, "or label, as kto needs"),
        ("grpo", {"prompt": "a", "image": "b"}, ConfigConflictError, r"images \(image\), and the model takes none"),
        (
            "dpo",
            {"images": ["b"], "chosen": "a", "rejected": "c"},
            ConfigConflictError,
            r"images \(images\), and the model takes none",
        ),
    ],
)
def test_what_is_missing_is_said_with_the_columns_that_are_there(task, row, error, said, tmp_path):
    with pytest.raises(error, match=said):
        tables_for(rows(tmp_path, row), task)


def test_a_file_of_another_kind_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qa.xlsx").write_text("question,answer\n1+1=,2\n")
    assert main(["recommend", *MODEL, "--data", "qa.xlsx", "--toml"]) == 1
    assert "choosing the data: qa.xlsx is none of .jsonl, .json, .csv, .parquet" in capsys.readouterr().err


def test_a_reward_of_ones_own_takes_the_place_of_the_chosen_one(tmp_path):
    file = rows(tmp_path, {"prompt": "a", "answer": "b" * 50})
    with pytest.raises(ConfigConflictError, match=r"mine\.py: No such file"):
        tables_for(file, "grpo", reward=f"{tmp_path}/mine.py:score")
    (tmp_path / "mine.py").write_text("def score(completions): ...\n")
    chosen = tables_for(file, "grpo", reward=f"{tmp_path}/mine.py:score")
    assert chosen.rewards == [{"use": f"{tmp_path}/mine.py:score"}]


def test_messages_need_a_model_with_a_template(tmp_path):
    file = rows(tmp_path, {"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(ConfigConflictError, match="chat template"):
        tables_for(file, "sft", Chat(is_there=False))


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


def test_a_template_without_system_messages_gets_the_instruction_in_the_users_turn(capsys, tmp_path):
    data = read_config(made(capsys, tmp_path, "google/gemma-2-2b-it", "--data", "openai/gsm8k")).data
    assert (data.format, data.system_prompt) == ("chat", None)
    assert data.prompt_template.startswith("Solve the problem")
    assert data.prompt_template.endswith("number.\n\n{question}")


TEMPLATES = {
    "": Chat(is_there=False),
    "{{ messages[0].content }}": Chat(),
    "{% if enable_thinking %}a{% endif %}": Chat(switch="enable_thinking"),
    "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}": Chat(takes_system=False),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_template_of_a_local_model_is_looked_at(template, model_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = template or None
    tokenizer.save_pretrained(tmp_path)
    assert chat_of(str(tmp_path)) == TEMPLATES[template]


def test_options_are_in_the_first_line_and_in_the_file(capsys, tmp_path):
    options = ["--data", "openai/gsm8k", "--subset", "socratic", "--max-length", "512", "--trust-remote-code"]
    file = made(capsys, tmp_path, *MODEL, *options)
    first = file.read_text().splitlines()[0]
    assert all(option in first for option in options)
    config = read_config(file)
    assert (config.data.subset, config.base.trust_remote_code) == ("socratic", True)
    assert config.train["vllm_max_model_length"] == 512


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--toml"], 2, "--data"),
        (["--data", "openai/gsm8k"], 2, "--data"),
        (["--subset", "main"], 2, "--data"),
        (["--reward", "exact_match"], 2, "--data"),
        (["--gpu-memory", "4", "--data", "openai/gsm8k", "--toml"], 3, ""),
    ],
)
def test_options_that_lack_something_or_do_not_fit_end_with_their_code(options, code, said, capsys):
    assert main(["recommend", *MODEL, *options]) == code
    assert said in capsys.readouterr().err


def test_a_file_in_a_directory_that_is_a_link_names_what_there_is(model_dir, capsys, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "far" / "deep" / "runs").mkdir(parents=True)
    (tmp_path / "here" / "out").symlink_to(tmp_path / "far" / "deep" / "runs")
    monkeypatch.chdir(tmp_path / "here")
    Path("tiny").symlink_to(model_dir)
    rows(Path(), {"question": "capital?", "answer": "Paris"})
    assert main(["recommend", "tiny", "--data", "rows.jsonl", "--device", "cpu", "--out", "out/run.toml"]) == 0
    config = read_config("out/run.toml", asks_trl=False)
    assert config.base.model == str(tmp_path / "here" / "tiny")
    assert config.data.train == str(tmp_path / "here" / "rows.jsonl")


def test_a_file_elsewhere_names_model_data_and_reward_from_where_it_is(model_dir, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(model_dir)
    rows(tmp_path, {"question": "capital?", "answer": "Paris"})
    (tmp_path / "mine.py").write_text("def score(completions, **_): return [0.0 for _ in completions]\n")
    out = tmp_path / "runs" / "a b" / "run.toml"
    given = ["recommend", "models/tiny", "--data", "rows.jsonl", "--reward", "mine.py:score", "--device", "cpu"]
    assert main([*given, "--out", str(out.relative_to(tmp_path))]) == 0
    said = capsys.readouterr().out
    assert "qlora-rl train 'runs/a b/run.toml'" in said
    assert "method" not in said
    text = out.read_text()
    assert 'train = "../../rows.jsonl"' in text
    config = read_config(out, asks_trl=False)
    assert config.base.model == str(tmp_path / "models" / "tiny")
    assert config.data.train == str(tmp_path / "rows.jsonl")
    assert config.rewards[0].use == f"{tmp_path / 'mine.py'}:score"
    before = out.stat().st_mtime_ns
    assert main([*given, "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert out.stat().st_mtime_ns == before
    assert main([*given, "--toml", "--max-length", "64"]) == 0  # on stdout as typed
    assert 'train = "rows.jsonl"' in capsys.readouterr().out


def test_a_config_is_no_model_to_train(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert main(["recommend", str(tmp_path / "config.json"), "--data", "openai/gsm8k", "--toml"]) == 2
    assert "a config.json is none" in capsys.readouterr().err
