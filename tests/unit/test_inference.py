"""A trained run: opened, talked to, and the arithmetic of its evaluation."""

import io
import json
import math
import shutil
from datetime import date
from pathlib import Path

import pytest
import torch
from kinds import FULL_WEIGHTS
from peft import get_peft_model_state_dict
from trained import make_run

from qlora_rl import ConfigConflictError, RunDirectoryError, SamplingSpec, cpu_matmul, open_trained
from qlora_rl.adapter.store import read_tensors
from qlora_rl.cli import main
from qlora_rl.config.text import to_toml
from qlora_rl.cpu_features import SETTING
from qlora_rl.data.load import load_data, read_file
from qlora_rl.inference.chat import Conversation
from qlora_rl.inference.evaluation import Compared, Evaluation, Mean, compare, evaluate, save
from qlora_rl.inference.first_look import FirstLook
from qlora_rl.inference.rows import as_trained
from qlora_rl.inference.sampling import choose, precision
from qlora_rl.report import write_report
from qlora_rl.rewards.load import load_reward, reward_name

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k" / "train-128.jsonl"


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    return make_run(base, tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.parametrize(
    ("place", "named"),
    [
        (lambda run, model, there: there, r"config\.json"),
        (lambda run, model, there: there / "nothing", "no such directory"),
        (lambda run, model, there: with_config(there, "{}"), "does not name a base"),
        (lambda run, model, there: with_config(there, (run / "config.json").read_text()), "adapter/"),
        (lambda run, model, there: model, "it is a model"),
        (lambda run, model, there: shutil.copytree(run / "adapter", there / "adapter"), "it is an adapter"),
    ],
)
def test_what_is_no_run_is_rejected_as_what_it_is(run, model_dir, tmp_path, place, named):
    with pytest.raises(RunDirectoryError, match=named):
        open_trained(place(run, model_dir, tmp_path))


def with_config(directory, text):
    (directory / "config.json").write_text(text)
    return directory


# Four share matrices between layers, or hold some in buffers; PEFT's BD-LoRA is dense on 4-bit linears.
@pytest.mark.parametrize("kind", ["VERA", "PVERA", "VBLORA", "UNILORA", "bdlora"])
def test_runs_whose_tensors_stand_elsewhere_than_those_of_lora_are_opened(kind, base, tmp_path):
    run = make_run(base, tmp_path / "run", FULL_WEIGHTS[kind].config())
    held, saved = get_peft_model_state_dict(open_trained(run).load()), read_tensors(run / "adapter")
    assert held.keys() == saved.keys()
    assert all(torch.equal(held[name], saved[name]) for name in held)


@pytest.mark.parametrize(
    ("trained_with", "longest"),
    [
        ({"max_completion_length": 512}, 512),
        ({"max_new_tokens": 64}, 64),  # online DPO
        ({"max_completion_length": None}, 256),
        ({}, 256),  # SFT and DPO sample nothing
    ],
)
def test_an_answer_may_be_as_long_as_in_the_runs_training(run, tmp_path, monkeypatch, trained_with, longest):
    path = shutil.copytree(run, tmp_path / "run")
    config = json.loads((path / "config.json").read_text())
    config["grpo"] |= trained_with
    (path / "config.json").write_text(json.dumps(config))
    assert open_trained(path).max_tokens == longest

    lengths = []
    found = Evaluation({}, (1.0, 1.0), (0.0, 0.0), 1, 1, SamplingSpec(), [])
    monkeypatch.setattr(
        "qlora_rl.inference.evaluation.evaluate",
        lambda t, r, rewards, *, sampling, **_: lengths.append(sampling.max_tokens) or found,
    )
    monkeypatch.setattr(
        "qlora_rl.inference.chat.sample", lambda model, ids, tokens, *_, **__: lengths.append(tokens) or iter(())
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n1+1=\n"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = ["eval", str(path), "--data", str(tmp_path / "rows.jsonl"), "--reward", "numeric", "--no-save"]
    assert main(words) == main([*words, "--max-tokens", "7"]) == main(["chat", str(path)]) == 0
    assert lengths == [longest, 7, longest, longest]


# --- talking ----------------------------------------------------------------------------------------------------------


def test_greedy_answers_are_those_of_the_policy_and_of_the_base(run):
    trained = open_trained(run)
    for is_base_only, model in ((False, trained.load()), (True, trained.load_base_alone())):
        talk = Conversation(trained, is_base_only=is_base_only, temperature=0.0, max_tokens=6, uses_template=False)
        ids = talk.tokenizer("12+34=").input_ids
        with torch.autocast("cpu", torch.bfloat16):
            sampled = model.generate(
                input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=6, do_sample=False
            )
        assert "".join(talk.answer("12+34=")) == talk.tokenizer.decode(sampled[0, len(ids) :], skip_special_tokens=True)


@pytest.mark.parametrize(
    "recorded",
    [
        lambda text, ids: {"ends": [1, ids[0]]},  # its tokenizer may have had another EOS than the base's
        lambda text, ids: {"grpo": {"learning_rate": 1e-5, "generation_kwargs": {"stop_token_ids": [ids[0]]}}},
        lambda text, ids: {"grpo": {"learning_rate": 1e-5, "generation_kwargs": {"stop": ["no such text", text[0]]}}},
        lambda text, ids: {"grpo": {"learning_rate": 1e-5, "generation_kwargs": {"stop": text[0]}}},
    ],
)
def test_an_answer_ends_where_the_run_s_completions_did(run, tmp_path, recorded):
    path = shutil.copytree(run, tmp_path / "run")
    ask = {"temperature": 0.0, "max_tokens": 6, "uses_template": False}
    talk = Conversation(open_trained(path), **ask)
    whole = "".join(talk.answer("12+34="))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | recorded(whole, talk.tokenizer(whole).input_ids)))
    talk = Conversation(open_trained(path), **ask)
    assert "".join(talk.answer("12+34=")) == whole[:1] != whole
    assert talk.cut_off_after is None


def test_a_stop_text_may_be_made_of_several_tokens_or_be_a_special_one(run, tmp_path):
    path = shutil.copytree(run, tmp_path / "run")
    ask = {"temperature": 0.0, "max_tokens": 6, "uses_template": False}
    talk = Conversation(open_trained(path), **ask)
    whole = "".join(talk.answer("12+34="))
    config = json.loads((path / "config.json").read_text())
    special = talk.tokenizer.pad_token
    for seen in (False, True):
        asked = {"stop": [whole[:2], special], "skip_special_tokens": not seen}
        config["grpo"]["generation_kwargs"] = asked
        (path / "config.json").write_text(json.dumps(config))
        talk = Conversation(open_trained(path), **ask)
        assert "".join(talk.answer("12+34=")) == whole[:2] != whole
        assert talk._holds_stop([40, talk.tokenizer.pad_token_id]) == seen


def test_a_server_s_clients_are_told_which_texts_to_stop_at(run, tmp_path, monkeypatch, capsys):
    path, served = shutil.copytree(run, tmp_path / "run"), {}
    config = json.loads((path / "config.json").read_text())
    config["grpo"]["generation_kwargs"] = {"stop": "\n\n", "stop_token_ids": [48]}
    (path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("qlora_rl.engine.server.serve", lambda base, **options: served.update(options))
    assert main(["serve", str(path)]) == 0
    assert served["ends"] == [48]
    assert r"stop=['\n\n']" in capsys.readouterr().err


def test_a_talk_remembers_what_was_said_and_forgets_it(run, monkeypatch):
    talk = Conversation(open_trained(run), temperature=0.0, max_tokens=4)
    assert talk.uses_template
    seen = []
    monkeypatch.setattr(
        "qlora_rl.inference.chat.model_inputs",
        lambda tokenizer, prompt: seen.append(prompt) or {"input_ids": tokenizer("1", return_tensors="pt").input_ids},
    )
    first = "".join(talk.answer("one"))
    list(talk.answer("two"))
    assert [m["content"] for m in seen[1]] == ["one", first, "two"]
    talk.forget()
    list(talk.answer("three"))
    assert [m["content"] for m in seen[2]] == ["three"]


def test_a_seed_gives_the_same_answer_again(run):
    said = {
        "".join(Conversation(open_trained(run), temperature=1.0, max_tokens=12, seed=seed).answer("1+"))
        for seed in (3, 3, 4)
    }
    assert len(said) == 2


def test_a_talk_and_an_evaluation_take_the_chat_template_that_the_run_was_trained_with(run, tmp_path, monkeypatch):
    """TRL takes it from the tokenizer that it was given; the base keeps its own."""
    from qlora_rl import FakeEngine, load_base
    from qlora_rl.inference.evaluation import both_sides

    asked = []

    class Engine(FakeEngine):
        def __init__(self, base, **_):
            super().__init__(load_base(base), max_model_length=64)

        def generate(self, prompts, *arguments, **named):
            asked.extend(prompts)
            return super().generate(prompts, *arguments, **named)

    path = with_template(shutil.copytree(run, tmp_path / "run"), "<{{ messages[0]['content'] }}>")
    talk = Conversation(open_trained(path), temperature=0.0, max_tokens=2)
    expected = talk.tokenizer("<1+1=>").input_ids
    monkeypatch.setattr(talk, "_sample", lambda inputs: asked.append(inputs["input_ids"][0].tolist()) or iter(()))
    list(talk.answer("1+1="))
    monkeypatch.setattr("qlora_rl.engine.local.LocalEngine", Engine)
    rows = [{"prompt": [{"role": "user", "content": "1+1="}]}]
    with both_sides(open_trained(path), rows, SamplingSpec(2), {}) as (ask, _):
        ask("base", {}, 1)
    assert asked == [expected, expected]


def with_template(run, template):
    """As a run is whose tokenizer had another chat template than the base's."""
    config = json.loads((run / "config.json").read_text())
    return with_config(run, json.dumps(config | {"chat_template": template}))


def test_from_a_pipe_each_line_gets_its_own_answer(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("12+34=\n56+11=\n12+34=\n"))
    assert main(["chat", str(run), "--temperature", "0", "--max-tokens", "4", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["prompt"] for each in found] == ["12+34=", "56+11=", "12+34="]
    assert found[0] == found[2]  # nothing of the line before is in the next
    monkeypatch.setattr("sys.stdin", io.StringIO("12+34=\n56+11=\n"))
    assert main(["chat", str(run), "--temperature", "0", "--max-tokens", "4"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "".join(f"{each['answer']}\n" for each in found[:2])  # for a file: answers alone
    assert [line for line in shown.err.splitlines() if line.startswith("> ")] == ["> 12+34=", "> 56+11="]


def test_an_answer_that_was_cut_off_says_so(run, monkeypatch, capsys):
    talk = Conversation(open_trained(run), temperature=0.0, max_tokens=200, uses_template=False)
    end = talk.tokenizer.eos_token_id

    def answers(*tokens):
        monkeypatch.setattr("qlora_rl.inference.chat.sample", lambda *_, **__: iter(tokens))
        list(talk.answer("1+1="))
        return talk.cut_off_after

    assert answers(40, 41, end) is None
    assert answers(40, 41) == 2
    monkeypatch.undo()
    list(talk.answer("1" * 120))
    assert talk.cut_off_after in (None, 8)  # the model has 128 positions

    monkeypatch.setattr(
        "qlora_rl.inference.chat.sample", lambda model, ids, tokens, *_, **__: iter([40] * min(tokens, 9))
    )
    for words, told in ((["--json"], [True, True]), ([], None)):
        monkeypatch.setattr("sys.stdin", io.StringIO("12+34=\n56+11=\n"))
        assert main(["chat", str(run), "--max-tokens", "4", *words]) == 0
        said = capsys.readouterr()
        assert "2 of 2 answers were cut off" in said.err
        if told:
            assert [json.loads(line)["cut_off"] for line in said.out.splitlines()] == told
        else:
            assert "cut off" not in said.out  # answers alone, for a file
    typed = iter(["12+34=", "/quit"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    assert main(["chat", str(run), "--max-tokens", "4"]) == 0
    assert "[cut off after 4 tokens" in capsys.readouterr().out


def test_messages_that_the_template_does_not_take_are_said(run):
    talk = Conversation(open_trained(run), system="Be brief.", max_tokens=1)
    talk.tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ConfigConflictError, match="no system role"):
        list(talk.answer("1+1="))


def test_a_system_message_needs_a_template(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", str(run), "--system", "be brief", "--raw"]) == 2
    assert "--raw, which uses no messages" in capsys.readouterr().err


SAID = {"format": "chat", "prompt_template": "{question}", "system_prompt": "Be brief.", "train": "rows.jsonl"}


@pytest.fixture
def told(run, tmp_path):
    """A run with a file whose [data] is as given."""

    def told(**data):
        path = tmp_path / "told"
        if not path.exists():
            shutil.copytree(run, path)
        (path / "run.toml").write_text(to_toml({"method": "grpo", "data": data}))
        return path

    return told


def asked(monkeypatch, talk, text):
    seen = []
    monkeypatch.setattr(
        "qlora_rl.inference.chat.model_inputs",
        lambda tokenizer, prompt, **given: seen.append((prompt, given))
        or {"input_ids": tokenizer("1", return_tensors="pt").input_ids},
    )
    list(talk.answer(text))
    return seen[0]


def test_a_talk_begins_as_the_runs_prompts_did(told, monkeypatch):
    short = {"temperature": 0.0, "max_tokens": 2}
    path = told(**SAID | {"prompt_template": "Q: {question}", "chat_template_kwargs": {"enable_thinking": False}})
    user = {"role": "user", "content": "Q: 1+1="}
    prompt, given = asked(monkeypatch, Conversation(open_trained(path), **short), "1+1=")
    assert prompt == [{"role": "system", "content": "Be brief."}, user]
    assert given == {"enable_thinking": False}
    own = Conversation(open_trained(path), system="Be long.", **short)
    assert asked(monkeypatch, own, "1+1=")[0] == [{"role": "system", "content": "Be long."}, user]
    assert asked(monkeypatch, Conversation(open_trained(path), system="", **short), "1+1=")[0] == [user]
    assert asked(monkeypatch, Conversation(open_trained(path), uses_template=False, **short), "1+1=")[0] == "1+1="
    # prompts of text stay text, though the base has a template; of several columns none is known to be the user's
    plain = told(train="rows.jsonl", prompt_template="Q: {question}\nA:")
    assert asked(monkeypatch, Conversation(open_trained(plain), **short), "1+1=")[0] == "Q: 1+1=\nA:"
    several = told(**SAID | {"prompt_template": "{context} {question}"})
    assert asked(monkeypatch, Conversation(open_trained(several), **short), "1+1=")[0][1]["content"] == "1+1="


def test_rows_of_an_evaluation_become_what_the_runs_rows_were(told):
    data = SAID | {"train": str(GSM8K), "extract": {"answer": r"####\s*(.+)"}, "limit": 8}
    trained = open_trained(told(**data))
    rows = [*read_file(GSM8K, limit=8)]
    wanted = load_data(trained.data)[0].to_list()
    found = as_trained(rows, trained.data)
    assert [row["prompt"] for row in found] == [row["prompt"] for row in wanted]
    assert [row["answer"] for row in found] == [row["answer"] for row in wanted]
    assert as_trained(found, trained.data) == found  # what is behind it is left out
    assert as_trained([{"prompt": "1+1=", "answer": "2"}], trained.data)[0]["prompt"][0]["content"] == "Be brief."
    with pytest.raises(ConfigConflictError, match="1 of 2 rows"):
        as_trained([rows[0], {"question": "1+1=", "answer": "2"}], trained.data)
    renamed = open_trained(told(train="rows.jsonl", columns={"prompt": "question", "solution": "answer"}))
    assert as_trained([{"question": "a", "answer": "b"}], renamed.data) == [{"prompt": "a", "solution": "b"}]
    # A file's rows have all of its columns, also those that only another row fills.
    rest = [{"question": None, "answer": "b", "prompt": "a", "solution": None}]
    assert as_trained(rest, renamed.data)[0].items() >= {"prompt": "a", "solution": "b"}.items()
    assert as_trained(rows, None) == rows
    framed = open_trained(told(train="rows.jsonl", prompt_template="Q: {prompt}\nA:"))
    assert as_trained([{"prompt": "2+2"}], framed.data) == [{"prompt": "Q: 2+2\nA:"}]  # as training does it


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_an_evaluation_reads_the_files_that_training_reads(kind, told, tmp_path):
    import datasets

    rows = [{"question": "1+1=", "solution": "2"}, {"question": "2, and 2?", "solution": "04"}]
    file = tmp_path / f"rows.{kind}"
    getattr(datasets.Dataset.from_list(rows), f"to_{kind}")(str(file))
    if kind == "json":
        file.write_text(json.dumps(rows))
    trained = open_trained(told(**SAID | {"train": "rows.jsonl", "columns": {"answer": "solution"}}))
    found = as_trained([*read_file(file)], trained.data)
    assert [row["prompt"][-1]["content"] for row in found] == [row["question"] for row in rows]
    assert [row["answer"] for row in found] == ["2", "04"]
    assert len(read_file(file, limit=1)) == 1
    file.write_bytes(b"")
    with pytest.raises(ConfigConflictError, match=r"reading the rows: .*rows\."):
        read_file(file)


@pytest.mark.parametrize("value", [["a?"], {"a": "?"}, None])
def test_rows_of_an_evaluation_fill_the_template_with_text_or_numbers_alone(told, value):
    data = open_trained(told(train="rows.jsonl", prompt_template="Q: {question}")).data
    with pytest.raises(ConfigConflictError, match=r"row 1 .*question"):
        as_trained([{"question": 5}, {"question": value}], data)
    own = [{"question": value, "prompt": "a"}]
    assert as_trained(own, data) == own


def test_an_evaluation_takes_the_runs_rewards_where_none_is_named(told, tmp_path, monkeypatch, capsys):
    path, asked = told(train="rows.jsonl"), {}
    (path / "run.toml").write_text(
        to_toml({"rewards": [{"use": "numeric_match", "weight": 2.0, "arguments": {"column": "solution"}}]})
    )
    found = Evaluation({}, (1.0, 1.0), (0.0, 0.0), 1, 1, SamplingSpec(), [])
    monkeypatch.setattr(
        "qlora_rl.inference.evaluation.evaluate", lambda t, r, rewards, **_: asked.update(rewards) or found
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n')
    words = ["eval", str(path), "--data", str(tmp_path / "rows.jsonl"), "--no-save"]
    assert main(words) == 0
    assert asked["numeric_match"](prompts=["1+1="], completions=["2"], solution=["2"]) == [1.0]
    assert main([*words, "--column", "solution"]) == 2
    assert "--column is for a --reward" in capsys.readouterr().err
    (path / "run.toml").unlink()
    assert main(words) == 2
    assert "Name one: --reward numeric" in capsys.readouterr().err


def test_an_evaluation_asks_the_rows_that_the_runs_file_evaluates_on_where_no_data_is_given(
    told, tmp_path, monkeypatch, capsys
):
    asked = {}

    def ask(trained, rows, rewards, **given):
        asked.update(rows=rows, rewards=list(rewards), given=given)
        return Evaluation({}, (1.0, 1.0), (0.0, 0.0), len(rows), 1, SamplingSpec(), [])

    monkeypatch.setattr("qlora_rl.inference.evaluation.evaluate", ask)
    # A pattern that would find something else in what it has found.
    data = SAID | {"train": str(GSM8K), "eval": str(GSM8K), "extract": {"answer": r"(.)\s*$"}}
    path = told(**data)
    with (path / "run.toml").open("a") as file:
        file.write('\n[[rewards]]\nuse = "numeric_match"\n')
    assert main(["eval", str(path), "--limit", "2"]) == 0
    wanted = load_data(open_trained(path).data)[1].to_list()[:2]
    assert [(row["prompt"], row["answer"]) for row in asked["rows"]] == [(r["prompt"], r["answer"]) for r in wanted]
    assert asked["given"]["are_as_trained"]
    assert json.loads((path / "eval.json").read_text())["asked"]["data"] == GSM8K.name
    told(**SAID | {"train": str(GSM8K)})
    assert main(["eval", str(path), "--reward", "numeric"]) == 2
    assert "no file that names [data] eval. Pass the rows to ask: --data FILE, any data file" in capsys.readouterr().err


def test_an_evaluation_whose_answers_are_dates_is_printed_as_json(told, tmp_path, monkeypatch, capsys):
    rows = [{"prompt": "when?", "answer": date(2024, 5, 1)}]
    found = Evaluation({}, (1.0, 1.0), (0.0, 0.0), 1, 1, SamplingSpec(), rows)
    monkeypatch.setattr("qlora_rl.inference.evaluation.evaluate", lambda *_, **__: found)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "when?", "answer": "2024-05-01"}\n')
    words = ["--data", str(tmp_path / "rows.jsonl"), "--reward", "exact", "--no-save", "--json"]
    assert main(["eval", str(told(train="rows.jsonl")), *words]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["answer"] == "2024-05-01"


def test_an_evaluation_names_rewards_as_training_does(told, tmp_path, monkeypatch):
    from trl.trainer.utils import get_callable_name

    source = tmp_path / "mine.py"
    source.write_text(
        "from qlora_rl.rewards import numeric_match, weighted\n\n\ndef short(completions, limit=4, **_):\n"
        "    return [1.0] * len(completions)\n\n\nboth = weighted((numeric_match, 1.0), (short, 1.0))\n\n\n"
        "class Judge:\n    def __call__(self, completions, **_):\n        return [1.0] * len(completions)\n"
    )
    names = ["short", "both", "Judge"]
    for name in names:
        loaded = load_reward(f"{source}:{name}")
        assert reward_name(loaded) == get_callable_name(loaded)
    path, asked = told(train="rows.jsonl"), {}
    used = [{"use": f"{source}:short"}, {"use": f"{source}:short", "arguments": {"limit": 8}}, {"use": "numeric"}]
    (path / "run.toml").write_text(to_toml({"rewards": used}))
    found = Evaluation({}, (1.0, 1.0), (0.0, 0.0), 1, 1, SamplingSpec(), [])
    monkeypatch.setattr("qlora_rl.inference.evaluation.evaluate", lambda t, r, rs, **_: asked.update(rs) or found)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = ["eval", str(path), "--data", str(tmp_path / "rows.jsonl"), "--no-save"]
    assert main(words) == 0
    assert list(asked) == ["short", "short (2)", "numeric_match"]


def test_what_cannot_be_answered_is_said(run, monkeypatch, capsys):
    with pytest.raises(ConfigConflictError) as caught:
        Conversation(open_trained(run), max_tokens=0, temperature=-1.0, top_p=0.0)
    assert len(caught.value.reasons) == 3
    talk = Conversation(open_trained(run), uses_template=False, seed=0)  # else the one token may be the end of the text
    with pytest.raises(ConfigConflictError, match="0 tokens"):
        list(talk.answer(""))
    with pytest.raises(ConfigConflictError, match="1 to 127"):
        list(talk.answer("1" * 128))
    assert "".join(talk.answer("1" * 127))

    typed = iter(["1" * 500, "12+34=", "/quit"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    assert main(["chat", str(run), "--temperature", "0"]) == 0  # the talk goes on
    shown = capsys.readouterr().out
    assert "answering: the prompt has" in shown
    assert len([line for line in shown.splitlines() if not line.startswith("[cut off ")]) == 3


def test_tokens_beyond_top_p_are_never_sampled():
    logits_V = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    assert {choose(logits_V, 1.0, 0.6, generator) for _ in range(200)} == {0, 1}
    assert {choose(logits_V, 1.0, 1.0, generator) for _ in range(400)} == {0, 1, 2, 3}
    assert {choose(logits_V, 1.0, 1e-9, generator) for _ in range(20)} == {0}
    assert choose(logits_V, 0.0, 1.0, generator) == 0


# --- evaluating -------------------------------------------------------------------------------------------------------


def test_means_and_errors_are_those_of_prompts_and_the_difference_is_paired():
    found = compare([0, 1, 0, 0, 1, 1], [1, 1, 0, 1, 1, 1], 2)  # prompts: 0.5, 0, 1 and 1, 0.5, 1
    assert found.base.value == pytest.approx(0.5)
    assert found.base.error == pytest.approx(0.5 / math.sqrt(3))
    assert found.policy.value == pytest.approx(2.5 / 3)
    assert found.difference.value == pytest.approx(1 / 3)
    assert found.difference.error == pytest.approx(math.sqrt(1 / 12) / math.sqrt(3))  # of 0.5, 0.5, 0


def test_the_table_says_which_share_of_each_side_was_cut_off():
    mean = Mean(0.0, None, 1)
    known = {"r": Compared(mean, mean, mean)}
    for cut_off, is_said in (((0.0, 0.0), False), ((1.0, 0.25), True)):
        found = str(Evaluation(known, (4.0, 3.0), cut_off, 1, 1, SamplingSpec(max_tokens=512), []))
        assert f"cut off  {cut_off[0]:.3f}  {cut_off[1]:.3f}\n" in found
        assert ("without their end" in found) == is_said


def test_the_step_of_what_is_evaluated_is_known(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.copytree(copy / "adapter", copy / "checkpoint-2")
    assert [open_trained(each).step for each in (copy, copy / "checkpoint-2")] == [3, 2]
    (copy / "summary.json").unlink()
    assert open_trained(copy).step is None
    mean = Mean(0.5, None, 1)
    found = Evaluation({"r": Compared(mean, mean, mean)}, (1.0, 1.0), (0.0, 0.0), 1, 1, SamplingSpec(), [])
    save(found, open_trained(copy / "checkpoint-2"), {"data": "x.jsonl"})
    assert json.loads((copy / "eval.json").read_text())["asked"] == {"data": "x.jsonl", "step": 2}
    assert "“after” is after step 2" in write_report(copy).read_text()


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}])
def test_numbers_out_of_range_are_rejected_before_an_engine_starts(run, wrong):
    with pytest.raises(ConfigConflictError, match=f"evaluating: {next(iter(wrong))}="):
        evaluate(open_trained(run), [{"prompt": "1"}], {"r": None}, sampling=SamplingSpec(**wrong))
    with pytest.raises(ConfigConflictError, match="samples=0"):
        evaluate(open_trained(run), [{"prompt": "1"}], {"r": None}, samples=0)


def test_rewards_that_are_none_are_left_out_with_their_prompt():
    found = compare([None, 1.0, 0.0], [0.0, 1.0, None], 1)
    assert (found.base.prompts, found.policy.prompts, found.difference.prompts) == (2, 2, 1)
    assert found.difference.value == 0
    assert found.difference.error is None
    with pytest.raises(ConfigConflictError):
        compare([None], [None], 1)


def test_what_is_no_run_gets_no_report(tmp_path):
    (tmp_path / "adapter").mkdir()
    assert main(["report", str(tmp_path)]) == 1
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_where_bf16_is_slow_a_policy_is_computed_in_float32_as_it_was_trained(monkeypatch, autocast):
    monkeypatch.setenv(SETTING, "float32")
    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16 if autocast is None else torch.float32)
    model.dtype = model.weight.dtype  # as transformers' models have it
    before = set(cpu_matmul._claims[torch.bfloat16])
    with precision(model, autocast):
        assert len(cpu_matmul._claims[torch.bfloat16] - before) == 1
        assert model(torch.ones(2, 4, dtype=model.dtype)).dtype == torch.bfloat16
    assert cpu_matmul._claims[torch.bfloat16] == before
    with precision(model, autocast, tokens=1):  # a vector is multiplied fast as it is
        assert cpu_matmul._claims[torch.bfloat16] == before


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        ([[1, 0], [0, 0]], "1 of 2 prompts"),
        ([[1, 1], [0, 0]], "Raise the temperature"),
        ([[0, 0], [0, 0]], "Every completion has the reward 0"),
    ],
)
def test_a_look_at_the_base_says_whether_there_is_something_to_learn_from(rewards, says):
    rows = [{"prompt": "p", "completions": [{"text": "t", "reward": r} for r in group]} for group in rewards]
    teaching = sum(len(set(group)) > 1 for group in rewards)
    look = FirstLook({"r": Mean(0.25, None, 2)}, teaching, 3.0, 0.0, 2, 2, SamplingSpec(8), rows)
    assert says in str(look)
    unscored = FirstLook({"r": None}, 0, 3.0, 0.0, 2, 2, SamplingSpec(8), [])
    assert "not scored" in str(unscored)
    assert "No reward has scored" in str(unscored)


def test_of_a_file_only_a_run_that_samples_is_asked(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    file = tmp_path / "run.toml"
    file.write_text(f'method = "sft"\n[base]\nmodel = "{tmp_path}"\n[data]\ntrain = "rows.jsonl"\n')
    assert main(["eval", str(file), "--temperature", "0"]) == 2
    assert "several different completions" in capsys.readouterr().err
    assert main(["eval", str(file), "--reward", "exact"]) == 2
    assert "names its data, rewards and base" in capsys.readouterr().err
    assert main(["eval", str(file)]) == 2
    assert "takes a method that samples" in capsys.readouterr().err
