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
# Why a model cannot be trained here, by what it has.
UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "experts": "is a mixture of experts of a type that is not supported. Use Qwen3-MoE, Mixtral or OLMoE "
        "(docs/mixtures.md), or a dense model",
        "images": "reads images or sound, and is of a type that is not supported. Use Qwen2-VL, Qwen2.5-VL, Qwen3-VL "
        "or Gemma 3 (docs/images.md), or a model for text alone",
    }
)


@dataclass(frozen=True)
class Published:
    """A public model.

    Attributes:
        name: on the hub.
        config: fields of its transformers config that say how large it is; enough for a memory estimate, not to run the
            model.
        parameters: as published, tied ones once.
        is_chat: it was trained under a chat template.
        switch: argument of that template that turns thinking off; empty where there is none.
        takes_system: that template takes system messages.
    """

    name: str
    config: Mapping[str, Any]
    parameters: int
    is_chat: bool
    switch: str = ""
    takes_system: bool = True


def published(model: str) -> Published | None:
    """The public model of that name, if its shape is known here."""
    return models().get(model.lower())


@cache
def models() -> Mapping[str, Published]:
    """All of them, by their name in lower case."""
    found = {}
    for row in _file()["model"]:
        config, parameters = row["config"], row["parameters"]
        for name in row["chat"]:
            found[name.lower()] = Published(
                name, config, parameters, True, row.get("switch", ""), row.get("takes_system", True)
            )
        positions = row.get("pretrained_positions", config["max_position_embeddings"])
        for name in row.get("pretrained", ()):
            found[name.lower()] = Published(name, config | {"max_position_embeddings": positions}, parameters, False)
    return MappingProxyType(found)


def why_unsupported(model: str) -> str:
    """Why the public model of that name cannot be trained here; empty where nothing is known against it."""
    rows = _file()["unsupported"].items()
    return next((UNSUPPORTED[part] for part, names in rows if model.lower() in map(str.lower, names)), "")


@cache
def _file() -> Mapping[str, Any]:
    return tomllib.loads((files(__package__) / FILE).read_text(encoding="utf-8"))
