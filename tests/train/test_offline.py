"""QLoRASFTTrainer, QLoRADPOTrainer and QLoRAKTOTrainer on real bitsandbytes: they learn, they leave the base alone,
they leave a whole run."""

import json
import math

import pytest
import torch
from datasets import Dataset
from peft import AdaLoraConfig, LNTuningConfig, LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from support import make_model, tiny_training
from test_models import adapter, as_form, assert_same, bytes_of_the_base
from transformers import AutoTokenizer, TrainerCallback, TrainingArguments
from trl import DPOConfig, KTOConfig, KTOTrainer, SFTConfig

from qlora_rl import (
    BaseMismatchError,
    ConfigConflictError,
    QLoRADPOTrainer,
    QLoRAKTOTrainer,
    QLoRASFTTrainer,
    RunDirectoryError,
    load_base,
    open_trained,
    prepare_base,
)
from qlora_rl.adapter.load import open_adapter
from qlora_rl.base import writer
from qlora_rl.config.schema import Data
from qlora_rl.data.load import load_data
from qlora_rl.export.job import export_run
from qlora_rl.train.setup.kto import mixed_completions

SENTENCES = Dataset.from_list([{"text": f"{a}+{a}={2 * a}"} for a in range(10, 26)])
PAIRS = Dataset.from_list(
    [{"prompt": f"{a}+{a}=", "chosen": str(2 * a), "rejected": str(2 * a + 7)} for a in range(10, 26)]
)
JUDGED = Dataset.from_list(
    [
        {"prompt": row["prompt"], "completion": row["rejected" if number % 2 else "chosen"], "label": number % 2 == 0}
        for number, row in enumerate(PAIRS)
    ]
)
KINDS = {
    "sft": (QLoRASFTTrainer, SFTConfig, SENTENCES),
    "dpo": (QLoRADPOTrainer, DPOConfig, PAIRS),
    "kto": (QLoRAKTOTrainer, KTOConfig, JUDGED),
}


@pytest.fixture
def make(base, tmp_path):
    """A trainer of a kind on the tiny base; arguments replace the usual ones, `fields` those of its config."""

    def build(kind, fields=None, **arguments):
        trainer, config, rows = KINDS[kind]
        tiny = tiny_training(output_dir=str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=8)
        usual = {
            "args": config(**tiny | (fields or {})),
            "model": base,
            "train_dataset": rows,
            "peft_config": LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        }
        return trainer(**usual | arguments)

    return build


@pytest.mark.parametrize("kind", KINDS)
def test_what_would_change_the_vocabulary_is_rejected(kind, make, base, tmp_path):
    """TRL resizes the model to the tokens of both tokenizers: its adapter fits no base."""
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    same = tokenizer.save_pretrained(tmp_path / "same") and str(tmp_path / "same")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|stop|>"]})
    tokenizer.save_pretrained(tmp_path / "more")
    with pytest.raises(ConfigConflictError, match=r"'<\|start\|>' \(128\), '<\|stop\|>' \(129\)"):
        make(kind, processing_class=tokenizer)
    if kind == "sft":
        with pytest.raises(ConfigConflictError, match="128 to 130 rows"):
            make(kind, {"chat_template_path": str(tmp_path / "more")})
        (tmp_path / "chat.jinja").write_text(tokenizer.chat_template)
        for number, path in enumerate((same, str(tmp_path / "chat.jinja"))):
            make(kind, {"chat_template_path": path, "output_dir": str(tmp_path / f"run-{number}")}).close()


@pytest.mark.parametrize("kind", KINDS)
def test_messages_that_the_chat_template_does_not_take_are_rejected(kind, make, base):
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('no system') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    user, system, answer = ({"role": role, "content": "1"} for role in ("user", "system", "assistant"))
    names = ("chosen", "rejected") if kind == "dpo" else ("completion",)
    said = {name: [answer] for name in names} | ({"label": True} if kind == "kto" else {})
    rows = [{"prompt": asked, **said} for asked in ([user], [user], [system, user])]
    with pytest.raises(ConfigConflictError, match=r"prompt of row 2.*no system"):
        make(kind, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    if kind == "kto":  # it takes no whole conversations but pairs of them
        names = ("chosen", "rejected")
    whole = [{name: [*row["prompt"], answer] for name in (("messages",) if kind == "sft" else names)} for row in rows]
    with pytest.raises(ConfigConflictError, match="row 2"):
        make(kind, train_dataset=Dataset.from_list(whole), processing_class=tokenizer)


@pytest.mark.parametrize(
    ("kind", "way"), [*((kind, "processing_class") for kind in KINDS), ("sft", "chat_template_path")]
)
def test_a_run_records_the_chat_template_that_is_not_the_bases(kind, way, make, base, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    other = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    (tmp_path / "chat.jinja").write_text(other)
    fields = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    if way == "processing_class":
        make(kind, fields | {"output_dir": str(tmp_path / "plain")}, processing_class=tokenizer).train()
        plain = open_trained(tmp_path / "plain")
        assert "chat_template" not in plain.config
        assert plain.processor().chat_template == tokenizer.chat_template
        tokenizer.chat_template = other
        trainer = make(kind, fields, processing_class=tokenizer)
    else:
        trainer = make(kind, fields | {way: str(tmp_path / "chat.jinja")})
    trainer.train()
    for path in (trainer.run.path, trainer.run.path / "checkpoint-1"):
        assert open_trained(path).processor().chat_template == other


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_max_length_leaves_nothing_of_are_counted_and_all_of_them_are_rejected(kind, make, caplog):
    """TRL drops them."""
    long = [f"{'1' * (40 if number % 4 else 1)}{row['prompt']}" for number, row in enumerate(PAIRS)]
    rows = PAIRS.remove_columns("prompt").add_column("prompt", long)  # KTO takes them apart
    if kind == "sft":
        rows = rows.rename_column("chosen", "completion").remove_columns("rejected")
    given = 2 * len(rows) if kind == "kto" else len(rows)
    trainer = make(kind, {"max_length": 16}, train_dataset=rows, eval_dataset={"own": rows.select([0, 1])})
    assert len(trainer.train_dataset) == given // 4
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert [each.partition(" rows")[0] for each in told] == [
        f"reading the train dataset: {given * 3 // 4} of its {given}",
        f"reading the own dataset: {given // 16} of its {given // 8}",
    ]
    assert all("max_length=16" in each and "raise max_length" in each for each in told)
    caplog.clear()
    trainer.close()
    make(kind, {"max_length": 64}, train_dataset=rows, existing_run="overwrite").close()
    assert "left out" not in caplog.text
    with pytest.raises(ConfigConflictError, match=r"the train dataset: all of its .*max_length=16.*Raise"):
        make(kind, {"max_length": 16}, train_dataset=rows.select([1, 2, 3, 5]), existing_run="overwrite")


def test_rows_that_are_packed_or_of_a_stream_are_not_counted(make, caplog):
    rows = SENTENCES.map(lambda row: {"text": row["text"] * 2})
    make("sft", {"max_length": 64, "packing": True}, train_dataset=rows)
    make("sft", {"max_length": 4}, train_dataset=rows.to_iterable_dataset(), existing_run="overwrite")
    assert "left out" not in caplog.text


@pytest.mark.parametrize("kind", ["input_ids", "skip_prepare_dataset", "texts"])
def test_messages_that_trl_does_not_render_are_not_looked_at(kind, make, base):
    tokenizer, asked = AutoTokenizer.from_pretrained(base.path), [{"role": "user", "content": "1"}]
    tokenizer.chat_template = None
    fields = {"max_steps": 1}
    if kind == "input_ids":
        rows = Dataset.from_list([{"input_ids": [40, 41, 42], "messages": asked}] * 8)
        pairs = [{"prompt": asked, "chosen": asked, "rejected": asked, "input_ids": [40]}] * 8
        with pytest.raises(ConfigConflictError, match="the prompt of row 0"):  # TRL's DPO knows no such column
            make("dpo", train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)
    elif kind == "skip_prepare_dataset":
        rows = Dataset.from_list([{"messages": asked}] * 8)
        rows = rows.with_transform(
            lambda batch: batch | {name: [[40, 41, 42]] * len(batch["messages"]) for name in ("input_ids", "labels")}
        )
        fields |= {"dataset_kwargs": {kind: True}, "remove_unused_columns": False}
    else:
        rows = SENTENCES.map(lambda row: {"messages": ["1", "2"]})
    trainer = make("sft", fields, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    assert lines(trainer.run.path)[0]["loss"] > 0


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"input_ids": [40, 200]}, "input_ids of row 9 hold 200"),
        ({"input_ids": [-1, 40]}, "input_ids of row 9 hold -1"),
        ({"input_ids": [40, 41], "labels": [-100, 128]}, "labels of row 9 hold 128"),
    ],
)
def test_token_ids_of_rows_have_a_row_in_the_embedding(make, row, named):
    right = {"input_ids": [40, 41, 42]} | ({"labels": [-100, 41, 127]} if "labels" in row else {})
    rows = Dataset.from_list([right] * 9 + [row])
    with pytest.raises(ConfigConflictError, match=rf"{named}, and the embedding of the base has 128 rows"):
        make("sft", train_dataset=rows)
    with pytest.raises(ConfigConflictError, match="of row 0 hold"):
        make("sft", train_dataset=rows.select([0, 1]), eval_dataset={"one": rows.select([9, 0])})


def test_a_pad_token_without_an_embedding_in_a_base_of_before_is_the_bases_own(model_dir, make, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_special_tokens({"pad_token": "<|unused|>"})
    with monkeypatch.context() as before:
        before.setattr(writer, "check_vocabulary", lambda *_: None)  # as versions did that had no such check
        old = prepare_base(model_dir, tokenizer=tokenizer, out=tmp_path / "old")
    for arguments in ({}, {"processing_class": tokenizer}):
        with pytest.raises(ConfigConflictError, match=r"'<\|unused\|>' \(128\)"):
            make("sft", model=old, **arguments)
    tokenizer.pad_token = tokenizer.eos_token  # the way out of the message
    make("sft", {"max_steps": 1}, model=old, processing_class=tokenizer, remove_padding=False).train()


def lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_sft_learns_its_sentences(make):
    trainer = make("sft", {"max_steps": 40})
    before = bytes_of_the_base(trainer.model)
    trainer.train()
    assert_same(before, bytes_of_the_base(trainer.model))
    losses = [line["loss"] for line in lines(trainer.run.path)]
    assert len(losses) == 40
    # A random model's first loss is above that of a uniform guess (ln 63 = 4.1); chance among ten digits would be 2.3.
    assert losses[0] > 4.0
    assert sum(losses[-5:]) / 5 < 1.5, losses
    assert lines(trainer.run.path)[-1]["mean_token_accuracy"] > 0.5


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [("dpo", 0.6931, 0.35), ("kto", 0.5, 0.4)],  # ln 2, and 1 - sigmoid(0)
)
def test_what_is_good_becomes_likelier_than_what_is_not(kind, first, last, make):
    trainer = make(kind, {"max_steps": 30})
    before = bytes_of_the_base(trainer.model)
    trainer.train()
    assert_same(before, bytes_of_the_base(trainer.model))
    steps = lines(trainer.run.path)
    assert steps[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-6)  # the policy is still the reference
    assert steps[0]["loss"] == pytest.approx(first, abs=1e-3)
    assert steps[-1]["rewards/margins"] > 1.0
    assert steps[-1].get("rewards/accuracies", 1.0) > 0.9  # which KTO does not measure
    assert steps[-1]["loss"] < last


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("is_computed_before", [False, True])
def test_the_reference_has_the_factors_of_the_policy(kind, is_computed_before, make, rescaled):
    given = {"model": rescaled, "peft_config": None}
    trainer = make(kind, {"max_steps": 1, "precompute_ref_log_probs": is_computed_before}, **given)
    trainer.train()
    (step,) = lines(trainer.run.path)
    # What is computed before is of padded rows, in bf16 by other kernels; other factors make it 0.01 and more.
    assert step["loss"] == pytest.approx(math.log(2) if kind == "dpo" else 0.5, abs=1e-3)


@pytest.mark.parametrize("fields", [{}, {"loss_type": "apo_zero_unpaired"}, {"precompute_ref_log_probs": True}])
@pytest.mark.parametrize("rows", [JUDGED, PAIRS], ids=["labels", "pairs"])
def test_the_losses_of_kto_are_those_of_trls_trainer(fields, rows, model_dir, tmp_path):
    """In float32, where the two sides round alike up to the order of a sum; with padding left out and kept."""
    exact = prepare_base(model_dir, "none", compute_dtype="float32")
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")

    def losses(name, kind, model, **arguments):
        usual = {"max_steps": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "bf16": False, "seed": 3}
        args = KTOConfig(**tiny_training(output_dir=str(tmp_path / name), logging_steps=1, **usual | fields))
        trainer = kind(model=model, args=args, train_dataset=rows, peft_config=lora, **arguments)
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    tokenizer = AutoTokenizer.from_pretrained(exact.path)
    expected = losses("trl", KTOTrainer, load_base(exact), processing_class=tokenizer)
    assert len(set(expected)) == 4
    for name, arguments in {"ours": {}, "padded": {"remove_padding": False}}.items():
        assert losses(name, QLoRAKTOTrainer, exact, **arguments) == pytest.approx(expected, abs=1e-5)


def test_a_run_of_a_file_mixes_good_and_bad_completions():
    mixed = mixed_completions(PAIRS, 42)
    assert set(mixed.column_names) == {"prompt", "completion", "label"}
    known = {(row["prompt"], row[name], name == "chosen") for row in PAIRS for name in ("chosen", "rejected")}
    assert {(row["prompt"], row["completion"], row["label"]) for row in mixed} == known
    assert len(mixed) == len(known)
    assert 2 <= sum(mixed["label"][:8]) <= 6  # of a micro-batch; of TRL's order all are good
    assert mixed_completions(PAIRS, 42).to_list() == mixed.to_list() != mixed_completions(PAIRS, 1).to_list()


@pytest.mark.parametrize("cells", [("true", "False"), ("1", "0")])
def test_a_run_of_a_file_reads_the_labels_that_csv_writes(cells, tmp_path):
    rows = "".join(f"{n}+{n}=,{2 * n},{cells[n % 2]}\n" for n in range(10))
    (tmp_path / "rows.csv").write_text(f"prompt,completion,good\n{rows}")
    dataset, _ = load_data(Data(train=str(tmp_path / "rows.csv"), columns={"label": "good"}))
    mixed = mixed_completions(dataset, 42)
    assert {row["prompt"]: row["label"] for row in mixed} == {f"{n}+{n}=": n % 2 == 0 for n in range(10)}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([JUDGED[0] | {"label": each} for each in (1, 0, 1, 0, 1, 2)], "label of row 5 is 2"),
        ([JUDGED[0] | {"label": each} for each in ("1", "0", "yes")], "label of row 2 is 'yes'"),
        ([PAIRS[0] | {"completion": "3"}], "completion is a column besides chosen and rejected"),
        ([{"prompt": "1", "label": True}], "no column completion"),
    ],
)
def test_a_run_of_a_file_rejects_rows_that_are_none_of_kto_before_they_are_mixed(rows, said):
    with pytest.raises(ConfigConflictError, match=said):
        mixed_completions(Dataset.from_list(rows), 42)


def test_kto_measures_no_kl_of_a_row_against_itself(make, caplog):
    """TRL gives a row the completion of another one of its micro-batch; alone there, it would get its own."""

    def rows_of(number, loss_type="kto"):
        fields = {"per_device_train_batch_size": 2, "loss_type": loss_type}
        with make("kto", fields, train_dataset=JUDGED.select(range(number)), existing_run="overwrite") as trainer:
            return trainer.train_dataset

    kept = rows_of(3)
    assert kept["prompt"] == JUDGED["prompt"][:2]
    assert all(row["KL_completion_ids"] != row["completion_ids"] for row in kept)
    assert "last row" in caplog.text
    caplog.clear()
    assert [len(rows_of(4)), len(rows_of(3, "apo_zero_unpaired"))] == [4, 3]
    assert "last row" not in caplog.text
    with pytest.raises(ConfigConflictError, match="one row"):
        rows_of(1)


ASKED = {"prompt": "1", "completion": "2"}


@pytest.mark.parametrize(
    ("rows", "fields", "said"),
    [
        (JUDGED, {"per_device_train_batch_size": 1}, "per_device_train_batch_size=1"),
        (JUDGED, {"train_sampling_strategy": "random"}, "train_sampling_strategy='random'"),
        ([ASKED | {"label": "true"}], {}, "label of row 0 is 'true'"),
        ([ASKED | {"label": each} for each in (1, 0, 2)], {}, "label of row 2 is 2"),
        ([ASKED], {}, "no column label"),
        ([{"prompt": "1", "label": True}], {}, "no column completion"),
        ([{"completion": "2", "label": True}], {}, "no column prompt"),
        ([{"chosen": "1", "label": True}], {}, "no columns prompt, completion"),
        ([PAIRS[0] | {"label": False}], {}, "label is a column"),
        ([PAIRS[0] | {"completion": "3", "label": False}], {}, "completion, label are columns"),
    ],
)
def test_what_kto_cannot_learn_from_is_said_before_anything_is_loaded(rows, fields, said, make, monkeypatch):
    monkeypatch.setattr("qlora_rl.train.offline.open_run", lambda *_: pytest.fail("a run was begun"))
    for split in (
        {"train_dataset": Dataset.from_list(list(rows))},
        {"eval_dataset": {"some": Dataset.from_list(list(rows))}},
    ):
        with pytest.raises(ConfigConflictError, match=said):
            make("kto", fields, **split)


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_directory_is_whole_and_its_adapter_is_the_trained_one(kind, make, base):
    with make(kind) as trainer:
        trainer.train()
    run = trainer.run.path
    assert json.loads((run / "summary.json").read_text()) == {"status": "finished", "steps": 2}
    described = json.loads((run / "config.json").read_text())
    assert described["command"] == type(trainer).__name__
    assert described["base"]["identity"] == base.identity
    assert described["adapter"] == {"travels_as": "adapter", "reasons": []}
    assert described[kind]["learning_rate"] == 1e-2
    assert [line["step"] for line in lines(run)] == [1, 2]
    assert all(line["step_seconds"] > 0 and line["grad_norm"] > 0 for line in lines(run))
    loaded = PeftModel.from_pretrained(load_base(base), run / "adapter")
    assert_same(adapter(trainer.model), {n: p.float() for n, p in adapter(loaded).items()})
    with pytest.raises(RunDirectoryError, match="holds another run"):
        make(kind)
    make(kind, existing_run="overwrite")
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.parametrize(("kind", "dtype"), [("sft", "float32"), ("dpo", "bfloat16"), ("kto", "bfloat16")])
def test_the_adapters_dtype_is_kept(kind, dtype, make):
    trainer = make(kind, {"max_steps": 1}, adapter_dtype=dtype)
    trainer.train()
    assert {p.dtype for p in adapter(trainer.model).values()} == {getattr(torch, dtype)}


COPIES = {
    "norm": LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]),
    "embedding and head": LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
    "LN tuning": LNTuningConfig(target_modules=["norm"]),
    "norm, 16-bit linears": LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]),
    "what is both": LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_modules_are_loaded_in_the_dtype_in_which_they_were_trained(name, make, base, tmp_path):
    """PEFT rounds them to the base's. Tolerance: sums in float32."""
    if name == "embedding and head":
        base = prepare_base(make_model(tmp_path / "untied", tied=False))
    if name == "norm, 16-bit linears":
        base = prepare_base(make_model(tmp_path / "plain"), "none", compute_dtype="bfloat16")
    with make("sft", model=base, peft_config=COPIES[name]) as trainer:
        trainer.train()
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    loaded, on = open_trained(trainer.run.path).load(), open_adapter(load_base(base), trainer.run.path)
    for model in (loaded, on):
        held = dict(model.named_parameters())
        assert all(torch.equal(held[name], p) and held[name].dtype == p.dtype for name, p in trained.items())
    assert {name for name, p in on.named_parameters() if p.requires_grad} == set(trained)
    assert loaded(torch.tensor([[40, 41, 42]])).logits.isfinite().all()  # without autocast, too
    done = export_run(trainer.run.path, "merged", out=tmp_path / "merged", dtype="float32", prompts=4)
    assert done.distance.kl_mean < 1e-9


def test_the_reference_of_an_adapter_with_copies_of_modules_is_as_exact_as_the_policy(make, base):
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"])
    with make("sft", {"max_steps": 4}, peft_config=lora) as trainer:
        trainer.train()
    model = open_adapter(load_base(base), trainer.run.path)
    with make("dpo", {"max_steps": 1}, model=model, peft_config=None, existing_run="overwrite") as trainer:
        trainer.train()
    (step,) = lines(trainer.run.path)
    assert step["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert step["rewards/margins"] == 0


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("sft", "checkpoint"),
        ("dpo", "quantised object"),
        *((kind, "PeftModel") for kind in KINDS),
        *(
            pytest.param(kind, form, marks=pytest.mark.full)
            for kind, form in (
                ("dpo", "checkpoint"),
                ("kto", "checkpoint"),
                ("sft", "quantised object"),
                ("kto", "quantised object"),
            )
        ),
    ],
)
def test_every_form_of_model_is_taken(kind, form, make, base, model_dir):
    arguments = as_form(form, base, model_dir)
    before = adapter(arguments["model"]) if form == "PeftModel" else None
    trainer = make(kind, **arguments)
    if form == "PeftModel":
        assert_same(before, adapter(trainer.model))  # not rounded to bfloat16 and back
    assert trainer.base.spec.label == "nf4-dq-64"
    start = bytes_of_the_base(trainer.model)
    trainer.train()
    assert_same(start, bytes_of_the_base(trainer.model))
    if kind != "sft":  # the reference of a PeftModel is its adapter as it came
        assert lines(trainer.run.path)[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-6)


TOKENS = {
    "rows of LoRA": LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 4]),
    "rows alone": TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[3, 4]),
}


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("form", ["base", "model", "PeftModel"])
def test_trained_rows_of_an_embedding_that_is_the_head_too_are_rejected_before_anything_is_trained(
    name, form, make, base, tmp_path
):
    if form == "PeftModel":
        given = {"model": get_peft_model(load_base(base), TOKENS[name]), "peft_config": None}
    else:
        given = {"model": load_base(base) if form == "model" else base, "peft_config": TOKENS[name]}
    with pytest.raises(ConfigConflictError, match="ensure_weight_tying=True"):
        make("sft", **given)
    if form == "base":
        untied = prepare_base(make_model(tmp_path / "untied", tied=False))
        make("sft", {"max_steps": 1}, model=untied, peft_config=TOKENS[name]).train()


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_that_somebody_has_written_into_is_rejected(kind, make, base):
    model = load_base(base)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.data[7] += 1
    with pytest.raises(BaseMismatchError, match=r"model\.layers\.1\.mlp\.up_proj"):
        make(kind, model=model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_that_fails_leaves_a_readable_run(kind, make):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                raise ZeroDivisionError("planted")

    trainer = make(kind, {"max_steps": 3}, callbacks=[Break()])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    summary = json.loads((trainer.run.path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert (trainer.run.path / "adapter" / "adapter_model.safetensors").exists()
    assert [line["step"] for line in lines(trainer.run.path)] == [1, 2]  # also the one that the callback saw


def test_adalora_goes_on_as_if_it_had_never_been_stopped(make, tmp_path):
    """Its count of ranks, which PEFT's cast makes trainable, is in no file."""

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 2:
                raise KeyboardInterrupt

    def run(name, *callbacks):
        torch.manual_seed(0)
        config = AdaLoraConfig(init_r=4, target_r=4, total_step=10, target_modules=["q_proj"])
        fields = {"max_steps": 3, "save_steps": 1, "save_strategy": "steps", "output_dir": str(tmp_path / name)}
        with make("sft", fields, peft_config=config, existing_run="resume", callbacks=list(callbacks)) as trainer:
            trainer.train()
        return trainer.model

    straight = run("straight")
    assert not any(p.requires_grad for name, p in straight.named_parameters() if "ranknum" in name)
    with pytest.raises(KeyboardInterrupt):
        run("stopped", Stop())
    assert_same(adapter(straight), adapter(run("stopped")))
    assert_same(adapter(straight), adapter(open_trained(tmp_path / "stopped").load()))


def test_adalora_that_is_to_give_ranks_up_is_rejected(make, base):
    config = AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"])
    for given in ({"peft_config": config}, {"model": get_peft_model(load_base(base), config), "peft_config": None}):
        with pytest.raises(ConfigConflictError, match="target_r=4"):
            make("sft", **given)


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_adapter_and_with_an_unknown_dtype_there_is_a_way_out(kind, make):
    with pytest.raises(ConfigConflictError, match="peft_config=LoraConfig") as caught:
        make(kind, peft_config=None)
    assert "sync=" not in str(caught.value)  # which it does not take
    with pytest.raises(ConfigConflictError, match="adapter_dtype='float16'"):
        make(kind, adapter_dtype="float16")


def test_sft_takes_conversations_and_evaluates(make, tmp_path):
    chats = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"{a}+1="}], "completion": [{"role": "assistant",
            "content": str(a + 1)}]}
            for a in range(4)
        ]
    )  # fmt: skip
    trainer = make("sft", train_dataset=chats, eval_dataset=chats)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


def test_sft_takes_transformers_own_arguments_as_trl_does(make, tmp_path):
    args = TrainingArguments(str(tmp_path / "plain"), max_steps=1, use_cpu=True, report_to=[], learning_rate=0.5)
    trainer = make("sft", args=args)
    trainer.train()
    assert (trainer.args.learning_rate, trainer.state.global_step) == (0.5, 1)
    assert type(trainer.args).__name__ == "SFTConfig"
