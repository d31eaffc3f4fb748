"""Everything that a TRL user passes as `model`, and what becomes of the adapter: docs/trl-arguments.md, row by row."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support import randomise
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback

from qlora_rl import BaseMismatchError, FakeEngine, load_base, prepare_base
from qlora_rl.train.run import RunDirectory
from qlora_rl.train.setup.model_source import base_of

NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)


def as_form(form, base, model_dir):
    """What may be passed as model=: a "checkpoint", a "quantised object", or a "PeftModel" that is trained on."""
    if form == "quantised object":
        return {"model": AutoModelForCausalLM.from_pretrained(model_dir, quantization_config=NF4)}
    if form == "PeftModel":
        model = get_peft_model(load_base(base), LoraConfig(r=4, target_modules=["q_proj"]))
        randomise(model)
        return {"model": model, "peft_config": None}
    return {"model": str(model_dir)}


def adapter(model, name="default"):
    """Copies of the LoRA weights called `name`."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if ".lora_" in n and f".{name}." in n}


def bytes_of_the_base(model):
    """Copies of all that is no LoRA: codes, scales, norms, embeddings; under the names of the bare base."""
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {n.replace("base_layer.", ""): t.detach().clone() for n, t in bare.state_dict().items() if ".lora_" not in n}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def assert_only_the_adapter_learns(trainer, steps=1):
    base_before, adapter_before = bytes_of_the_base(trainer.model), adapter(trainer.model)
    trainable = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert trainable == set(adapter_before)
    trainer.train()
    assert trainer.state.global_step == steps
    assert_same(base_before, bytes_of_the_base(trainer.model))
    after = adapter(trainer.model)
    assert any(not torch.equal(after[n], adapter_before[n]) for n in after if "lora_B" in n)


# --- model ----------------------------------------------------------------------------------------------------------


def test_a_prepared_base_keeps_its_bytes_while_the_adapter_learns(make_trainer, base, config):
    trainer = make_trainer(args=config(max_steps=2))
    assert trainer.base == base
    assert_same(bytes_of_the_base(trainer.model), bytes_of_the_base(load_base(base)))
    assert_only_the_adapter_learns(trainer, steps=2)


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_a_checkpoint_directory_is_quantised_once_and_trained(make_trainer, model_dir, base, kind):
    trainer = make_trainer(model=kind(model_dir))
    assert trainer.base == base  # the same contents, so the same directory in the cache
    assert_only_the_adapter_learns(trainer)


def test_a_hub_name_is_fetched_quantised_and_trained(make_trainer, model_dir, base, tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--someone--tiny" / "snapshots" / "0123abc"
    shutil.copytree(model_dir, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    trainer = make_trainer(model="someone/tiny")
    assert trainer.base.identity == base.identity
    assert_only_the_adapter_learns(trainer)


def test_a_model_object_quantised_in_flight_gives_the_engine_its_own_bytes(make_trainer, model_dir, engine_in_flight):
    model = AutoModelForCausalLM.from_pretrained(model_dir, quantization_config=NF4, dtype=torch.bfloat16)
    before = bytes_of_the_base(model)
    trainer = make_trainer(model=model, rollout=engine_in_flight)
    assert trainer.model.get_base_model() is model
    assert_same(before, bytes_of_the_base(load_base(trainer.base)))
    assert_only_the_adapter_learns(trainer)


def test_a_model_quantised_in_flight_is_another_base_than_the_prepared_one(make_trainer, model_dir):
    """Codes are equal, scales are bitsandbytes' own: they would depend on the machine."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, quantization_config=NF4, dtype=torch.bfloat16)
    with pytest.raises(BaseMismatchError, match=r"scales differ.*load_base\(the engine's directory\)"):
        make_trainer(model=model)


def engine_on(model_dir, *quant, **options):
    """An engine on another base than the one that the tests share."""
    return FakeEngine(load_base(prepare_base(model_dir, *quant, **options)), max_model_length=64)


def test_a_16_bit_model_object_stays_16_bit(make_trainer, model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    trainer = make_trainer(model=model, rollout=engine_on(model_dir, "none"))
    assert not trainer.base.spec.is_4bit
    assert_same(bytes_of_the_base(model), bytes_of_the_base(load_base(trainer.base)))
    assert_only_the_adapter_learns(trainer)


def test_training_goes_on_with_the_adapter_of_a_peft_model(make_trainer, adapted):
    before = adapter(adapted)
    trainer = make_trainer(model=adapted, peft_config=None)
    assert trainer.model is adapted
    assert_same(before, adapter(trainer.model))
    assert_only_the_adapter_learns(trainer)
    # The adapter was not zero: the engine agrees only if it got it. Both compute in bf16 here, by the same kernels.
    assert trainer._record.last["mismatch_kl"] < 1e-4


def test_a_peft_model_that_was_loaded_for_training_goes_on_under_any_name(make_trainer, base, adapted, tmp_path):
    adapted.save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(load_base(base), tmp_path / "adapter", adapter_name="mine", is_trainable=True)
    before = adapter(model, "mine")
    trainer = make_trainer(model=model, peft_config=None)
    trainer.train()
    after = adapter(trainer.model, "mine")
    assert any(not torch.equal(after[n], before[n]) for n in after)


def test_quantization_config_decides_how_a_name_is_quantised(make_trainer, model_dir):
    fp4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.bfloat16)
    trainer = make_trainer(
        model=str(model_dir), quantization_config=fp4, rollout=engine_on(model_dir, "fp4", double_quant=False)
    )
    spec = trainer.base.spec
    assert (spec.quant_type, spec.double_quant, spec.compute_dtype) == ("fp4", False, "bfloat16")
    layer = trainer.model.get_base_model().model.layers[0].self_attn.k_proj
    assert layer.weight.quant_state.quant_type == "fp4"


def test_quantization_config_may_stand_in_model_init_kwargs(make_trainer, model_dir, config):
    options = {"quantization_config": NF4, "attn_implementation": "eager", "device_map": "auto"}
    trainer = make_trainer(model=str(model_dir), args=config(model_init_kwargs=options))
    assert trainer.base.spec.label == "nf4-dq-64"
    assert trainer.model.config._attn_implementation == "eager"


# --- the adapter's dtype, optimizers, callbacks ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_adapters_dtype_is_what_was_asked_for(make_trainer, dtype):
    trainer = make_trainer(adapter_dtype=dtype)
    trainer.train()
    assert {p.dtype for p in adapter(trainer.model).values()} == {getattr(torch, dtype)}


def test_float32_adapters_keep_updates_that_bfloat16_rounds_away(make_trainer, base, config, tmp_path):
    def moved(dtype):
        model = get_peft_model(load_base(base), LoraConfig(r=4, target_modules=["q_proj"]))
        randomise(model)
        trainer = make_trainer(
            model=model,
            peft_config=None,
            adapter_dtype=dtype,
            args=config(learning_rate=1e-6, output_dir=str(tmp_path / dtype)),
        )
        before = adapter(trainer.model)
        trainer.train()
        return sum(int((p != before[n]).sum()) for n, p in adapter(trainer.model).items() if "lora_B" in n)

    # B is about 0.05, where neighbouring bfloat16 numbers are 2e-4 apart and a step is 1e-6.
    assert moved("float32") > 10 * max(1, moved("bfloat16"))


def test_an_optimizer_that_was_passed_in_trains_the_exact_adapter(make_trainer, adapted):
    before = adapter(adapted)
    assert any(not torch.equal(p, p.bfloat16().float()) for p in before.values())
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = make_trainer(model=adapted, peft_config=None, optimizers=(optimizer, scheduler))
    assert_same(before, adapter(trainer.model))
    assert_only_the_adapter_learns(trainer)
    assert trainer.optimizer.optimizer is optimizer
    assert {p.dtype for p in adapter(trainer.model).values()} == {torch.float32}


def test_callbacks_are_called(make_trainer):
    class Count(TrainerCallback):
        steps = 0

        def on_step_end(self, *_, **__):
            self.steps += 1

    count = Count()
    make_trainer(callbacks=[count]).train()
    assert count.steps == 1


# --- processing_class -----------------------------------------------------------------------------------------------


def test_a_processing_class_is_used_and_without_one_the_bases_own_is_loaded(make_trainer, base, config, tmp_path):
    mine = AutoTokenizer.from_pretrained(base.path)
    assert make_trainer(processing_class=mine).processing_class is mine
    loaded = make_trainer(args=config(output_dir=str(tmp_path / "other"))).processing_class
    assert loaded.chat_template == mine.chat_template
    assert loaded.padding_side == "left"


def test_a_model_object_without_a_name_takes_its_tokenizer_from_processing_class(make_trainer, model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    model.config._name_or_path = ""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    trainer = make_trainer(model=model, processing_class=tokenizer, rollout=engine_on(model_dir, "none"))
    assert (trainer.base.path / "tokenizer_config.json").is_file()
    assert_only_the_adapter_learns(trainer)


# --- the reference --------------------------------------------------------------------------------------------------


def test_a_model_object_with_an_old_generation_config_can_be_saved_after_its_training(model_dir, tmp_path):
    """transformers reads such a file, and does not write it: all weights were trained, and lost at the end."""
    source = shutil.copytree(model_dir, tmp_path / "source")
    (source / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "eos_token_id": 1}')
    model = AutoModelForCausalLM.from_pretrained(source)
    base = base_of(model, None, AutoTokenizer.from_pretrained(source))
    saved = RunDirectory(tmp_path / "run").save_model(model, base.path, chat_template="<1>")
    assert AutoTokenizer.from_pretrained(saved).chat_template == "<1>"
    assert json.loads((saved / "generation_config.json").read_text())["eos_token_id"] == 1


def test_with_beta_the_reference_of_a_new_adapter_is_the_base(make_trainer, config):
    trainer = make_trainer(args=config(beta=0.1, max_steps=2))
    assert trainer.ref_model is None
    trainer.train()
    kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert kl[0] == 0.0  # B is zero at first: adapter on and adapter off are the same numbers
    assert kl[1] > 0.0


@pytest.mark.parametrize("kind", ["rloo", "online_dpo", "grpo"])
def test_the_reference_of_a_peft_model_drops_nothing(kind, make_online, make_trainer, config, base):
    """Only the policy, which trains, has a mask."""
    torch.manual_seed(0)
    model = get_peft_model(load_base(base), LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3)
    fields = {"beta": 0.1, "disable_dropout": False, "max_steps": 1}
    given = {"model": model, "peft_config": None, "on_mismatch": "warn"}
    trainer = make_trainer(args=config(**fields), **given) if kind == "grpo" else make_online(kind, fields, **given)
    trainer.train()
    model.train()
    ids = torch.arange(40, 60)[None]

    def logits(name):
        model.set_adapter(name)
        with torch.no_grad():
            return model(ids).logits

    assert torch.equal(logits("ref"), logits("ref"))
    assert not torch.equal(logits("default"), logits("default"))


@pytest.mark.parametrize(("kind", "said"), [("grpo", "kl"), ("rloo", "kl"), ("online_dpo", "objective/kl")])
def test_the_reference_has_the_factors_of_the_policy(kind, said, make_trainer, make_online, config, rescaled):
    given = {"model": rescaled, "peft_config": None}
    fields = {"beta": 0.1, "max_steps": 1}
    trainer = make_trainer(args=config(**fields), **given) if kind == "grpo" else make_online(kind, fields, **given)
    trainer.train()
    (kl,) = [entry[said] for entry in trainer.state.log_history if said in entry]
    assert kl == pytest.approx(0.0, abs=1e-6)


def test_another_adapter_that_is_called_ref_keeps_its_factors(make_trainer, config, rescaled):
    rescaled.add_adapter("ref", rescaled.peft_config["default"])
    make_trainer(model=rescaled, peft_config=None, args=config(beta=0.0))
    layer = rescaled.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.scaling == {"default": 6.0, "ref": 2.0}


def test_with_beta_the_reference_of_a_peft_model_is_a_frozen_copy_of_its_adapter(make_trainer, config, adapted):
    before = adapter(adapted)
    trainer = make_trainer(model=adapted, peft_config=None, args=config(beta=0.1, max_steps=2))
    assert_same(before, adapter(trainer.model))
    trainer.train()
    kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert kl[0] == 0.0  # against the base it would not be: the adapter was not zero
    assert kl[1] > 0.0
    reference = {n.replace(".ref.", ".default."): p for n, p in adapter(trainer.model, "ref").items()}
    assert_same(before, reference)
    assert not any(p.requires_grad for n, p in trainer.model.named_parameters() if ".ref." in n)
    # The policy travels, not the reference.
    assert sorted(p.name for p in (trainer.run.path / "adapter").iterdir() if p.suffix == ".safetensors") == [
        "adapter_model.safetensors"
    ]
