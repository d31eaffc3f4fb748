"""`RecordedTraining`: a mixin for TRL's trainers that leaves a readable run directory, however the training ends."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from qlora_rl.adapter.inspected import active_adapter, bare_model, copy_factors, is_bare, shorten_lora, stop_dropout
from qlora_rl.base.checkpoint import PreparedBase
from qlora_rl.base.experts import directory_is_mixture
from qlora_rl.base.model_classes import load_processor
from qlora_rl.base.writer import read_template
from qlora_rl.cpu_features import keep_few_kernels, processor
from qlora_rl.cpu_matmul import Float32Products
from qlora_rl.distributed import ranks
from qlora_rl.errors import ConfigConflictError
from qlora_rl.methods import Method
from qlora_rl.sharded_tensors import is_sharded
from qlora_rl.stages import remark
from qlora_rl.train.ranks.sharded import is_gathered, trained_weights
from qlora_rl.train.run.directory import SUMMARY, RunDirectory, describe_machine, describe_versions
from qlora_rl.train.run.progress import end_progress, show_progress, told
from qlora_rl.train.run.resume import Resumable, WrappedModel
from qlora_rl.train.scoring.padding import apply_padding, micro_batches
from qlora_rl.train.setup import settings
from qlora_rl.train.setup.layer_inputs import keep_on_host
from qlora_rl.train.setup.linears import apply_linears
from qlora_rl.train.setup.model_source import Source, refers_to_copy, resolve_model
from qlora_rl.train.setup.processes import begin_alike, fit_for_sharding, shards_base
from qlora_rl.train.setup.residual_init import keep_start
from qlora_rl.train.setup.tiled_mlp import tile_layers
from qlora_rl.train.setup.vision_tower import apply_tower

logger = logging.getLogger(__name__)

ADAPTER_DTYPES = ("float32", "bfloat16")


class RecordedTraining(Resumable, WrappedModel):
    """Comes before TRL's class; its `__init__` sets `run` and `base`.

    Attributes:
        run: the run directory; `None` on other processes than the first.
        base: the prepared base.
    """

    run: RunDirectory | None
    base: PreparedBase
    # TRL makes a frozen copy of a PeftModel's adapter; `None`: where beta is not 0.
    _refers: bool | None = None
    _has_trained = False
    _method: Method

    def _fit(
        self, args: Any, start: Any, adapter_dtype: str, before: Any, remove_padding: bool, optimizer: Any
    ) -> dict[str, Any]:
        """Have the model that TRL was given multiply, hold its inputs and leave out padding as ours do, and resume;
        `_after_trl` makes ready what TRL has built.

        Args:
            start: how the adapter begins, where TRL does not know it.
            adapter_dtype: of the trained weights.
            before: their values when they were loaded.
            optimizer: the one that was passed in, if any.

        Returns:
            What became of the padding and of the linears, for config.json.
        """
        self._settle_reference(args)
        set_adapter_dtype(self.model, getattr(torch, adapter_dtype), before)
        keep_start(self, start)
        bare = bare_model(self.model)
        keep_on_host(bare)
        linears = {"reason": "the base is sharded"}
        if not shards_base(args):
            linears = apply_linears(bare)
            tile_layers(bare)
        apply_tower(bare)
        begin_alike(self.model)
        self._after_trl(args)
        padding = apply_padding(bare, self._method.why_padded or ("" if remove_padding else "remove_padding=False"))
        check_optimizer(optimizer, self.model)
        self.make_resumable()
        show_progress(self)
        return {"padding": padding, "linears": linears}

    def _settle_reference(self, args: Any) -> None:
        """Make what TRL has made of the policy's config and weights the policy as it came."""
        stop_dropout(self.model, "ref")
        if not is_bare(self.model) and refers_to_copy(self._refers, args):  # else it is one of the user's own
            copy_factors(self.model, active_adapter(self.model), "ref")

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's `train`. However it ends, the run directory is readable and holds the last step's adapter.

        Args:
            resume_from_checkpoint: as transformers has it: a checkpoint, or True for the last one, here the last whole
                one. With existing_run="resume" it may be left out.
        """
        with told(self.args) as is_shown:
            result = self._train_and_record(resume_from_checkpoint, *args, **kwargs)
            if is_shown and self.run is not None:
                named = shlex.quote(str(self.run.path))
                remark(f"the run is in {named}; look at it: qlora-rl report {named}, talk to it: qlora-rl chat {named}")
        return result

    def _train_and_record(self, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> Any:
        with ranks().one_outcome("choosing the checkpoint"):
            checkpoint = self.resume_point(resume_from_checkpoint)  # what it rejects leaves the run directory as it is
        self._before_train()
        try:
            with ranks().one_outcome("training"):
                result = self._done_already() or super().train(checkpoint, *args, **kwargs)
                with ranks().together("ending the training"):
                    self._after_train()
        except (KeyboardInterrupt, SystemExit):
            self._end("interrupted", None)
            raise
        except (Exception, CheckpointException) as error:  # that of torch's sharded checkpoints is no Exception
            self._end("failed", error)
            raise
        finally:
            end_progress(self)
        self._finish("finished", None)
        return result

    def _resolve(self, model: Any, args: Any, **named: Any) -> Source:
        """What was passed as `model`, as something that can be loaded; its base is prepared on one rank of a machine
        before the others."""
        source = ranks().in_turn(lambda: resolve_model(model, args, refers=self._refers, **named), "preparing the base")
        source = fit_for_sharding(source, args)
        self.base = source.base
        # The experts of a mixture have products of many shapes, which come again.
        if not directory_is_mixture(self.base.path):
            keep_few_kernels()
        return source

    def close(self) -> None:
        """Give back what the trainer holds in addition to its model; harmless when repeated."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's, on the hub only: it calls a base that is in a directory "None". `qlora-rl export` writes a card with
        the facts."""
        if self.hub_model_id is not None:
            super().create_model_card(*args, **kwargs)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _before_train(self) -> None:
        """Called before every `train`."""
        if self._has_trained and self._resumed is None and self.is_world_process_zero():
            logger.warning(
                "train() again: metrics.jsonl goes on with another step 1; a new trainer would begin a run of its own"
            )
        self._has_trained = True

    def _after_train(self) -> None:
        """Called when training has come to its end, before its outcome is written; what it raises is that outcome."""

    def _end(self, status: str, error: BaseException | None) -> None:
        if self._resumed is None:  # else the checkpoint was not restored yet: what the run has left stays as it is
            self._finish(status, error)

    def _finish(self, status: str, error: BaseException | None) -> None:
        trained = self.accelerator.unwrap_model(self.model)
        weights = None
        if status == "finished":
            weights = trained_weights(trained) if is_gathered(trained) else None
        elif is_sharded(trained):  # the ranks no longer meet
            logger.warning(
                "what was trained in the last step is not saved: it is sharded; the last checkpoint holds it"
            )
            trained = None
        if self.run is None:
            return
        unwritten: OSError | None = None

        def attempt(write: Callable[[], Any]) -> None:
            nonlocal unwritten
            try:
                write()
            except OSError as problem:
                unwritten = unwritten or problem
                if status != "finished":  # a full disk must not hide what ended the run
                    logger.exception("the run directory could not be completed")

        attempt(self._write_rest)
        attempt(lambda: self._save_trained(trained, weights))
        # Last: what says "finished" has left what it trained.
        error = error or unwritten
        summary = {
            "status": "failed" if unwritten and status == "finished" else status,
            "steps": self.state.global_step,
        }
        if (counts := micro_batches(bare_model(self.model))).get("padded"):
            summary["micro_batches"] = counts
        if error is not None:
            summary["error"] = f"{type(error).__name__}: {error}"
        attempt(lambda: self.run.write_json(SUMMARY, summary))
        if unwritten is not None and status == "finished":
            raise unwritten

    def _save_trained(self, trained: Any, weights: Any) -> None:
        if trained is None:
            return
        if is_bare(trained):
            self.run.save_model(trained, self.base.path, weights, self._other_template())
        else:
            self.run.save_adapter(trained, self.base.parent or self.base.identity, weights)

    def _describe(self, adapter_dtype: str, facts: dict[str, Any]) -> dict[str, Any]:
        """The content of config.json; `facts` stand between the base and the seed."""
        adapter = {} if is_bare(self.model) else self.model.peft_config[active_adapter(self.model)].to_dict()
        measured = {} if self.base.measured is None else {"measured": self.base.measured.as_dict()}
        if (start := getattr(self.model, "qlora_start", None)) is not None:
            facts = facts | {"adapter_start": start.kind}
        return {
            "command": type(self).__name__,
            "model": self.base.path.name,
            "base": {
                "path": str(self.base.path),
                "identity": self.base.identity,
                **self.base.spec.as_dict(),
                **measured,
            },
            **facts,
            "ends": self._ends(),
            "seed": self.args.seed,
            "adapter_dtype": adapter_dtype,
            **({} if (template := self._other_template()) is None else {"chat_template": template}),
            "lora": {k: sorted(v) if isinstance(v, set) else v for k, v in adapter.items() if v is not None},
            self._method.record: self.args.to_dict(),
            "versions": describe_versions(),
            "machine": describe_machine(is_4bit=self.base.spec.is_4bit),
        }

    def _ends(self) -> list[int]:
        """The tokens that end what the policy says: those of the model, and the tokenizer's."""
        held = bare_model(self.model).generation_config.eos_token_id
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        return sorted({*(held if isinstance(held, list) else [held]), tokenizer.eos_token_id} - {None})

    def _other_template(self) -> str | dict[str, str] | None:
        """The chat template of the tokenizer or processor; `None` where it is that of the base, or there is none."""
        template = getattr(self.processing_class, "chat_template", None)
        return None if not template or template == read_template(self.base.path) else template


def open_run(output_dir: str, existing: str) -> RunDirectory | None:
    """The run directory, which rank 0 alone writes; `None` on the others.

    Raises:
        RunDirectoryError: on all of them.
    """
    with ranks().together("opening the run directory"):
        return RunDirectory(output_dir, existing) if ranks().is_first else None


def check_adapter_dtype(adapter_dtype: str) -> None:
    """Raises: ConfigConflictError: it is none of those that are trained."""
    if adapter_dtype not in ADAPTER_DTYPES:
        raise ConfigConflictError(
            f"reading the arguments: adapter_dtype={adapter_dtype!r} is not one of {ADAPTER_DTYPES}."
        )


def load_tokenizer(base: PreparedBase, args: Any) -> Any:
    """The tokenizer that is stored with the base, or of a vision-language model the processor, set up as TRL's online
    trainers want it."""
    return load_processor(
        base.path, padding_side="left", truncation_side="left", trust_remote_code=args.trust_remote_code
    )


def products_of(model: Any, base: PreparedBase, args: Any) -> Float32Products:
    """The claim of a trainer on the CPU: its base's dtype, and that of autocast."""
    if next(model.parameters()).device.type != "cpu":
        return Float32Products()
    logger.info("the trainer runs on %s", processor())
    return Float32Products(base.spec.dtype, settings.autocast_dtype(args) or base.spec.dtype)


def trained_values(model: Any) -> dict[str, torch.Tensor]:
    """Copies of what is trained, by name, before TRL rounds it; empty where TRL makes the adapter."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def set_adapter_dtype(model: Any, dtype: torch.dtype, before: dict[str, torch.Tensor]) -> None:
    """Give the trained weights their dtype, with the values they had before TRL rounded them to bf16; the frozen copy
    that TRL has made of them ("ref") is as exact.

    Args:
        model: the PeftModel that TRL has built.
        dtype: of the trained weights.
        before: of `trained_values`.
    """
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if ".ranknum." in name:  # AdaLoRA's count of ranks: PEFT's cast has made it trainable, and no file holds it
            parameter.requires_grad_(False)
        if parameter.requires_grad and parameter.is_floating_point():
            exact = before.get(name)
            parameter.data = (exact if exact is not None else parameter.data).to(dtype)
            copy = parameters.get(name.replace(".default.", ".ref."), parameter)
            if copy is not parameter and copy.dtype.itemsize < dtype.itemsize:  # `modules_to_save`, as in the base
                copy.data = parameter.data.clone()
    shorten_lora(model)


def check_optimizer(optimizer: Any, model: Any) -> None:
    """Reject an optimizer that was made for other parameters than those that are trained.

    Raises:
        ConfigConflictError: it holds none of them.
    """
    if optimizer is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters() if parameter.requires_grad):
        raise ConfigConflictError(
            f"reading the arguments: the {type(optimizer).__name__} in optimizers= holds none of the adapter's "
            "parameters, so nothing would be trained; peft_config= makes the adapter after it. Make the PeftModel "
            "first, the optimizer for its parameters, and pass both; or leave optimizers out and use the config's "
            "optim."
        )
