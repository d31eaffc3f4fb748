"""`Resumable`: a mixin for transformers' trainers. A run that was killed goes on from its last checkpoint, bit for bit.

transformers keeps weights, optimizer, scheduler, random numbers and the place in the data. What it leaves out, and TRL
too, is kept with them: completions that several steps use, the loss and metrics since the last line of the log, the
order of the data after the first epoch, what both sides of the engine have counted. And what the run *is*, so that
another one is rejected. `WrappedModel`: how a trainer's model is sharded and saved, where accelerate's own way would
round or leave out what is trained.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import TrainOutput
from trl.trainer.utils import RepeatSampler

from qlora_rl.adapter.directory import load_adapters, place_of
from qlora_rl.adapter.export import settle_patterns
from qlora_rl.adapter.inspected import is_bare
from qlora_rl.adapter.store import STATE, write_origin
from qlora_rl.base.fingerprint import digest_bytes
from qlora_rl.distributed import ranks
from qlora_rl.documents import read_object
from qlora_rl.errors import RunDirectoryError
from qlora_rl.stages import remark
from qlora_rl.train.ranks.sharded import (
    OPTIMIZER,
    SCHEDULER,
    is_gathered,
    load_optimizer,
    load_weights,
    of_deepspeed,
    save_optimizer,
    trained_weights,
)
from qlora_rl.train.run import checkpoints
from qlora_rl.train.run.directory import RunDirectory, describe_versions
from qlora_rl.train.run.identity import factors_of, identity_of, reject_other
from qlora_rl.train.setup.processes import sharding_of

logger = logging.getLogger(__name__)

ROLLOUTS, TRAINER_STATE = "rollouts.pt", "trainer_state.json"
ENTROPY = "entropy_ctrl_state.json"
# What a checkpoint's state must hold.
_FIELDS = {
    "step": int,
    **dict.fromkeys(("identity", "versions", "files", "loss", "counters", "metrics", "states"), dict),
}
# Counters of TRL's trainers that no checkpoint of theirs holds.
_COUNTERS = ("_step", "_total_train_tokens")


class Resumable:
    """Comes before TRL's class; `train` asks `resume_point` first.

    Checkpoints have the files of transformers and two more, `qlora_rl.json` and `manifest.json`; a third,
    `rollouts.pt`, where completions are used by later steps. Each appears whole, or not at all (`checkpoints`).
    """

    run: RunDirectory | None
    _staging: Path | None = None
    _resumed: dict[str, Any] | None = None  # what is stored with the checkpoint that training is about to go on from
    factors: float | list[str] | None = None  # `factors_of` the adapter as the run begins
    _groups: Any = ()  # of the optimizer that DeepSpeed was given

    # --- what a subclass adds ---------------------------------------------------------------------------------------

    def decisive(self) -> dict[str, Any]:
        """Further settings that decide the numbers of a run, in addition to those of TRL's config."""
        return {}

    def _states(self) -> dict[str, Any]:
        """Further state, as JSON."""
        return {}

    def _restore_states(self, saved: dict[str, Any]) -> None:
        """Inverse of `_states`; called before the first step, when everything else has been restored."""

    def _before_checkpoint(self) -> None:
        """Called on all ranks; what it raises ends the training without one."""

    def _write_rest(self) -> None:
        """Write what is measured and not written yet."""

    # --- going on ---------------------------------------------------------------------------------------------------

    def make_resumable(self) -> None:
        """Called when TRL has built the trainer, and before anything of a run directory that is there is touched.

        Raises:
            ConfigConflictError: with existing_run="resume", and this is another run; names what differs.
        """
        trained = self.accelerator.unwrap_model(self.model)
        # As it begins: a callback may change them (`set_scale`) while it trains.
        self.factors = None if is_bare(trained) else factors_of(trained)
        with ranks().together("choosing the checkpoint"):
            if self.run is not None and self.run.existing == "resume" and (path := self.run.last_checkpoint()):
                reject_other(path, _read(path)["identity"], identity_of(self))
        self.add_callback(_GoOn(self))

    def resume_point(self, wish: str | bool | None) -> str | None:
        """The checkpoint that `train(resume_from_checkpoint=wish)` goes on from; lines and checkpoints behind it go.

        Args:
            wish: a directory; True for the last whole one; None: with existing_run="resume" the last whole one, if
                there is any.

        Raises:
            RunDirectoryError: there is none, or it is torn. ConfigConflictError: it is another run's; names what
                differs.
        """
        self._resumed = None
        saved = ranks().share(lambda: self._chosen(wish), "choosing the checkpoint")
        if saved is None:
            return None
        self._resumed = saved
        return saved["path"]

    def _chosen(self, wish: str | bool | None) -> dict[str, Any] | None:
        """What is stored with the checkpoint, and its path; chosen by rank 0."""
        path = self._wished(wish)
        if path is None:
            return None
        saved = _read(path)
        reject_other(path, saved["identity"], identity_of(self))
        if not (path / "optimizer.pt").exists():
            raise RunDirectoryError(
                f"resuming from {path}: it was saved with save_only_model=True, so the optimizer is lost. Train its "
                "adapter on, with a new optimizer: model=PeftModel.from_pretrained(..., is_trainable=True), in another "
                "output_dir."
            )
        if saved["identity"].get("processes", 1) != ranks().size:
            if (path / ROLLOUTS).exists():
                raise RunDirectoryError(
                    f"resuming from {path} in {ranks().size} processes: it is between two steps that share their "
                    f"rollouts, of which each of {saved['identity'].get('processes', 1)} processes holds a part. Start "
                    "as many, or choose another checkpoint."
                )
            logger.warning("%s was written by another number of processes: random numbers differ from here on", path)
        if (now := describe_versions()) != saved["versions"]:
            other = [name for name in {**now, **saved["versions"]} if now.get(name) != saved["versions"].get(name)]
            logger.warning("%s was written with other versions of %s: the numbers may differ", path, ", ".join(other))
        last = saved["step"]
        if self.run is not None and path.resolve().parent == self.run.path.resolve():
            last = max(last, self.run.cut_back(saved["files"]))
            checkpoints.set_aside(self.run.path, saved["step"])
        logger.info("going on from %s: step %d", path, saved["step"])
        return saved | {"path": str(path), "last": last}

    def _wished(self, wish: str | bool | None) -> Path | None:
        if wish is None or wish is False:
            if self.run is None or self.run.existing != "resume":
                return None
            path = self.run.last_checkpoint()
            if path is None:
                logger.info("%s holds no checkpoint yet: the run begins at step 0", self.run.path)
            return path
        if wish is True:
            path = checkpoints.last_whole(Path(self.args.output_dir))
            if path is None:
                raise RunDirectoryError(
                    f"resuming: {self.args.output_dir} holds no whole checkpoint. Leave resume_from_checkpoint out and "
                    "pass existing_run='resume', which begins at step 0 where there is none yet."
                )
            return path
        path = Path(wish)
        if reasons := checkpoints.damage(path):
            raise RunDirectoryError(
                f"resuming from {path}: {'; '.join(reasons)}. Pass resume_from_checkpoint=True for the last whole one. "
                "Of a checkpoint that something else has saved, train the adapter on: "
                "model=PeftModel.from_pretrained(..., is_trainable=True).",
                reasons=reasons,
            )
        return path

    def _done_already(self) -> TrainOutput | None:
        """Where the checkpoint is that of the last step: transformers would do one more."""
        saved = self._resumed
        if saved is None:
            return None
        steps = self.set_initial_training_values(self.args, self.get_train_dataloader())[-1]
        if saved["step"] < steps:
            return None
        logger.info("all %d steps are done; raise max_steps or num_train_epochs to train on", saved["step"])
        self._load_from_checkpoint(saved["path"])
        self.state = TrainerState.load_from_json(str(Path(saved["path"]) / TRAINER_STATE))
        self._resumed = None
        if ranks().is_first:  # it may have been killed before it came to that
            root = Path(self.args.output_dir)
            checkpoints.rotate(root, self.args.save_total_limit, self.state.best_model_checkpoint)
        since = saved["loss"]["since"]
        loss = (saved["loss"]["total"] + sum(since) / len(since)) / max(1, saved["step"])
        return TrainOutput(saved["step"], loss, {})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The adapter of a checkpoint, in the dtype in which it is trained; PEFT would cast it."""
        model = self.model if model is None else model
        if is_bare(model) and not is_gathered(model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        if is_gathered(model):
            load_weights(model, Path(resume_from_checkpoint))
        else:
            load_adapters(model, Path(resume_from_checkpoint))
        if is_bare(model):
            return
        if self._resumed is not None and _digest(trained_weights(model)) != self._resumed["adapter"]:
            raise RunDirectoryError(
                f"resuming from {resume_from_checkpoint}: the adapter that PEFT has read is not the one that was "
                "trained. Pass the same model and peft_config as at first."
            )

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, whose order after the first epoch depends on how often it was walked through."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        if self._resumed is not None and isinstance(sampler, RepeatSampler) and sampler.shuffle:
            for _ in range(int(self._resumed["epoch"])):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _go_on(self) -> None:
        """Restore what transformers has just set to its beginning."""
        saved, self._resumed = self._resumed, None
        self._metrics["train"].clear()  # of steps that an earlier `train` has done since its last line of the log
        if saved is None:
            return
        self.state.compute_steps(self.args, self.state.max_steps)  # the checkpoint's intervals are not the user's
        if ranks().is_first:
            step, last = saved["step"], saved["last"]
            again = f"; steps up to {last} are done again" if last > step else ""
            remark(f"going on from {Path(saved['path']).name}, step {step} of {self.state.max_steps}{again}")
        since = saved["loss"]["since"]  # of each rank; transformers logs their mean
        own = since[ranks().rank] if len(since) == ranks().size else sum(since) / len(since)
        self._tr_loss.fill_(own)
        self._total_loss_scalar, self._globalstep_last_logged = saved["loss"]["total"], saved["loss"]["logged"]
        for name, value in saved["counters"].items():
            setattr(self, name, value)
        if saved["identity"].get("processes", 1) != ranks().size:
            self._step = 0  # it counts parts of a step, which are others now; at a checkpoint a new batch begins
        for name, values in saved["metrics"].items():
            self._metrics["train"][name].extend(values)
        rollouts = Path(saved["path"]) / ROLLOUTS
        if rollouts.exists():
            # Not map_location: torch does not know "cpu:0", as accelerate calls it in several processes.
            parts = torch.load(rollouts, map_location="cpu", weights_only=True)
            mine = parts if ranks().size == 1 else parts[ranks().rank]
            self._buffered_inputs = send_to_device(mine, self.accelerator.device)
        self._restore_states(saved["states"])

    # --- saving -----------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        """Where transformers writes checkpoints: the staging directory, while one is made."""
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """transformers'; what DeepSpeed makes of it no longer says which parameter was which."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.is_deepspeed_enabled:
            self._groups = of_deepspeed().groups_of(optimizer)
        return optimizer

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """transformers', which would look for a checkpoint of DeepSpeed's own; here one is read that any process may
        have written."""
        if not self.is_deepspeed_enabled:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        with of_deepspeed().base_stays(self.model):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        of_deepspeed().gather_what_is_read(self.model)
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        files = Path(output_dir) / OPTIMIZER, Path(output_dir) / SCHEDULER
        if self.is_deepspeed_enabled:
            of_deepspeed().save_optimizer(self._groups, self.optimizer, self.lr_scheduler, *files)
        elif ranks().size == 1:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            save_optimizer(self.optimizer, self.lr_scheduler, Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or (ranks().size == 1 and not self.is_deepspeed_enabled):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        if self.is_deepspeed_enabled:
            files = Path(checkpoint) / OPTIMIZER, Path(checkpoint) / SCHEDULER
            of_deepspeed().load_optimizer(self._groups, self.optimizer, self.lr_scheduler, *files)
        else:
            load_optimizer(self.optimizer, self.lr_scheduler, Path(checkpoint))
        entropy = Path(checkpoint) / ENTROPY  # of TRL's adaptive entropy bonus
        if getattr(self, "use_adaptive_entropy", False) and entropy.exists():
            state = json.loads(entropy.read_text())
            self.entropy_coef, self._last_world_entropy = state["entropy_coef"], state["last_world_entropy"]

    def _load_best_model(self) -> None:
        """transformers', which wants files of the way in which the trainer is spread, looks for an adapter by the name
        of "default" alone, and has PEFT cast it; here the adapter is read."""
        best = Path(self.state.best_model_checkpoint)
        if is_gathered(self.model):
            load_weights(self.model, best)
        elif is_bare(self.model) or not load_adapters(self.model, best):
            super()._load_best_model()  # which warns where nothing is there

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """TRL's checkpoint and our state, whole or not there."""
        with ranks().together("writing a checkpoint"):
            self._before_checkpoint()
        self._write_rest()
        root, step = Path(self._get_output_dir(trial)), self.state.global_step
        # It would upload, and forget, what has no name yet.
        is_pushed, self.args.push_to_hub = self.args.push_to_hub, False
        try:
            with _staged(root, step) as directory:
                self._staging = directory.parent
                super()._save_checkpoint(model, trial)
                self._complete(directory, root)
        finally:
            self._staging, self.args.push_to_hub = None, is_pushed
        ranks().barrier("writing a checkpoint")
        if not ranks().is_first:
            return
        if is_pushed:
            self._push_from_checkpoint(str(root / f"checkpoint-{step}"))
        checkpoints.rotate(root, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _complete(self, directory: Path, root: Path) -> None:
        step, best = self.state.global_step, self.state.best_global_step
        if best and (best == step or (root / f"checkpoint-{best}").exists()):
            self.state.best_model_checkpoint = str(root / f"checkpoint-{best}")  # not in the staging directory
            if ranks().is_first:
                self.state.save_to_json(str(directory / TRAINER_STATE))
        # With it the others have written their random numbers.
        parts = ranks().gather(_held(self) if self._uses_rollouts_again() else None, "writing a checkpoint")
        losses = ranks().gather(self._tr_loss.item(), "writing a checkpoint")
        trained = self.accelerator.unwrap_model(self.model)
        weights = None if is_bare(trained) else trained_weights(trained)
        if not ranks().is_first:
            return
        if not is_bare(trained) and (place := place_of(trained, directory)) is not None:
            settle_patterns(trained, place)
            write_origin(place, self.base.parent or self.base.identity)
        if self._uses_rollouts_again():
            torch.save(self._buffered_inputs if ranks().size == 1 else parts, directory / ROLLOUTS)
        state = {
            "step": step,
            "epoch": self.state.epoch,
            "identity": identity_of(self),
            "versions": describe_versions(),
            "files": self.run.sizes() if self.run is not None else {},
            "adapter": None if weights is None else _digest(weights),
            "loss": {
                "since": losses,
                "total": self._total_loss_scalar,
                "logged": self._globalstep_last_logged,
            },
            "counters": {name: getattr(self, name) for name in _COUNTERS if hasattr(self, name)},
            "metrics": {k: [float(v) for v in values] for k, values in self._metrics["train"].items()},
            "states": self._states(),
        }
        (directory / STATE).write_text(json.dumps(state, indent=1))

    def _uses_rollouts_again(self) -> bool:
        """The next step trains on completions that were generated for an earlier one."""
        if getattr(self, "_buffered_inputs", None) is None:
            return False
        return self._step % (self.args.steps_per_generation * self.num_iterations) != 0


class _GoOn(TrainerCallback):
    """The one moment between transformers' beginning and the first step."""

    def __init__(self, trainer: Resumable):
        self._trainer = weakref.ref(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer()
        if trainer is not None:
            trainer._go_on()


@contextlib.contextmanager
def _staged(root: Path, step: int) -> Iterator[Path]:
    """`checkpoints.staged` of rank 0; the others, which write their random numbers only, see the same directory."""
    if not ranks().is_first:
        yield Path(ranks().share(str, "staging a checkpoint"))
        return
    with checkpoints.staged(root, step) as directory:
        ranks().share(lambda: str(directory), "staging a checkpoint")
        yield directory


def _held(trainer: Any) -> Any:
    """The completions that a rank holds for later steps; those of one process stay where they are."""
    if ranks().size == 1:
        return None
    return [
        {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in part.items()}
        for part in trainer._buffered_inputs
    ]


def _read(path: Path) -> dict[str, Any]:
    try:
        saved = read_object(path / STATE)
        if wrong := [name for name, kind in _FIELDS.items() if not isinstance(saved.get(name), kind)]:
            raise ValueError(f"{', '.join(wrong)} missing, or of another type")
        return saved
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"resuming from {path}: {STATE} cannot be read ({error}): it was saved by another version. Train its "
            "adapter on: model=PeftModel.from_pretrained(..., is_trainable=True)."
        ) from error


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Of everything that is trained, with its name and dtype."""
    parts = [f"{name} {tensor.dtype} {digest_bytes(tensor)}" for name, tensor in weights.items()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


class WrappedModel:
    """Before one of transformers' trainers in the order of classes."""

    args: Any
    accelerator: Any
    model: Any

    def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers'.

        accelerate would have FSDP2 gather weights, and add up their gradients, in the dtype of autocast, which
        multiplies in that dtype anyway: an adapter would be rounded before it is gathered, and torch rejects 16-bit
        gradients of a float32 one.
        """
        if sharding_of(self.args) == "fsdp2":
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = None
        return super()._wrap_model(model, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """transformers', which would gather a sharded base; here what is trained is gathered, and rank 0 writes it."""
        if not is_gathered(self.model):
            super().save_model(output_dir, _internal_call)
            return
        weights = trained_weights(self.model)
        if ranks().is_first:
            self._save(output_dir or self.args.output_dir, state_dict=weights)
