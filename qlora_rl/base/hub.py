"""`hub_reachable`: is there a network? Without one, what is cached is used at once, and what is not is one error, not
five minutes of retries."""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

_PATIENCE_S = 3.0
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")


def is_local(model: str | os.PathLike[str]) -> bool:
    """A path of this machine, not a name on the hub."""
    return Path(model).exists() or Path(model).is_absolute()


def missing_path(model: str | os.PathLike[str]) -> str:
    """That there is nothing at a path which cannot be a name on the hub; empty for any other name, and where there
    is."""
    text = os.fspath(model)
    is_path = text.startswith(("/", ".", "~")) or text.count("/") > 1
    return f"there is no directory {text}" if is_path and not os.path.exists(text) else ""


@functools.cache
def hub_reachable() -> bool:
    """Whether the hub's host takes a connection; tried once a process, for three seconds at most.

    Where it does not, huggingface_hub and datasets are switched to their caches for the rest of the process, as
    `HF_HUB_OFFLINE=1` does. Behind a proxy nothing is tried: only the proxy can reach it.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    url = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection(
            (url.hostname, url.port or (443 if url.scheme == "https" else 80)), _PATIENCE_S
        ).close()
    except OSError as error:
        logger.warning("%s cannot be reached (%s): only what is cached here can be used", constants.ENDPOINT, error)
        constants.HF_HUB_OFFLINE = True
        if (datasets := sys.modules.get("datasets")) is not None:  # it has taken its own copy of the setting
            datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True
        return False
    return True


def why_missing(name: str) -> str:
    """Why the hub has given nothing of that name; with the way out."""
    if hub_reachable():
        return (
            f"the hub has no {name!r} that can be read from here. Check the name, log in if it is gated (`hf auth "
            "login`), or pass a path"
        )
    is_wanted = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    why = "HF_HUB_OFFLINE is set. Unset it" if is_wanted else "the hub cannot be reached. Connect"
    here = "" if os.path.exists(name) else "is no path here, "
    return (
        f"{name!r} {here}is not in the local cache, and {why} once, set HF_HOME to a cache that has it, or pass a path"
    )


def in_short(error: Exception) -> str:
    """What transformers says of a checkpoint, and what to do."""
    said = str(error).strip() or type(error).__name__
    if not isinstance(error, (OSError, ValueError)):
        said = f"{type(error).__name__}: {said}"
    if "trust_remote_code" in said:
        way = "Read that code, then pass trust_remote_code=True (to a trainer in args.model_init_kwargs)."
    elif "does not recognize this architecture" in said:
        way = "Update transformers, or take another model."
    else:
        way = "Pass a directory that holds a causal language model's weights, or a hub name."
    return f"{said.partition(chr(10))[0].rstrip('.')}. {way}"  # all classes that there are follow in further lines
