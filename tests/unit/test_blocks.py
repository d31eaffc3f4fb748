"""What README and docs show as code: each block is read by what would run it."""

import ast
import contextlib
import importlib
import inspect
import io
import json
import re
import shlex
from pathlib import Path

import pytest

import qlora_rl

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(*kinds):
    """(page and line, text) of every block of these kinds."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in FENCE.finditer(text):
            if block[1] in kinds:
                line = text.count("\n", 0, block.start()) + 2
                found.append(pytest.param(block[2], id=f"{page.relative_to(ROOT)}:{line}"))
    return found


def command_lines(text):
    """Lines of a shell block, continued ones joined, without what is said about them."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        said = re.split(r"\s+#\s|\s{2,}(?=\S)|\s[<>]\s|\s&&\s", line.strip())[0]
        if said.startswith(("qlora-rl ", "make ", "python ")):
            yield said


SHELL = [p for p in blocks("", "bash") if any(command_lines(p.values[0]))]


def usage(line):
    """A summary with choices, "[--steps N]" or "a|b", is not a command to type."""
    return re.search(r"[\[\]|]|\.\.\.", line) is not None


@pytest.mark.parametrize("text", SHELL)
def test_every_command_is_understood_by_its_own_parser(text, monkeypatch):
    from qlora_rl.cli import _parser

    monkeypatch.setattr(Path, "exists", lambda path: True)  # the runs of the docs
    for line in command_lines(text):
        program, *arguments = shlex.split(line)
        if program == "qlora-rl" and usage(line):
            known = _parser()._subparsers._group_actions[0].choices[arguments[0]].format_help()
            for option in re.findall(r"--[\w-]+", line):
                assert option in known, line
        elif program == "qlora-rl":
            numbers = [{"N": "1", "T": "1.0"}.get(argument, argument) for argument in arguments]
            said, code = io.StringIO(), 0
            try:
                with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                    _parser().parse_args(numbers)
            except SystemExit as end:
                code = end.code  # 0: --help
            assert code == 0, f"{line}: {said.getvalue()}"
        elif program == "make":
            target = next(argument for argument in arguments if "=" not in argument)
            assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        elif arguments[0].endswith(".py"):
            source = (ROOT / arguments[0]).read_text()
            for option in re.findall(r"--[\w-]+", line):
                assert f'"{option}"' in source, line


PYTHON = blocks("python")


@pytest.mark.parametrize("text", PYTHON)
def test_every_keyword_that_is_shown_is_one(text):
    """Of the functions and classes of this package, and of TRL's and PEFT's configs, that a block calls by name."""
    import peft
    import trl

    tree = ast.parse(text)
    known = {name: getattr(qlora_rl, name) for name in qlora_rl.__all__}
    known |= {"GRPOConfig": trl.GRPOConfig, "LoraConfig": peft.LoraConfig}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qlora_rl."):
            module = importlib.import_module(node.module)
            known |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and callable(known.get(node.func.id)):
            parameters = inspect.signature(known[node.func.id]).parameters
            if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
                continue
            for keyword in node.keywords:
                assert keyword.arg is None or keyword.arg in parameters, f"{node.func.id}({keyword.arg}=...)"


@pytest.mark.parametrize("text", blocks("toml"))
def test_every_run_file_passes_the_check(text, tmp_path):
    from qlora_rl.config.read import read_config

    (tmp_path / "run.toml").write_text(text)
    (tmp_path / "key").write_text("k" * 32)
    for name in ("sums.jsonl", "products.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": "2+2=", "answer": "4", "image": "a.png"}) + "\n")
    (tmp_path / "tools.py").write_text(next(p.values[0] for p in PYTHON if "def multiply(" in p.values[0]))
    read_config(tmp_path / "run.toml")


def test_the_blocks_are_found():
    assert len(SHELL) > 10
    assert len(PYTHON) > 20
    assert len(blocks("toml")) >= 2
