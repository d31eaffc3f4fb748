"""What README and docs say is so."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import program

import qlora_rl

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")] + sorted(
    (ROOT / "docs").glob("*.md")
)


def test_every_sentence_that_a_gpu_decides_is_on_its_page():
    tables = program("benchmarks/gpu_tables.py")
    assert not [each["now"] for each in tables.sentences() if not tables.place(each, (ROOT / each["page"]).read_text())]


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


def test_the_architecture_names_every_folder():
    page = (ROOT / "docs" / "architecture.md").read_text()
    home = ROOT / "qlora_rl"
    rows = re.findall(r"^\| (`(?:\.|[\w/]+/)`(?:, `[\w/]+/`)*) \| .+ \|$", page, re.MULTILINE)
    named = {(home / folder).resolve() for folders in rows for folder in re.findall(r"`([^`]+)`", folders)}
    assert named == {file.parent for file in home.rglob("*.py")}
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
