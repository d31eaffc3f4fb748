"""`QLoRADistillationTrainer`: TRL's DistillationTrainer, whose completions come from our engine, and whose teacher may
be the student's own base.

The divergence is TRL 1.16's, in tiles that are small on every device; a server as teacher has one of its own
(`scoring/divergence.py`). TRL knows the student's own completions alone (no `lmbda`). It drops the sampler's logprobs;
here they are kept, and compared with what the training pass says of the same tokens.

Letters: B completions, T tokens (padded), N scored tokens, H hidden size.
"""

from __future__ import annotations

import math
import operator
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE

from qlora_rl.adapter.directory import open_adapter
from qlora_rl.adapter.inspected import bare_model
from qlora_rl.base.checkpoint import load_base, prepare_base
from qlora_rl.base.quant import QuantSpec, spec_of
from qlora_rl.base.unsupported_configs import engine_positions
from qlora_rl.contracts import RolloutEngine
from qlora_rl.data.rows import reading
from qlora_rl.documents import read_object
from qlora_rl.engine.client import PromptLogprobs
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError, PromptTooLongError, collected
from qlora_rl.fidelity import mean_by_position
from qlora_rl.memory.plan import teacher_fields
from qlora_rl.memory.shape import read_config
from qlora_rl.methods import METHODS
from qlora_rl.sync.truncated_sampling import TruncatedSampling
from qlora_rl.train.metrics.measure import MeasuredSteps, logprobs_like
from qlora_rl.train.online import OnlineOptions, OnlineTrainer
from qlora_rl.train.rollouts.batches import EndedCompletions
from qlora_rl.train.rollouts.bridge import EngineBridge
from qlora_rl.train.run import CONFIG
from qlora_rl.train.scoring.divergence import from_candidates, from_hidden
from qlora_rl.train.scoring.logprobs import TOKENS, logit_scale_of, score
from qlora_rl.train.setup import settings
from qlora_rl.train.teacher import (
    NAME,
    NONE,
    POLICY,
    TOP_K,
    ServerTeacher,
    check_name_is_free,
    on_own_base,
    on_same_base,
)

# What of a batch is looked at when it has been trained on; TRL shuffles the rows of all of it alike.
_ROWS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampling_per_token_logps")


# Bytes of text in a token, few at that; and more tokens than a chat template writes around what is said.
_BYTES, _TEMPLATE = 3, 512


class TaughtRollouts:
    """Comes between `MeasuredSteps` and `EndedCompletions`: a batch also has the sampler's logprobs, and the prompts
    that the teacher reads, or what a server says of them."""

    bridge: EngineBridge
    teacher_prompt: str | None
    _server: ServerTeacher | None = None
    # Tokens that the teacher reads at most; `None` where that is not known.
    _positions: int | None = None
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
        rows = [ids[mask.bool()] for ids, mask in zip(output["prompt_ids"], output["prompt_mask"], strict=True)]
        if self.teacher_prompt is not None:
            prompts = [row.get(self.teacher_prompt) for row in inputs]
            if not all(prompts):  # of a stream, which nobody could read before
                raise ConfigConflictError(
                    f"reading the dataset: {self.teacher_prompt} is empty where the prompt is "
                    f"{inputs[[not each for each in prompts].index(True)]['prompt']!r}. Fill it in, or remove the row."
                )
            rows = [torch.tensor(ids) for ids in self._tokenize_prompts(prompts)[0]]
        if self._server is not None:
            said = self._server.candidates(
                [ids.tolist() for ids in rows], output["completion_ids"], output["completion_mask"]
            )
            output["teacher_ids"], output["teacher_logprobs"] = said
            return output
        answers = output["completion_mask"].sum(-1).tolist()
        self._reject_long(
            [
                f"the row whose prompt is {str(inputs[row]['prompt'])[:80]!r}: {len(ids)} tokens"
                for row, (ids, answer) in enumerate(zip(rows, answers, strict=True))
                if len(ids) + answer > (self._positions or math.inf)
            ],
            f"and an answer of up to {max(answers)}",
        )
        if self.teacher_prompt is not None:
            padded, pad = {"batch_first": True, "padding_side": "left"}, self._tokenizer.pad_token_id
            device = output["prompt_ids"].device
            output["teacher_prompt_ids"] = pad_sequence(rows, padding_value=pad, **padded).to(device)
            output["teacher_prompt_mask"] = pad_sequence([torch.ones_like(row) for row in rows], **padded).to(device)
        return output

    def _reject_long(self, long: list[str], answer: str) -> None:
        if long:
            more = f"; {len(long) - 5} rows more" * (len(long) > 5)
            raise PromptTooLongError(
                f"reading what the teacher reads: {'; '.join(long[:5])}{more} {answer}, and the teacher reads "
                f"{self._positions} tokens at most. Shorten or remove these rows, or lower max_completion_length."
            )


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
        teacher_model: a second model in this process: a name, which is quantised to NF4 as `model` is (where
            `teacher_model_init_kwargs` is set TRL loads it), a prepared base, or an object.
        teacher_adapter: in place of it the student's own base, which is held once: with the adapter of a directory or
            of a run; "none": without any; "policy": with the adapter that is trained, as it is at that moment.
        teacher_url: or a server, of `qlora-rl serve` or vLLM's own, which is asked for the likeliest tokens at each
            place, at temperature 1. `teacher_model` is then its name of the model: by default "policy", or the only
            base.
        teacher_top_k: how many; all others together are one outcome more, on both sides. vLLM gives up to 20, or
            `--max-logprobs`.
        teacher_key_file: holds the server's key. Without it none is sent: QLORA_RL_API_KEY is the rollout server's.
        teacher_prompt: the column with what the teacher reads in place of `prompt`: the same question with a hint, the
            answer, or instructions. Text or messages, as `prompt`.
        rollout: and all further keyword arguments as `QLoRAGRPOTrainer` has them. There is no `remove_padding`: TRL
            computes padded batches here.

    Raises:
        ConfigConflictError, AdapterRejectedError, NotYetSupportedError: of the teacher, and as `QLoRAGRPOTrainer`;
            before anything is trained.
    """

    _tag_names = ["trl", "distillation", "qlora-rl"]
    _name = "Distillation"
    _method = METHODS["distill"]
    _refers = False
    # Where the second model is stored, if that is known.
    _stored_at: Mapping[str, str] = {}
    # Rows of the batch whose loss is still to be computed, and what is known of the others.
    _unscored = 0
    _parts: Sequence[tuple[dict[str, Any], torch.Tensor]] = ()
    # Of the same parts: how far student and teacher are apart at each token, in nats, and which tokens count.
    _taught: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
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
        reasons, adapter, url = [], self._teacher_adapter, self._teacher_url
        if sum(given is not None for given in (adapter, self._given_teacher if url is None else url)) != 1:
            reasons.append(
                "name one teacher: teacher_adapter (a directory, 'none' or 'policy'), teacher_model for a second model "
                "in this process, or teacher_url for a server"
            )
        if url is not None:
            reasons += self._contradictions(asked.args)
        elif self._teacher_top_k != TOP_K or self._teacher_key_file is not None:
            reasons.append("teacher_top_k or teacher_key_file without teacher_url: they are a server's. Leave them out")
        is_alike = adapter == POLICY or (adapter == NONE and asked.peft_config is not None)
        if self.teacher_prompt is None and is_alike:
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
        reasons += [reason for part in parts for reason in self._gaps(part, is_alike)]
        if reasons:
            raise collected("choosing the teacher", reasons, ConfigConflictError)
        if adapter not in (None, NONE, POLICY):
            open_adapter(adapter)
        check_name_is_free(model)
        return asked

    def _contradictions(self, args: Any) -> list[str]:
        """What a server as teacher does not go with."""
        reasons = []
        if args.temperature != 1:
            reasons.append(
                f"teacher_url with temperature={args.temperature:g}: a server says its likeliest tokens at temperature "
                "1, from which no other can be made. Set temperature=1.0"
            )
        if self._given_teacher is not None and not isinstance(self._given_teacher, str):
            reasons.append("teacher_url with a model as teacher_model, which is then the name of the server's")
        if self._teacher_top_k < 1:
            reasons.append(f"teacher_top_k={self._teacher_top_k} < 1")
        return reasons

    def _gaps(self, dataset: Any, is_alike: bool) -> list[str]:
        """Why the teacher cannot read each row of a dataset, or, where it is the student, why it would say the same; of
        a stream only its columns are known before."""
        column, columns = self.teacher_prompt, getattr(dataset, "column_names", None)
        if column is None or not columns:
            return []
        if column not in columns:
            return [f"teacher_prompt={column!r} is no column; there are {', '.join(columns)}"]
        read = dataset[column] if hasattr(dataset, "__len__") else ()
        gaps = [row for row, prompt in enumerate(read) if not prompt]
        named = ", ".join(map(str, gaps[:5])) + ", ..." * (len(gaps) > 5)
        if gaps:
            return [f"{column} is empty in {len(gaps)} rows ({named}). Fill it in, or remove them"]
        if is_alike and read and "prompt" in columns and all(map(operator.eq, read, dataset["prompt"])):
            return [
                f"{column} is the prompt in every row, and nothing can be learned. Put into it what the student lacks"
            ]
        return []

    def _of_method(self, asked: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"method": "distill"}
        if self._teacher_url is not None:
            return found | teacher_fields(top_k=self._teacher_top_k)
        rows, column = asked.datasets[0], self.teacher_prompt
        if column is not None and hasattr(rows, "__len__"):
            longer = (_size(other) - _size(prompt) for prompt, other in zip(rows["prompt"], rows[column], strict=True))
            found["teacher_more"] = max(0, max(longer, default=0)) // _BYTES
        teacher, adapter, init = self._given_teacher, self._teacher_adapter, asked.args.teacher_model_init_kwargs
        if adapter is not None:
            return found | teacher_fields(adapter=None if adapter in (NONE, POLICY) else adapter)
        is_path = isinstance(teacher, str | os.PathLike)
        spec = QuantSpec("none") if init else None if is_path else spec_of(bare_model(teacher))
        whom = teacher if is_path else bare_model(teacher).config
        return found | teacher_fields(model=whom, spec=spec, trust_remote_code=asked.args.trust_remote_code)

    def _prepared(self, asked: Any, images: list[str]) -> tuple[Any, Any]:
        source, processing_class = super()._prepared(asked, images)
        if self._teacher_url is not None:
            name, key = self._given_teacher, self._teacher_key_file
            served = PromptLogprobs(self._teacher_url, model=name, api_key_file=key)
            weakref.finalize(self, served.close)
            before = {}
            if self.run is not None and self.run.existing == "resume" and (self.run.path / CONFIG).is_file():
                before = read_object(self.run.path / CONFIG).get("teacher", {})
            words = read_config(self.base.path).get_text_config().vocab_size
            self._server = ServerTeacher(served, self._teacher_top_k, processing_class, words, before)
        return source, processing_class

    def _model_for_trl(self, model: Any, peft_config: Any, args: Any) -> dict[str, Any]:
        teacher = None if self._server is not None else self._given_teacher
        if isinstance(teacher, str | os.PathLike):
            self._check_tokenizer(teacher, args)
            if getattr(args, "teacher_model_init_kwargs", None):
                teacher = os.fspath(teacher)  # TRL loads it as these say
            else:
                trusted = {"trust_remote_code": args.trust_remote_code}
                held = prepare_base(teacher, compute_dtype=self.base.spec.compute_dtype, **trusted)
                teacher = load_base(held, device=args.device, **trusted)
                self._stored_at = {"path": os.path.abspath(held.path)}
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
        if self._server is not None:
            key = self._teacher_key_file
            self._taught_by = self._server.facts | ({} if key is None else {"key_file": os.path.abspath(key)})
        elif self._teacher_adapter is None:
            self.teacher_model, self._taught_by = on_own_base(self.accelerator.unwrap_model(self.teacher_model))
            self._taught_by |= self._stored_at
        else:
            self.teacher_model, self._taught_by = on_same_base(self.model, self._teacher_adapter, self.base)
        if (column := self.teacher_prompt) is not None:
            self._taught_by["prompt"] = column
            rows = self.train_dataset
            if hasattr(rows, "__len__") and (reads := reading(rows["prompt"], rows[column])):
                self._taught_by["reads"] = reads
        self._check_lengths(args.max_completion_length)
        self._truncated = TruncatedSampling.of(settings.sampling_spec(args))

    def _check_lengths(self, answer: int) -> None:
        """Of all rows that can be read before, what the teacher reads with an answer has room in it.

        Raises:
            PromptTooLongError: names the rows.
        """
        if self._server is not None:
            self._positions = None if (most := self._server.max_length) is None else most - 1
        else:
            self._positions = engine_positions(self.teacher_model.config) or None
        rows, column = self.train_dataset, self.teacher_prompt or "prompt"
        if self._positions is None or not hasattr(rows, "__len__"):
            return
        room = self._positions - answer
        # A token is a byte at least; what else a chat template writes is short.
        read = [(row, prompt) for row, prompt in enumerate(rows[column]) if _size(prompt) > room - _TEMPLATE]
        lengths = [len(ids) for ids in self._tokenize_prompts([prompt for _, prompt in read])[0]] if read else []
        self._reject_long(
            [
                f"row {row}: {column} has {length} tokens"
                for (row, _), length in zip(read, lengths, strict=True)
                if length > room
            ],
            f"and max_completion_length={answer}",
        )

    def decisive(self) -> dict[str, Any]:
        """The teacher, wherever it came from or is."""
        places = ("path", "url", "logprobs", "key_file", "reads")
        named = [f"{n} {v[:16] if n == 'digest' else v}" for n, v in self._taught_by.items() if n not in places]
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

    def _uses_rollouts_again(self) -> bool:
        return False  # each step has completions of its own

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self.teacher_prompt is not None and self.teacher_prompt not in self._signature_columns:
            self._signature_columns.append(self.teacher_prompt)

    # --- the loss, and what it is computed from -----------------------------------------------------------------------

    def _compute_loss(self, unwrapped_student: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        """As TRL's: the loss, the student's entropies summed up, and the number of tokens. The teacher comes first,
        before the student holds what its backward pass needs."""
        wanted_BT = inputs["completion_mask"].bool()
        head = _head_of(unwrapped_student)
        # Logits of two models, in float32: a quarter of the tokens that GRPO scores at once take as much.
        tokens = (TOKENS if head[0].weight.device.type == "cpu" else TOKEN_CHUNK_SIZE) // 4
        with self.accelerator.autocast():  # TRL goes past the forward on which accelerate puts it
            if self.teacher_model is None:
                said = inputs["teacher_ids"][wanted_BT], inputs["teacher_logprobs"][wanted_BT]
            else:
                read = "teacher_prompt" if "teacher_prompt_ids" in inputs else "prompt"
                theirs_NH = self._hidden_of(self.teacher_model, inputs, read)
            is_watched = self._unscored > 0
            self._part = inputs if is_watched else None
            try:
                ours_NH = self._hidden_of(unwrapped_student, inputs, "prompt")
            finally:
                self._part = None
            if self.teacher_model is None:
                found_N, entropy_N = from_candidates((ours_NH, *head), *said, self.beta, self.temperature, tokens)
            else:
                its = _head_of(self.teacher_model)
                found_N, entropy_N = from_hidden(
                    (ours_NH, *head), (theirs_NH, *its), self.beta, self.temperature, tokens
                )
        if is_watched:
            divergence_N = found_N.detach().float()
            divergence_BT = divergence_N.new_zeros(wanted_BT.shape).masked_scatter(wanted_BT, divergence_N)
            self._taught = [*self._taught, (divergence_BT, wanted_BT)]
        count = wanted_BT.sum()
        divisor = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return found_N.sum() / divisor, entropy_N.sum(), count

    def _hidden_of(self, model: Any, inputs: dict[str, Any], prompt: str) -> torch.Tensor:
        """Where `model` has read the prompts of that name: its hidden states at each completion token, [N, H]."""
        ids_BT, mask_BT = (
            torch.cat([inputs[f"{prompt}_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
        )
        wanted_BT = inputs["completion_mask"].bool()
        return self._get_last_hidden_state(model, ids_BT, mask_BT, wanted_BT.shape[1])[wanted_BT]

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
        wanted_BT, (head, softcap, scale) = part["completion_mask"].bool(), _head_of(student)
        tokens = TOKENS if head.weight.device.type == "cpu" else TOKEN_CHUNK_SIZE
        hidden_NH, targets_N = hidden_BTH[wanted_BT], part["completion_ids"][wanted_BT]
        scored = (hidden_NH, head.weight, head.bias, targets_N, self.temperature, softcap, scale)
        logprobs_N = score(*scored, (), tokens)[0]
        if self._truncated is not None:
            logprobs_N = logprobs_N - self._truncated.log_kept_by_head(*scored)
        return logprobs_N.new_zeros(wanted_BT.shape).masked_scatter(wanted_BT, logprobs_N)

    # --- the measurement ----------------------------------------------------------------------------------------------

    def _compare(self, mode: str, output: dict[str, Any]) -> None:
        # The loss comes past them anyway.
        self._unscored, self._parts, self._taught = len(output["completion_ids"]), (), ()

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
        divergences, masks = zip(*self._taught, strict=True)
        divergence_BT, mask_BT = torch.cat(divergences).double(), torch.cat(masks)
        mean, by_position = float(divergence_BT[mask_BT].mean()), mean_by_position(divergence_BT, mask_BT)
        self._note(mode, {"teacher_divergence": mean, "teacher_divergence_by_position": by_position})

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
        teacher_url: str | None = None,
        teacher_top_k: int = TOP_K,
        teacher_key_file: str | os.PathLike[str] | None = None,
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
        gpu_memory: str | float = "auto",
        api_key_file: str | os.PathLike[str] | None = None,
    ):
        self._given_teacher, self._teacher_adapter, self.teacher_prompt = teacher_model, teacher_adapter, teacher_prompt
        self._teacher_url, self._teacher_top_k, self._teacher_key_file = teacher_url, teacher_top_k, teacher_key_file
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
                gpu_memory=gpu_memory,
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


def _size(prompt: Any) -> int:
    """Bytes of the text of a prompt, which may be messages."""
    said = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    return sum(len(str(each).encode()) for each in said)


def _head_of(model: Any) -> tuple[torch.nn.Linear, float | None, float]:
    """Of a bare model or a `Teacher`: its output head, and what its logits are capped and multiplied with."""
    text = model.config.get_text_config()
    return model.get_output_embeddings(), getattr(text, "final_logit_softcapping", None), logit_scale_of(text)
