"""`QLoRASFTTrainer`, `QLoRADPOTrainer`, `QLoRAKTOTrainer`: TRL's trainers that learn from data alone. No engine; the
base is checked against its directory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback, TrainingArguments
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from qlora_rl.adapter.inspected import bare_model
from qlora_rl.adapter.verdict import judge_adapter
from qlora_rl.base.attention.choice import apply_attention
from qlora_rl.base.checkpoint import models_are_whole
from qlora_rl.base.fingerprint import compare, fingerprint_base, recorded_fingerprint
from qlora_rl.base.model_classes import directory_takes_images, may_take_images
from qlora_rl.base.writer import embedding_rows
from qlora_rl.distributed import join
from qlora_rl.errors import BaseMismatchError, ConfigConflictError, collected
from qlora_rl.methods import METHODS
from qlora_rl.stages import begin
from qlora_rl.train.metrics.measure import StepClock
from qlora_rl.train.run import CONFIG, StepRecord
from qlora_rl.train.run.progress import told
from qlora_rl.train.run.recorded_training import (
    RecordedTraining,
    check_adapter_dtype,
    load_tokenizer,
    open_run,
    products_of,
    trained_values,
)
from qlora_rl.train.scoring.logprobs import use_small_tiles
from qlora_rl.train.setup import dataset_checks, settings
from qlora_rl.train.setup.kto import kto_contradictions, kto_row_problems
from qlora_rl.train.setup.model_source import check_cloned
from qlora_rl.train.setup.processes import check_common_base, check_processes
from qlora_rl.train.setup.residual_init import settle

logger = logging.getLogger(__name__)


class OfflineTrainer(RecordedTraining):
    """Comes before TRL's class; a trainer's `__init__` calls `set_up`, and nothing else."""

    # TRL makes a frozen copy of a PeftModel's adapter, to refer to.
    _refers = False
    # Its rows may bring their own token ids.
    _takes_ids = False

    def set_up(
        self,
        model: Any,
        args: Any,
        *,
        peft_config: Any,
        quantization_config: Any,
        processing_class: Any,
        train_dataset: Any,
        eval_dataset: Any,
        optimizers: tuple[Any, Any],
        adapter_dtype: str,
        existing_run: str,
        remove_padding: bool,
        **of_trl: Any,
    ) -> None:
        """Everything, TRL's `__init__` included.

        Args:
            model: as the trainer takes it.
            args: TRL's config; it is copied.
            of_trl: further arguments of TRL's class, handed through.
        """
        check_adapter_dtype(adapter_dtype)
        args = settings.own_copy(args)
        check_processes(args, "starting the training")
        peft_config, start = settle(model, peft_config)
        images = dataset_checks.check_datasets(train_dataset, eval_dataset, why="")
        if images and not may_take_images(model):
            dataset_checks.reject_images(images, f"{model} takes none")
        with told(args), join(args.ddp_timeout).one_outcome("preparing the training"), models_are_whole():
            self.run = open_run(args.output_dir, existing_run)
            source = self._resolve(
                model,
                args,
                quantization_config=quantization_config,
                peft_config=peft_config,
                processing_class=processing_class,
                takes_sync=False,
            )
            if images and not directory_takes_images(self.base.path):
                dataset_checks.reject_images(images, f"{self.base} takes none")
            begin("loading the base")
            loaded = source.load()
            check_base(loaded, self.base.path)
            check_common_base(self.base.identity)
            is_rendered = of_trl.get("formatting_func") is None and not images
            rendered = self._rendered(args, train_dataset, eval_dataset) if is_rendered else ()
            processing_class = self._checked_processor(processing_class, args, rendered)
            if self._takes_ids:
                dataset_checks.check_ids(embedding_rows(bare_model(loaded)), train_dataset, eval_dataset)
            if (reference := of_trl.get("ref_model")) is not None:
                apply_attention(reference)
            before = trained_values(loaded)
            init, args.model_init_kwargs = args.model_init_kwargs, None  # the model is loaded already
            super().__init__(
                model=loaded,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                peft_config=peft_config,
                optimizers=optimizers,
                **of_trl,
            )
            args.model_init_kwargs = init
            computes = self._fit(args, start, adapter_dtype, before, remove_padding, optimizers[0])
            self._record = StepRecord(self.run)
            # Before the user's, which may raise: the step is done all the same.
            self.callback_handler.callbacks.insert(0, _Recorder(self._record))
            if self.run is not None:
                self.run.begin()
                self.run.write_json(CONFIG, self._describe(adapter_dtype, {"adapter": self._travels(), **computes}))
        # Last, so that nothing is claimed for a trainer that could not be made.
        products = products_of(self.model, self.base, args)
        self._finalizer = weakref.finalize(self, products.close)  # also when nobody calls close()

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *further: Any) -> Any:
        """As TRL's, which drops rows of which `max_length` leaves nothing to learn: they are counted.

        Args:
            further: the dataset's name; of SFT after whether it is packed, and a function.

        Raises:
            ConfigConflictError: none is left.
        """
        rows = super()._prepare_dataset(dataset, processing_class, args, *further)
        is_packed = len(further) > 1 and further[0]
        if hasattr(dataset, "__len__") and not is_packed and len(dataset):
            given = self._given(dataset)
            lost = dataset_checks.lost_rows(given, len(rows), further[-1], args.max_length)
            if lost and self.run is not None:
                logger.warning("%s", lost)
        return rows

    def _given(self, dataset: Any) -> int:
        """The rows that TRL makes of a dataset."""
        return len(dataset)

    def _travels(self) -> dict[str, Any]:
        """How the adapter could be synced, for config.json."""
        verdict = judge_adapter(self.model)
        return {"travels_as": verdict.kind, "reasons": list(verdict.reasons)}

    def _after_trl(self, args: Any) -> None:
        use_small_tiles(bare_model(self.model), 1.0, self._outputs())

    def _checked_processor(self, given: Any, args: Any, rendered: Sequence[Any]) -> Any:
        """The tokenizer or processor, by default that of the base; it takes the messages of what TRL renders."""
        processor = load_tokenizer(self.base, args) if given is None else given
        dataset_checks.check_processor(processor, self.base.path, is_given=given is not None)
        check_cloned(args, processor, self.base.path)
        if getattr(args, "chat_template_path", None) is None:
            dataset_checks.check_messages(processor, *rendered, is_online=False)
        return processor

    def _rendered(self, args: Any, *datasets: Any) -> Sequence[Any]:
        """The datasets whose messages TRL renders."""
        return datasets

    def _outputs(self) -> set[str]:
        """What TRL reads of each token besides its logprob."""
        return {"entropy", "is_top1"}

    def close(self) -> None:
        """Give torch its own products back, where others were made; harmless when repeated."""
        self._finalizer()

    def _write_rest(self) -> None:
        self._record.flush()


def check_base(model: Any, directory: Any) -> None:
    """What was loaded is, weight by weight, what was written when the base was prepared.

    Raises:
        BaseMismatchError: names the first weight.
    """
    diff = compare(recorded_fingerprint(directory), fingerprint_base(model))
    if diff.entries:
        more = f", and {len(diff.modules) - 1} more weights do" if len(diff.modules) > 1 else ""
        raise BaseMismatchError(
            f"checking the base: {diff.entries[0]}{more} in the model that is to be trained, against {directory}. "
            "Something has written into the model since it was loaded; load it again, or prepare the base again.",
            reasons=[str(entry) for entry in diff.entries],
            module=diff.modules[0],
        )


class _Recorder(StepClock):
    """Also writes one line per optimizer step: its time, and what TRL logs in it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            self._record.add(**{name: value for name, value in logs.items() if name != "epoch"})
            self._record.flush()
        elif any(name.startswith("eval_") for name in logs):
            self._record.evaluated(state.log_history[-1])


class QLoRASFTTrainer(OfflineTrainer, SFTTrainer):
    """Supervised fine-tuning of an adapter on a 4-bit base: TRL's SFTTrainer, its arguments and config, and these.

    ::

        with QLoRASFTTrainer(
            model=prepare_base("Qwen/Qwen3-8B"), train_dataset=dataset, args=SFTConfig(output_dir="run"),
            peft_config=LoraConfig(r=16, target_modules="all-linear"),
        ) as trainer:
            trainer.train()

    Its adapter, trained on the base that the engine will hold, can be trained on by the other trainers, or served.
    config.json says under `adapter` how it will be sent.

    Args:
        model: prepared base, hub name, checkpoint directory, model object, or PeftModel, as `QLoRAGRPOTrainer` takes
            it.
        adapter_dtype: of the trained LoRA weights: "float32" (default), or "bfloat16" as TRL.
        existing_run: what to do when `args.output_dir` holds a run: `"reject"`, `"overwrite"`, `"continue"` (append),
            or `"resume"`: `train()` goes on from its last whole checkpoint, or begins where there is none yet.
        remove_padding: the sequences of a micro-batch are computed one behind the other, without padding and without
            attention masks, where the model allows it (docs/memory.md#without-padding). False: padded, as TRL does.

    Raises:
        BaseMismatchError, ConfigConflictError, AdapterRejectedError, UnsupportedQuantError, NotYetSupportedError,
        RunDirectoryError:
            before anything is trained.
    """

    _tag_names = ["trl", "sft", "qlora-rl"]
    _name = "SFT"
    _method = METHODS["sft"]
    _takes_ids = True

    def _rendered(self, args: Any, *datasets: Any) -> Sequence[Any]:
        return dataset_checks.rendered(args.dataset_kwargs, *datasets)

    def __init__(
        self,
        model: Any,
        args: SFTConfig | TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Any = None,
        *,
        adapter_dtype: str = "float32",
        existing_run: str = "reject",
        remove_padding: bool = True,
    ):
        self.set_up(
            model,
            _sft_config(args),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            adapter_dtype=adapter_dtype,
            existing_run=existing_run,
            remove_padding=remove_padding,
            data_collator=data_collator,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            formatting_func=formatting_func,
        )


def _sft_config(args: SFTConfig | TrainingArguments | None) -> SFTConfig:
    """Transformers' own arguments as TRL's, which has more; only SFT takes them."""
    if args is None:
        return settings.default_args(SFTConfig, "qlora-sft")
    if isinstance(args, SFTConfig):
        return args
    return SFTConfig(**args.to_dict() | {"hub_token": args.hub_token})  # to_dict hides the token


class PreferenceTrainer(OfflineTrainer):
    """What DPO and KTO share: a reference, and the arguments of TRL's class."""

    _refers = True
    _config: type[DPOConfig] | type[KTOConfig]

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: DPOConfig | KTOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        adapter_dtype: str = "float32",
        existing_run: str = "reject",
        remove_padding: bool = True,
    ):
        self.set_up(
            model,
            args if args is not None else settings.default_args(self._config, f"qlora-{self._method.name}"),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            adapter_dtype=adapter_dtype,
            existing_run=existing_run,
            remove_padding=remove_padding,
            ref_model=ref_model,
            data_collator=data_collator,
            compute_metrics=compute_metrics,
        )

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, which it calls while it builds the trainer, before anything else is made ready."""
        self._settle_reference(self.args)
        return super()._precompute_ref_logps(*args, **kwargs)


class QLoRADPOTrainer(PreferenceTrainer, DPOTrainer):
    """Direct preference optimisation of an adapter on a 4-bit base: TRL's DPOTrainer; otherwise as `QLoRASFTTrainer`.

    The reference is the base without the adapter, or a frozen copy of the adapter that came with a PeftModel; so the
    base is held once.
    """

    _tag_names = ["trl", "dpo", "qlora-rl"]
    _name = "DPO"
    _method = METHODS["dpo"]
    _config = DPOConfig

    def _outputs(self) -> set[str]:
        return super()._outputs() | {"mean_logits"} | ({"log_sum_sq_probs"} if self.use_weighting else set())


class QLoRAKTOTrainer(PreferenceTrainer, KTOTrainer):
    """Kahneman-Tversky optimisation: TRL's KTOTrainer, which learns from single completions and whether each is good
    (column `label`), or from pairs, which it takes apart. Reference and base as in `QLoRADPOTrainer`.

    TRL takes the rows in their order, and of pairs all better ones of a thousand before the worse ones: mix them first.
    A last row that is alone in its micro-batch is left out.
    """

    _tag_names = ["trl", "kto", "qlora-rl"]
    _name = "KTO"
    _method = METHODS["kto"]
    _config = KTOConfig

    def set_up(self, model: Any, args: KTOConfig, **given: Any) -> None:
        """As `OfflineTrainer.set_up`; what TRL would find when the model is loaded is said before.

        Raises:
            ConfigConflictError: besides, a micro-batch of one row, which has no KL, columns that are not those of KTO,
                or labels that are none.
        """
        found = kto_contradictions(args)
        for part in dataset_checks.parts((given["train_dataset"], given["eval_dataset"])):
            found += kto_row_problems(part)
        if found:
            raise collected("reading the arguments", found, ConfigConflictError)
        super().set_up(model, args, **given)

    def _given(self, dataset: Any) -> int:
        return len(dataset) * (2 if {"chosen", "rejected"} <= set(dataset.column_names) else 1)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: KTOConfig, dataset_name: str) -> Any:
        """As TRL's, without a last row that has a micro-batch to itself: its KL would be between it and itself.

        Of a stream, whose length is not known, it stays.
        """
        rows = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        size = args.per_device_train_batch_size  # which TRL also takes for rows to evaluate on
        if not self.calculate_KL or not hasattr(rows, "__len__") or len(rows) % size != 1:
            return rows
        if len(rows) == 1:
            raise ConfigConflictError(
                f"reading the dataset: the {dataset_name} dataset has one row, and KTO measures a KL between rows. "
                "Add rows, or use loss_type='apo_zero_unpaired', which has no KL."
            )
        logger.warning(
            "KTO: the last row of the %s dataset (%s rows) is left out: alone in its micro-batch of %s, it has no KL",
            *(dataset_name, len(rows), size),
        )
        return rows.select(range(len(rows) - 1))

    def _outputs(self) -> set[str]:
        return {"entropy", "mean_logits"}
