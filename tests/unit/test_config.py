"""The TOML file of a run: every field has a wrong value, and what is said about it; the settled copy is the same
run."""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runfile import GOOD, ROOT, reasons, with_field, written

from qlora_rl.config.directories import check_directory, source_line, source_of
from qlora_rl.config.launch import record
from qlora_rl.config.read import read_config, resolved
from qlora_rl.config.schema import ALIASES, KINDS, TABLES, TRAIN, Reward, applies, options
from qlora_rl.config.text import example, markdown, to_toml
from qlora_rl.errors import ConfigConflictError
from qlora_rl.locks import hold, is_held
from qlora_rl.methods import METHODS

EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
TEXT, WHOLE, NUMBER, TRUTH, TABLE = "a string in quotes", "a whole number", "a number", "true or false", "a table"
# A wrong value of every field, and what is said about it.
WRONG = {
    "base": {
        "model": [
            (3, TEXT),
            ("/nowhere", "no directory /nowhere"),
            ("a/b/c", "no directory a/b/c"),
            ("a b", "neither a directory nor a name"),
        ],
        "quant": [("nf5", "did you mean 'nf4'"), (4, "4 is not one of")],
        "double_quant": [("yes", TRUTH)],
        "blocksize": [(65, "one of 64, 128"), ("64", "one of 64")],
        "compute_dtype": [("bf16", "not one of 'bfloat16'"), ("float32", "do not compute in float32")],
        "skip_modules": [("down_proj", "a list of strings"), ([1], "a list of strings")],
        "revision": [(1, TEXT)],
        "quantize_experts": [(1, TRUTH)],
        "quantize_tower": [(1, TRUTH)],
        "calibrate": [(1, "true or false or a string in quotes"), ("/nowhere/x.jsonl", "no file /nowhere/x.jsonl")],
        "trust_remote_code": [(1, TRUTH)],
        "attn_implementation": [(False, TEXT)],
    },
    "adapter": {
        "kind": [("full", "not one of 'lora', 'none'"), ("none", "a 4-bit base cannot be trained")],
        "start_from": [(1, TEXT), ("/nowhere", "holds no adapter_config.json")],
        "dtype": [("float16", "not one of 'float32', 'bfloat16'")],
        "r": [(0, "0 is not a whole number of at least 1"), (8.0, WHOLE), (True, WHOLE)],
        "lora_alpha": [(-1, "at least 1"), ("32", WHOLE)],
        "target_modules": [(1, "a string in quotes or a list of strings")],
        "exclude_modules": [({}, "a list of strings")],
        "lora_dropout": [(1.0, "below 1"), (-0.1, "at least 0"), ("0", NUMBER)],
        "bias": [("lora", "did you mean 'lora_only'"), (True, "one of 'none'")],
        "use_rslora": [("no", TRUTH)],
        "use_dora": [(0, TRUTH)],
        "init_lora_weights": [("gausian", "did you mean 'gaussian'"), (1, "one of 'gaussian'")],
        "rank_pattern": [({"q_proj": "8"}, "a table of whole numbers"), ([1], TABLE)],
        "alpha_pattern": [({"q_proj": 0.5}, "a table of whole numbers")],
        "layers_to_transform": [("0", "a list of whole numbers or a whole number")],
        "layers_pattern": [(0, "a string in quotes or a list of strings")],
        "modules_to_save": [("norm", "a list of strings")],
    },
    "data": {
        "train": [
            (3, "a string in quotes or a list of strings"),
            ([], "names no file"),
            ("/nowhere/x.jsonl", "no file /nowhere/x.jsonl"),
            ("x.csv y", "neither a .jsonl, .json, .csv or .parquet file nor a name on the hub"),
            (["a.jsonl", "openai/gsm8k"], "a dataset of the hub stands alone"),
        ],
        "eval": [(False, "a string in quotes"), ("/nowhere/x.parquet", "no file"), ([], "names no file")],
        "split": [(1, TEXT), ("test", "train names a file")],
        "eval_split": [([], TEXT)],
        "subset": [(1, TEXT), ("main", "train names a file")],
        "revision": [(1.5, TEXT), ("main", "train names a file")],
        "columns": [({"a": []}, "strings"), ("prompt", "a table of strings"), ({"text": "txet"},
            "no column 'txet'; there are prompt, answer, careless")],
        "prompt_template": [
            ("no braces", "names no column"),
            ("{", "is no template"),
            ("{question}", "no column 'question'"),
            (1, TEXT),
        ],
        "extract": [({"answer": "("}, "is no regular expression"), ({"answer": "(a)(b)"}, "has 2 groups"), ("####",
            "a table of strings")],
        "format": [("chatml", "not one of 'plain', 'chat'")],
        "system_prompt": [(1, TEXT), ("Think.", "Set [data] format = 'chat'")],
        "chat_template_kwargs": [("x", TABLE), ({"enable_thinking": False},
            "Set [data] format = 'chat'")],
        "images": [(1, TEXT), ("image", "Set [data] format = 'chat'"), ("image",
            "train: there is no column 'image'; there are prompt, answer, careless")],
        "limit": [(0, "at least 1"), ("all", WHOLE)],
    },
    "rewards": {
        "use": [
            ("exactmatch", "did you mean 'exact_match'"),
            ("/nowhere/r.py:f", "No such file"),
            (str(ROOT / "examples" / "rewards.py:shorts"), "did you mean 'short'"),
            (1, TEXT),
        ],
        "weight": [("1", NUMBER), (True, NUMBER)],
        "arguments": [({"colum": "x"}, "did you mean 'column'"), ("x", TABLE)],
    },
    "teacher": {
        "adapter": [(1, TEXT), ("/nowhere/polcy", "neither 'none' nor 'policy'; did you mean 'policy'"),
            ("policy", "belongs to distill")],
        "url": [(1, TEXT), ("host:8000", "is no URL such as"), ("http://a:b@host", "names a user or has a query")],
        "top_k": [(0, "at least 1"), (5, "there is no url")],
        "api_key_file": [("/nowhere", "no file /nowhere"), (str(ROOT / "Makefile"), "there is no url")],
        "model": [(1, TEXT), ("/nowhere", "no directory /nowhere")],
        "quant": [("nf5", "did you mean 'nf4'"), ("none", "there is none")],
        "prompt": [(1, TEXT), ("hint", "there is no column 'hint'; there are answer, careless, prompt")],
        "prompt_template": [("no braces", "names no column"), ("{hint}", "there is no column 'hint'")],
        "system_prompt": [(1, TEXT), ("Think.", "Set [data] format = 'chat'")],
    },
    "tools": {"use": [("tools.py:f", "a list of strings"), (["f"], "'f' is not path.py:name"), (["/nowhere/t.py:f"],
        "No such file")]},
    "environment": {"use": [(1, TEXT), ("Game", "'Game' is not path.py:name"), ({"a": "/nowhere/t.py:f"},
        "No such file")]},
    "rollout": {
        "where": [("colocat", "did you mean 'colocate'"), ([], "names no server"), (["localhost:8000"], "nor a URL"),
            ("https://host?a=b", "names a user or has a query")],
        "api_key_file": [("/nowhere", "no file /nowhere"), (1, TEXT)],
        "share_base": [("yes", "true or false or 'auto'")],
        "max_staleness": [(-1, "at least 0"), (2, "belongs to async_grpo, not to method = 'grpo'")],
        "rollout_threads": [(0, "at least 1")],
        "base_compute": [("vlm", "did you mean 'vllm'")],
        "max_num_seqs": [(0, "at least 1")],
        "kv_cache_gib": [(0, "above 0"), ("2", NUMBER)],
        "enforce_eager": [("yes", TRUTH)],
        "enable_prefix_caching": [(1, TRUTH)],
        "vllm": [("block_size", TABLE)],
        "replicas": [(0, "at least 1"), (2, "belongs to where = 'ray'")],
        "ray_address": [(1, TEXT)],
        "ray_options": [("num_gpus", TABLE)],
    },
    "sync": {
        "how": [("merge", "not one of 'auto', 'lora_adapter', 'weights'")],
        "dir": [(1, TEXT)],
        "canary_every": [(-1, "at least 0"), (1.5, WHOLE)],
        "on_mismatch": [("halt", "not one of 'stop', 'warn'")],
        "allow_base_mismatch": [("no", TRUTH)],
    },
    "run": {
        "dir": [(1, TEXT), (str(ROOT / "Makefile"), "is a file")],
        "existing": [("overwrit", "did you mean 'overwrite'")],
        "seed": [(-1, "at least 0"), ("0", WHOLE)],
        "gpu_memory": [(0, "above 0"), ("aut", "did you mean 'auto'"), ("24TB", "'24TB' is not")],
        "remove_padding": [("auto", TRUTH), (1, TRUTH)],
        "routing_replay": [("on", TRUTH)],
    },
}  # fmt: skip
EVERY_FIELD = [(table, name) for table, kind in TABLES.items() for name in options(kind)]


def check_read_or_rejected(directory: Path, document: dict) -> None:
    """Any other exception comes out."""
    config, said = None, ()
    try:
        config = read_config(written(directory, document), asks_trl=False, trains=True)
    except ConfigConflictError as error:
        said = error.reasons
    assert said or read_config(written(directory, resolved(config)), asks_trl=False) == config


@pytest.mark.parametrize(("table", "name"), EVERY_FIELD, ids=lambda part: part)
def test_a_wrong_value_of_any_field_is_found_and_said_with_its_place(table, name, tmp_path):
    place = f"[[{table}]] {name}" if table == "rewards" else f"[{table}] {name}"
    for value, said in WRONG[table][name]:  # a field without a wrong value fails here
        found = reasons(written(tmp_path, with_field(table, name, value)))
        mine = [reason for reason in found if reason.startswith(f"{place}: ") and said in reason]
        assert mine, (value, found)


def test_the_table_of_wrong_values_has_no_field_that_is_gone():
    assert {(table, name) for table, held in WRONG.items() for name in held} == set(EVERY_FIELD)


@pytest.mark.parametrize(
    ("table", "name", "place"),
    [
        ("adapter", "lr", "[train] learning_rate"),
        ("adapter", "learning_rate", "[train] learning_rate"),
        ("run", "max_step", "[train] max_steps"),
        ("base", "target_module", "[adapter] target_modules"),
        ("train", "rank", "[adapter] r"),
        ("train", "system_prmpt", "[data] system_prompt"),
        ("train", "lr", "[train] learning_rate"),
        ("data", "output_dir", "[run] dir"),
        ("data", "use_vllm", "[rollout] where"),
    ],
)
def test_a_name_that_belongs_into_another_table_is_led_there(table, name, place, tmp_path):
    (said,) = reasons(written(tmp_path, with_field(table, name, 1)), asks_trl=table == "train")
    assert said == f"[{table}] {name}: unknown; did you mean {place}?"


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("ppo", ". The closest to it is 'grpo' or 'rloo', which need no value model"),
        ("DAPO", ". The closest to it is 'grpo' with [train] loss_type = 'dapo'"),
        ("GKD", ". The closest to it is 'distill', with [teacher]"),
        ("distillation", "; did you mean 'distill'?"),
        ("GRPO", "; did you mean 'grpo'?"),
        ("zpo", ""),
    ],
)
def test_a_method_of_others_is_no_slip_of_ours(method, said, tmp_path):
    (found,) = reasons(written(tmp_path, {**GOOD, "method": method}), asks_trl=False)
    assert found == f"method: '{method}' is not one of {', '.join(map(repr, METHODS))}{said}"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("dora", "'dora' is not one of 'lora', 'none'. Write kind = 'lora' and use_dora = true"),
        ("DoRA", "Write kind = 'lora' and use_dora = true"),
        ("pissa", "Write kind = 'lora' and init_lora_weights = 'pissa'"),
        ("vera", "A file trains LoRA; pass this method to a trainer in Python: peft_config="),
        ("ln-tuning", "A file trains LoRA; pass this method to a trainer in Python: peft_config="),
        ("lara", "'lara' is not one of 'lora', 'none'; did you mean 'lora'?"),
    ],
)
def test_a_kind_of_adapter_that_is_said_otherwise_is_led_there(kind, said, tmp_path):
    (found,) = reasons(written(tmp_path, with_field("adapter", "kind", kind)))
    assert found.startswith("[adapter] kind: ")
    assert found.endswith(said)


def test_what_is_said_in_place_of_a_kind_is_taken(tmp_path):
    for way in KINDS.values():
        adapter = tomllib.loads(way.replace(" and ", "\n"))
        config = read_config(written(tmp_path, {**GOOD, "adapter": adapter}), asks_trl=False)
        assert {name: getattr(config.adapter, name) for name in adapter} == adapter


def test_everything_is_said_at_once(tmp_path):
    file = tmp_path / "some.toml"
    file.write_text(
        'method = "gpro"\nepochs = 3\n[base]\nmdel = "x"\n[adapter]\nrank = 8\nr = "8"\n'
        "[sinc]\nhow = 1\n[run]\nlora_alpha = 2\n"
        '[rollout]\nwhere = "colocat"\n[[rewards]]\nuse = "length_match"\n'
        '[[rewards]]\nuse = "format_match"\nweight = "1"\n'
    )
    found = reasons(file, "rewards.5.weight=2", "adapter")
    for wanted in (
        "--set rewards.5.weight=2: there is no number 5 among 2; they are counted from 0",
        "--set adapter: is no table.field=value",
        f"method: 'gpro' is not one of {', '.join(map(repr, METHODS))}; did you mean 'grpo'?",
        "epochs: unknown; did you mean [train] num_train_epochs?",
        "[sinc]: unknown; did you mean 'sync'?",
        "[base] mdel: unknown; did you mean 'model'?",
        "[adapter] rank: unknown; did you mean [adapter] r?",
        "[adapter] r: '8' is not a whole number of at least 1",
        "[run] lora_alpha: unknown; did you mean [adapter] lora_alpha?",
        "[rollout] where: 'colocat' is neither 'colocate', 'server', 'ray' nor a URL such as 'http://host:8000'; did "
        "you mean 'colocate'?",
        "[[rewards]] number 0 arguments: at_most is missing: 'length_match' needs it",
        "[[rewards]] number 1 weight: '1' is not a number",
    ):
        assert wanted in found
    assert any(reason.startswith("[base] model: is missing") for reason in found)
    assert any(reason.startswith("[data] train: is missing") for reason in found)


@pytest.mark.parametrize(
    ("changes", "place", "said"),
    [
        ({"rewards": None}, "[[rewards]]", "scores completions"),
        ({"method": "dpo", "rewards": None}, "[data] train",
            "needs the columns chosen and rejected; there are answer, careless, prompt"),
        ({"method": "sft"}, "[[rewards]]", "scores no completions"),
        ({"method": "kto", "rewards": None}, "[data] train", "prompt and completion and label or chosen and rejected"),
        ({"method": "distill", "teacher": {"adapter": "policy"}}, "[[rewards]]", "scores no completions"),
        ({"method": "distill", "rewards": None}, "[teacher]", "is missing: method = 'distill' learns from a teacher"),
        ({"method": "distill", "rewards": None, "teacher": {"adapter": "policy"}}, "[teacher] adapter",
            "nothing can be learned"),
        ({"method": "distill", "rewards": None, "teacher": {"adapter": "none"}}, "[teacher] adapter",
            "nothing can be learned"),
        ({"method": "distill", "rewards": None, "teacher": {"adapter": "none", "model": "a"}}, "[teacher] adapter",
            "names another teacher"),
        ({"method": "distill", "rewards": None, "teacher": {"url": "http://a", "model": "big", "quant": "fp4"}},
            "[teacher] quant", "there is none"),
        ({"method": "distill", "rewards": None, "teacher": {"url": "http://a"}, "train": {"temperature": 0.7}},
            "[train] temperature", "at temperature 1"),
        ({"method": "distill", "rewards": None, "teacher": {"adapter": "none", "prompt": "answer",
            "prompt_template": "{answer}"}}, "[teacher] prompt_template", "prompt names it, too"),
        ({"method": "distill", "rewards": None, "teacher": {"adapter": "policy", "prompt": "answer"},
            "adapter": {"kind": "none"}, "base": {"model": "a", "quant": "none"}}, "[adapter] kind", "adapters only"),
        ({"method": "sft", "rewards": None, "sync": {"how": "weights"}}, "[sync] how", "not to method = 'sft'"),
        ({"method": "sft", "rewards": None, "run": {"gpu_memory": 8}}, "[run] gpu_memory",
            "belongs to grpo, rloo, async_grpo, distill, not"),
        ({"method": "sft", "rewards": None, "adapter": {"kind": "none"}, "base": {"model": "a", "quant": "none"}},
            "[adapter] kind", "adapters only"),
        ({"base": {"model": "a", "quant": "none"}, "adapter": {"kind": "none"}}, "[adapter] kind",
            "Set [sync] how = 'weights'"),
        ({"adapter": {"kind": "none"}, "run": {"gpu_memory": 8}}, "[run] gpu_memory", "cannot be planned"),
        ({"method": "async_grpo", "train": {"vllm_enable_sleep_mode": True}}, "[train] vllm_enable_sleep_mode",
            "cannot sleep"),
        ({"adapter": {"kind": "none", "r": 4}}, "[adapter] r", "trains no adapter"),
        ({"adapter": {"use_dora": True}, "sync": {"how": "lora_adapter"}}, "[sync] how",
            "use_dora or modules_to_save cannot be synced alone"),
        ({"rollout": {"where": "http://a", "base_compute": "vllm"}}, "[rollout] base_compute", "when it was started"),
        ({"rollout": {"where": "server", "vllm": {"a": 1}}}, "[rollout] vllm", "where = 'ray' only"),
        ({"rollout": {"where": "server", "replicas": 2}}, "[rollout] replicas", "belongs to where = 'ray'"),
        ({"rollout": {"api_key_file": str(ROOT / "Makefile")}}, "[rollout] api_key_file", "only a server needs a key"),
        ({"rollout": {"where": "server", "share_base": True}}, "[rollout] share_base", "nothing can be shared"),
        ({"rollout": {"where": "server"}, "sync": {"dir": "x"}}, "[sync] dir", "Remove it"),
        ({"train": {"eval_strategy": "steps"}}, "[train] eval_strategy", "Set [data] eval"),
        ({"data": {**GOOD["data"], "columns": {"prompt": "answer"}, "prompt_template": "{answer}"}},
            "[data] prompt_template", "columns does so"),
        ({"data": {**GOOD["data"], "columns": {"question": "prompt"}}}, "[data] train", "needs the columns prompt"),
        ({"base": {"model": str(ROOT), "revision": "main"}}, "[base] revision", "names a directory"),
        ({"rewards": [{"use": "numeric_match", "arguments": {"column": "solution"}}]}, "[[rewards]] arguments",
            "there are answer, careless, prompt"),
        ({"train": 3}, "[train]", "3 is not a table"),
        ({"sync": "auto"}, "[sync]", "'auto' is not a table"),
        ({"rewards": {"use": "exact_match"}}, "[[rewards]]", "is a list of tables"),
    ],
)  # fmt: skip
def test_what_contradicts_is_rejected_with_the_way_out(changes, place, said, tmp_path):
    document = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    found = reasons(written(tmp_path, document))
    assert any(reason.startswith(f"{place}: ") and said in reason for reason in found), found


def test_an_adapter_that_is_trained_on_brings_its_own_config(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").touch()
    document = with_field("adapter", "start_from", str(tmp_path))
    assert read_config(written(tmp_path, document), asks_trl=False).adapter.start_from == str(tmp_path)
    document["adapter"]["lora_alpha"] = 8
    assert reasons(written(tmp_path, document))[0].startswith(
        "[adapter] lora_alpha: cannot be combined with start_from"
    )


def test_a_run_directory_that_is_taken_is_found_before_anything_is_loaded(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    file = written(tmp_path, with_field("run", "dir", str(tmp_path)))
    assert "holds a run" in reasons(file)[0]
    assert "--set run.existing=overwrite" in reasons(file)[0]
    assert "'resume' (go on from its last checkpoint)" in reasons(file)[0]
    assert f"Choose another (--set run.dir={tmp_path}-2)" in reasons(file)[0]
    assert read_config(file, ["run.existing=overwrite"], asks_trl=False, trains=True).run.dir == str(tmp_path)


def test_a_run_directory_that_cannot_be_made_is_found_before_anything_is_loaded(tmp_path):
    blocked = written(tmp_path, GOOD)
    for out in (blocked / "x", blocked / "x" / "y"):
        file = written(tmp_path, with_field("run", "dir", str(out)))
        assert reasons(file)[0] == f"[run] dir: {out} cannot be made: {blocked} is no directory. Choose another"
    assert reasons(written(tmp_path, with_field("run", "dir", str(blocked))))[0] == f"[run] dir: {blocked} is a file"
    file = written(tmp_path, with_field("run", "dir", str(tmp_path / "new" / "run")))
    assert read_config(file, asks_trl=False, trains=True).run.dir == str(tmp_path / "new" / "run")


def test_a_run_directory_that_is_not_writable_is_found_before_anything_is_loaded():
    with tempfile.TemporaryDirectory() as directory:  # pytest's own is closed to others
        os.chmod(directory, 0o755)
        closed = os.path.join(directory, "closed")
        os.mkdir(closed, 0o555)
        for out, what in ((closed, "written"), (os.path.join(closed, "run"), "made")):
            wanted = f"[run] dir: {out} cannot be {what}: {closed} is not writable. Choose another"
            if (child := os.fork()) == 0:
                found = ["not asked"]
                try:
                    if os.geteuid() == 0:
                        os.setuid(65534)  # root may write everywhere
                    found = list(map(str, check_directory(out, "auto")))
                finally:
                    os._exit(found != [wanted])
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_usual_run_directory_is_looked_at_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, taken = written(tmp_path, GOOD), tmp_path / "runs" / "some"
    taken.mkdir(parents=True)
    assert read_config(file, asks_trl=False, trains=True).run.dir == str(taken)
    (taken / "metrics.jsonl").write_text("{}\n")
    said = reasons(file, "run.existing=reject")[0]
    assert said.startswith(f"[run] dir: {taken} holds a run. Choose another (--set run.dir={taken}-2)")


def began(directory, file=None, *left):
    """A run has left this in a directory, and was recorded as one of the file."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in left or ("config.json", "metrics.jsonl"):
        (directory / name).touch()
    if file is not None:
        (directory / "run.toml").write_text(f"# Settled\n{source_line(os.path.realpath(file))}\n\nmethod = 1\n")


def place(file, *overrides, trains=True):
    run = read_config(file, overrides, asks_trl=False, trains=trains).run
    assert run.existing == (overrides[0].partition("=")[2] if overrides else "reject")
    return Path(run.dir).relative_to(Path.cwd() / "runs").name


GOES_ON = ("resume", "overwrite", "continue")


def test_a_second_run_of_a_file_takes_the_next_free_name_and_what_goes_on_takes_the_only_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, runs = written(tmp_path, GOOD), tmp_path / "runs"
    for existing in GOES_ON:
        assert place(file, f"run.existing={existing}") == "some"
    for number, wanted in enumerate(("some", "some-2", "some-3"), 1):
        assert place(file) == wanted
        (runs / wanted).mkdir(parents=True)
        assert place(file) == wanted  # nothing has trained in it
        began(runs / wanted, file)
        for existing in GOES_ON:
            if number == 1:
                assert place(file, f"run.existing={existing}") == "some"
                continue
            (said,) = reasons(file, f"run.existing={existing}")
            assert said.startswith(
                f"[run] existing: '{existing}' without [run] dir: several runs may be meant: {runs / 'some'}, "
            )
            assert said.endswith(f"Say which: --set run.dir={runs / wanted}")
            chosen = read_config(file, [f"run.existing={existing}", "run.dir=runs/some"], asks_trl=False, trains=True)
            assert chosen.run.dir == str(runs / "some")
    began(runs / "some-other")
    assert place(file) == "some-4"
    assert place(file, trains=False) == "some"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "holds a run" in reasons(file)[0]
    assert "--set run.dir=" in reasons(file, "run.existing=resume")[0]


def test_the_run_of_another_file_is_never_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, runs = written(tmp_path, GOOD), tmp_path / "runs"
    other = tmp_path / "some-2.toml"
    other.write_text(file.read_text())
    began(runs / "some-2", other)
    for existing in GOES_ON:  # no run of ours is there
        assert place(file, f"run.existing={existing}") == "some"
    assert place(file) == "some"
    began(runs / "some", file)
    for existing in GOES_ON:
        assert place(file, f"run.existing={existing}") == "some"
        assert place(other, f"run.existing={existing}") == "some-2"
    assert (place(file), place(other)) == ("some-3", "some-2-2")
    began(runs / "some-2", file)  # the name of `other`'s first run, and our second
    for existing in GOES_ON:
        (said,) = reasons(other, f"run.existing={existing}")
        assert f"{runs / 'some-2'} may be meant, and is not recorded as a run of this file" in said
    assert (place(file), place(other)) == ("some-3", "some-2-2")


@pytest.mark.parametrize("recorded", [False, True])
def test_a_run_of_an_unknown_file_is_not_taken(recorded, tmp_path, monkeypatch):
    """It is of an earlier version, or from Python; or the file has moved."""
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, GOOD)
    began(tmp_path / "runs" / "some", tmp_path / "elsewhere" / "some.toml" if recorded else None)
    assert place(file) == "some-2"
    for existing in GOES_ON:
        (said,) = reasons(file, f"run.existing={existing}")
        assert said.endswith(f"Say which: --set run.dir={tmp_path / 'runs' / 'some'}")


@pytest.mark.parametrize("left", ["config.json", "metrics.jsonl", "checkpoint-5"])
def test_a_run_that_was_killed_early_is_one(left, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, GOOD)
    began(tmp_path / "runs" / "some", file)
    began(tmp_path / "runs" / "some-2", file, left)
    assert place(file) == "some-3"
    assert f"--set run.dir={tmp_path / 'runs' / 'some-2'}" in reasons(file, "run.existing=resume")[0]


def test_processes_of_one_run_must_be_told_a_directory_that_is_not_the_usual_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = written(tmp_path, GOOD)
    began(tmp_path / "runs" / "some-2", file)
    assert "several processes must be told" in reasons(file, "run.existing=resume")[0]
    assert place(file) == "some"


def test_a_directory_in_which_a_process_starts_is_not_free(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, taken = written(tmp_path, GOOD), tmp_path / "runs" / "some"
    taken.mkdir(parents=True)
    code = (
        "import sys, time; from pathlib import Path; from qlora_rl.locks import hold; hold(Path(sys.argv[1])); "
        "print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(taken)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        assert place(file) == "some-2"
        other.stdin.close()
        other.wait()
    assert place(file) == "some"


def test_two_that_start_together_take_two_names_and_leave_nothing_where_nothing_was_written(
    tmp_path, monkeypatch, capsys
):
    from qlora_rl.cli import main

    monkeypatch.chdir(tmp_path)
    file, started = written(tmp_path, GOOD), []

    def launch(config, begun, source):
        started.append(Path(config.run.dir).name)
        assert Path(config.run.dir).is_dir()
        if len(started) < 3:
            assert main(["train", str(file)]) == 0  # while the one before is still loading
        return Path(config.run.dir)

    monkeypatch.setattr("qlora_rl.config.launch.launch", launch)
    assert main(["train", str(file)]) == 0
    assert started == ["some", "some-2", "some-3"]
    assert f"another process trains in {tmp_path / 'runs' / 'some'}, so this one goes to" in capsys.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []


def test_one_that_another_was_faster_in_is_chosen_again(tmp_path):
    from qlora_rl.train.run import claimed

    names = iter([str(tmp_path / "held"), str(tmp_path / "done"), str(tmp_path / "free")])
    (tmp_path / "held").mkdir()
    began(tmp_path / "done")
    handle = hold(tmp_path / "held")
    with claimed(lambda: next(names)) as found:
        assert found == str(tmp_path / "free")
        assert is_held(tmp_path / "free")
    os.close(handle)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["done", "held"]


def test_train_says_which_directory_it_takes_and_how_the_run_before_goes_on(tmp_path, monkeypatch, capsys):
    from qlora_rl.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qlora_rl.config.launch.launch", lambda config, *_: Path(config.run.dir))
    file, taken = written(tmp_path, GOOD), tmp_path / "runs" / "some"
    assert main(["train", str(file)]) == 0
    assert "holds a run" not in capsys.readouterr().err
    began(taken, file)
    assert main(["train", str(file)]) == 0
    said = capsys.readouterr()
    assert f"{taken} holds a run, so this one goes to {taken}-2." in said.err
    assert f"--set run.dir={taken} --set run.existing=resume" in said.err
    assert f"run directory: {taken}-2\n" in said.out
    assert main(["train", str(file), "--set", "run.existing=resume"]) == 0
    said = capsys.readouterr()
    assert "goes to" not in said.err
    assert f"run directory: {taken}\n" in said.out


def test_a_run_directory_that_is_taken_is_no_matter_where_nothing_is_trained(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    file = written(tmp_path, with_field("run", "dir", str(tmp_path)))
    assert read_config(file, asks_trl=False).run.dir == str(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [("method = grpo", "it is not valid TOML"), (b"\xff\xfe", "it is not valid TOML"), (None, "No such file")],
)
def test_what_is_no_toml_is_rejected(content, said, tmp_path):
    file = tmp_path / "some.toml"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in reasons(file)[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "is empty"), ("nonsense\n", "its first line is no JSON"), ("[1]\n", "no JSON object")],
)
def test_a_data_file_that_is_none_is_found_by_its_first_line(content, said, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text(content)
    assert any(said in reason for reason in reasons(written(tmp_path, with_field("data", "train", str(data)))))


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "holds no text"), (b" \n", "holds no text"), (b"caf\xe9", "is not in UTF-8")]
)
def test_a_file_without_text_is_nothing_to_calibrate_on(content, said, tmp_path):
    (text := tmp_path / "text.txt").write_bytes(content)
    (found,) = reasons(written(tmp_path, with_field("base", "calibrate", str(text))), asks_trl=False)
    assert found.startswith("[base] calibrate: ")
    assert said in found
    text.write_text("text")
    read_config(written(tmp_path, with_field("base", "calibrate", str(text))), asks_trl=False)


# --- what is right --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [24, "24GB", "24GiB"])
def test_a_cards_size_is_read_with_its_unit(said, tmp_path):
    file = written(tmp_path, with_field("run", "gpu_memory", said))
    assert read_config(file, asks_trl=False).run.gpu_memory == 24
    assert read_config(file, [f"run.gpu_memory={said}"], asks_trl=False).run.gpu_memory == 24


def test_a_set_replaces_adds_and_needs_no_quotes(tmp_path):
    overrides = [
        "adapter.r=32", "base.model=a/b", 'adapter.target_modules=["q_proj"]', "rewards.0.weight=2",
        "train.learning_rate=1e-3",
        "method=rloo", "adapter.use_rslora=true",
    ]  # fmt: skip
    config = read_config(written(tmp_path, GOOD), overrides, asks_trl=False)
    assert (config.adapter.r, config.base.model, config.adapter.target_modules) == (32, "a/b", ["q_proj"])
    assert (config.rewards[0].weight, config.train, config.method) == (2.0, {"learning_rate": 1e-3}, "rloo")
    assert config.adapter.use_rslora is True


def test_paths_are_those_of_the_file_and_those_of_a_set_are_of_the_working_directory(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for directory in (here, there):
        directory.mkdir()
        (directory / "rows.jsonl").write_text('{"prompt": "a"}\n')
        (directory / "mine.py").write_text("def reward(completions, **_):\n    return [0.0] * len(completions)\n")
        (directory / "model").mkdir()
    file = written(
        here,
        {
            "method": "grpo",
            "base": {"model": "model"},
            "data": {"train": "rows.jsonl"},
            "rewards": [{"use": "mine.py:reward"}],
        },
    )
    monkeypatch.chdir(there)
    config = read_config(file, asks_trl=False)
    assert (config.base.model, config.data.train) == (str(here / "model"), str(here / "rows.jsonl"))
    assert (config.rewards[0].use, config.run.dir) == (f"{here / 'mine.py'}:reward", str(there / "runs" / "some"))
    overrides = ["base.model=model", "data.train=rows.jsonl", "rewards.0.use=mine.py:reward", "run.dir=out"]
    config = read_config(file, overrides, asks_trl=False)
    assert (config.base.model, config.data.train) == (str(there / "model"), str(there / "rows.jsonl"))
    assert (config.rewards[0].use, config.run.dir) == (f"{there / 'mine.py'}:reward", str(there / "out"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda f: f.stem)
def test_the_settled_copy_of_every_example_is_the_same_run(file, tmp_path):
    config = read_config(file, asks_trl=False)
    copy = tmp_path / "elsewhere" / "run.toml"
    copy.parent.mkdir()
    copy.write_text(record(config, file))
    assert source_of(str(copy.parent)) == str(file)
    assert read_config(copy, asks_trl=False) == config
    assert all(f'"{file.parent}' in line for line in copy.read_text().splitlines() if "sums.jsonl" in line)


def test_the_settled_copy_says_every_field_that_its_method_knows(tmp_path):
    """Other defaults of a later version do not change it."""
    document = resolved(read_config(written(tmp_path, GOOD), asks_trl=False))
    for table, kind in TABLES.items():
        held = document[table][0] if kind is Reward else document.get(table, {})
        for name in {name for name, known in options(kind).items() if applies(known, "grpo")} - set(held):
            assert options(kind)[name]["default"] in (None, {}), (table, name)  # nothing to say


LEAVES = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner,
max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
max_leaves=8)  # fmt: skip


ODD = ["a" * 5000 + ".jsonl", "/" + "b" * 5000, "a" * 5000 + ".py:f", "~nobody/x", "\0", "/a\0.jsonl", ".", "/", ":",
".py:f", "http://", "{0}", "{!r}"]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "name"), [each for each in EVERY_FIELD if options(TABLES[each[0]])[each[1]].get("type") != "boolean"]
)
def test_odd_texts_are_read_or_rejected(table, name, tmp_path):
    for value in [*ODD, ODD]:
        check_read_or_rejected(tmp_path, with_field(table, name, value))


PATHS = st.sampled_from(
    ["/", ".", "~", "a.jsonl", "/x/y.parquet", "a" * 5000 + ".jsonl", "/" + "b" * 5000, "a.py:b", "~nobody/x", "\0"]
)
ANYTHING = st.one_of(
    VALUES, PATHS, st.lists(PATHS, max_size=2), st.just("auto"), st.just("server"), st.just("http://a")
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*METHODS, "none"]),
    st.lists(
        st.tuples(st.sampled_from([*EVERY_FIELD, ("base", "x"), ("x", "y"), ("train", "seed")]), ANYTHING), max_size=6
    ),
    st.dictionaries(st.sampled_from([*TABLES, "train", "x"]), ANYTHING, max_size=1),
)
def test_whatever_stands_in_the_file_is_read_or_rejected_with_reasons(method, changes, tables):
    document = {**json.loads(json.dumps(GOOD)), "method": method}
    for (table, name), value in changes:
        held = document.setdefault(table, [{}] if table == "rewards" else {})
        (held[0] if table == "rewards" else held)[name] = value
    document |= tables
    with tempfile.TemporaryDirectory() as directory:
        check_read_or_rejected(Path(directory), document)


@settings(deadline=None)
@given(st.dictionaries(st.text("abc_ .\"'é\n", max_size=4), VALUES, max_size=4))
def test_what_is_written_is_read_again(table):
    assert tomllib.loads(to_toml({"top": 1, "table": table, "many": [table, {"x": 1}]})) == {
        name: value
        for name, value in {"top": 1, "table": table, "many": [each for each in (table, {"x": 1}) if each]}.items()
        if value != {}
    }


@pytest.mark.parametrize("method", METHODS)
def test_the_file_to_start_from_is_right_and_shows_every_field(method, tmp_path, monkeypatch):
    text = example(method)
    file = tmp_path / "run.toml"
    file.write_text(text.replace("examples/data", str(ROOT / "examples" / "data")))
    assert read_config(file, asks_trl=False).method == method
    loose = tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    for table, kind in TABLES.items():
        wanted = {name for name, known in options(kind).items() if applies(known, method)}
        if kind is Reward and not METHODS[method].scores:
            continue
        held = loose.get(table, {})
        assert set(held[0] if kind is Reward else held) == wanted


def test_the_documentation_has_every_method_and_the_schema_every_field():
    methods, *tables = markdown().split("\n\n### ")
    assert methods in (ROOT / "docs" / "config.md").read_text()
    assert all(
        f"| `{name}` |" in table for kind, table in zip(TABLES.values(), tables, strict=True) for name in options(kind)
    )


def test_every_alias_leads_to_a_field():
    for place in ALIASES.values():
        table, name = re.fullmatch(r"\[+(\w+)\]+ (\w+)", place).groups()
        assert table == TRAIN or name in options(TABLES[table]), place
