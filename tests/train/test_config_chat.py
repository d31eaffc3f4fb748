"""Chat data of a run's file: the token ids are TRL's, and `qlora-rl data` shows them."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
from support import make_model
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_chat_template

from qlora_rl import QLoRADPOTrainer, QLoRASFTTrainer, load_base, prepare_base
from qlora_rl.cli import main
from qlora_rl.commands.data import _ids, _sequences
from qlora_rl.config.launch import load_tokenizer, trl_config, unused_template
from qlora_rl.config.read import read_config
from qlora_rl.config.schema import Data
from qlora_rl.config.text import to_toml
from qlora_rl.data.load import TEMPLATE_COLUMN, load_data
from qlora_rl.engine.fake import FakeEngine
from qlora_rl.errors import ConfigConflictError
from qlora_rl.inference.trained import open_trained

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k" / "train-128.jsonl"
SYSTEM = "End with #### and the number."
CHAT = {
    "train": str(GSM8K),
    "format": "chat",
    "prompt_template": "{question}",
    "system_prompt": SYSTEM,
    "extract": {"answer": r"####\s*(.+)"},
    "limit": 10,
}
SHORT = {"max_steps": 1, "per_device_train_batch_size": 2, "gradient_checkpointing": False}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint with Qwen3's template, which knows `enable_thinking`, and room for 4096 characters."""
    path = make_model(tmp_path_factory.mktemp("models") / "chatting")
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = qwen3_chat_template
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def read(source, tmp_path):
    def read(method, data, train=None, **tables):
        document = {
            "method": method,
            "base": {"model": str(source)},
            "data": data,
            "run": {"dir": str(tmp_path / "run")},
            "train": {**SHORT, **({"num_generations": 2} if method == "grpo" else {}), **(train or {})},
            **({"rewards": [{"use": "numeric_match"}]} if method == "grpo" else {}),
            **tables,
        }
        (tmp_path / "run.toml").write_text(to_toml(document))
        return read_config(tmp_path / "run.toml")

    return read


def loaded(config):
    args = trl_config(config)
    return args, load_data(config.data, has_template_field=hasattr(args, TEMPLATE_COLUMN))[0]


def shown(config, dataset):
    """Token ids as `qlora-rl data` counts them."""
    tokenizer, given = load_tokenizer(config), config.data.chat_template_kwargs
    return [{name: _ids(tokenizer, name, value, given) for name, value in _sequences(row).items()} for row in dataset]


def test_a_template_without_a_system_role_is_said_before_a_base_is_made(source, read, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("qlora_rl.config.launch.prepare_base", lambda *_, **__: pytest.fail("a base was made"))
    strict, file = shutil.copytree(source, tmp_path / "strict"), str(tmp_path / "run.toml")
    tokenizer = AutoTokenizer.from_pretrained(strict)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('no system here') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    tokenizer.save_pretrained(strict)
    read("grpo", CHAT, base={"model": str(strict)})
    for words in (["train", file, "--check"], ["data", file], ["train", file]):
        assert main(words) == 1
        said = capsys.readouterr().err
        assert "prompt of row 0, whose roles are system, user: TemplateError: no system here" in said
        assert "prompt_template in place of system_prompt" in said
    asked = {name: value for name, value in CHAT.items() if name != "system_prompt"}
    read("grpo", asked | {"prompt_template": SYSTEM + " {question}"}, base={"model": str(strict)})
    assert main(["train", file, "--check"]) == 0
    assert "Not checked: rows of train-128.jsonl after the first 1,000, the weights," in capsys.readouterr().err


@pytest.mark.parametrize("thinks", [True, False, None])
def test_the_prompts_of_ten_rows_are_tokenised_as_trl_does(thinks, read, source, make_trainer):
    given = {} if thinks is None else {"enable_thinking": thinks}
    config = read("grpo", CHAT | {"chat_template_kwargs": given}, {"num_generations": 2, "max_completion_length": 3})
    args, dataset = loaded(config)
    assert dataset[0]["prompt"] == [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": dataset[0]["question"]},
    ]
    assert dataset["answer"][:2] == ["72", "10"]
    base = prepare_base(source)
    with FakeEngine(load_base(base), max_model_length=4096) as engine:
        trainer = make_trainer(model=base, rollout=engine, train_dataset=dataset, args=args)
        theirs = trainer._tokenize_prompts(list(dataset["prompt"]))[0]
    tokenizer = AutoTokenizer.from_pretrained(source)
    by_hand = [
        tokenizer.apply_chat_template(row, add_generation_prompt=True, return_dict=True, **given)["input_ids"]
        for row in dataset["prompt"]
    ]
    ours = [row["prompt"] for row in shown(config, dataset)]
    assert len(ours) == 10
    assert ours == theirs == by_hand
    assert (tokenizer.decode(ours[0]).endswith("</think>\n\n")) == (thinks is False)


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("kind", ["prompt and completion", "messages"])
def test_what_sft_imitates_is_tokenised_as_trl_does(kind, thinks, read, source, lora, tmp_path):
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()[:10]]
    if kind == "messages":
        turns = [
            [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}] for r in rows
        ]
        rows = [{"messages": each} for each in turns]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    data = {
        "train": str(file),
        "format": "chat",
        "system_prompt": SYSTEM,
        "chat_template_kwargs": {"enable_thinking": thinks},
        "columns": {} if kind == "messages" else {"prompt": "question", "completion": "answer"},
    }
    config = read("sft", data, {"max_length": 4096})
    args, dataset = loaded(config)
    with QLoRASFTTrainer(model=prepare_base(source), args=args, train_dataset=dataset, peft_config=lora) as trainer:
        theirs = [list(ids) for ids in trainer.train_dataset["input_ids"]]
    ours = [next(iter(row.values())) for row in shown(config, dataset)]
    assert ours == theirs
    assert SYSTEM in load_tokenizer(config).decode(ours[0])


def test_both_sides_of_a_preference_are_tokenised_as_trl_does(read, source, lora, tmp_path):
    rows = [{"prompt": f"{i}+1?", "chosen": str(i + 1), "rejected": "no"} for i in range(4)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    data = {
        "train": str(file),
        "format": "chat",
        "system_prompt": SYSTEM,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    config = read("dpo", data, {"max_length": 4096})
    args, dataset = loaded(config)
    with QLoRADPOTrainer(model=prepare_base(source), args=args, train_dataset=dataset, peft_config=lora) as trainer:
        made = trainer.train_dataset
        theirs = [
            {name: list(row["prompt_ids"]) + list(row[f"{name}_ids"]) for name in ("chosen", "rejected")}
            for row in made
        ]
    assert shown(config, dataset) == theirs


def test_the_command_shows_rows_and_counts_those_that_are_too_long(read, source, tmp_path, capsys):
    read("grpo", CHAT | {"limit": 4}, {"max_completion_length": 100, "vllm_max_model_length": 420})
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert main(["data", str(tmp_path / "run.toml"), "--rows", "1"]) == 0
    out, told = capsys.readouterr()
    assert "     reading the data\n     counting the tokens of 4 rows\n" in told
    assert "train: 4 rows; columns: " in out
    assert SYSTEM in out
    assert "row 0" in out
    assert "row 1" not in out
    counts = [len(_ids(AutoTokenizer.from_pretrained(source), "prompt", [{"role": "system", "content": SYSTEM},
    {"role": "user", "content": json.loads(line)["question"]}],
    {})) for line in GSM8K.read_text().splitlines()[:4]]  # fmt: skip
    over = sum(count > 320 for count in counts)
    assert 0 < over < 4
    assert f"{over} of 4 rows have more than 320 (vllm_max_model_length=420 - max_completion_length=100)" in out
    if max(counts) < 420:
        assert "Their completions are cut off at 420 tokens in all. If these rows matter, raise [train]" in out
    # a prompt of 420 tokens in 420 would end the run
    words = ["--rows", "1", "--set", f"train.vllm_max_model_length={max(counts)}"]
    assert main(["data", str(tmp_path / "run.toml"), *words]) == 0
    assert "1 of them leave no room for a completion, and training stops there" in capsys.readouterr().out
    assert main(["data", str(tmp_path / "run.toml"), "--set", "train.vllm_max_model_length=4096"]) == 0
    assert "cut off" not in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_run_on_chat_data_trains_and_evaluation_uses_its_template(read, source, tmp_path):
    data = CHAT | {
        "columns": {"completion": "answer"},
        "extract": {},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    read("sft", data | {"limit": 4}, {"max_length": 4096})
    assert main(["train", str(tmp_path / "run.toml")]) == 0
    assert open_trained(tmp_path / "run").template_kwargs == {"enable_thinking": False}


def test_a_base_without_a_template_is_rejected_before_it_is_made(read, source, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(source, plain)
    (plain / "chat_template.jinja").unlink()
    config = read("grpo", CHAT, base={"model": str(plain)})
    with pytest.raises(ConfigConflictError, match="chat template"):
        load_tokenizer(config)


TURN = {"role": "user", "content": "?"}


@pytest.mark.parametrize(
    ("rows", "data", "said"),
    [
        ([{"prompt": "a"}, {"prompt": None}], {}, "row 1 has in prompt neither text nor messages"),
        ([{"prompt": None}, {"prompt": "a"}], {}, "row 0 has in prompt neither text nor messages"),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}], {}, "row 1 has in completion"),
        ([{"messages": [TURN]}, {"messages": []}], {"system_prompt": SYSTEM}, "row 1 has in messages"),
        ([{"messages": [{"from": "human", "value": "?"}]}], {}, "row 0 has in messages"),
        ([{"prompt": ["a"]}], {}, "row 0 has in prompt"),
        (
            [{"prompt": [TURN | {"content": [{"type": "text", "text": "?"}]}]}],
            {"system_prompt": SYSTEM},
            "contents of two kinds",
        ),
        ([{"q": "a"}, {"q": None}], {"prompt_template": "{q}!", "format": "plain"}, "row 1 has nothing in q"),
        ([{"q": []}, {"q": ["a?"]}], {"prompt_template": "{q}!"}, "row 0 has in q neither text nor a number, but []"),
        ([{"q": {"a": "?"}}], {"prompt_template": "{q}!"}, "row 0 has in q neither text nor a number, but {'a': '?'}"),
        (
            [{"prompt": "a", "n": None}, {"prompt": "a", "n": 1}],
            {"extract": {"n": ".+"}},
            "in 1 of 2 rows, first in row 0",
        ),
        ([{"prompt": "a", "n": "x"}], {"extract": {"n": r"x(\d)?"}}, "in 1 of 1 rows, first in row 0"),
        (None, {"extract": {"answer": r"\$(\d+)€"}}, "in 10 of 10 rows, first in row 0"),
        (None, {"extract": {"solution": "a"}}, "there is no column 'solution'; there are question, answer"),
        (None, {"prompt_template": None, "columns": {"text": "question"}}, "needs a column prompt"),
        ([{"a": "1", "b": "2"}], {"columns": {"a": "b"}, "format": "plain"}, "there is a column a already, and b"),
        ([{"a": "1"}], {"columns": {"x": "a", "y": "a"}, "format": "plain"}, "a gets two names"),
    ],
)
def test_odd_rows_are_rejected_with_their_number(rows, data, said, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows or [])))
    usual = {"train": str(file), "format": "chat"} if rows else CHAT
    with pytest.raises(ConfigConflictError, match=re.escape(said)):
        load_data(Data(**usual | data))


@pytest.mark.parametrize("broken", ['{"prompt": "a"', "words"])
def test_a_broken_line_is_rejected_with_its_file_and_number_alone(broken, tmp_path, caplog, monkeypatch):
    whole, file = tmp_path / "whole.jsonl", tmp_path / "rows.jsonl"
    whole.write_text('{"prompt": "a"}\n')
    file.write_bytes(b'{"prompt": "a"}\n\n' + broken.encode() + b'\n{"prompt": "a"}\n')
    monkeypatch.setattr(logging.getLogger("datasets"), "handlers", [caplog.handler])
    with pytest.raises(ConfigConflictError, match=re.escape(f"[data] train: {file}:3 is no JSON: ")):
        load_data(Data(train=[str(whole), str(file)]))
    assert not caplog.records


@pytest.mark.parametrize(
    ("row", "data", "wanted"),
    [
        ({"a": 1, "b": 0.5}, {"prompt_template": "{a}+{b}="}, {"prompt": "1+0.5="}),
        ({"a": "1", "b": "2"}, {"columns": {"a": "b", "b": "a"}}, {"a": "2", "b": "1"}),
        ({"a": "Sing.", "b": ""}, {"prompt_template": "{a}\n\n{b}"}, {"prompt": "Sing."}),
    ],
    ids=["numbers", "names are swapped", "an empty input leaves no blank line"],
)
def test_a_template_and_new_names_give_what_they_say(row, data, wanted, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    found = load_data(Data(train=str(file), **data))[0][0]
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "needs the columns messages or prompt and completion; there are other, text"),
        ({"columns": {"prompt": "text", "completion": "other"}, "extract": {"answer": "."}}, "[data] extract"),
        ({"columns": {"other": "text"}}, "there is a column other already, and text"),
    ],
)
def test_columns_that_do_not_fit_are_known_before_anything_is_loaded(data, said, read, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a", "other": "b"}))
    with pytest.raises(ConfigConflictError) as error:
        read("sft", {"train": str(tmp_path / "rows.jsonl"), "format": "chat"} | data)
    assert said in str(error.value)


def test_what_is_sampled_is_the_prompt_alone_whatever_else_a_row_has():
    row = {"prompt": "a", "completion": "b"}
    assert _sequences(row) == {"completion": "ab"}
    assert _sequences(row, samples=True) == {"prompt": "a"}
    for odd in ({"prompt": None}, {"prompt": "a", "completion": [TURN]}):
        with pytest.raises(ConfigConflictError, match="reading the rows"):
            _sequences(odd)


def test_messages_keep_their_own_system_message():
    from qlora_rl.data.rows import as_conversation

    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "?"}]
    assert as_conversation({"prompt": own, "answer": "1"}, SYSTEM) == {"prompt": own}
    pair = as_conversation({"chosen": own[1:], "rejected": own[1:]}, SYSTEM)
    assert all(side[0] == {"role": "system", "content": SYSTEM} for side in pair.values())


@pytest.mark.parametrize(
    ("data", "warns"),
    [
        ({"train": [{"prompt": "1+1=", "answer": "2"}]}, True),
        ({"train": [{"prompt": "1+1=", "answer": "2"}], "format": "chat"}, False),
        ({"train": [{"messages": [{"role": "user", "content": "a"}]}]}, False),
    ],
)
def test_a_chat_template_that_is_not_used_is_said(data, warns, source, tmp_path):
    bare = shutil.copytree(source, tmp_path / "bare", ignore=shutil.ignore_patterns("*.jinja"))
    tokenizer = AutoTokenizer.from_pretrained(bare)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in data["train"]))
    method = "sft" if "messages" in data["train"][0] else "grpo"
    for model, has_template in ((source, True), (bare, False)):
        document = {"method": method, "base": {"model": str(model)}, "data": {**data, "train": str(file)}}
        document |= {"rewards": [{"use": "exact_match"}]} if method == "grpo" else {}
        (tmp_path / "run.toml").write_text(to_toml(document))
        said = unused_template(read_config(tmp_path / "run.toml", asks_trl=False))
        assert ("format = 'plain' does not apply it" in said) is (warns and has_template)


@pytest.mark.parametrize(
    ("name", "text", "column", "wanted"),
    [
        (
            "a.json",
            '[\n {"prompt": "1+1=", "answer": "2"},\n {"prompt": "1+2=", "answer": "3"}\n]\n',
            "prompt",
            ["1+1=", "1+2="],
        ),
        ("a.csv", 'prompt,answer\n"a, b",2\nc,3\n', "prompt", ["a, b", "c"]),
        (
            "a.jsonl",
            '{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}\n',
            "messages",
            [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]],
        ),
    ],
)
def test_data_as_people_have_it_is_read(name, text, column, wanted, tmp_path):
    (tmp_path / name).write_text(text)
    rows, _ = load_data(Data(train=str(tmp_path / name)))
    assert list(rows[column]) == wanted
    method = "grpo" if column == "prompt" else "sft"
    document = {"method": method, "base": {"model": "a/b"}, "data": {"train": name}}
    document |= {"rewards": [{"use": "exact_match"}]} if method == "grpo" else {}
    (tmp_path / "run.toml").write_text(to_toml(document))
    assert read_config(tmp_path / "run.toml", asks_trl=False).data.train == str(tmp_path / name)
