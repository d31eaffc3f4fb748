"""What README and docs say is so."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qlora_rl

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")] + sorted(
    (ROOT / "docs").glob("*.md")
)


def test_every_table_is_what_its_json_says():
    command = [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_number_in_prose_has_its_source():
    command = [sys.executable, ROOT / "benchmarks" / "claims.py"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http", "mailto")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_python_block_is_python_and_imports_what_exists(page):
    import importlib

    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("qlora_rl"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page.name}: {node.module}.{alias.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_that_is_shown_exists(page):
    from qlora_rl.cli import _parser

    known = set(_parser()._subparsers._group_actions[0].choices)
    for command in re.findall(r"^qlora-rl (\w+)", page.read_text(), re.MULTILINE):
        assert command in known, f"{page.name}: qlora-rl {command}"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", page.read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


def test_the_architecture_names_every_folder_and_its_modules():
    page = (ROOT / "docs" / "architecture.md").read_text()
    home = ROOT / "qlora_rl"
    rows = re.findall(r"^\| (`(?:\.|[\w/]+/)`(?:, `[\w/]+/`)*) \| .+ \| (.*)\|$", page, re.MULTILINE)
    named = {
        (home / folder).resolve(): re.findall(r"`(\w+)`", modules)
        for folders, modules in rows
        for folder in re.findall(r"`([^`]+)`", folders)
    }
    assert set(named) == {file.parent for file in home.rglob("*.py")}
    rooms = ("train", "engine", "sync", "adapter", "base", "memory", "rewards")
    for folder, modules in named.items():
        there = {file.stem for file in folder.glob("*.py")} - (set() if folder == home else {"__init__"})
        listed = folder == home or folder.relative_to(home).parts[0] in rooms
        if modules or (listed and folder.name != "judging"):
            assert sorted(modules) == sorted(there), folder.relative_to(ROOT)
    for link in re.findall(r"\b(\w+/[\w/]+\.py)\b", page):
        assert (home / link).exists() or (ROOT / link).exists(), link


def test_every_error_has_an_entry_in_troubleshooting_and_no_other_has():
    from qlora_rl import errors

    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and name.endswith("Error")}
    assert set(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == kinds - {"QloraRLError"}


def test_the_messages_of_troubleshooting_are_those_of_the_code():
    """What people search for there: the first words of a message."""
    code = "\n".join(file.read_text() for file in (ROOT / "qlora_rl").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # messages over several lines
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    entries = [line for line in page.splitlines() if re.match(r"- `[^`]+`[^:\n]*: ", line)]
    assert len(entries) >= 9
    for line in entries:
        for part in re.findall(r"`([^`]+)`", line.partition("`: ")[0] + "`"):
            for piece in part.split("..."):
                assert piece.strip() in code, part


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_to_a_heading_finds_it(page):
    def anchors(text):
        titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text()):
        if not target.startswith("http"):
            file = page.parent / target if target else page
            assert anchor in anchors(file.read_text()), f"{page.name}: {target}#{anchor}"


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api.html").read_text()
    assert all(f'id="{home}.{name}"' in api for name, home in qlora_rl._HOMES.items())
    assert "max_staleness" in (tmp_path / "config-fields.html").read_text()
    assert "base_compute" in (tmp_path / "files" / "qlora_rl" / "engine" / "local" / "engine.py.html").read_text()
