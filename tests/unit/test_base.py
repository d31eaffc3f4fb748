"""Preparing and loading bases, with real bitsandbytes."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import time

import pytest
import torch
from support import make_model, quantised_in_flight
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
)

from qlora_rl import BaseIncompleteError, ConfigConflictError, QuantSpec, UnsupportedQuantError, load_base, prepare_base
from qlora_rl.base.checkpoint import MANIFEST, open_base
from qlora_rl.base.quant import dequantize_exactly, exact_absmax, spec_of
from qlora_rl.demo.tiny_model import make_tokenizer

PROMPT = torch.tensor([[40, 41, 42, 43, 44]])


def stored(base):
    from safetensors.torch import load_file

    return load_file(base.path / "model.safetensors")


def test_preparing_twice_gives_the_same_directory_and_does_the_work_once(model_dir, base):
    before = (base.path / "model.safetensors").stat().st_mtime_ns
    again = prepare_base(model_dir)
    assert again == base
    assert (base.path / "model.safetensors").stat().st_mtime_ns == before


def test_the_name_depends_on_the_contents_and_not_on_the_place(model_dir, base, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(model_dir, moved)
    assert prepare_base(moved).identity == base.identity
    make_model(moved, seed=7)
    assert prepare_base(moved).identity != base.identity


def test_a_base_is_prepared_whole_where_transformers_was_told_of_zero_3(model_dir, base, tmp_path):
    pytest.importorskip("deepspeed")
    from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    told = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})  # as TRL's config does under a launcher
    try:
        made = prepare_base(model_dir, out=tmp_path / "base")
        assert is_deepspeed_zero3_enabled()
        assert told.is_zero3()
    finally:
        unset_hf_deepspeed_config()
    assert made.identity == base.identity
    assert stored(made).keys() == stored(base).keys()


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("blocksize", [64, 128])
def test_what_is_stored_is_what_bitsandbytes_makes_of_the_weights(model_dir, quant, double_quant, blocksize):
    import bitsandbytes.functional as functional

    base = prepare_base(model_dir, quant, double_quant=double_quant, blocksize=blocksize)
    original = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    model = load_base(base)
    for name, module in model.named_modules():
        if not name.endswith("_proj"):
            continue
        state = module.weight.quant_state
        assert (state.quant_type, state.nested, state.blocksize) == (quant, double_quant, blocksize)
        weight = original.get_submodule(name).weight.data
        codes, made = functional.quantize_4bit(
            weight, blocksize=blocksize, compress_statistics=double_quant, quant_type=quant
        )
        assert torch.equal(module.weight.data, codes)
        if double_quant:  # its scales depend on threads and processor: ours are at least as near, but for a rounding
            _, flat = functional.quantize_4bit(weight, blocksize=blocksize, quant_type=quant)
            ours, theirs = (exact_absmax(each) - flat.absmax for each in (state, made))
            assert (ours.abs() - theirs.abs()).max() < 1e-7 * flat.absmax.max()
        else:
            ours, theirs = functional.dequantize_4bit(codes, state), functional.dequantize_4bit(codes, made)
            assert torch.equal(ours, theirs)
    for name in ("model.embed_tokens", "model.norm", "model.layers.0.self_attn.q_proj"):
        ours, theirs = model.get_submodule(name), original.get_submodule(name)
        what = "bias" if name.endswith("q_proj") else "weight"
        assert torch.equal(getattr(ours, what), getattr(theirs, what))


def test_a_base_without_quantisation_keeps_every_bit(model_dir):
    model, original = load_base(prepare_base(model_dir, "none")), AutoModelForCausalLM.from_pretrained(model_dir)
    assert torch.equal(model(PROMPT).logits, original(PROMPT).logits)
    assert not getattr(model, "is_loaded_in_4bit", False)


def listed(base):
    return json.loads((base.path / "config.json").read_text())["quantization_config"]["llm_int8_skip_modules"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("entry", ["model.layers.1.mlp", "layers.1.mlp", "1.mlp"])
def test_a_skipped_module_is_listed_as_transformers_and_as_vllm_name_its_linears(tmp_path, tied, entry):
    source = make_model(tmp_path / "model", tied=tied)
    mlp = [f"model.layers.1.mlp.{own}_proj" for own in ("down", "gate", "gate_up", "up")]
    skipping = prepare_base(source, skip_modules=[entry])
    assert listed(skipping) == ["lm_head", *mlp]
    plain = [name for name, module in load_base(skipping).named_modules() if type(module) is torch.nn.Linear]
    assert sorted(plain) == ["lm_head", *(name for name in mlp if "gate_up" not in name)]
    if entry.startswith("model."):  # as transformers reads it
        published = quantised_in_flight(source, tmp_path / "published", "lm_head", entry)
        assert listed(prepare_base(published)) == listed(skipping)


def test_a_linear_that_vllm_fuses_with_4_bit_ones_is_not_skipped_alone(tmp_path):
    source = make_model(tmp_path / "model", tied=False)
    with pytest.raises(UnsupportedQuantError, match=re.escape("['k_proj', 'q_proj', 'v_proj']")):
        prepare_base(source, skip_modules=["q_proj"])
    with pytest.raises(UnsupportedQuantError, match=re.escape("['1.mlp.gate_proj', '1.mlp.up_proj', 'o_proj']")):
        prepare_base(source, skip_modules=["o_proj", "1.mlp.up_proj"])
    published = quantised_in_flight(source, tmp_path / "published", "lm_head", "model.layers.1.mlp.up_proj")
    with pytest.raises(UnsupportedQuantError, match=r"layers\.1\.mlp\.up_proj"):
        prepare_base(published)


@pytest.mark.parametrize("tied", [True, False])
def test_a_4_bit_output_head_is_rejected(tmp_path, tied):
    """transformers makes it 4-bit wherever a list of skipped modules does not name it."""
    source = make_model(tmp_path / "model", tied=tied)
    with pytest.raises(UnsupportedQuantError) as caught:
        prepare_base(quantised_in_flight(source, tmp_path / "published", "model.layers.1.mlp"))
    assert caught.value.module == "lm_head"


@pytest.mark.parametrize("architecture", ["glm4", "phi3"])
def test_a_linear_that_a_checkpoint_holds_as_one_is_skipped_by_its_name(tmp_path, architecture):
    source = make_model(tmp_path / "model", architecture=architecture, tied=False)
    skipping = prepare_base(source, skip_modules=["layers.1.mlp"])
    assert listed(skipping) == ["lm_head", "model.layers.1.mlp.down_proj", "model.layers.1.mlp.gate_up_proj"]


@pytest.mark.parametrize("form", ["directory", "object"])
@pytest.mark.parametrize(
    ("invalid", "kept"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "pad_token_id": -1}, {"do_sample": False}),
        ({"temperature": 0.6, "length_penalty": 2.0, "max_length": 64}, {"max_length": 64}),
        ({"do_sample": True, "temperature": 0.6, "early_stopping": True}, {"do_sample": True, "temperature": 0.6}),
    ],
)
def test_a_generation_config_that_transformers_would_not_write_keeps_what_is_valid(
    model_dir, tmp_path, caplog, form, invalid, kept
):
    source = shutil.copytree(model_dir, tmp_path / "old")
    ends = {"eos_token_id": [1, 5], "bos_token_id": 2}
    (source / "generation_config.json").write_text(json.dumps(ends | invalid))
    if form == "directory":
        base = prepare_base(source, out=tmp_path / "base")
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        base = prepare_base(model, tokenizer=AutoTokenizer.from_pretrained(source), out=tmp_path / "base")
    written = json.loads((base.path / "generation_config.json").read_text())
    written.pop("transformers_version")
    assert written == ends | kept
    assert all(name in caplog.text for name in invalid if name not in kept)
    load_base(base).generation_config.save_pretrained(tmp_path / "again")


def test_tokens_without_an_embedding_are_rejected_by_name(model_dir, tmp_path):
    tokenizer = _tokenizer(prepare_base(model_dir))
    tokenizer.add_tokens(["<picture>"], special_tokens=True)
    rows = len(tokenizer) - 1
    tokenizer.image_token = "<picture>"  # as Gemma 3's text models have one
    prepare_base(model_dir, tokenizer=tokenizer, out=tmp_path / "base")
    tokenizer.add_tokens(["<think>"], special_tokens=True)
    with pytest.raises(ConfigConflictError, match=rf"{rows} rows.*'<think>' \({rows + 1}\)"):
        prepare_base(model_dir, tokenizer=tokenizer)


def test_a_mark_that_came_with_the_model_and_has_no_use_may_be_without_an_embedding(model_dir, tmp_path, caplog):
    source = shutil.copytree(model_dir, tmp_path / "source")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<|unused|>"})  # as Llama 2 repositories have it
    tokenizer.save_pretrained(source)
    with pytest.raises(ConfigConflictError, match=r"'<\|unused\|>'.*tokenizer\.pad_token"):
        prepare_base(source)
    tokenizer.pad_token = tokenizer.eos_token
    base = prepare_base(source, tokenizer=tokenizer)
    assert _tokenizer(base).pad_token == tokenizer.eos_token
    assert "'<|unused|>' (128). A text that contains them" in caplog.text
    tokenizer.chat_template = "<|unused|>{{ messages[0]['content'] }}"
    with pytest.raises(ConfigConflictError, match=r"'<\|unused\|>'"):
        prepare_base(source, tokenizer=tokenizer)


@pytest.mark.parametrize("named", ["Qwen2Model", "Qwen2ForSequenceClassification"])
def test_a_base_names_the_class_that_was_loaded_and_not_that_of_its_checkpoint(model_dir, tmp_path, named):
    """As AutoModel and classifiers leave them; vLLM would make a pooling model."""
    source = shutil.copytree(model_dir, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": [named]}))
    base = prepare_base(source, out=tmp_path / "base")
    assert json.loads((base.path / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]


def test_a_model_made_from_a_config_names_its_class_for_vllm(model_dir, tmp_path):
    config = AutoConfig.from_pretrained(model_dir)
    config.architectures = None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base = prepare_base(model, tokenizer=make_tokenizer(), out=tmp_path / "base")
    assert json.loads((base.path / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]


def test_untied_heads_are_stored_and_tied_ones_once(model_dir, base, tmp_path):
    assert "lm_head.weight" not in stored(base)
    untied = prepare_base(make_model(tmp_path / "untied", tied=False))
    assert stored(untied)["lm_head.weight"].dtype == torch.bfloat16


def test_a_loaded_base_is_frozen_and_fit_for_adapters_with_gradient_checkpointing(base):
    from peft import LoraConfig, get_peft_model

    model = load_base(base)
    assert not any(p.requires_grad for p in model.parameters())
    model.gradient_checkpointing_enable()
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    adapted(PROMPT, labels=PROMPT).loss.backward()
    with_gradient = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert with_gradient
    assert all(".lora_" in name for name in with_gradient)


def test_eval_mode_changes_neither_bytes_nor_numbers(base):
    model = load_base(base)
    codes = {name: p.detach().clone() for name, p in model.named_parameters()}
    training = model(PROMPT).logits
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, training)
    assert all(torch.equal(p, codes[name]) for name, p in model.named_parameters())


def test_a_model_quantised_in_flight_is_stored_with_its_own_bytes(model_dir):
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)  # FP4, single: the defaults
    model = AutoModelForCausalLM.from_pretrained(model_dir, quantization_config=config, dtype=torch.bfloat16)
    base = prepare_base(model, tokenizer=AutoTokenizer.from_pretrained(model_dir))
    assert (base.spec.quant_type, base.spec.double_quant) == ("fp4", False)
    loaded = load_base(base)
    for name, p in model.named_parameters():
        assert torch.equal(p, loaded.get_parameter(name)), name
    assert torch.equal(loaded(PROMPT).logits, model.train()(PROMPT).logits)


def test_the_base_of_a_peft_model_is_stored_without_its_adapter(adapted, base):
    bare = adapted.get_base_model()
    bare.qlora_base = None  # as if it had been loaded by other means
    written = prepare_base(adapted, tokenizer=_tokenizer(base))
    assert stored(written).keys() == stored(base).keys()
    assert all(torch.equal(t, stored(base)[name]) for name, t in stored(written).items())


def _tokenizer(base):
    return AutoTokenizer.from_pretrained(base.path)


@pytest.mark.parametrize(
    ("ask", "error", "named"),
    [
        (lambda model, base, there: prepare_base(model, "int8"), UnsupportedQuantError, "quant='nf4'"),
        (lambda model, base, there: QuantSpec(blocksize=48), UnsupportedQuantError, "blocksize=48"),
        (lambda model, base, there: QuantSpec(compute_dtype="int8"), UnsupportedQuantError, "compute_dtype='int8'"),
        (lambda model, base, there: prepare_base(base.path, "fp4"), ConfigConflictError, "fp4-dq-64"),
        (lambda model, base, there: prepare_base(there / "nothing"), BaseIncompleteError, "nothing"),
        (lambda model, base, there: prepare_base("nobody/nothing"), BaseIncompleteError, "nobody/nothing"),
    ],
)
def test_what_no_base_can_be_made_of_is_rejected_by_name(model_dir, base, tmp_path, ask, error, named):
    with pytest.raises(error, match=named):
        ask(model_dir, base, tmp_path)


def test_modules_of_a_model_object_are_skipped_too(model_dir, base):
    loaded = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    skipping = prepare_base(loaded, tokenizer=_tokenizer(base), skip_modules=["o_proj"])
    assert stored(skipping)["model.layers.0.self_attn.o_proj.weight"].dtype == torch.bfloat16


def test_an_8_bit_model_object_is_rejected(model_dir):
    config = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(model_dir, quantization_config=config, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedQuantError, match="q_proj"):
        prepare_base(model)


def test_a_half_written_directory_is_never_used(base, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(base.path, half)
    (half / MANIFEST).unlink()
    with pytest.raises(BaseIncompleteError):
        load_base(half)


def test_damage_is_named_file_by_file(base, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(base.path, broken)
    weights = broken / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    (broken / "config.json").write_text("{}")
    (broken / "tokenizer.json").unlink()
    with pytest.raises(BaseIncompleteError) as caught:
        open_base(broken)
    assert len(caught.value.reasons) == 3
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert name in str(caught.value)
    weights.write_bytes(data[:-100])
    with pytest.raises(BaseIncompleteError):
        open_base(broken, verify=False)


def test_what_holds_anything_else_is_not_overwritten(model_dir, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    made = prepare_base(model_dir, out=tmp_path / "base")
    for out, asked in (
        (tmp_path, {}),
        (tmp_path / "mine.txt", {}),
        (made.path, {"blocksize": 128}),
        (made.path, {"compute_dtype": "float32"}),
    ):
        with pytest.raises(ConfigConflictError):
            prepare_base(model_dir, out=out, **asked)
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert open_base(made.path) == made


def test_a_named_directory_is_made_and_reused(model_dir, tmp_path):
    made = prepare_base(model_dir, out=tmp_path / "base")
    assert prepare_base(model_dir, out=tmp_path / "base") == made
    assert prepare_base(made.path) == made


def _prepare_in_process(model_dir, root, barrier, results):
    os.environ["QLORA_RL_CACHE"] = root
    barrier.wait()
    results.put(str(prepare_base(model_dir, "fp4").path))


def test_two_processes_that_race_get_one_whole_base(model_dir, tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [
        context.Process(target=_prepare_in_process, args=(str(model_dir), str(tmp_path), barrier, results))
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    paths = {results.get(timeout=120) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(paths) == 1
    open_base(paths.pop())
    assert [p.name for p in (tmp_path / "bases").iterdir() if ".tmp-" in p.name] == []


def _prepare_slowly(model_dir, root, started):
    os.environ["QLORA_RL_CACHE"] = root
    from qlora_rl.base import checkpoint

    real = checkpoint.write_checkpoint

    def write_then_hang(*args, **kwargs):
        real(*args, **kwargs)
        started.set()
        time.sleep(600)

    checkpoint.write_checkpoint = write_then_hang
    prepare_base(model_dir)


def test_a_process_killed_in_the_middle_leaves_nothing_that_is_used(model_dir, tmp_path, monkeypatch):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    worker = context.Process(target=_prepare_slowly, args=(str(model_dir), str(tmp_path), started))
    worker.start()
    assert started.wait(120)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert any(".tmp-" in p.name for p in (tmp_path / "bases").iterdir())  # it really was in the middle
    monkeypatch.setenv("QLORA_RL_CACHE", str(tmp_path))
    open_base(prepare_base(model_dir))
    assert not any(".tmp-" in p.name for p in (tmp_path / "bases").iterdir())


def test_another_tokenizer_is_another_base(model_dir, base):
    tokenizer = _tokenizer(base)
    tokenizer.chat_template = "{{ messages }}"
    other = prepare_base(model_dir, tokenizer=tokenizer)
    assert other.path != base.path
    assert _tokenizer(other).chat_template == "{{ messages }}"


def test_blocks_that_would_span_rows_are_rejected(model_dir):
    """bitsandbytes 0.50's CPU kernel dequantises them with the wrong scales where it runs with AVX-512; this documents
    it."""
    import bitsandbytes.functional as functional

    from qlora_rl.base.decode import uses_avx512

    with pytest.raises(UnsupportedQuantError, match=r"in_features=128 is no multiple of blocksize=256 at .*q_proj"):
        prepare_base(model_dir, blocksize=256)
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    codes, state = functional.quantize_4bit(weight, blocksize=256, quant_type="nf4")
    theirs = functional.dequantize_4bit(codes, state)
    exact = dequantize_exactly(codes, exact_absmax(state), state.code, state.blocksize, state.shape)
    # When this fails with AVX-512, the kernel was fixed: the check can go.
    is_wrong = bool((theirs - weight).abs().mean() > 1.3 * (exact - weight).abs().mean())
    assert is_wrong == uses_avx512()
    assert is_wrong or torch.allclose(theirs, exact, rtol=0, atol=1e-6)


def test_a_model_without_linears_is_not_called_4_bit(tmp_path):
    """GPT-2's layers are transformers' Conv1D."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=64, n_layer=1, n_head=4, n_positions=32))
    with pytest.raises(UnsupportedQuantError, match="GPT2LMHeadModel"):
        prepare_base(model, tokenizer=make_tokenizer(), out=tmp_path / "base")
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize(
    ("config", "error", "named"),
    [
        (lambda text: text[: len(text) // 2], BaseIncompleteError, "config.json"),
        (lambda text: text.replace("qwen2", "qwen99"), BaseIncompleteError, "qwen99"),
        (lambda _: json.dumps({"model_type": "t5"}), BaseIncompleteError, "AutoModelForCausalLM"),
        (lambda _: json.dumps({"auto_map": {"AutoConfig": "code.Config"}}), BaseIncompleteError, "trust_remote_code"),
        (
            lambda text: json.dumps(json.loads(text) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
            UnsupportedQuantError,
            "gptq",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_said_in_one_sentence(model_dir, tmp_path, config, error, named):
    broken = shutil.copytree(model_dir, tmp_path / "broken")
    file = broken / "config.json"
    file.write_text(config(file.read_text()))
    with pytest.raises(error, match=named) as caught:
        prepare_base(broken)
    assert len(str(caught.value).splitlines()) == 1


def test_a_directory_without_weights_is_said(model_dir, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(model_dir, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(BaseIncompleteError):
        prepare_base(bare)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_whose_blocks_span_rows_is_rejected_on_every_device(device):
    """As on a GPU, whose kernel is right: the base would be served, and compared, on CPUs whose kernel is not."""
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(96, 8, quant_type="nf4", bias=False)
    layer.weight = bnb.nn.Params4bit(torch.randn(8, 96), requires_grad=False, quant_type="nf4", blocksize=64)
    model = torch.nn.Sequential(layer.to("cpu"))
    state = model[0].weight.quant_state
    codes = model[0].weight.data.to(device)
    model[0].weight = bnb.nn.Params4bit(codes, requires_grad=False, quant_state=state, bnb_quantized=True)
    assert (model[0].weight.device.type, model[0].weight.quant_state) == (device, state)
    with pytest.raises(UnsupportedQuantError, match=r"in_features=96 is no multiple of blocksize=64 at 0"):
        spec_of(model)
