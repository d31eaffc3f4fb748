"""`prepare_base` quantises once into a directory; `load_base` reads it for training. The engine reads the same bytes.

A base directory is a standard transformers checkpoint (bitsandbytes format) with tokenizer and chat template, plus
`fingerprint.json` (what every weight is, see base/fingerprint) and `qlora_base.json`, written last: what was quantised
how, what the base is, and the size and digest of every other file. A directory
without it, or that differs from it, is never used.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qlora_rl.base.attention.choice import attention_for
from qlora_rl.base.calibrated import Calibration, measure_stored
from qlora_rl.base.experts import experts_as_linears
from qlora_rl.base.fingerprint import base_parameters, fingerprint_stored, identify
from qlora_rl.base.hub import hub_reachable, in_short, missing_path, why_missing
from qlora_rl.base.model_classes import auto_class, check_vision_type
from qlora_rl.base.quant import Measured, QuantSpec, keep_packing, spec_of
from qlora_rl.base.source_digest import (
    digest_directory,
    digest_file,
    digest_model,
    digest_parts,
    digest_tokenizer,
    misfits,
)
from qlora_rl.base.unsupported_configs import check_function, note_function
from qlora_rl.base.writer import embedding_rows, read_tokenizer, require_writable, write_checkpoint, write_tokenizer
from qlora_rl.documents import read_object
from qlora_rl.errors import BaseIncompleteError, ConfigConflictError, QloraRLError, UnsupportedQuantError
from qlora_rl.locks import flush, replace_file
from qlora_rl.stages import begin, ended, remark

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qlora_rl.base.calibrated import Row

logger = logging.getLogger(__name__)

MANIFEST = "qlora_base.json"
FINGERPRINT = "fingerprint.json"
BASE_FILES = (MANIFEST, FINGERPRINT)
FORMAT = 3


@dataclass(frozen=True)
class PreparedBase:
    """A base directory on disk; usable wherever a path is.

    Attributes:
        path: the directory.
        spec: how it is quantised.
        identity: of what it is (hex): weights, tokenizer, config. Two bases with one identity are the same base.
        inputs: digest of what went in (hex): the source's bytes, the settings, the tokenizer. Names the directory in
            the cache, and says nothing of what came out.
        parent: identity of the 4-bit base that this one was baked from, if it was.
        calibrated_on: digest of the text by which its codes were chosen (hex), if they were.
        measured: how far it is from its source (`kl`, `perplexity_base`, ...), if it was measured.
    """

    path: Path
    spec: QuantSpec
    identity: str
    inputs: str
    parent: str | None = None
    calibrated_on: str | None = None
    measured: Measured | None = field(default=None, compare=False)

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)


def cache_root() -> Path:
    """`$QLORA_RL_CACHE`, or `~/.cache/qlora_rl`.

    Raises:
        ConfigConflictError: this user has no home directory.
    """
    try:
        return Path(os.environ.get("QLORA_RL_CACHE") or Path.home() / ".cache" / "qlora_rl")
    except RuntimeError as error:
        raise ConfigConflictError(
            f"looking for the cache: user {os.getuid()} has no home directory. Set HOME or QLORA_RL_CACHE to a "
            "directory that it can write."
        ) from error


@ended()
def prepare_base(
    model: str | os.PathLike[str] | PreTrainedModel,
    quant: str = "nf4",
    *,
    double_quant: bool = True,
    blocksize: int = 64,
    compute_dtype: str = "bfloat16",
    skip_modules: Sequence[str] = (),
    quantize_experts: bool = False,
    quantize_tower: bool = False,
    out: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    calibrate: bool | Sequence[Row] = False,
    measure: bool | None = None,
) -> PreparedBase:
    """Quantise a model once, into a directory that trainer and engine both load.

    A model object that already is 4-bit is written down with its own bytes (the quantisation arguments are ignored);
    a directory that already is a prepared base is checked and returned.

    Args:
        model: hub name, checkpoint directory, or transformers model (bare, or the base of a PeftModel).
        quant: "nf4", "fp4", or "none" for a 16- or 32-bit base.
        double_quant: quantise the block scales too.
        blocksize: weights per scale.
        compute_dtype: dtype of activations and of what is not quantised.
        skip_modules: further linears that stay unquantised: names, or parts of them such as "down_proj" and
            "layers.1.mlp"; of linears that vLLM fuses (q, k and v; gate and up) all or none.
        quantize_experts: hold the experts of a mixture in 4 bits too, by default in `compute_dtype`.
        quantize_tower: hold vision tower and projector of a vision-language model in 4 bits too, where their widths are
            multiples of `blocksize`.
        out: directory to write; by default one in the cache, named after what goes in.
        tokenizer: stored with the base; by default the one that belongs to `model`.
        revision: of a hub model.
        trust_remote_code: let transformers run the model's own code.
        calibrate: choose codes and scales by what the layers see of a text, in the same format: rows of text, of
            messages or of token ids, or `True` for a text of ours. The same rows give the same bytes on one machine
            with one number of threads, and on others nearly the same: their sums are rounded otherwise. A call that was
            interrupted goes on where it was when it is made again.
        measure: also compute how far the base is from its source, on some hundred tokens: `measured` of the result;
            also of a base that was there before. By default where the base is calibrated.

    Returns:
        The finished, checked directory. Two processes may prepare the same base at once; one result is kept.

    Raises:
        UnsupportedQuantError: a quantisation that the engine could not hold bit for bit.
        ConfigConflictError: `out` holds something else; or `measure=True` of a base whose source is not passed.
    """
    skipped = tuple(sorted(skip_modules))
    spec = QuantSpec(quant, double_quant, blocksize, compute_dtype, skipped, quantize_experts, quantize_tower)
    choice = Calibration.of(calibrate, measure, spec)
    if not isinstance(model, str | os.PathLike):
        return _prepare_object(model, spec, tokenizer, out, choice)
    return _prepare_directory(os.fspath(model), revision, spec, tokenizer, out, choice, trust_remote_code)


def _prepare_directory(
    model: str,
    revision: str | None,
    spec: QuantSpec,
    tokenizer: Any,
    out: str | os.PathLike[str] | None,
    choice: Calibration,
    trust_remote_code: bool,
) -> PreparedBase:
    """`prepare_base` of a hub name, or of the directory of a checkpoint or a base."""
    source = _local_directory(model, revision)
    if (source / MANIFEST).is_file():
        base = open_base(source)
        if spec not in (QuantSpec(), base.spec):
            raise ConfigConflictError(
                f"preparing a base: {source} is a prepared base already ({base.spec.label}) and cannot become "
                f"{spec.label}. Start from the original model."
            )
        if out is not None and Path(out).resolve() != source.resolve():
            raise ConfigConflictError(f"preparing a base: {source} is a prepared base already. Copy it to {out}.")
        choice.check_made(base, f"{source} is a prepared base already")
        return base
    method = _quant_method(source)
    if method is not None and not method.startswith("bitsandbytes-4bit"):
        raise UnsupportedQuantError(
            f"preparing a base: {model} is quantised with {method}. Start from its 16-bit original, or from a 4-bit "
            "bitsandbytes checkpoint."
        )
    if method is not None:
        choice.check_made(None, f"{model} is 4-bit already")
        spec = QuantSpec.stored(json.loads((source / "config.json").read_text())["quantization_config"])
    begin(f"reading {model}")
    try:
        inputs = _digest_inputs(digest_directory(source), spec, digest_tokenizer(tokenizer), *choice.digests)
    except PermissionError as error:
        raise _unreadable("preparing a base", error) from error

    def write(directory: Path) -> QuantSpec:
        begin(f"loading {model}, and quantising it: {spec.label}")
        loaded = _load_source(source, trust_remote_code)
        # A checkpoint that is 4-bit already keeps its bytes; its live layers say what its config may not.
        written = spec if method is None else spec_of(loaded)

        _write(
            loaded,
            written,
            directory,
            tokenizer,
            source,
            trust_remote_code,
            is_quantized=method is not None,
            choice=choice,
        )
        for code in source.glob("*.py") if trust_remote_code else ():  # what `auto_map` of the config names
            shutil.copy(code, directory / code.name)
        return written

    name = source.name if source == Path(model) else model.replace("/", "--")
    made = _publish(name, choice.label(spec), inputs, out, write, source=model, choice=choice)
    if method is not None:
        return made
    return _measured_since(made, choice, lambda: _load_source(source, trust_remote_code), trust_remote_code)


@ended()
def measure_quantisation(
    base: str | os.PathLike[str],
    source: str | os.PathLike[str],
    *,
    text: Sequence[Row] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Measured:
    """How far a prepared base is from the model that it was made from: KL and perplexities, computed in float32 by one
    block at a time.

    Args:
        base: directory made by `prepare_base`.
        source: hub name or checkpoint directory.
        text: rows as of `calibrate` of `prepare_base`; by default some of ours on which no base is calibrated.
        revision: of a hub model.
        trust_remote_code: let transformers run the model's own code.
    """
    prepared = open_base(base)
    directory = _local_directory(os.fspath(source), revision)
    begin(f"measuring how far {base} is from {source}")
    source_model = _load_source(directory, trust_remote_code)
    return measure_stored(prepared.path, prepared.spec, source_model, text, trust_remote_code)


def _measured_since(
    made: PreparedBase, choice: Calibration, source: Callable[[], Any], trust_remote_code: bool
) -> PreparedBase:
    """A base that was there before is measured now, where that is asked for, and its manifest says so."""
    if made.measured is not None or not choice.is_due:
        return made

    def measured() -> Measured:
        found = measure_stored(made.path, made.spec, source(), None, trust_remote_code)
        file = made.path / MANIFEST
        with contextlib.suppress(OSError):  # somebody else's base: this call knows it all the same
            replace_file(file, json.dumps(read_object(file) | {"measured": found.as_dict()}, indent=1).encode())
        return found

    begin(f"measuring how far {made} is from its source")
    choice.try_to_measure(measured)
    return replace(made, measured=choice.measured)


def _load_source(source: Path, trust_remote_code: bool) -> Any:
    """The model of a checkpoint directory, all of it: transformers gives random values to what is not there."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        check_vision_type(config)
        check_function(config)
        note_function(config)
        with models_are_whole():
            model, told = auto_class(config).from_pretrained(
                source,
                dtype="auto",
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below, together with what is missing
            )
    except (QloraRLError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # safetensors, pickle and torch have errors of their own for what is damaged
        raise BaseIncompleteError(f"preparing a base: {source} cannot be loaded: {in_short(error)}") from error
    reasons = [f"{name} is missing" for name in sorted(told["missing_keys"])]
    reasons += [f"{name} has another shape than the config says" for name, *_ in sorted(told["mismatched_keys"])]
    if reasons:
        more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
        raise BaseIncompleteError(
            f"preparing a base: {source} does not hold the whole model: {'; '.join(reasons[:5])}{more}. Pass the "
            "checkpoint of a causal language model with all of its weights.",
            reasons=reasons,
        )
    return model


def _prepare_object(
    model: Any, spec: QuantSpec, tokenizer: Any, out: str | os.PathLike[str] | None, choice: Calibration
) -> PreparedBase:
    """Write down a model object: its own bytes if it is 4-bit, else quantised as `spec` says."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = getattr(base, "qlora_base", None)
    if isinstance(known, PreparedBase) and out is None:
        choice.check_made(known, f"the model is that of the prepared base {known}")
        return open_base(known)
    check_vision_type(base.config)
    check_function(base.config)
    note_function(base.config)
    live = spec_of(base)
    written = live if live.is_4bit else spec
    if live.is_4bit:
        choice.check_made(None, "the model is 4-bit already")
    inputs = _digest_inputs(digest_model(base), written, digest_tokenizer(tokenizer), *choice.digests)
    origin = getattr(base.config, "_name_or_path", "") or type(base).__name__

    def write(directory: Path) -> QuantSpec:
        _write(base, written, directory, tokenizer, Path(origin), False, is_quantized=live.is_4bit, choice=choice)
        return written

    name, label = Path(origin).name, choice.label(written)
    made = _publish(name, label, inputs, out, write, source=f"model object ({origin})", choice=choice)
    return made if live.is_4bit else _measured_since(made, choice, lambda: base, trust_remote_code=False)


def _write(
    model: Any,
    spec: QuantSpec,
    directory: Path,
    tokenizer: Any,
    source: Path,
    trust_remote_code: bool,
    *,
    is_quantized: bool,
    choice: Calibration,
) -> None:
    """A model and its tokenizer, by default that of `source`, as a base directory."""

    def read() -> Any:
        return read_tokenizer(tokenizer, source, trust_remote_code)

    choice.check_range(model, read, spec.compute_dtype, is_quantized=is_quantized)
    write_checkpoint(model, spec, directory, is_quantized=is_quantized, choose=choice.by(read))
    write_tokenizer(tokenizer, source, directory, trust_remote_code, rows=embedding_rows(model))


def open_base(path: str | os.PathLike[str], *, verify: bool = True) -> PreparedBase:
    """Check a base directory and describe it.

    Args:
        path: what `prepare_base` returned or wrote.
        verify: compare the digest of every file (reads them once); otherwise only their sizes.

    Raises:
        BaseIncompleteError: no manifest, or files that differ from it; all of them are named.
    """
    directory = Path(path)
    try:
        manifest = read_object(directory / MANIFEST)
    except FileNotFoundError:
        what = "is not a prepared base" if directory.is_dir() else "does not exist"
        raise BaseIncompleteError(
            f"opening a base: {directory} {what} (no {MANIFEST}: it is written last, so a half-written directory has "
            f"none). Make it: qlora-rl prepare MODEL {directory}"
        ) from None
    except PermissionError as error:
        raise _unreadable("opening a base", error) from error
    except (OSError, ValueError) as error:
        raise _damaged(directory, error) from error
    form = manifest.get("format")
    if form != FORMAT:
        which = "an earlier" if isinstance(form, int) and form < FORMAT else "another"
        raise BaseIncompleteError(
            f"opening a base: {directory}: format={form} != {FORMAT}: {which} version has prepared it. Remove the "
            "directory and prepare it again with this one."
        )
    try:
        reasons = list(misfits(directory, manifest["files"], verify=verify))
        spec, parent = QuantSpec.from_dict(manifest["spec"]), manifest.get("parent")
        measured = Measured(**manifest["measured"]) if "measured" in manifest else None
        text = manifest.get("calibrated_on")
        opened = PreparedBase(
            directory, spec, str(manifest["identity"]), str(manifest["inputs"]), parent, text, measured
        )
    except PermissionError as error:
        raise _unreadable("opening a base", error) from error
    except (AttributeError, LookupError, TypeError, ValueError, OSError) as error:
        raise _damaged(directory, error) from error
    if reasons:
        raise BaseIncompleteError(
            f"opening a base: {directory}: {'; '.join(reasons)}. Remove the directory and prepare it again.",
            reasons=reasons,
        )
    return opened


def _unreadable(doing: str, error: PermissionError) -> BaseIncompleteError:
    return BaseIncompleteError(
        f"{doing}: {error.filename}: {error.strerror}. It belongs to another user: have them let you read it (chmod "
        "-R go+rX DIRECTORY), or copy it."
    )


def _damaged(directory: Path, error: Exception) -> BaseIncompleteError:
    said = f"{type(error).__name__}: {error}"
    return BaseIncompleteError(f"opening a base: {directory / MANIFEST} is damaged ({said}). Prepare it again.")


def load_base(
    base: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a prepared base for PEFT training: frozen, inputs requiring grad (so that gradient checkpointing works).

    Norms and embeddings stay in the compute dtype. (`prepare_model_for_kbit_training` would lift them to float32, away
    from what the engine multiplies with.)

    Args:
        base: directory made by `prepare_base`.
        device: where to; by default the current GPU, or the CPU where there is none.
        attn_implementation: handed to transformers. By default its choice; ours, "sdpa_per_sequence", where that would
            leave out the `attn_logit_softcapping` of the config.
        trust_remote_code: handed to transformers.

    Raises:
        BaseIncompleteError: see `open_base`.
        ConfigConflictError: `attn_implementation` leaves that out.
    """
    from transformers import AutoConfig

    prepared = open_base(base)
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    config = AutoConfig.from_pretrained(prepared.path, trust_remote_code=trust_remote_code)
    with building(prepared):
        model = auto_class(config).from_pretrained(
            prepared.path,
            dtype=prepared.spec.dtype,
            device_map={"": device},
            attn_implementation=attention_for(config, attn_implementation, "loading a base"),
            trust_remote_code=trust_remote_code,
        )
    adopt(model, prepared)
    return model


@contextlib.contextmanager
def building(base: PreparedBase) -> Iterator[None]:
    """While it lasts transformers makes the model of `base` whole, and with the layers that its stored weights are
    for."""
    from transformers import AutoConfig

    with contextlib.ExitStack() as stack:
        stack.enter_context(models_are_whole())
        if base.spec.quantize_experts:
            stack.enter_context(experts_as_linears(AutoConfig.from_pretrained(base.path)))
        yield


@contextlib.contextmanager
def models_are_whole() -> Iterator[None]:
    """While it lasts transformers makes models whole, where DeepSpeed's ZeRO-3 would have it part them from the start.

    A base is verified while it is whole; it is sharded when training begins.
    """
    from transformers.integrations import deepspeed as known

    told = known._hf_deepspeed_config_weak_ref  # nothing public gives it back
    held = told() if told is not None else None
    known.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if held is not None and known.deepspeed_config() is None:
            known.set_hf_deepspeed_config(held)


def outline(base: PreparedBase, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model without values: every tensor on the meta device, nothing quantised."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base.path, trust_remote_code=trust_remote_code)
    with building(base):
        return empty_model(config, dtype=base.spec.dtype, trust_remote_code=trust_remote_code)


def empty_model(
    config: Any, *, dtype: torch.dtype = torch.bfloat16, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model of a transformers config, every tensor on the meta device."""
    with models_are_whole(), torch.device("meta"):
        return auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def adopt(model: PreTrainedModel, base: PreparedBase) -> None:
    """Mark `model` as holding `base`, freeze everything but its adapters, and make it fit for adapter training."""
    if base.spec.is_4bit:
        keep_packing(model)
    for _, parameter in base_parameters(model):
        parameter.requires_grad_(False)
    model.enable_input_require_grads()
    model.qlora_base = base
    model.qlora_vocabulary = embedding_rows(model)


def _local_directory(model: str, revision: str | None) -> Path:
    """The directory of a checkpoint; a hub model is downloaded first."""
    if Path(model).is_dir():
        return Path(model)
    if why := missing_path(model):
        raise BaseIncompleteError(f"preparing a base: {why}. Pass a checkpoint directory, or a hub name.")
    from huggingface_hub import snapshot_download

    hub_reachable()
    patterns = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt", "*.py"]
    try:
        # Some repositories also hold the weights in another format.
        other = ["consolidated*", "original/*"]
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=other))
    except Exception as error:
        said = str(error).strip().splitlines()
        raise BaseIncompleteError(
            f"preparing a base: there is no directory {model}, and {why_missing(model)} ({type(error).__name__}: "
            f"{said[0] if said else ''})."
        ) from error


def _quant_method(source: Path) -> str | None:
    """None for a plain checkpoint, "bitsandbytes-4bit…", or the name of another method."""
    try:
        config = read_object(source / "config.json")
    except FileNotFoundError:
        raise BaseIncompleteError(
            f"preparing a base: {source} has no config.json, so it is not a transformers checkpoint."
        ) from None
    except (OSError, ValueError) as error:
        raise BaseIncompleteError(
            f"preparing a base: {source}/config.json cannot be read: {error}. Copy the checkpoint again."
        ) from error
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    if quantization.get("quant_method") == "bitsandbytes":
        return "bitsandbytes-4bit" if quantization.get("load_in_4bit") else "bitsandbytes in 8 bits"
    return str(quantization.get("quant_method"))


def derive(
    parent: PreparedBase, spec: QuantSpec, write: Callable[[Path], QuantSpec], out: str | os.PathLike[str] | None
) -> PreparedBase:
    """Publish a base that is computed from another one; the manifest names the parent."""
    inputs = _digest_inputs(parent.identity, spec)
    name = parent.path.name
    return _publish(name, f"baked-{spec.label}", inputs, out, write, source=str(parent), parent=parent.identity)


def _publish(
    name: str,
    label: str,
    inputs: str,
    out: str | os.PathLike[str] | None,
    write: Callable[[Path], QuantSpec],
    *,
    source: str,
    parent: str | None = None,
    choice: Calibration | None = None,
) -> PreparedBase:
    """Run `write` into a new directory next to the target and rename it when everything is on disk."""
    target = Path(out) if out is not None else cache_root() / "bases" / f"{name}-{label}-{inputs[:16]}"
    if target.exists() and not target.is_dir():
        raise ConfigConflictError(f"preparing a base: {target} is a file. Choose another directory.")
    if out is not None and target.exists() and any(target.iterdir()):
        base = open_base(target) if (target / MANIFEST).is_file() else None
        if base is None or base.inputs != inputs:
            other = "one of another model or other settings" if base and base.spec.label == label else label
            held = f"holds a base {base.spec.label}, and {other} was asked for" if base else "contains other files"
            raise ConfigConflictError(f"preparing a base: {target} {held}. Choose another directory or remove it.")
        return base
    require_writable(target.parent)
    keep = target.with_name(f".{target.name}.chosen-{inputs[:16]}")
    if choice is not None:
        choice.keep = keep
    with _exclusive(target.parent / f".{target.name}.lock"):
        if (target / MANIFEST).is_file():
            return open_base(target)
        # The lock is ours, so unfinished directories of this base belong to processes that are gone.
        for stale in target.parent.glob(f".{glob.escape(target.name)}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
        try:
            spec = write(staging)
            begin("recording what was written")
            found = fingerprint_stored(staging)
            identity = identify(found, spec.compute_dtype)
            (staging / FINGERPRINT).write_text(json.dumps(found.as_dict(), indent=1))
            files = {
                str(f.relative_to(staging)): {"bytes": f.stat().st_size, "sha256": digest_file(f)}
                for f in sorted(staging.rglob("*"))
                if f.is_file()
            }
            manifest = {
                "format": FORMAT,
                "identity": identity,
                "inputs": inputs,
                "source": source,
                "spec": spec.as_dict(),
            }
            manifest["files"] = files
            manifest |= {} if choice is None else choice.recorded
            if parent is not None:
                manifest["parent"] = parent
            (staging / MANIFEST).write_text(json.dumps(manifest, indent=1))
            os.umask(mask := os.umask(0o077))  # which can only be read by setting it
            for file in filter(Path.is_file, staging.rglob("*")):
                file.chmod(0o666 & ~mask)  # safetensors lets nobody but this user read what it writes
                flush(file)
            staging.chmod(0o777 & ~mask)
            if target.exists():  # empty and made by the caller, or in the cache and never finished
                target.rmdir() if out is not None else shutil.rmtree(target)
            os.rename(staging, target)
            flush(target.parent)
            for kept in target.parent.glob(f".{glob.escape(target.name)}.chosen-*"):
                shutil.rmtree(kept, ignore_errors=True)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            if keep.is_dir():
                remark(f"the codes that are chosen by now are kept in {keep}, and the same call goes on from there")
            raise
    logger.info("prepared %s (%s) in %s", source, label, target)
    text, measured = (None, None) if choice is None else (choice.digest, choice.measured)
    return PreparedBase(target, spec, identity, inputs, parent, text, measured)


def _digest_inputs(source: str, spec: QuantSpec, *others: str) -> str:
    """`PreparedBase.inputs`: another format makes something else of the same source, as does another rule of
    `skip_modules`."""
    rule = ["skips whole modules, lists each linear"] if {*spec.skip_modules} - {"lm_head"} else []
    return digest_parts([str(FORMAT), source, json.dumps(spec.as_dict(), sort_keys=True), *others, *rule])


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Hold an advisory lock; the system releases it when the process dies."""
    with open(lock, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
