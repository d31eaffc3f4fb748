"""What mkdocs is told beyond mkdocs.yml: pages for the files of the repository that the docs link to, the fields of a
run's file, the API."""

import ast
import json
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
# In the repository, not on the site (`exclude_docs` in mkdocs.yml); links to it become text.
LEFT_OUT = re.compile(r"\[([^\]]+)\]\(development-log\.md(#[^)\s]*)?\)")


def on_files(files: Files, config) -> Files:
    """Add what is generated."""
    linked = {path for file in files.documentation_pages() for path, _ in LINK.findall(file.content_string)}
    for path in sorted(linked):
        files.append(File.generated(config, _page_of(path), content=_content(path)))
    files.append(File.generated(config, "config-fields.md", content=_fields()))
    files.append(File.generated(config, "api.md", content=_api()))
    return files


def on_page_markdown(markdown: str, *, page, **_) -> str:
    """Links out of docs/ lead to the generated pages."""
    if page.file.generated_by:
        return markdown
    return LINK.sub(lambda found: f"]({_page_of(found[1])})", LEFT_OUT.sub(r"\1", markdown))


def _page_of(path: str) -> str:
    return f"files/{path.rstrip('/')}.md"


def _content(path: str) -> str:
    place, title = ROOT / path, path.rstrip("/")
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.suffix in (".py", ".ipynb"))
        rows = [f"| `{file.relative_to(place)}` | {_says(file)} |" for file in files]
        return "\n".join([f"# {title}", "", "| file | says |", "|---|---|", *rows])
    if place.suffix == ".md":
        text = place.read_text()
        return re.sub(r"\]\((?!http)([^)#\s]+)(#[^)\s]*)?\)", "]", text)  # its links start from the repository's root
    if place.suffix == ".ipynb":
        return _notebook(json.loads(place.read_text()))
    kind = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "bash"}.get(place.suffix, "")
    fence = "`" * 6
    return f"# {title}\n\n{fence}{kind}\n{place.read_text()}\n{fence}\n"


def _notebook(notebook: dict) -> str:
    """Its text, code and outputs, with the pictures inside; links to docs/ lead to the site's own pages."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text.replace("](../../docs/", "](../../../"))
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(
                    f"![what the cell above draws](data:image/png;base64,{''.join(data['image/png']).strip()})"
                )
            elif "text/html" in data:
                parts.append("".join(data["text/html"]))
            else:
                parts.append(f"```text\n{''.join(output.get('text', data.get('text/plain', ''))).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _says(file: Path) -> str:
    if file.suffix == ".ipynb":
        return json.loads(file.read_text())["cells"][0]["source"][0].strip("# \n")
    said = ast.get_docstring(ast.parse(file.read_text())) or ""
    return said.split("\n")[0].replace("|", "\\|")


def _find_package() -> None:
    if str(ROOT) not in sys.path:  # mkdocs takes it out again after it has loaded this file
        sys.path.insert(0, str(ROOT))


def _fields() -> str:
    _find_package()
    from qlora_rl.config.text import markdown

    about = "What `qlora-rl train --print-schema` prints; [config.md](config.md) says how to use it."
    return f"# Every field of a run's file\n\n{about}\n\n{markdown()}"


def _api() -> str:
    _find_package()
    import qlora_rl

    homes = {name: home for name, home in qlora_rl._HOMES.items() if name not in qlora_rl._ERRORS}
    rooms: dict[str, list[str]] = {}
    for name, home in homes.items():
        rooms.setdefault(home.split(".")[1], []).append(f"{home}.{name}")
    lines = ["# API", "", "Everything that `from qlora_rl import ...` gives, by room. Errors: [below](#errors).", ""]
    for room, names in rooms.items():
        lines += [f"## {room}", "", *(f"::: {name}\n" for name in names)]
    kinds = [name for name in qlora_rl._ERRORS]
    return "\n".join([*lines, "## errors", "", *(f"::: qlora_rl.errors.{name}\n" for name in kinds)])
