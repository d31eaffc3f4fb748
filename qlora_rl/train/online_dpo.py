"""`QLoRAOnlineDPOTrainer`: what TRL's experimental OnlineDPOTrainer does by itself, done with our engine: the pair is
sampled, the steps are measured.

TRL 1.16 talks to vLLM here without the backend that GRPO and RLOO share: it merges the adapter into the weights of a
vLLM that it has built. It also lifts parts of a 4-bit base to float32 on the way (`prepare_peft_model`), and copies a
whole PeftModel to refer to it. So the adapter is made here, the reference is the same model under another adapter, and
`_generate` asks the bridge.

Shape letters: P prompts, B = 2 P completions (all first ones, then all second ones, as TRL has them), T tokens, V
vocabulary.
"""

from __future__ import annotations

import functools
import math
import os
from collections import defaultdict
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, TrainerCallback, set_seed
from trl import is_conversational, maybe_apply_chat_template
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.trainer.utils import is_async_callable, nanstd, use_adapter

from qlora_rl.adapter.initialization import REFERENCE, copy_adapter, start_adapter
from qlora_rl.adapter.inspected import active_adapter, is_bare
from qlora_rl.base.unsupported_configs import engine_positions
from qlora_rl.contracts import RolloutEngine
from qlora_rl.distributed import ranks
from qlora_rl.engine.sampling import check_lengths
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError, RewardFunctionError
from qlora_rl.methods import METHODS
from qlora_rl.sync.truncated_sampling import TruncatedSampling
from qlora_rl.train.metrics.measure import MeasuredSteps, batch_of_all_ranks, logprobs_like
from qlora_rl.train.metrics.rewards import agree_on
from qlora_rl.train.online import OnlineOptions, OnlineTrainer
from qlora_rl.train.setup import settings
from qlora_rl.train.setup.processes import sharding_of


class Reference(torch.nn.Module):
    """The policy as it was at the start: the same model, under a frozen adapter or under none.

    Args:
        model: the PeftModel in training.
        adapter: the frozen one; `None` for the bare base.
    """

    def __init__(self, model: Any, adapter: str | None):
        super().__init__()
        self._held = (model,)  # no submodule: TRL puts this one into eval mode
        self._adapter = adapter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model says, as it was at the start."""
        with use_adapter(self._held[0], self._adapter):
            return self._held[0](*args, **kwargs)


class SampledPairs:
    """Comes between `MeasuredSteps` and TRL's OnlineDPOTrainer."""

    _refers = False  # the reference is made here
    _reference: Any = None
    _is_built = False  # TRL's __init__ is over
    _of_reference: torch.Tensor | None = None
    _sampled: list[list[float | None]] | None = None
    _mask_BT: torch.Tensor  # of the completions that were sampled last; TRL reads it after the rewards, for its loss
    _failures: list[RewardFunctionError] | None = None

    def _engine_options(self, args: Any) -> dict[str, Any]:
        limit = AutoConfig.from_pretrained(self.base.path, trust_remote_code=args.trust_remote_code)
        positions = engine_positions(limit)
        longest = min(args.max_length, positions) if positions else args.max_length
        return settings.engine_options(args) | {"max_model_length": longest}

    def _model_for_trl(self, model: Any, peft_config: Any, args: Any) -> dict[str, Any]:
        self._metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        if peft_config is not None:
            set_seed(args.seed)  # before the adapter is initialized, as TRL
            model = start_adapter(model, peft_config)
            reference = None
        elif is_bare(model):
            return {"model": model, "peft_config": None}
        else:
            if REFERENCE in model.peft_config:
                raise ConfigConflictError(
                    "reading the PeftModel: it holds an adapter 'ref' already (another trainer's frozen reference?). "
                    "Remove it: model.delete_adapter('ref')."
                )
            copy_adapter(model, active_adapter(model))
            reference = REFERENCE
        return {"model": model, "peft_config": None, "ref_model": Reference(model, reference)}

    def _refers_to_wrapped(self) -> bool:
        """The reference is the policy's own model, and what gathers its layers stands around it."""
        args = getattr(self, "args", None)  # TRL's `__init__` asks before it has them
        is_around = args is not None and sharding_of(args) in ("zero2", "zero3")
        return is_around and isinstance(self._reference, Reference)

    @property
    def ref_model(self) -> Any:
        """The reference; none while TRL's `__init__` would have DeepSpeed prepare it: the model in it is the
        policy's."""
        return None if self._refers_to_wrapped() and not self._is_built else self._reference

    @ref_model.setter
    def ref_model(self, reference: Any) -> None:
        self._reference = reference

    def _after_trl(self, args: Any) -> None:
        self._is_built = True
        self.max_length = math.inf  # the prompts fit; TRL's `_forward` would cut columns of the padded batch
        self._truncated = TruncatedSampling.of(settings.sampling_spec(args))
        waits = [
            name
            for reward, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
            if is_async_callable(reward)
        ]
        if waits:
            raise ConfigConflictError(
                f"reading the arguments: the reward {waits[0]!r} is asynchronous, which TRL's OnlineDPOTrainer does "
                "not wait for. Make it a plain function."
            )
        self._failures = [] if ranks().size > 1 else None
        self._guard_rewards()

    @property
    def beta(self) -> float:
        """Of this epoch; TRL 1.16 looks a list up by the fraction of the epoch that is done, and fails."""
        return (
            self._beta[min(int(self.state.epoch or 0), len(self._beta) - 1)]
            if isinstance(self._beta, list)
            else self._beta
        )

    # --- the rollout ------------------------------------------------------------------------------------------------

    def _generate(self, model: Any, prompts: list[Any], images: Any = None) -> tuple[Any, ...]:
        if images is not None:
            raise NotYetSupportedError(
                "generating: the prompts hold images, which this version does not hand to the engine. Use text prompts."
            )
        self._before_rollout("train" if self.model.training else "eval")
        if self.state.global_step != self._last_loaded_step:
            self.sync()
        texts = [maybe_apply_chat_template({"prompt": prompt}, self.processing_class)["prompt"] for prompt in prompts]
        # The template has written a conversation's; text gets those of the tokenizer, as everywhere.
        of_template = {"add_special_tokens": False} if is_conversational({"prompt": prompts[0]}) else {}
        ids = self.processing_class(text=texts, **of_template)["input_ids"]
        with ranks().together("generating"):
            check_lengths(ids, self.args.max_length)
        # On their way the two of a prompt are neighbours: so the place of each, which its seed depends on, is its place
        # in one process too.
        prompt_ids, completion_ids, _, _ = self.bridge.generate([row for row in ids for _ in range(settings.PAIR)])
        self._after_generation()
        prompt_ids, completion_ids, sampled, added = (
            [row for first in range(settings.PAIR) for row in rows[first :: settings.PAIR]]
            for rows in (prompt_ids, completion_ids, self.bridge.last.logprobs, self._missing_eos(completion_ids))
        )
        self._sampled = [values + [0.0] * len(end) for values, end in zip(sampled, added, strict=True)]
        prompts_BT, prompt_mask_BT = self._padded(prompt_ids, "left")
        whole = [ids + end for ids, end in zip(completion_ids, added, strict=True)]
        completions_BT, mask_BT = self._padded(whole, "right")
        lengths_B = torch.tensor([len(ids) for ids in completion_ids], device=mask_BT.device)
        mask_BT *= torch.arange(mask_BT.shape[1], device=mask_BT.device) < lengths_B[:, None]
        self._mask_BT = mask_BT
        return prompts_BT, prompt_mask_BT, completions_BT, mask_BT, None

    def _missing_eos(self, completion_ids: list[list[int]]) -> list[list[int]]:
        """An EOS for each completion that has ended without one, at a stop text or token: TRL takes what has none for
        cut off. As with TRL's own vLLM it is masked: nothing was sampled there.

        What an engine says nothing of has ended before the limit. At the limit itself none is added, as by TRL: the
        column that it would make is padded, in other rows perhaps with an EOS.
        """
        most = self.bridge.sampling.max_tokens
        ended = self.bridge.last.has_ended or [True] * len(completion_ids)
        return [
            [self.eos_token_ids[0]] if has_ended and len(ids) < most and not {*ids[-1:]} & {*self.eos_token_ids} else []
            for has_ended, ids in zip(ended, completion_ids, strict=True)
        ]

    def _generate_vllm(self, prompts: list[Any], images: Any = None) -> tuple[Any, ...]:
        return self._generate(None, prompts, images)[:4]

    def _padded(self, rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
        device, pad = self.accelerator.device, self._tokenizer.pad_token_id
        tensors = [torch.tensor(row) for row in rows]
        ids = pad_sequence(tensors, batch_first=True, padding_value=pad, padding_side=side)
        mask = pad_sequence([torch.ones_like(t) for t in tensors], batch_first=True, padding_side=side)
        return ids.to(device), mask.to(device)

    # --- the step ---------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; the loss is that of a batch whose parts are accumulated: TRL divides for its log alone, and by what a
        last batch may have less of."""
        accelerator, parts = self.accelerator, self.current_gradient_accumulation_steps
        backward = accelerator.backward
        # DeepSpeed would divide a second time; transformers tells it the same.
        scaling = {"scale_wrt_gas": False} if accelerator.distributed_type == DistributedType.DEEPSPEED else {}
        accelerator.backward = lambda loss, **options: backward(loss / parts, **options, **scaling)
        try:
            return super().training_step(*args, **kwargs) * (self.args.gradient_accumulation_steps / parts)
        finally:
            del accelerator.backward  # the method is there again

    # --- the measurement --------------------------------------------------------------------------------------------

    def _forward(
        self, model: Any, prompt_ids: Any, prompt_mask: Any, completion_ids: Any, completion_mask: Any, *rest: Any
    ) -> Any:
        """TRL's. The first one after a rollout is the policy's: its logits also give the logprobs at the rollout's
        temperature."""
        sampled, self._sampled = self._sampled, None
        batch = (prompt_ids, prompt_mask, completion_ids, completion_mask, *rest)
        arguments = (model, *batch)
        if sampled is None:
            known, self._of_reference = self._of_reference, None
            return self._logprobs(*arguments) if known is None else known
        if self._refers_to_wrapped():
            # Before the policy's: ZeRO-3 counts what the backward pass has to let go of, and a forward pass in between
            # counts again.
            with torch.no_grad():
                self._of_reference = self._logprobs(self.ref_model, *batch)
        self._note_rollout(*batch_of_all_ranks(completion_mask))
        if not self._compares:
            return self._logprobs(*arguments)
        seen: list[torch.Tensor] = []
        hook = model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits.detach()))
        try:
            logprobs_BT = self._logprobs(*arguments)
        finally:
            hook.remove()
        logits_BTV = seen[0][:, -completion_ids.shape[1] - 1 : -1]
        ours_BT = torch.stack(
            [
                self._sampled_logprobs(logits_TV.float() / self.temperature, ids_T)
                for logits_TV, ids_T in zip(logits_BTV, completion_ids, strict=True)
            ]
        )
        rollout = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask.clone(),  # ties are taken out of it later, for the loss
            "sampling_per_token_logps": logprobs_like(completion_ids, sampled),
        }
        self._look_at("train", rollout, ours_BT)
        return logprobs_BT

    def _logprobs(self, *arguments: Any) -> torch.Tensor:
        """TRL's, 0 where nothing was sampled: TRL's loss leaves these places out, its KL, entropy and reward do not."""
        completion_mask_BT = arguments[4]
        return super()._forward(*arguments).masked_fill(completion_mask_BT == 0, 0.0)

    def _sampled_logprobs(self, logits_TV: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        """As the engine reports them; TRL's loss takes those of the whole vocabulary."""
        logprobs_T = logits_TV.log_softmax(-1).gather(1, ids_T[:, None])[:, 0]
        return logprobs_T if self._truncated is None else logprobs_T - self._truncated.log_kept(logits_TV, ids_T)

    def _note_rollout(self, of_all_BT: torch.Tensor) -> None:
        """Into TRL's log and the record of the step; of the mask of the completions of all ranks."""
        self._note("train", self._measured_rollout())
        self._record.add(completion_length=float(of_all_BT.sum(1).float().mean()))

    # What TRL has gathered since its last log.

    def _states(self) -> dict[str, Any]:
        return super()._states() | {"stats": self.stats}

    def _restore_states(self, saved: dict[str, Any]) -> None:
        super()._restore_states(saved)
        self.stats |= saved["stats"]

    def _guard_rewards(self) -> None:
        super()._guard_rewards()
        self._given: list[list[float | None]] = []  # what each function has said of the newest completions
        self.reward_funcs = [
            reward if isinstance(reward, torch.nn.Module) else self._keeping(reward) for reward in self.reward_funcs
        ]

    def _keeping(self, reward: Any) -> Any:
        @functools.wraps(reward)
        def call(**kwargs: Any) -> list[float | None]:
            self._given.append(reward(**kwargs))
            return self._given[-1]

        return call

    def _calculate_rewards_from_functions(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's; what a reward function has raised on one rank is raised on all, and what teaches nothing is left
        out."""
        self._given.clear()
        rewards_B = super()._calculate_rewards_from_functions(*args, **kwargs)
        agree_on(self._failures)
        if len(self._given) == len(self.reward_funcs):  # a model scores all; TRL makes None 0
            are_scored = [any(value is not None for value in values) for values in zip(*self._given, strict=True)]
            scores_B = rewards_B.where(torch.tensor(are_scored, device=rewards_B.device), math.nan)
        else:
            scores_B = rewards_B
        (of_all_1B,) = batch_of_all_ranks(scores_B[None])
        self._record.add(reward=float(of_all_1B.nanmean()), reward_std=float(nanstd(of_all_1B.flatten())))
        if ranks().is_first:
            self._look_at_rewards([(value,) for value in of_all_1B.flatten().tolist()])
        self._leave_out_ties(scores_B, kwargs["completion_ids_list"])
        return rewards_B

    def _leave_out_ties(self, scores_B: torch.Tensor, completion_ids: list[list[int]]) -> None:
        """Of pairs with equal scores, and of pairs with one that has none (NaN), the loss sees no token: it does not
        depend on the policy, and the mean is over all pairs as before."""
        if self.args.missing_eos_penalty is not None:  # which TRL takes off next
            is_cut = [not {*ids} & {*self.eos_token_ids} for ids in completion_ids]
            scores_B = scores_B - self.args.missing_eos_penalty * torch.tensor(is_cut, device=scores_B.device)
        first_P, second_P = scores_B.chunk(settings.PAIR)
        self._mask_BT[((first_P - second_P).nan_to_num() == 0).repeat(settings.PAIR)] = 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's `log`, with ours."""
        for name, values in self._metrics["train"].items():
            logs[name] = sum(values) / len(values)
        self._metrics["train"].clear()
        super().log(logs, start_time)


class QLoRAOnlineDPOTrainer(SampledPairs, OnlineTrainer, MeasuredSteps, OnlineDPOTrainer):
    """Online DPO on a 4-bit base: TRL's (experimental) OnlineDPOTrainer, sampling its pairs from an engine of ours.

    ::

        trainer = QLoRAOnlineDPOTrainer(
            model=prepare_base("Qwen/Qwen3-8B"), reward_funcs=reward, train_dataset=dataset,
            args=OnlineDPOConfig(output_dir="run"), peft_config=LoraConfig(r=16, target_modules="all-linear"),
        )
        trainer.train()

    Args:
        model: as `QLoRAGRPOTrainer` takes it.
        quantization_config: for a name or a checkpoint; TRL's trainer has no such argument.
        rollout: and all further keyword arguments as `QLoRAGRPOTrainer` has them. There is no `gpu_memory`: TRL holds
            whole logits here, which the memory estimate does not count.

    TRL's `ref_model` is not taken: the reference is the base, or the adapter of the PeftModel as it came.
    """

    _tag_names = ["trl", "online-dpo", "qlora-rl"]
    _name = "Online DPO"
    _method = METHODS["online_dpo"]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: OnlineDPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        *,
        quantization_config: Any = None,
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
        self.set_up(
            model,
            args if args is not None else settings.default_args(OnlineDPOConfig, "qlora-online-dpo"),
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
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
