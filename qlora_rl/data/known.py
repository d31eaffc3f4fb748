"""Public datasets that are known by name: `datasets.toml`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib.resources import files as package_files
from typing import Any


def known_dataset(name: str) -> Mapping[str, Any] | None:
    """What `datasets.toml` says of a public dataset; `None` where it is not in there."""
    return _known_datasets().get(name)


def check_subset(name: str, subset: str | None) -> str:
    """What is wrong with the subset of a known dataset; empty where it is none, or nothing."""
    subsets = (known_dataset(name) or {}).get("subsets", [])
    if not subsets or subset in subsets:
        return ""
    there = ", ".join(subsets)
    return f"{name} has {there}" + (f", and no {subset!r}" if subset else f". Name one: subset = '{subsets[0]}'")


@functools.cache
def _known_datasets() -> Mapping[str, Any]:
    return tomllib.loads((package_files(__package__) / "datasets.toml").read_text(encoding="utf-8"))
