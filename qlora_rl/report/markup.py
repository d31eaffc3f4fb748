"""HTML in which every text is escaped unless it was built here."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

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
