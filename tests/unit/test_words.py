"""Prose uses the words of TRL's, vLLM's and PyTorch's docs: in messages, docstrings, comments, pages, notebooks."""

import io
import json
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What is written instead.
WORDS = {
    r"dr[ae]w|drawn|draws|drawing": "sample, sampled, generate",
    r"prove[sdn]?|proving|unproven|proofs?": "verify, verified, check",
    r"travel(s|led|ling)?": "is sent, is synced",
    r"refus(e|es|ed|al|als|ing)": "reject, rejected, raise, unsupported",
    r"mend(s|ed|ing)?": "fix, fixed",
    r"lies|lie|lay|lain": "is stored, is kept, is",
    r"anew": "again",
    r"beside": "alongside, next to, with",
    r"handshakes?|admission": "base verification",
    r"ledgers?": "memory estimate",
    r"rooms|floors?|doors?": "packages, layers",
    r"aloud": "say what is printed",
}
PATTERN = re.compile(rf"(?<![\w./_-])({'|'.join(WORDS)})(?![\w_(=/-])", re.IGNORECASE)
# Python 3.12 has tokens of their own for the text of f-strings.
TEXT = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
CODE = re.compile(r"`[^`\n]*`")
FIELD = re.compile(r"\{[^{}]*\}")  # of an f-string
# Charts and diagrams are drawn.
DRAWS = ("qlora_rl/report/", "scripts/diagrams.py", "docs/diagrams/", "qlora_rl/export/card.py")
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")] + sorted((ROOT / "docs").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
# The log of negative results stays as it was written.
LEFT_OUT = {ROOT / "docs" / "development-log.md"}
CODE_FILES = sorted((ROOT / "qlora_rl").rglob("*.py")) + sorted((ROOT / "examples").rglob("*.py"))


def prose_of_page(text: str) -> str:
    return CODE.sub("", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def prose_of_code(text: str) -> str:
    """Comments, and strings that are more than a name."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type in TEXT and " " in token.string):
            found.append(CODE.sub("", FIELD.sub("", token.string)))
    return "\n".join(found)


def prose_of_notebook(text: str) -> str:
    cells = json.loads(text)["cells"]
    return "\n".join(
        prose_of_page("".join(cell["source"]))
        if cell["cell_type"] == "markdown"
        else prose_of_code("".join(cell["source"]) + "\n")
        for cell in cells
    )  # fmt: skip


def stumbles(prose: str, *, draws: bool = False) -> list[str]:
    return [m[0] for m in PATTERN.finditer(prose) if not (draws and m[0].lower().startswith("dr"))]


def test_prose_uses_the_words_of_the_field():
    read = {".md": prose_of_page, ".py": prose_of_code, ".ipynb": prose_of_notebook}
    found = {}
    for path in PAGES + CODE_FILES + NOTEBOOKS:
        name = str(path.relative_to(ROOT))
        if path not in LEFT_OUT and (
            words := stumbles(read[path.suffix](path.read_text()), draws=name.startswith(DRAWS))
        ):
            found[name] = words
    assert found == {}


def test_names_in_the_code_are_words_of_the_field():
    """So that a page and the code which it explains call a thing alike."""
    pattern = re.compile(r"(?<![a-z])(drawn|ledger|admission|(un)?proven|refus(e|es|ed|al))(?![a-z])", re.IGNORECASE)
    found = {}
    for path in CODE_FILES:
        name = str(path.relative_to(ROOT))
        if not name.startswith(DRAWS) and (words := {m[0] for m in pattern.finditer(path.read_text())}):
            found[name] = words
    assert found == {}


def test_the_check_finds_a_word_in_prose_and_leaves_names_alone():
    code = 'x = "drawn"  # a rollout is drawn\n"""Nobody refuses `verify_base`."""\nrefused = f"{x} was mended, {x}"\n'
    assert stumbles(prose_of_code(code)) == ["drawn", "refuses", "mended"]
    assert stumbles(prose_of_page("Sampled.\n```\ndrawn\n```\n`ledger` is a name; a ledger is not.")) == ["ledger"]
    assert stumbles("a chart is drawn and lies there", draws=True) == ["lies"]
