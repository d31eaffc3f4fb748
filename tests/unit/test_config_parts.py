"""Datasets and rewards of a run's TOML file, and the command itself."""

import inspect
import json
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from runfile import GOOD, reasons, with_field, written

from qlora_rl.config.findings import choices
from qlora_rl.config.launch import check_model, trainer_arguments
from qlora_rl.config.read import read_config
from qlora_rl.config.schema import Base, Data, options
from qlora_rl.config.text import markdown
from qlora_rl.contracts import QUANT_TYPES
from qlora_rl.data.load import load_data, read_file
from qlora_rl.data.rows import filled
from qlora_rl.engine.server import serve
from qlora_rl.errors import ConfigConflictError, RewardFunctionError
from qlora_rl.rewards import load_reward

# --- data and rewards -----------------------------------------------------------------------------------------------


def data_of(tmp_path, **changes):
    rewards = [{"use": "length_match", "arguments": {"at_most": 3}}]  # needs no column
    document = {**GOOD, "rewards": rewards, "data": {**GOOD["data"], **changes}}
    return read_config(written(tmp_path, document), asks_trl=False).data


def test_data_is_renamed_cut_and_put_into_a_template(tmp_path):
    changes = {"columns": {"solution": "answer"}, "prompt_template": "Q: {prompt}\nA: {{", "limit": 3}
    dataset, held_out = load_data(data_of(tmp_path, **changes))
    assert held_out is None
    assert dataset.column_names == ["prompt", "solution", "careless"]
    assert dataset[0] == {"prompt": "Q: 97+36=\nA: {", "solution": "133", "careless": "23"}
    assert len(dataset) == 3


def test_parquet_is_read_and_its_columns_are_known_before(tmp_path):
    from datasets import Dataset

    parquet = tmp_path / "rows.parquet"
    Dataset.from_list([{"question": "1+1=", "answer": "2"}] * 4).to_parquet(parquet)
    file = written(tmp_path, with_field("data", "train", str(parquet)))
    found = reasons(file)
    assert found == (
        "[data] train: method = 'grpo' needs the columns prompt; there are answer, question. "
        "Rename them with [data] columns",
    )
    dataset, _ = load_data(data_of(tmp_path, train=str(parquet), columns={"prompt": "question"}))
    assert dataset[:2] == {"prompt": ["1+1="] * 2, "answer": ["2"] * 2}
    parquet.write_text("nonsense")
    assert "is no Parquet file" in reasons(file)[0]


def test_two_files_are_one_dataset_and_a_broken_line_names_the_file(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('{"prompt": "a"}\n')
    two.write_text('{"prompt": "b"}\n')
    assert load_data(data_of(tmp_path, train=[str(one), str(two)]))[0]["prompt"] == ["a", "b"]
    two.write_text('{"prompt": "b"}\n{"prompt": \n')
    with pytest.raises(ConfigConflictError, match=r"\[data\] train: .*two.jsonl:2 is no JSON"):
        load_data(data_of(tmp_path, train=[str(one), str(two)], limit=2))


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_text_of_json_that_looks_like_a_date_is_a_text(suffix, tmp_path):
    rows = [{"prompt": f"{n}?", "answer": f"2024-05-0{n}", "said": [{"content": "2024-05-01"}]} for n in (1, 2)]
    rows[1]["note"] = "late"
    text = json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows))
    file = tmp_path / f"rows.{suffix}"
    file.write_text(text)
    assert list(read_file(file)) == [rows[0] | {"note": None}, rows[1]]


def test_csv_is_read_as_it_is_written(tmp_path):
    file = tmp_path / "rows.csv"
    long = "x" * 200_000
    file.write_bytes(f'\ufeff"instruction",input,answer,\nAdd,,007,0\n\n"a,\nb",NA,,1\n{long},y\n'.encode())
    data = data_of(tmp_path, train=str(file), prompt_template="{instruction}\n\n{input}")
    dataset, _ = load_data(data)
    assert dataset["prompt"] == ["Add", "a,\nb\n\nNA", f"{long}\n\ny"]
    assert dataset["answer"] == ["007", "", ""]
    assert dataset["Unnamed: 3"] == ["0", "1", ""]
    file.write_text(f"prompt,answer\n{long},1\n")
    assert load_data(data_of(tmp_path, train=str(file)))[0]["prompt"] == [long]


def test_a_file_that_is_read_by_nobody_is_no_dataset_of_the_hub(tmp_path):
    with pytest.raises(ConfigConflictError, match=r"rows.tsv is none of \.jsonl"):
        data_of(tmp_path, train="rows.tsv")


def test_csv_files_of_one_dataset_have_the_same_columns_in_any_order(tmp_path):
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    one.write_text("prompt,answer\na,1\n")
    two.write_text("answer,prompt\n2,b\n")
    assert load_data(data_of(tmp_path, train=[str(one), str(two)]))[0][:] == {
        "prompt": ["a", "b"],
        "answer": ["1", "2"],
    }
    two.write_text("prompt\nb\n")
    with pytest.raises(ConfigConflictError, match=r"one.csv has the columns prompt, answer, and .*two.csv prompt\. "):
        load_data(data_of(tmp_path, train=[str(one), str(two)]))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"prompt,answer\na,b,1\n", r"row 0 \(line 2\) has 3 cells, and there are 2 columns: prompt, answer"),
        ("prompt,answer\ncaf\u00e9,1\n".encode("latin-1"), r"is not in UTF-8 \(byte 0xe9.*iconv -f LATIN1"),
        (b"prompt,prompt\na,b\n", "has two columns prompt"),
        (b"prompt,answer\n", "holds no rows"),
        (b"prompt;answer\na;b\n", "its cells end with ';'. Save it with commas"),
    ],
)
def test_csv_that_would_be_read_wrongly_is_rejected_before_anything_is_loaded(content, said, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_bytes(content)
    with pytest.raises(ConfigConflictError, match=said):
        data_of(tmp_path, train=str(file))


@pytest.mark.parametrize(
    ("row", "said"),
    [(b"c, d,2", r"\[data\] train: .*row 2 \(line 4\) has 3 cells"), (b"\xe9,2", r"\[data\] train: .*is not in UTF-8")],
)
def test_a_later_row_of_csv_that_would_be_read_wrongly_is_named(row, said, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_bytes(b"prompt,answer\na,1\n" + b"a" * 2**20 + b",1\n" + row + b"\n")
    data = data_of(tmp_path, train=str(file))
    with pytest.raises(ConfigConflictError, match=said):
        load_data(data)


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_json_with_a_byte_order_mark_is_read(name, tmp_path):
    file = tmp_path / name
    text = '{"prompt": "a"}\n' if name == "rows.jsonl" else '[{"prompt": "a"}]'
    file.write_text("\ufeff" + text, encoding="utf-8")
    assert load_data(data_of(tmp_path, train=str(file)))[0]["prompt"] == ["a"]
    file.write_bytes(b'{"prompt": "\xe9"}')
    assert "is not in UTF-8" in reasons(written(tmp_path, with_field("data", "train", str(file))))[0]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{q}\n\n{h}", "Q"),
        ("{q}\n\n{h}\n", "Q\n"),
        ("{q}\n{h}\n### Answer:\n", "Q\n\n### Answer:\n"),
        ("### {q}:\n\n{{{h}}}", "### Q:\n\n{}"),
        ("{q}\n{h}\n{h}", "Q"),
        ("{h}", ""),
    ],
)
def test_only_an_empty_value_at_the_end_of_a_template_takes_its_blank_lines_with_it(template, wanted):
    assert filled(template, {"q": "Q", "h": ""}) == wanted
    assert filled(template, {"q": "Q\n", "h": "H"}) == template.format(q="Q\n", h="H")


def test_a_dataset_of_the_hub_is_asked_for_by_its_name(tmp_path, monkeypatch):
    import datasets

    asked = []

    def load(name, subset, **options):
        asked.append((name, subset, options))
        return datasets.Dataset.from_list([{"question": "1+1="}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = {
        "train": "openai/gsm8k",
        "eval": "openai/gsm8k",
        "subset": "main",
        "revision": "v1",
        "columns": {"prompt": "question"},
    }
    document = {**GOOD, "data": data, "train": {"eval_strategy": "steps"}}
    train, held_out = load_data(read_config(written(tmp_path, document), asks_trl=False).data)
    assert asked == [("openai/gsm8k", "main", {"split": split, "revision": "v1"}) for split in ("train", "test")]
    assert (train.column_names, held_out.column_names) == (["prompt"], ["prompt"])
    document["data"]["columns"] = {"prompt": "problem"}
    with pytest.raises(ConfigConflictError, match="there is no column 'problem'; there are question"):
        load_data(read_config(written(tmp_path, document), asks_trl=False).data)


def test_a_dataset_that_needs_a_subset_says_which_there_are(tmp_path, monkeypatch):
    document = {**GOOD, "data": {"train": "openai/gsm8k", "columns": {"prompt": "question"}}}
    assert reasons(written(tmp_path, document)) == (
        "[data] subset: openai/gsm8k has main, socratic. Name one: subset = 'main'",
    )
    document["data"]["subset"] = "mian"
    assert reasons(written(tmp_path, document)) == ("[data] subset: openai/gsm8k has main, socratic, and no 'mian'",)
    # of another dataset, datasets says it when it is loaded
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "some" / "rows"
    folder.mkdir(parents=True)
    (folder / "one.jsonl").write_text('{"prompt": "a"}\n')
    configs = "".join(f"- config_name: {name}\n  data_files: one.jsonl\n" for name in ("easy", "hard"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    with pytest.raises(
        ConfigConflictError, match=r"some/rows has several subsets: 'easy', 'hard'. Name one: \[data\] subset"
    ):
        load_data(Data(train="some/rows"))
    assert load_data(Data(train="some/rows", subset="hard"))[0]["prompt"] == ["a"]


def test_data_without_rows_is_said(tmp_path, capsys):
    from datasets import Dataset

    (tmp_path / "none.jsonl").write_text("\n\n")
    assert (
        "none.jsonl is empty. Write one JSON object per line"
        in reasons(written(tmp_path, with_field("data", "train", str(tmp_path / "none.jsonl"))))[0]
    )
    parquet = tmp_path / "none.parquet"
    Dataset.from_dict({"prompt": [], "answer": []}).to_parquet(parquet)
    assert "none.parquet holds no rows" in reasons(written(tmp_path, with_field("data", "train", str(parquet))))[0]
    with pytest.raises(ConfigConflictError, match=r"none\.parquet holds no rows\. Pass another one"):
        load_data(Data(train=str(parquet)))


def test_a_reward_is_loaded_with_its_arguments(tmp_path):
    (tmp_path / "beside.py").write_text("ONE = 1.0\n")
    (tmp_path / "mine.py").write_text(
        "from beside import ONE\ndef reward(completions, bonus, **_):\n    return [ONE + bonus] * len(completions)\n"
    )
    reward = load_reward(f"{tmp_path / 'mine.py'}:reward", {"bonus": 2})
    assert (reward(completions=["a", "b"]), reward.__name__) == ([3.0, 3.0], "reward")
    assert load_reward("numeric_match", {"column": "x"})(completions=["so 3"], x=["3"]) == [1.0]
    assert "beside" not in [Path(each).name for each in sys.path]


def test_a_reward_file_is_not_run_by_the_check_and_its_failure_is_said(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(completions, bonus):\n    pass\nraise RuntimeError('boom')\n")
    document = with_field("rewards", "use", f"{tmp_path / 'mine.py'}:reward")
    config = read_config(written(tmp_path, document), asks_trl=False)
    with pytest.raises(RewardFunctionError, match=r"mine.py raised RuntimeError while it was imported: boom"):
        load_reward(config.rewards[0].use, config.rewards[0].arguments)
    document["rewards"][0]["arguments"] = {"bonsu": 1}
    assert reasons(written(tmp_path, document)) == (
        "[[rewards]] arguments: 'bonsu' is none of bonus; did you mean 'bonus'?",
    )


def test_only_what_differs_from_the_default_is_told_the_engine(tmp_path):
    document = with_field("rollout", "vllm", {"block_size": 32})
    document["rollout"] |= {"kv_cache_gib": 1, "base_compute": "nf4"}
    arguments = trainer_arguments(read_config(written(tmp_path, document), asks_trl=False))
    assert arguments["engine_options"] == {"kv_cache_gib": 1.0, "block_size": 32}
    assert arguments["sync"] == "auto"


@pytest.mark.parametrize(("said", "told"), [({}, {}), ({"vllm_enable_sleep_mode": False}, {"enable_sleep": False})])
def test_an_engine_that_is_not_to_sleep_is_left_awake_by_the_plan(said, told, tmp_path):
    document = with_field("rollout", "where", "colocate")
    document.setdefault("train", {}).update(said)
    arguments = trainer_arguments(read_config(written(tmp_path, document), asks_trl=False))
    assert arguments["engine_options"] == told


def test_a_server_that_is_started_is_told_what_to_multiply_with(tmp_path):
    document = with_field("rollout", "where", "server")
    document["rollout"] |= {"base_compute": "vllm"}
    arguments = trainer_arguments(read_config(written(tmp_path, document), asks_trl=False))
    assert (arguments["rollout"], arguments["engine_options"]) == ("server", {"base_compute": "vllm"})
    assert "base_compute" in inspect.signature(serve).parameters


# --- the command ----------------------------------------------------------------------------------------------------

HEAVY = ("torch", "vllm", "trl", "peft", "transformers", "bitsandbytes", "datasets", "numpy")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["train", "--example", "grpo"]], ids=" ".join)
def test_the_command_answers_at_once_and_imports_nothing_heavy(arguments):
    code = (
        "import sys; from qlora_rl.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout.strip().endswith("HEAVY []")
    assert min(seconds) < 0.5  # of the processor: others may use it too


def test_our_own_fields_are_checked_without_a_library(tmp_path):
    code = (
        "import sys; from qlora_rl.config.read import read_config\n"
        f"read_config({str(written(tmp_path, GOOD))!r}, asks_trl=False)\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_knows_every_way_to_quantise():
    assert tuple(choices(options(Base)["quant"])) == QUANT_TYPES


def test_the_command_names_what_is_wrong_and_ends_with_1(tmp_path, capsys):
    from qlora_rl.cli import main

    assert main(["train"]) == 2
    assert "--example grpo" in capsys.readouterr().err
    assert main(["train", "--example"]) == 2
    assert "grpo, rloo" in capsys.readouterr().err
    assert main(["train", str(written(tmp_path, with_field("adapter", "r", 0))), "--set", "method=gpro"]) == 1
    error = capsys.readouterr().err
    assert "2 reasons" in error
    assert "[adapter] r: 0 is not a whole number of at least 1" in error
    assert main(["train", "--print-schema"]) == 0
    assert capsys.readouterr().out == markdown()


def test_an_adapter_that_finds_no_module_is_found_by_the_check(tmp_path, capsys):
    from qlora_rl.cli import main

    file = written(tmp_path, {**GOOD, "adapter": {"target_modules": ["q_prj"]}, "run": {"dir": str(tmp_path / "out")}})
    assert main(["train", str(file), "--check"]) == 1
    assert "Target modules {'q_prj'} not found" in capsys.readouterr().err
    assert main(["train", str(file), "--check", "--set", 'adapter.target_modules=["q_proj"]']) == 0
    assert f"{file}: no errors found. Not checked: " in capsys.readouterr().err


@pytest.mark.parametrize("adapter", [{}, {"kind": "none"}], ids=["lora", "none"])
def test_an_encoder_decoder_model_is_rejected_by_the_check(adapter, tmp_path):
    from transformers import T5Config

    T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32).save_pretrained(tmp_path / "t5")
    base, sync = {"model": str(tmp_path / "t5")}, {}
    if adapter:
        base["quant"], sync = "none", {"sync": {"how": "weights"}}
    config = read_config(written(tmp_path, {**GOOD, "base": base, "adapter": adapter, **sync}), asks_trl=False)
    with pytest.raises(ConfigConflictError, match="makes no language model of T5Config"):
        check_model(config)


def test_a_closed_terminal_ends_a_run_as_ctrl_c_does_and_the_log_says_so(tmp_path, monkeypatch):
    from qlora_rl.cli import main

    def hung_up(config, begun, file):
        (tmp_path / "out").mkdir()
        begun(tmp_path / "out")
        for _ in range(2):  # a shell sends it, too
            os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(10)

    monkeypatch.setattr("qlora_rl.config.launch.launch", hung_up)
    file = written(tmp_path, {**GOOD, "run": {"dir": str(tmp_path / "out")}})
    assert main(["train", str(file)]) == 130
    assert "the terminal was closed (SIGHUP)" in (tmp_path / "out" / "log.txt").read_text()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_run_whose_terminal_is_gone_ends_whole_though_nothing_can_be_written_to_it(tmp_path):
    out = tmp_path / "out"
    file = written(tmp_path, {**GOOD, "run": {"dir": str(out)}})
    script = f"""
import sys, time
from pathlib import Path
import qlora_rl.config.launch as launch
from qlora_rl.cli import main
out = Path({str(out)!r})
def waits(config, begun, file):
    out.mkdir()
    begun(out)
    (out / "ready").touch()
    for _ in range(600):
        print("a step", flush=True)
        time.sleep(0.05)
launch.launch = waits
(out / "code").write_text(str(main(["train", {str(file)!r}])))
"""
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", script])
    reader = threading.Thread(target=_read_all, args=(terminal, out / "ready"))
    reader.start()
    reader.join(120)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert (out / "code").read_text() == "130"
    assert "the terminal was closed (SIGHUP)" in (out / "log.txt").read_text()


def _read_all(terminal, ready):
    while not ready.exists():
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 4096)


def test_an_interrupted_run_says_where_it_is_and_how_it_goes_on(tmp_path, capsys, monkeypatch):
    from qlora_rl.cli import main

    left = []

    def interrupted(config, *_):
        for name in left:
            (Path(config.run.dir) / name).mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr("qlora_rl.config.launch.launch", interrupted)
    file = written(tmp_path, {**GOOD, "run": {"dir": str(tmp_path / "out")}})
    assert main(["train", str(file)]) == 130
    said = capsys.readouterr().err
    assert f"the run so far is in {tmp_path / 'out'}. It has no checkpoint to go on from" in said
    assert f"qlora-rl train {file} --set train.save_steps=1" in said
    assert "chat" not in said
    left.append("adapter")
    assert main(["train", str(file)]) == 130
    assert f"qlora-rl chat {tmp_path / 'out'}." in capsys.readouterr().err
    left[:] = ["checkpoint-3"]
    assert main(["train", str(file), "--set", "train.learning_rate=1e-3"]) == 130
    assert (
        f"with: qlora-rl train {file} --set train.learning_rate=1e-3 --set run.dir={tmp_path / 'out'} "
        "--set run.existing=resume\n" in capsys.readouterr().err
    )
    assert "holds a run" in reasons(file)[0]  # also where it was killed before its first line
