"""`open_trained`: the base and the adapter of a run directory, each checked to be what was trained."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qlora_rl.adapter.directory import is_checkpoint, trained_in
from qlora_rl.adapter.store import ORIGIN
from qlora_rl.base.attention.choice import attention_for
from qlora_rl.base.checkpoint import MANIFEST, PreparedBase, load_base, open_base
from qlora_rl.base.hub import in_short
from qlora_rl.base.model_classes import auto_class, load_processor
from qlora_rl.config.schema import Data, Reward
from qlora_rl.contracts import SamplingSpec
from qlora_rl.documents import read_object
from qlora_rl.errors import BaseIncompleteError, BaseMismatchError, RunDirectoryError
from qlora_rl.stages import begin, ended
from qlora_rl.train.run import ADAPTER, CONFIG, MODEL, SUMMARY
from qlora_rl.train.setup.linears import apply_linears

_ADAPTER_CONFIG = "adapter_config.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# Of vLLM's SamplingParams: how it looks for a text that ends a completion.
_AT_TEXTS = ("stop", "include_stop_str_in_output", "skip_special_tokens", "min_tokens")


@dataclass(frozen=True)
class TrainedRun:
    """A run whose policy can be loaded.

    Attributes:
        path: of the run directory.
        config: what its config.json says.
        base: that it was trained on; checked.
        adapter: PEFT directory; `None` where the base itself was trained.
        model: directory of that base, trained; otherwise `None`.
    """

    path: Path
    config: dict[str, Any]
    base: PreparedBase
    adapter: Path | None
    model: Path | None = None

    @property
    def name(self) -> str:
        """Of the run's directory."""
        return self.path.resolve().name

    @property
    def step(self) -> int | None:
        """The step after which the adapter was saved; `None` where it is unknown."""
        if self.adapter is not None and (found := _CHECKPOINT.fullmatch(_saved_as(self.adapter).name)):
            return int(found[1])
        try:
            return int(read_object(self.path / SUMMARY)["steps"])
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            return None

    @property
    def source(self) -> str:
        """What the base was quantised from: a hub name, a directory, or "model object (...)"."""
        return str(read_object(self.base.path / MANIFEST).get("source", ""))

    @property
    def autocast(self) -> str | None:
        """Torch name of the dtype under which it was trained; `None`: no autocast."""
        arguments = arguments_of(self.config)
        return "bfloat16" if arguments.get("bf16") else "float16" if arguments.get("fp16") else None

    @property
    def max_tokens(self) -> int:
        """Longest completion in its training; `SamplingSpec`'s where none was sampled, as in SFT."""
        arguments = arguments_of(self.config)
        found = arguments.get("max_new_tokens") or arguments.get("max_completion_length")  # online DPO; GRPO and RLOO
        return found if isinstance(found, int) and found > 0 else SamplingSpec.max_tokens

    @property
    def ends(self) -> list[int]:
        """Tokens that ended a completion when it was trained; those of the base alone where that is not recorded."""
        return list(dict.fromkeys([*self.config.get("ends", ()), *(self._asked.get("stop_token_ids") or ())]))

    @property
    def stop(self) -> dict[str, Any]:
        """Fields of vLLM's SamplingParams with the texts that ended a completion when it was trained, in a list;
        empty where none did."""
        if not (texts := self._asked.get("stop")):
            return {}
        told = {name: self._asked[name] for name in _AT_TEXTS if name in self._asked}
        return told | {"stop": [texts] if isinstance(texts, str) else list(texts)}

    @property
    def _asked(self) -> dict[str, Any]:
        return arguments_of(self.config).get("generation_kwargs") or {}

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template was given when it was trained, such as `enable_thinking`."""
        given = arguments_of(self.config).get("chat_template_kwargs")
        if not given and self.data is not None:  # TRL's configs of SFT and DPO have no such field
            given = self.data.chat_template_kwargs
        return dict(given or {})

    @cached_property
    def _file(self) -> dict[str, Any]:
        try:
            return tomllib.loads((self.path / "run.toml").read_text(encoding="utf-8"))
        except OSError:
            return {}

    @property
    def data(self) -> Data | None:
        """[data] of the run's file; `None` where it was trained without one."""
        held = self._file.get("data")
        return None if held is None else Data.model_construct(**held)

    @property
    def rewards(self) -> list[Reward]:
        """[[rewards]] of the run's file; none where it was trained without one, or without rewards."""
        return [Reward.model_construct(**each) for each in self._file.get("rewards", [])]

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """That it was trained with; `None` where it is that of the base."""
        return self.config.get("chat_template")

    def processor(self) -> Any:
        """The tokenizer of the base, of a vision-language model the processor, with the chat template that it was
        trained with."""
        found = load_processor(self.base.path)
        if self.chat_template is not None:
            for each in (found, getattr(found, "tokenizer", None)):
                if each is not None:
                    each.chat_template = self.chat_template
        return found

    def load(self) -> Any:
        """The policy as it was trained: the 4-bit base with the adapter; in eval mode.

        Raises:
            AdapterRejectedError: the adapter is damaged, or of another base.
        """
        if self.model is not None:
            return load_plain(self.model)
        return self.with_adapter(self.adapter)

    def load_base_alone(self) -> Any:
        """The base from before the training, in eval mode."""
        return _settled(load_base(self.base)).eval()

    def with_adapter(self, adapter: str | os.PathLike[str] | None, model: Any = None) -> Any:
        """An adapter of this base, on it or on a model in its place; its products are those of a trainer."""
        from qlora_rl.adapter.load import load_adapter

        return _settled(load_adapter(load_base(self.base) if model is None else model, adapter, base=self.base))


def _saved_as(adapter: Path) -> Path:
    """The checkpoint that holds an adapter that is not called "default"; otherwise its own directory."""
    path = adapter.resolve()
    return path.parent if is_checkpoint(path.parent) else path


def _settled(model: Any) -> Any:
    apply_linears(model)
    return model


def _no_run(given: Path, path: Path) -> str:
    if not given.exists():
        return (
            f"there is no such directory (seen from {Path.cwd()}). Pass a run directory: `train` and `demo` name "
            "it in their last lines; in Python it is output_dir."
        )
    if given != path:
        return (
            f"it is an adapter, and its parent directory is no run (no {CONFIG}). Pass the run that it comes from, or "
            "an adapter that is still in its run."
        )
    return f"there is no {CONFIG}. Pass the output_dir of a run that this package has trained."


@ended()
def open_trained(run: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None) -> TrainedRun:
    """Open a run directory, or a checkpoint in one.

    Args:
        run: directory of a run, or `checkpoint-N` in it.
        base: directory of the base; by default where it was during training.

    Raises:
        RunDirectoryError: no run, or one that has not trained anything yet.
        BaseIncompleteError: the base is not there, or was changed.
        BaseMismatchError: `base` is another one.
    """
    path = Path(run)
    adapter = path / ADAPTER
    held = trained_in(path)
    if (held / _ADAPTER_CONFIG).is_file() and not (path / CONFIG).is_file():  # a checkpoint, or adapter/ itself
        adapter, path = held, _saved_as(held).parent
    try:
        config = read_object(path / CONFIG)
        held = config["base"]
        place, identity = Path(held["path"]), str(held.get("identity", ""))
    except FileNotFoundError:
        raise RunDirectoryError(f"opening the run {run}: {_no_run(Path(run), path)}") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if not isinstance(error, OSError | ValueError) and "model_type" in config:
            raise RunDirectoryError(
                f"opening the run {run}: it is a model, not a run. Pass the directory of a run that was trained on it "
                "(its output_dir); "
                "`qlora-rl chat RUN --base-only` talks to the model itself, and `qlora-rl prepare` makes a base of "
                "it, which `serve` takes."
            ) from None
        raise RunDirectoryError(
            f"opening the run {path}: {CONFIG} is damaged or does not name a base ({type(error).__name__}: {error}). "
            "Copy the run again."
        ) from error
    if not identity:
        raise BaseMismatchError(
            f"opening the run {path}: an earlier version has trained it, and recorded what its base was made from, not "
            f"its identity; so no base can be recognised as its own. If you know its base: copy {adapter.name}/ "
            f"without {ORIGIN} and load it on that base."
        )
    model = path / MODEL if (path / MODEL / CONFIG).is_file() else None
    if model is None and not (adapter / _ADAPTER_CONFIG).is_file():
        raise RunDirectoryError(
            f"opening the run {path}: it holds no {ADAPTER}/, which is written when training ends or is interrupted. "
            "Wait for it, or pass a checkpoint: RUN/checkpoint-N."
        )
    try:
        begin("checking the base")
        opened = open_base(base if base is not None else place)
    except BaseIncompleteError as error:
        if base is not None or (place / MANIFEST).is_file():
            raise
        raise BaseIncompleteError(
            f"opening the run {path}: its base was at {place}, where none is now. Say where it is (--base), or prepare "
            f"it again: qlora-rl prepare MODEL {place}; its identity must be {identity[:16]}."
        ) from error
    if opened.identity != identity:
        raise BaseMismatchError(
            f"opening the run {path}: it was trained on the base with identity {identity[:16]}, and {opened} has "
            f"{opened.identity[:16]}: other weights, tokenizer or config. Pass the directory that it was trained on, "
            "or a copy of it; preparing it again gives the same one from the same model, settings and versions."
        )
    return TrainedRun(path, config, opened, None if model else adapter, model)


def arguments_of(config: dict[str, Any]) -> dict[str, Any]:
    """The trainer's own arguments in a run's config.json, under whatever name they stand ("grpo", "sft", ...)."""
    return next((v for v in config.values() if isinstance(v, dict) and "learning_rate" in v), {})


def load_plain(directory: str | os.PathLike[str], dtype: str = "auto", *, is_ours: bool = True, **options: Any) -> Any:
    """A checkpoint as transformers loads it, whole, on the GPU where there is one; in eval mode.

    Args:
        directory: of the checkpoint, or its hub name.
        dtype: of transformers.
        is_ours: we have written it, so nothing pickled is read.
        options: of `from_pretrained`.

    Raises:
        BaseIncompleteError: weights are missing, or do not fit.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = AutoModelForCausalLM
    if "gguf_file" not in options:  # which has no config.json next to it
        config = AutoConfig.from_pretrained(directory)
        kind, options["attn_implementation"] = auto_class(config), attention_for(config)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    safe = {"use_safetensors": True} if is_ours and "gguf_file" not in options else {}
    try:
        model, told = kind.from_pretrained(
            directory, dtype=dtype, device_map={"": device}, output_loading_info=True, **safe, **options
        )
    except OSError as error:
        raise BaseIncompleteError(f"loading {directory}: {in_short(error)}") from error
    wrong = [
        f"{what}: {', '.join(map(str, sorted(told[what])[:3]))}" for what in told if what != "error_msgs" and told[what]
    ]
    if wrong:
        raise BaseIncompleteError(f"loading {directory}: its weights are not those of the model ({'; '.join(wrong)}).")
    return model.eval()
