"""`QLoRADistillationTrainer`: TRL's DistillationTrainer, whose completions come from our engine, and whose teacher may
be the student's own base.

TRL 1.16 computes the divergence in tiles, without logits of tokens x vocabulary; that computation is used as it is. It
knows the student's own completions alone (no `lmbda`) and the whole vocabulary (no top-k). It drops the sampler's
logprobs; here they are kept, and compared with what the training pass says of the same tokens.

Letters: B completions, T tokens (padded), N scored tokens, H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE

from qlora_rl.adapter.directory import open_adapter
from qlora_rl.adapter.inspected import bare_model
from qlora_rl.base.checkpoint import MANIFEST, load_base
from qlora_rl.contracts import RolloutEngine
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError, collected
from qlora_rl.sync.truncated_sampling import TruncatedSampling
from qlora_rl.train.metrics.measure import MeasuredSteps, logprobs_like
from qlora_rl.train.online import OnlineOptions, OnlineTrainer
from qlora_rl.train.rollouts.bridge import EngineBridge
from qlora_rl.train.rollouts.endings import EndedCompletions
from qlora_rl.train.scoring.logprobs import TOKENS, logit_scale_of, score
from qlora_rl.train.setup import settings
from qlora_rl.train.teacher import NAME, NONE, POLICY, Teacher, check_name_is_free, on_own_base, on_same_base

# What of a batch is looked at when it has been trained on; TRL shuffles the rows of all of it alike.
_ROWS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampling_per_token_logps")


class TaughtRollouts:
    """Comes between `MeasuredSteps` and `EndedCompletions`: a batch also has the sampler's logprobs, and the prompts
    that the teacher reads."""

    bridge: EngineBridge
    teacher_prompt: str | None
    mask_truncated_completions = False  # TRL has no such setting here

    def __init__(self, *, reward_funcs: Any, reward_processing_classes: Any, **of_trl: Any):
        super().__init__(**of_trl)
        self.reward_funcs: list[Any] = []
        self.reward_func_names: list[str] = []
        self.num_generations = 1
        self._logs["rewards"] = {}

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        output["sampling_per_token_logps"] = logprobs_like(output["completion_ids"], self.bridge.last.logprobs)
        if not self.log_completions:  # else TRL has written the texts down
            for name in ("prompt", "completion"):
                ids_BT = output[f"{name}_ids"]
                self._logs[name].extend(self.processing_class.batch_decode(ids_BT, skip_special_tokens=True))
        if self.teacher_prompt is not None:
            prompts = [row.get(self.teacher_prompt) for row in inputs]
            if None in prompts:
                raise ConfigConflictError(
                    f"reading the dataset: the row with the prompt {inputs[prompts.index(None)]['prompt']!r} has no "
                    f"{self.teacher_prompt}. Fill it in, or remove the row."
                )
            rows = [torch.tensor(ids) for ids in self._tokenize_prompts(prompts)[0]]
            if not all(map(len, rows)):
                raise ConfigConflictError(f"reading the dataset: a row has an empty {self.teacher_prompt}. Fill it in.")
            padded, pad = {"batch_first": True, "padding_side": "left"}, self._tokenizer.pad_token_id
            device = output["prompt_ids"].device
            output["teacher_prompt_ids"] = pad_sequence(rows, padding_value=pad, **padded).to(device)
            output["teacher_prompt_mask"] = pad_sequence([torch.ones_like(row) for row in rows], **padded).to(device)
        return output


class QLoRADistillationTrainer(OnlineTrainer, MeasuredSteps, TaughtRollouts, EndedCompletions, DistillationTrainer):
    """On-policy distillation on a 4-bit base: TRL's DistillationTrainer, its arguments (but `tools`) and config,
    sampling from an engine of ours, and these.

    ::

        trainer = QLoRADistillationTrainer(
            model=prepare_base("Qwen/Qwen3-8B"), teacher_adapter="longer-run", train_dataset=dataset,
            args=DistillationConfig(output_dir="run"), peft_config=LoraConfig(r=16, target_modules="all-linear"),
        )
        trainer.train()

    Args:
        model: as `QLoRAGRPOTrainer` takes it.
        teacher_model: a second model in this process: an object, a name (as TRL), or a prepared base.
        teacher_adapter: in place of it the student's own base, which is held once: with the adapter of a directory or
            of a run; "none": without any; "policy": with the adapter that is trained, as it is at that moment.
        teacher_prompt: the column with what the teacher reads in place of `prompt`: the same question with a hint, the
            answer, or instructions. Text or messages, as `prompt`.
        rollout: and all further keyword arguments as `QLoRAGRPOTrainer` has them. There is no `gpu_memory`: the memory
            estimate does not know this step; and no `remove_padding`: TRL computes padded batches here.

    Raises:
        ConfigConflictError, AdapterRejectedError, NotYetSupportedError: of the teacher, and as `QLoRAGRPOTrainer`;
            before anything is trained.
    """

    _tag_names = ["trl", "distillation", "qlora-rl"]
    _name = "Distillation"
    _config_name = "distillation"
    _is_planned = False
    _refers = False
    # Rows of the batch whose loss is still to be computed, and what is known of the others.
    _unscored = 0
    _parts: Sequence[tuple[dict[str, Any], torch.Tensor]] = ()
    # The part whose loss is being computed, while its sampled tokens are to be scored.
    _part: dict[str, Any] | None = None

    # --- the teacher ------------------------------------------------------------------------------------------------

    def _checked(self, model: Any, args: Any, options: OnlineOptions, **given: Any) -> Any:
        asked = super()._checked(model, args, options, **given)
        if asked.is_whole or args.world_size > 1:
            what = "training all weights" if asked.is_whole else f"{args.world_size} processes"
            raise NotYetSupportedError(
                f"reading the arguments: distillation with {what}. Train an adapter (peft_config), in one process."
            )
        reasons, adapter = [], self._teacher_adapter
        if (self._given_teacher is None) == (adapter is None):
            reasons.append(
                "name one teacher: teacher_adapter (a directory, 'none' or 'policy'), or teacher_model for a second "
                "model"
            )
        if self.teacher_prompt is None and (adapter == POLICY or (adapter == NONE and asked.peft_config is not None)):
            reasons.append(
                f"teacher_adapter={adapter!r} without teacher_prompt: the teacher says what the student says, and "
                "nothing can be learned. Name the column with what the teacher reads"
            )
        teacher = self._given_teacher
        if (
            teacher is not None
            and not isinstance(teacher, str | os.PathLike)
            and bare_model(teacher) is bare_model(model)
        ):
            reasons.append("teacher_model is the model that is trained. Pass teacher_adapter= in its place")
        parts = [part for d in asked.datasets for part in (d.values() if isinstance(d, dict) else [d])]
        for columns in (getattr(part, "column_names", None) for part in parts):
            if self.teacher_prompt is not None and columns and self.teacher_prompt not in columns:
                reasons.append(f"teacher_prompt={self.teacher_prompt!r} is no column; there are {', '.join(columns)}")
        if reasons:
            raise collected("choosing the teacher", reasons, ConfigConflictError)
        if adapter not in (None, NONE, POLICY):
            open_adapter(adapter)
        check_name_is_free(model)
        return asked

    def _model_for_trl(self, model: Any, peft_config: Any, args: Any) -> dict[str, Any]:
        teacher = self._given_teacher
        if isinstance(teacher, str | os.PathLike):
            self._check_tokenizer(teacher, args)
            if (Path(teacher) / MANIFEST).is_file():
                teacher = load_base(teacher, device=args.device, trust_remote_code=args.trust_remote_code)
            else:
                teacher = os.fspath(teacher)
        return {**super()._model_for_trl(model, peft_config, args), "teacher_model": teacher}

    def _check_tokenizer(self, teacher: str | os.PathLike[str], args: Any) -> None:
        """TRL compares the number of tokens alone."""
        own, its = (
            AutoTokenizer.from_pretrained(where, trust_remote_code=args.trust_remote_code).get_vocab()
            for where in (self.base.path, os.fspath(teacher))
        )
        differ = [token for token, number in its.items() if own.get(token) != number]
        if differ:
            raise ConfigConflictError(
                f"choosing the teacher: {os.fspath(teacher)} has another tokenizer: {differ[0]!r} is its token "
                f"{its[differ[0]]}, and {own.get(differ[0])} of the student. Take a teacher of the student's family."
            )

    def _after_trl(self, args: Any) -> None:
        if self._teacher_adapter is None:
            self.teacher_model, self._taught_by = on_own_base(self.accelerator.unwrap_model(self.teacher_model))
        else:
            self.teacher_model, self._taught_by = on_same_base(self.model, self._teacher_adapter, self.base)
        if self.teacher_prompt is not None:
            self._taught_by["prompt"] = self.teacher_prompt
        self._truncated = TruncatedSampling.of(settings.sampling_spec(args))

    def decisive(self) -> dict[str, Any]:
        """The teacher, whatever the directory is called that it came from."""
        named = [f"{n} {v[:16] if n == 'digest' else v}" for n, v in self._taught_by.items() if n != "path"]
        return super().decisive() | {"teacher": ", ".join(named)}

    def _describe(self, adapter_dtype: str, facts: dict[str, Any]) -> dict[str, Any]:
        return super()._describe(adapter_dtype, facts | {"teacher": self._taught_by})

    def _save(self, *args: Any, **kwargs: Any) -> None:
        """PEFT writes every adapter that the model holds: not the teacher's."""
        held = self.model.peft_config
        teacher = held.pop(NAME, None)
        try:
            super()._save(*args, **kwargs)
        finally:
            if teacher is not None:
                held[NAME] = teacher

    # --- as TRL wants it --------------------------------------------------------------------------------------------

    def _engine_options(self, args: Any) -> dict[str, Any]:
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return settings.engine_options(args) | {"max_num_seqs": rows * args.vllm_tensor_parallel_size}

    def _why_padded(self, options: OnlineOptions) -> str:
        return "TRL computes padded batches here"

    def _uses_rollouts_again(self) -> bool:
        return False  # each step has completions of its own

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self.teacher_prompt is not None and self.teacher_prompt not in self._signature_columns:
            self._signature_columns.append(self.teacher_prompt)

    # --- the loss, and what it is computed from -----------------------------------------------------------------------

    def _compute_loss(self, unwrapped_student: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        teacher: Teacher = self.teacher_model
        if "teacher_prompt_ids" in inputs:
            ids, mask = (
                torch.cat([inputs[f"teacher_prompt_{name}"], inputs[f"completion_{name}"]], dim=1)
                for name in ("ids", "mask")
            )
            teacher.sequences = ids, mask
        self._part = inputs if self._unscored else None
        try:
            with self.accelerator.autocast():  # TRL goes past the forward on which accelerate puts it
                return super()._compute_loss(unwrapped_student, inputs, num_items_in_batch)
        finally:
            self._part = teacher.sequences = None

    def _get_last_hidden_state(self, unwrapped_model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden_BTH = super()._get_last_hidden_state(unwrapped_model, *args, **kwargs)
        if self._part is not None and unwrapped_model is not self.teacher_model:
            part, self._part = self._part, None
            self._parts = [*self._parts, (part, self._sampled_logprobs(unwrapped_model, hidden_BTH, part))]
            self._unscored -= len(hidden_BTH)
        return hidden_BTH

    @torch.no_grad()
    def _sampled_logprobs(self, student: Any, hidden_BTH: torch.Tensor, part: dict[str, Any]) -> torch.Tensor:
        """Natural logs of the student's probabilities of the completions, [B, T]."""
        wanted_BT, head = part["completion_mask"].bool(), student.get_output_embeddings()
        text = student.config.get_text_config()
        softcap, scale = getattr(text, "final_logit_softcapping", None), logit_scale_of(text)
        hidden_NH, targets_N = hidden_BTH[wanted_BT], part["completion_ids"][wanted_BT]
        scored = (hidden_NH, head.weight, head.bias, targets_N, self.temperature, softcap, scale)
        logprobs_N = score(*scored, (), TOKENS if head.weight.device.type == "cpu" else TOKEN_CHUNK_SIZE)[0]
        if self._truncated is not None:
            logprobs_N = logprobs_N - self._truncated.log_kept_by_head(*scored)
        return logprobs_N.new_zeros(wanted_BT.shape).masked_scatter(wanted_BT, logprobs_N)

    # --- the measurement ----------------------------------------------------------------------------------------------

    def _compare(self, mode: str, output: dict[str, Any]) -> None:
        self._unscored, self._parts = len(output["completion_ids"]), ()  # the loss comes past them anyway

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; after the backward pass of a batch's last part, what the student thinks of the whole batch is
        measured."""
        loss = super().training_step(*args, **kwargs)
        self._look_at_parts("train")
        return loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; its batch is measured, too."""
        found = super().prediction_step(*args, **kwargs)
        self._look_at_parts("eval")
        return found

    def _look_at_parts(self, mode: str) -> None:
        if self._unscored or not self._parts:
            return
        parts, self._parts = self._parts, ()
        batch = {name: torch.cat([inputs[name] for inputs, _ in parts]) for name in _ROWS}
        self._look_at(mode, batch, torch.cat([logprobs for _, logprobs in parts]))

    def __init__(
        self,
        model: Any,
        teacher_model: Any = None,
        args: DistillationConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        teacher_adapter: str | os.PathLike[str] | None = None,
        teacher_prompt: str | None = None,
        rollout: str | list[str] | RolloutEngine = "colocate",
        sync: str = "auto",
        adapter_dtype: str = "float32",
        engine_options: dict[str, Any] | None = None,
        sync_dir: str | os.PathLike[str] | None = None,
        existing_run: str = "reject",
        allow_base_mismatch: bool = False,
        canary_every: int = 4,
        on_mismatch: str = "stop",
        share_base: bool | str = "auto",
        api_key_file: str | os.PathLike[str] | None = None,
    ):
        self._given_teacher, self._teacher_adapter, self.teacher_prompt = teacher_model, teacher_adapter, teacher_prompt
        self.set_up(
            model,
            args if args is not None else settings.default_args(DistillationConfig, "qlora-distillation"),
            OnlineOptions(
                rollout=rollout,
                sync=sync,
                adapter_dtype=adapter_dtype,
                engine_options=engine_options,
                sync_dir=sync_dir,
                existing_run=existing_run,
                allow_base_mismatch=allow_base_mismatch,
                canary_every=canary_every,
                on_mismatch=on_mismatch,
                share_base=share_base,
                api_key_file=api_key_file,
            ),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
