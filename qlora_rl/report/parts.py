"""HTML that is escaped, and the parts that several sections of the page are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_THUMBNAIL = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]{1,65536}={0,2}")
_VOID = frozenset({"meta", "link", "br", "img"})


class Markup(str):
    """Text that is HTML already. Only `tag` and `join` make it from data; a plain `str` is always escaped."""

    __slots__ = ()


def join(parts: Iterable[object]) -> Markup:
    """One piece of HTML from many; `None` is left out."""
    shown = [part for part in parts if part is not None]
    return Markup("".join(part if isinstance(part, Markup) else escape(str(part)) for part in shown))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. `class_` becomes `class`, `aria_label` `aria-label`; an attribute that is `None` is left out."""
    opening = name + "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{opening}>" if name in _VOID else f"<{opening}>{join(children)}</{name}>")


def section(title: str, caption: str | None, *content: object) -> Markup:
    """A headed part of the page; where nothing is left of its content, it says that nothing was recorded."""
    shown = [part for part in content if part is not None]
    return tag(
        "section", tag("h2", title), tag("p", caption, class_="caption") if caption else None,
        *(shown or [tag("p", "Not recorded in this run.", class_="soft")]),
    )  # fmt: skip


def text_of(value: Any) -> str:
    """A prompt or an answer as text; a chat is the contents of its messages."""
    if _is_chat(value):
        return "\n\n".join(_content(message["content"]) for message in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def images_of(value: Any) -> list[Markup]:
    """The thumbnails in the messages of a chat; nothing else is shown as an image."""
    parts = [p for m in value for p in m["content"] if isinstance(m["content"], list)] if _is_chat(value) else []
    held = [part.get("image") for part in parts if isinstance(part, dict) and part.get("type") == "image"]
    return [
        tag("img", src=each, alt=f"image {number} of the prompt")
        for number, each in enumerate(held, 1)
        if isinstance(each, str) and _THUMBNAIL.fullmatch(each)
    ]


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "content" in m for m in value)


def _content(content: Any) -> str:
    """Text of a message; of one that has parts, their texts."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return str(content)
    return "".join("[image] " if part.get("type") == "image" else str(part.get("text", part)) for part in content)


def table(heads: Sequence[object], rows: Sequence[Sequence[object]], *, is_first_main: bool = False) -> Markup:
    """A table whose first column is words and whose others are numbers."""
    top = tag("tr", *(tag("th", head, scope="col", class_="num" if i else None) for i, head in enumerate(heads)))
    first = "num main" if is_first_main else "num"
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *(tag("td", cell, class_="num" if i else first) for i, cell in enumerate(row[1:])),
        )
        for row in rows
    ]
    return tag("div", tag("table", tag("thead", top), tag("tbody", *body)), class_="scroll")


def object_in(record: dict[str, Any], name: str) -> dict[str, Any]:
    """A field that is to be an object; an empty one where it is something else."""
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def objects_in(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The objects of a field that is to be a list of them."""
    value = record.get(name)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def pairs(pairs: Sequence[tuple[str, str]]) -> Markup | None:
    """A table of two columns of words; `None` without a row."""
    rows = [tag("tr", tag("th", key, scope="row"), tag("td", value)) for key, value in pairs if key]
    return tag("div", tag("table", tag("tbody", *rows)), class_="scroll") if rows else None
