"""`export_run`: adapter, merged model or GGUF file, written to a temporary directory, loaded again, compared, and only
then moved."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from qlora_rl.adapter.export import read_adapter
from qlora_rl.adapter.merged_weights import iter_weights
from qlora_rl.adapter.store import write_adapter, write_origin
from qlora_rl.adapter.verdict import judge_adapter
from qlora_rl.base.bake import bake_base, copy_plain
from qlora_rl.base.checkpoint import load_base
from qlora_rl.base.model_classes import directory_takes_images
from qlora_rl.base.writer import write_ends, write_template, write_weights
from qlora_rl.contracts import rank_class
from qlora_rl.engine.cleanup import trim_memory
from qlora_rl.errors import AdapterRejectedError, ConfigConflictError, ExportError, raise_where
from qlora_rl.export.card import Card, write_card
from qlora_rl.export.check import Distance, Witness, choose_prompts
from qlora_rl.export.gguf import (
    check_gguf,
    is_read_by_transformers,
    load_gguf,
    verify_gguf,
    write_gguf,
    write_modelfile,
)
from qlora_rl.export.llama_cpp import in_llama_cpp
from qlora_rl.inference.trained import TrainedRun, load_plain, open_trained
from qlora_rl.locks import flush
from qlora_rl.stages import begin, ended, remark

KINDS = ("adapter", "merged", "merged-original", "gguf")
DTYPES = ("bfloat16", "float16", "float32", "q8_0")
# Largest mean KL (nats per token) of an export that claims to be the policy. Two 16-bit computations of one function
# differ by rounding, about twice as much as either of them from float32; merged weights are rounded once more. Nothing
# above `LARGEST` is rounding. Two of float32 differ by next to nothing.
LIMIT, LIMIT_FLOAT32, ROUNDINGS, LARGEST = 1e-3, 1e-9, 4.0, 0.05
# Of a file of weights.
SHARD_BYTES = 4 * 10**9
# Of weights that are quantised again.
LIMITS = {"q8_0": 1e-2}


@dataclass(frozen=True)
class Export:
    """What was exported.

    Attributes:
        path: directory.
        kind: one of `KINDS`.
        distance: from the trained policy, of what was loaded again from `path`; `None` where that was not checked.
        prompts: where the prompts of that comparison are from.
        load: one line each that load it, by name of the library.
        llama_cpp: distance of what llama.cpp computes of a GGUF file; `None` where it is not installed.
        accepted: largest mean KL that was accepted, where the policy's own 16-bit rounding has raised it; otherwise
            `None`.
    """

    path: Path
    kind: str
    distance: Distance | None
    prompts: str
    load: dict[str, str]
    llama_cpp: Distance | None = None
    accepted: float | None = None


@ended()
def export_run(
    run: str | os.PathLike[str],
    to: str = "merged",
    *,
    out: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    original: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | None = None,
    prompts: int = 16,
    max_kl: float | None = None,
    check: bool = True,
) -> Export:
    """Export what a run has trained; the result is loaded again, and its distance from the policy stands in its
    README.md.

    Args:
        run: directory of a run, or a checkpoint in it.
        to: "adapter": for PEFT and vLLM, on the same base. "merged": one plain model on the exactly dequantised base,
            the function that was trained. "merged-original": the adapter on the weights from before the quantisation,
            another function. "gguf": the merged model as one file, for llama.cpp.
        out: directory to write; there must be none. By default `export-<to>` in the run directory.
        dtype: of merged weights; by default the base's compute dtype. Of GGUF also "q8_0".
        original: model of "merged-original": directory or hub name; by default what the base says it was made from.
        base: directory of the base, if it was moved.
        data: .jsonl file with prompts to compare on; by default the run's own, or random tokens.
        prompts: how many of them.
        max_kl: largest mean KL in nats per token; by default 1e-3 or four times the policy's distance from its own
            float32 pass, and 1e-9 in float32. "merged-original" has no limit of its own.
        check: load it again and compare; without it nothing says that it is the policy. Of a large model it takes most
            of the time.

    Raises:
        RunDirectoryError, BaseIncompleteError, BaseMismatchError: see `open_trained`.
        ConfigConflictError: the target exists, or arguments contradict each other.
        ExportError: what was loaded again is not the policy; nothing is left.
        NotYetSupportedError: GGUF of this model; names the way out.
    """
    wish = _Wish(to, dtype, original, data, prompts, max_kl, check)
    wish.check_all()
    trained = open_trained(run, base=base)
    target = Path(out) if out is not None else trained.path / f"export-{to}"
    wish = wish.for_run(trained, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
    try:
        export = _export(trained, wish, target, staging)
        os.rename(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return export


@dataclass(frozen=True)
class _Wish:
    """What `export_run` was asked for, under the names of its arguments."""

    to: str
    dtype: str | None
    original: str | os.PathLike[str] | None
    data: str | os.PathLike[str] | None
    prompts: int
    max_kl: float | None
    check: bool

    def check_all(self) -> None:
        """Raise `ConfigConflictError` where arguments contradict each other."""
        to, dtype = self.to, self.dtype
        raise_where(
            "exporting",
            [
                (to not in KINDS, f"to={to!r} is not one of {', '.join(KINDS)}."),
                (dtype not in (None, *DTYPES), f"dtype={dtype!r} is not one of {', '.join(DTYPES)}."),
                (dtype in LIMITS and to != "gguf", f"dtype={dtype!r} is for --to gguf only."),
                (
                    to == "adapter" and dtype is not None,
                    "an adapter keeps the dtype that it was trained in. Leave dtype out.",
                ),
                (
                    to != "merged-original" and self.original is not None,
                    f"original={str(self.original)!r} is for --to merged-original.",
                ),
                (
                    not self.check and self.max_kl is not None,
                    "max_kl is for the check, which check=False (--no-check) leaves out.",
                ),
                (self.prompts < 1, f"prompts={self.prompts} is not above 0."),
            ],
        )

    def for_run(self, trained: TrainedRun, target: Path) -> _Wish:
        """With what the run decides.

        Raises:
            ConfigConflictError: the target exists, or the run has nothing to be exported like that.
            NotYetSupportedError: GGUF of this model.
        """
        if target.exists() or target.is_symlink():
            raise ConfigConflictError(f"exporting to {target}: it already exists. Choose another --out, or remove it.")
        if trained.adapter is None and self.to in ("adapter", "merged-original"):
            raise ConfigConflictError(
                f"exporting {trained.path}: all weights of the base were trained, so there is no adapter. Export it as "
                "merged or gguf."
            )
        if self.to == "gguf":
            check_gguf(trained.base.path)
        original = _original(trained, self.original) if self.to == "merged-original" else self.original
        return replace(self, dtype=self.dtype or trained.base.spec.compute_dtype, original=original)


def _export(trained: TrainedRun, wish: _Wish, target: Path, staging: Path) -> Export:
    """All of it in `staging`, checked and described as what it is as `target`."""
    to, dtype, tokenizer = wish.to, str(wish.dtype), _tokenizer(trained)
    begin(f"loading the policy of {trained.path}")
    policy = trained.load()
    ids, where = choose_prompts(
        trained.path,
        tokenizer,
        policy.get_input_embeddings().weight.shape[0],
        data=None if wish.data is None else Path(wish.data),
        rows=trained.data,
        count=wish.prompts,
        longest=min(256, policy.config.get_text_config().max_position_embeddings // 2),
        **trained.template_kwargs,
    )
    is_exact, witness = dtype == "float32" and to in ("merged", "gguf"), None
    if wish.check and not is_exact:
        begin(f"sampling from the policy and scoring it: {len(ids)} prompts, {where} (--no-check leaves this out)")
        witness = Witness(policy, ids, autocast=trained.autocast, ends=trained.ends)
    begin(f"writing {to}")
    if to == "merged":
        _write_merged(trained, policy, staging, dtype)
    elif to == "gguf":
        texts = _write_gguf(trained, policy, tokenizer, staging, dtype, [tokenizer.decode(each) for each in ids])
        remark(f"a tokenizer made of the file's own fields gives {texts} texts the ids that the base's gives them")
    del policy
    trim_memory()
    if to == "adapter":
        _write_adapter(trained, staging)
    elif to == "merged-original":
        plain = load_plain(wish.original, trained.base.spec.compute_dtype, is_ours=False)
        plain = trained.with_adapter(trained.adapter, plain)
        _write_merged(trained, plain, staging, dtype)
        del plain
        trim_memory()
    compared: tuple[Distance | None, Distance | None, float | None] = None, None, None
    if wish.check:
        compared = _compared(trained, witness, ids, staging, wish)
    distance, in_cpp, accepted = compared
    load = _lines(trained, staging, to, name=target.name, base=trained.base.path.name)
    if trained.stop:
        remark("completions of the run ended at texts, too, which a model's files do not say; README.md names them")
    write_card(Card(trained, to, dtype, distance, where, load, in_cpp), staging)
    staging.chmod(0o755)
    _settle(staging)
    if target.exists():
        raise ConfigConflictError(f"exporting to {target}: it was created meanwhile. Choose another --out.")
    here = _lines(trained, staging, to, name=str(target.resolve()), base=str(trained.base.path.resolve()))
    return Export(target, to, distance, where, here, in_cpp, accepted)


def _compared(
    trained: TrainedRun,
    witness: Witness | None,
    ids: list[list[int]],
    staging: Path,
    wish: _Wish,
) -> tuple[Distance, Distance | None, float | None]:
    """The distance of what was written, that in llama.cpp, and the mean KL up to which it was accepted where that is
    more than usual.

    Raises:
        ExportError: it is not the policy.
    """
    to, dtype, max_kl = wish.to, str(wish.dtype), wish.max_kl
    if witness is None:
        begin("computing the policy in float32")
        witness = _exact_witness(trained, ids, staging.parent)
    begin("loading it again")
    again = _load_again(trained, staging, to)
    distance = witness.distance(again, autocast=trained.autocast if to == "adapter" else None)
    del again
    trim_memory()
    in_cpp = in_llama_cpp(witness, staging) if to == "gguf" else None
    limit = max_kl if max_kl is not None else _limit(to, dtype, witness.rounding)
    # What is not a number is beyond any limit.
    worst = max(filter(None, (distance, in_cpp)), key=lambda found: (math.isnan(found.kl_mean), found.kl_mean))
    if not worst.kl_mean <= limit:
        plain = "; without rounding: --dtype float32" if to in ("merged", "gguf") and dtype != "float32" else ""
        raise ExportError(
            f"exporting {trained.path} as {to}: {worst}, above the limit of {limit:.2g} (16-bit rounding of this "
            f"policy: {witness.rounding:.2g}). Nothing was written. Another limit: --max-kl{plain}."
        )
    accepted = None
    if max_kl is None and limit > _limit(to, dtype, 0.0):
        accepted = limit
    return distance, in_cpp, accepted


def _limit(to: str, dtype: str, rounding: float) -> float:
    if to == "merged-original":
        return float("inf")
    if dtype == "float32" and to == "merged":
        return LIMIT_FLOAT32
    return max(LIMITS.get(dtype, LIMIT), min(LARGEST, ROUNDINGS * rounding))


def _original(trained: TrainedRun, wish: str | os.PathLike[str] | None) -> str:
    """Name or directory of the model from before the quantisation."""
    name = os.fspath(wish) if wish is not None else trained.source
    if name.startswith("model object"):
        raise ConfigConflictError(
            f"exporting to the original: the base was made from a {name}. Say where its weights are: --original MODEL."
        )
    if not Path(name).is_dir() and (Path(name).is_absolute() or name.startswith((".", "~"))):
        raise ConfigConflictError(
            f"exporting to the original: there is no directory {name}. Say where it is: --original MODEL."
        )
    return name


def _write_adapter(trained: TrainedRun, staging: Path) -> None:
    """In canonical form; one that has none, for it is more than LoRA, as PEFT has saved it."""
    adapter, base = trained.adapter, trained.base
    try:
        write_adapter(read_adapter(adapter, base), staging)
    except AdapterRejectedError as error:
        reasons = "; ".join(reason.rstrip(".") for reason in error.reasons)
        remark(f"as PEFT has saved it, for PEFT and not for vLLM: {reasons}. For vLLM export it merged")
        for file in adapter.iterdir():
            if file.is_file() and file.name not in ("README.md", "training_args.bin"):
                shutil.copy(file, staging / file.name)
    write_ends(base.path, trained.ends, staging)
    write_origin(staging, base.parent or base.identity)
    _tokenizer(trained).save_pretrained(staging)


def _write_merged(trained: TrainedRun, model: Any, staging: Path, dtype: str) -> None:
    copy_plain(trained.base, staging, dtype)
    if trained.chat_template is not None:
        write_template(trained.chat_template, staging)
    write_ends(trained.base.path, trained.ends, staging)
    write_weights(iter_weights(model, dtype=getattr(torch, dtype)), staging, shard_bytes=SHARD_BYTES)


def _write_gguf(trained: TrainedRun, policy: Any, tokenizer: Any, staging: Path, dtype: str, texts: list[str]) -> int:
    """The number of `texts` whose ids a tokenizer made of the file gives as the base's does: all of them."""
    file = staging / f"{trained.name}.gguf"
    write_gguf(policy, trained.base, tokenizer, file, dtype, name=trained.name, ends=trained.ends)
    stop = trained.stop.get("stop", ())
    write_modelfile(staging, tokenizer, model=f"./{file.name}", ends=trained.ends, texts=stop)
    return verify_gguf(file, tokenizer, texts)


def _exact_witness(trained: TrainedRun, ids: list[list[int]], room: Path) -> Witness:
    """The policy computed in float32: PEFT's own layers on the base whose products of code and scale are not
    rounded."""
    if trained.adapter is None:
        return Witness(load_plain(trained.model, "float32"), ids, ends=trained.ends)
    with tempfile.TemporaryDirectory(prefix=".exact-", dir=room) as directory:
        if trained.base.spec.is_4bit:
            plain = load_base(bake_base(trained.base, "float32", out=Path(directory) / "base"))
        else:
            plain = load_plain(trained.base.path, "float32")
        witness = Witness(trained.with_adapter(trained.adapter, plain), ids, ends=trained.ends)
        del plain
        trim_memory()
    return witness


def _load_again(trained: TrainedRun, directory: Path, to: str) -> Any:
    if to == "adapter":
        return trained.with_adapter(directory)
    if to == "gguf":
        return load_gguf(directory)
    return load_plain(directory)


def _lines(trained: TrainedRun, written: Path, to: str, *, name: str, base: str) -> dict[str, str]:
    """How it is loaded, one line each.

    Args:
        trained: the run.
        written: directory of the export.
        to: kind of export.
        name: of the export: for a card, which is published, its directory's name.
        base: name of the base.
    """
    if to == "adapter":
        lines = {"transformers": f"PeftModel.from_pretrained(qlora_rl.load_base({_text(base)}), {_text(name)})"}
        config = json.loads((written / "adapter_config.json").read_text())
        # vLLM applies plain LoRA, and before 0.32 drops patterns silently.
        if judge_adapter(written, base=trained.base) and not (
            config.get("rank_pattern") or config.get("alpha_pattern")
        ):
            rank = f" --max-lora-rank {rank_class(config['r'])}" if config["r"] > 16 else ""
            ends = f" --generation-config {quote(name)}" if (written / "generation_config.json").is_file() else ""
            adapter = quote(f"policy={name}")
            talks = "" if trained.chat_template is None else f" --chat-template {quote(f'{name}/chat_template.jinja')}"
            lines["vllm"] = f"vllm serve {quote(base)} --enable-lora{rank} --lora-modules {adapter}{ends}{talks}"
        return lines
    if to == "gguf":
        file = f"{trained.name}.gguf"
        lines = {
            "ollama": f"ollama create {_model_name(trained.name)} -f {quote(f'{name}/Modelfile')}",
            "transformers": f"AutoModelForCausalLM.from_pretrained({_text(name)}, gguf_file={_text(file)})",
            "llama.cpp": f"llama-cli -m {quote(f'{name}/{file}')}",
        }
        return (
            lines
            if is_read_by_transformers(trained.base.path)
            else {k: v for k, v in lines.items() if k != "transformers"}
        )
    kind = "AutoModelForImageTextToText" if directory_takes_images(written) else "AutoModelForCausalLM"
    loaded = f'{kind}.from_pretrained({_text(name)}, dtype="auto")'
    return {"transformers": loaded, "vllm": f"LLM({_text(name)})"}


def _model_name(name: str) -> str:
    """As Ollama takes it: letters in lower case, digits, `.`, `_` and `-`, of which the first is none of the last
    three."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("._-") or "policy"


def _text(value: str) -> str:
    """As it stands in Python, in double quotes."""
    return json.dumps(value, ensure_ascii=False)


def _tokenizer(trained: TrainedRun) -> Any:
    processor = trained.processor()
    return getattr(processor, "tokenizer", processor)


def _settle(directory: Path) -> None:
    """All of it is on disk before it gets its name."""
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(0o644)
            flush(file)
