"""`published`: the shape of a public model by its name, out of `models.toml`, where the hub cannot be asked."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

FILE = "models.toml"


@dataclass(frozen=True)
class Published:
    """A public model.

    Attributes:
        name: on the hub.
        config: fields of its transformers config that say how large it is; enough for a memory estimate, not to run the model.
        parameters: as published, tied ones once.
        is_chat: it was trained under a chat template.
        switch: argument of that template that turns thinking off; empty where there is none.
    """

    name: str
    config: Mapping[str, Any]
    parameters: int
    is_chat: bool
    switch: str = ""


def published(model: str) -> Published | None:
    """The public model of that name, if its shape is known here."""
    return models().get(model.lower())


@cache
def models() -> Mapping[str, Published]:
    """All of them, by their name in lower case."""
    found = {}
    for row in tomllib.loads((files(__package__) / FILE).read_text(encoding="utf-8"))["model"]:
        config, parameters = row["config"], row["parameters"]
        for name in row["chat"]:
            found[name.lower()] = Published(name, config, parameters, True, row.get("switch", ""))
        positions = row.get("pretrained_positions", config["max_position_embeddings"])
        for name in row.get("pretrained", ()):
            found[name.lower()] = Published(name, config | {"max_position_embeddings": positions}, parameters, False)
    return MappingProxyType(found)
