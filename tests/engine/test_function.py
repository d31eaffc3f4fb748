"""Trainer and engine hold the same weights: that they compute the same function of them is checked on long sequences
too, on real vLLM."""

import copy
import logging

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import make_model
from test_training import make
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3MoeConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qlora_rl import Canary, FakeEngine, LocalEngine, PolicyMismatchError, load_base, prepare_base
from qlora_rl.demo.tiny_model import make_tokenizer
from qlora_rl.sync import function_check
from qlora_rl.sync.forward import NotComparedError, as_engine, in_float32, tail_logprobs
from qlora_rl.sync.function_check import (
    FACTOR,
    TAIL,
    Apart,
    FunctionCheck,
    lengths_for,
    lengths_of,
    make_text,
    reach_of,
)

WINDOW = 64


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A base whose attention has a window."""
    made = make_model(
        tmp_path_factory.mktemp("function") / "model", architecture="mistral", sliding_window=WINDOW, positions=512
    )
    return prepare_base(made)


@pytest.fixture(scope="module")
def engine(windowed):
    with LocalEngine(windowed, max_lora_rank=8, max_model_length=300, max_num_seqs=8) as engine:
        yield engine


@pytest.fixture
def model(windowed):
    return load_base(windowed)


def stretch_positions(model):
    model.model.rotary_emb.inv_freq.mul_(0.9)


def widen_window(model):
    model.config.sliding_window = WINDOW + 32


def change_activation(model):
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()


def scale_attention(model):
    model.model.layers[0].self_attn.scaling *= 1.3


def drop_position(model):
    """As a layer that has no rotation."""
    layer = model.model.layers[1].self_attn
    forward = layer.forward

    def without(hidden_states, position_embeddings, *args, **kwargs):
        cos, sin = position_embeddings
        return forward(hidden_states, (torch.ones_like(cos), torch.zeros_like(sin)), *args, **kwargs)

    layer.forward = without


def test_two_sides_that_compute_one_function_agree_at_all_lengths(model, engine):
    found = FunctionCheck(model, engine).compare()
    assert [apart.tokens for apart in found] == [TAIL + 1, WINDOW + TAIL, 299]
    assert not any(apart.odd for apart in found)
    assert all(0.5 < apart.engine / apart.trainer < 2 for apart in found), found  # alarm at 3


@pytest.mark.parametrize("fault", [stretch_positions, change_activation, scale_attention, drop_position])
def test_another_function_of_the_same_weights_is_found(model, engine, fault):
    fault(model)
    with pytest.raises(PolicyMismatchError, match=r"the engine's logprobs are .* in sequences of 65 tokens") as raised:
        FunctionCheck(model, engine).compare()
    assert raised.value.cause == "function"


def test_another_window_is_found_where_it_matters_and_its_field_is_named(model, engine):
    widen_window(model)
    with pytest.raises(PolicyMismatchError, match=r"of 160 tokens, not in those of 65 \(sliding_window=96\)"):
        FunctionCheck(model, engine).compare()


def test_beyond_what_an_engine_may_score_it_samples_and_a_window_there_is_found_too(model, engine, monkeypatch):
    monkeypatch.setattr(function_check, "PLAIN", 66)
    monkeypatch.setattr(function_check, "_LOGITS", 1)
    asked, generate = [], engine.generate
    monkeypatch.setattr(
        engine, "generate", lambda prompts, spec: asked.append(len(prompts[0])) or generate(prompts, spec)
    )
    found = FunctionCheck(model, engine).compare()
    assert [apart.tokens for apart in found] == [TAIL + 1, 66, WINDOW + TAIL]
    assert not any(apart.odd for apart in found)
    assert asked == [WINDOW]
    widen_window(model)
    with pytest.raises(PolicyMismatchError, match=r"of 160 tokens, not in those of 66 \(sliding_window=96\)"):
        FunctionCheck(model, engine).compare()


def test_a_long_text_that_does_not_fit_leaves_what_was_found_of_short_ones(model, engine, monkeypatch, caplog):
    monkeypatch.setattr(function_check, "PLAIN", 66)
    monkeypatch.setattr(function_check, "_LOGITS", 1)
    monkeypatch.setattr(FunctionCheck, "_measure", _full_beyond(66))
    check = FunctionCheck(model, engine)
    assert [apart.tokens for apart in check.compare()] == [TAIL + 1, 66]
    assert "not compared on 128 tokens" in caplog.text
    stretch_positions(model)
    with pytest.raises(PolicyMismatchError):
        FunctionCheck(model, engine).compare()


def _full_beyond(most):
    measure = FunctionCheck._measure

    def measured(self, texts, count):
        if len(texts[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(self, texts, count)

    return measured


def test_the_windows_of_real_models_are_reached():
    """Of a vocabulary of 150,000 an engine would score 883 tokens."""
    model = meta_mistral(vocab_size=151_936, sliding_window=4096)
    assert lengths_for(model, 32_768) == [65, 512, 4160]
    assert lengths_for(model, 4_000) == lengths_for(model, 32_768, may_sample=False) == [65, 512, 883]
    assert lengths_for(meta_mistral(vocab_size=151_936, sliding_window=20_000), 32_768) == [65, 512, 883]


def meta_mistral(**fields):
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(MistralConfig(**shape, num_hidden_layers=1, **fields))


def test_a_trainer_whose_attention_drops_what_its_config_asks_for_is_named(model, engine):
    """Its float32 pass has transformers' own attention, and agrees with the engine."""

    def halved(module, query, key, value, mask, scaling=None, **kwargs):
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling / 2, **kwargs)

    AttentionInterface.register("halved", halved)
    AttentionMaskInterface.register("halved", sdpa_mask)
    model.set_attn_implementation("halved")
    with pytest.raises(PolicyMismatchError, match="the trainer's"):
        FunctionCheck(model, engine).compare()
    assert model.config._attn_implementation == "halved"


def test_a_trainer_asked_to_warn_goes_on(model, engine, caplog):
    stretch_positions(model)
    check = FunctionCheck(model, engine, on_mismatch="warn")
    with caplog.at_level(logging.WARNING):
        assert any(apart.odd for apart in check.compare())
    assert "going on" in caplog.text


def test_a_default_run_of_another_function_does_not_begin(windowed, engine, tmp_path):
    faulty = load_base(windowed)
    stretch_positions(faulty)
    with pytest.raises(PolicyMismatchError, match="the weights are equal"):
        make(faulty, tmp_path / "run", rollout=engine, vllm_max_model_length=None)
    with pytest.raises(PolicyMismatchError) as raised:
        FunctionCheck(faulty, engine).compare()
    assert "on_mismatch" not in str(raised.value)  # where there is no such argument


@pytest.mark.parametrize("architecture", ["qwen2", "gemma", "qwen3_moe"])
def test_the_float32_pass_is_that_of_a_float32_copy_and_leaves_the_model_as_it_was(tmp_path, architecture):
    base = prepare_base(make_model(tmp_path / "model", architecture=architecture))
    model = get_peft_model(
        load_base(base), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    bare, ids = model.get_base_model(), list(range(5, 45))

    config = copy.deepcopy(bare.config)
    del config.quantization_config
    exact = type(bare)._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    weights = {
        name: bnb.functional.dequantize_4bit(p.data, p.quant_state) if hasattr(p, "quant_state") else p
        for name, p in load_base(base).named_parameters()
    }
    exact.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    exact.tie_weights()
    buffers = dict(bare.named_buffers())
    for name, buffer in exact.named_buffers():  # Gemma multiplies embeddings with a rounded root
        buffer.copy_(buffers[name])
    before = tail_logprobs(model.eval(), [ids], 39)
    with in_float32(model, len(ids)):
        adapted = tail_logprobs(model, [ids], 39)
        with model.disable_adapter():
            found = tail_logprobs(model, [ids], 39)
    torch.testing.assert_close(found, tail_logprobs(exact, [ids], 39), atol=2e-5, rtol=0)  # float32's own rounding
    assert (adapted - found).abs().mean() > 1e-3
    assert torch.equal(tail_logprobs(model, [ids], 39), before)
    assert bare.config._attn_implementation != "eager"


def test_sequences_reach_beyond_each_length_at_which_a_config_computes_something_else():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "rope_theta": 1e4}
    phi = Phi3Config(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=4096,
        original_max_position_embeddings=1024,
        rope_parameters={**rope, "original_max_position_embeddings": 1024},
    )
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 700, "rope_theta": 1e4}
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for config, wanted in [
        (MistralConfig(sliding_window=256), {("sliding_window", 256)}),
        (MistralConfig(sliding_window=None), set()),
        (phi, {("original_max_position_embeddings", 1024)}),
        (LlamaConfig(rope_parameters=yarn), {("original_max_position_embeddings", 700)}),
        (LlamaConfig(rope_parameters=dynamic, max_position_embeddings=900), {("max_position_embeddings", 900)}),
        (Gemma3TextConfig(sliding_window=512), {("sliding_window", 512)}),
    ]:
        assert set(lengths_of(config)) >= wanted, config.model_type
        assert wanted or not set(lengths_of(config))
    assert reach_of(phi) == 1024  # no engine is longer for it
    assert reach_of(MistralConfig(sliding_window=2000)) == 2000 + TAIL + 1


def test_texts_are_as_long_as_the_engine_takes_and_differ(model):
    assert lengths_for(model, 4096) == [65, 128, 512]
    assert lengths_for(model, 100) == [65, 99]
    assert lengths_for(model, 32) == [31]
    with pytest.raises(NotComparedError, match="takes 2 tokens"):
        lengths_for(model, 2)
    tokenizer = AutoTokenizer.from_pretrained(model.qlora_base.path)
    texts = [make_text(model, tokenizer, 65, number) for number in range(8)]
    assert all(len(ids) == 65 for ids in texts)
    assert len({tuple(ids) for ids in texts}) == 8


@pytest.mark.parametrize(
    ("engine", "trainer", "alike", "odd"),
    [
        (1e-3, 1e-3, True, ""),
        (1e-2, 4e-3, True, ""),  # a deep model's rounding
        (1.3e-2, 4e-3, True, "engine"),
        (4e-3, 1.3e-2, True, "trainer"),
        (1e-6, 1.3e-2, False, ""),  # a 16-bit trainer and an engine in float32
        (2e-3, 1e-6, True, ""),  # below what 16 bits round in any case
        (float("nan"), 1e-3, True, "engine"),
        (1e-3, float("nan"), True, "trainer"),
    ],
)
def test_a_side_is_odd_when_it_is_several_times_as_far_from_float32_as_the_other(engine, trainer, alike, odd):
    assert FACTOR == 3.0
    assert Apart(65, engine, trainer, 1e-3, alike).odd == odd


def test_what_the_trainer_has_in_the_engines_dtype_does_not_excuse_the_trainer():
    """A float16 base: the engine's 4-bit products are in bfloat16, the trainer's are finer."""
    exact = torch.zeros(64)
    apart = [exact + x for x in (7e-3, 5e-2, 5e-2)]
    assert Apart.of(65, *apart[:2], exact, apart[2], "float16", torch.float16).odd == "trainer"
    healthy = [exact + x for x in (7e-3, 1.8e-3, 6e-3)]
    assert Apart.of(65, *healthy[:2], exact, healthy[2], "float16", torch.float16).odd == ""


def random_llama(dtype, layers=4, seed=0, **fields):
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, num_hidden_layers=layers, vocab_size=256, max_position_embeddings=4096, **fields)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model


@pytest.mark.parametrize(
    ("trainer", "engine", "autocast"),
    [
        (torch.float16, torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float16),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, None),
    ],
)
def test_two_dtypes_are_no_fault_and_another_function_in_them_is(trainer, engine, autocast):
    model, other = random_llama(trainer, layers=24), FakeEngine(random_llama(engine, layers=24))
    assert not any(apart.odd for apart in FunctionCheck(model, other, autocast=autocast).compare())
    model.model.rotary_emb.inv_freq.mul_(0.5)
    with pytest.raises(PolicyMismatchError):
        FunctionCheck(model, other, autocast=autocast).compare()


def test_4bit_linears_that_multiply_in_bfloat16_are_no_fault_of_a_base_in_float16(tmp_path):
    """As those of vLLM do, whatever the base's dtype; the trainer's then rounds eight times less."""
    source = random_llama(torch.float16, layers=24)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(2.0 if parameter.ndim > 1 else 1.0)
    source.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    base = prepare_base(tmp_path / "model", compute_dtype="float16", out=tmp_path / "base")
    model, other = load_base(base), load_base(base)
    forward = bnb.nn.Linear4bit.forward
    for linear in other.modules():
        if isinstance(linear, bnb.nn.Linear4bit):
            linear.compute_dtype = torch.bfloat16
            linear.forward = lambda x, linear=linear: forward(linear, x.bfloat16()).to(x.dtype)
    check = FunctionCheck(model, FakeEngine(other))
    assert not any(apart.odd for apart in check.compare())
    assert all(apart.engine > FACTOR * max(apart.trainer, function_check.FLOOR_16_BIT) for apart in check.found)
    model.model.rotary_emb.inv_freq.mul_(0.5)
    with pytest.raises(PolicyMismatchError):
        FunctionCheck(model, FakeEngine(other)).compare()


def test_a_trainer_that_overflows_is_named():
    model, other = random_llama(torch.float16), random_llama(torch.float32)
    with torch.no_grad():
        for each in (model, other):
            each.lm_head.weight.mul_(2e5)
    engine = FakeEngine(other)
    with pytest.raises(PolicyMismatchError, match="the trainer's logprobs are nan"):
        FunctionCheck(model, engine).compare()


def test_long_texts_are_scored_in_float32_by_an_attention_that_takes_it():
    """FlashAttention takes 16 bits alone."""

    def flash(module, query, key, value, mask, **kwargs):
        assert query.dtype == torch.bfloat16
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("needs_bf16", flash)
    AttentionMaskInterface.register("needs_bf16", sdpa_mask)
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope["original_max_position_embeddings"] = 1500
    model = random_llama(torch.bfloat16, rope_parameters=rope)
    engine = FakeEngine(random_llama(torch.bfloat16, rope_parameters=rope), max_model_length=2048)
    model.set_attn_implementation("needs_bf16")
    found = FunctionCheck(model, engine).compare()
    assert [apart.tokens for apart in found] == [TAIL + 1, 512, 1500 + TAIL]
    assert not any(apart.odd for apart in found)


def test_a_model_that_does_not_compute_in_float32_is_not_compared_and_that_is_said(caplog):
    model, engine = random_llama(torch.bfloat16), FakeEngine(random_llama(torch.bfloat16))
    forward = model.model.norm.forward

    def picky(x):
        if x.dtype != torch.bfloat16:
            raise RuntimeError("this kernel takes bfloat16 alone")
        return forward(x)

    model.model.norm.forward = picky
    check = FunctionCheck(model, engine)
    with caplog.at_level(logging.WARNING):
        assert check.compare() == []
    assert "takes bfloat16 alone" in check.why_not
    assert "not compared on what they compute" in caplog.text
    assert "takes bfloat16 alone" in caplog.text
    assert Canary(model, engine).calibrate() > 0
    assert "takes the engine's distance for rounding" in caplog.text


@pytest.mark.parametrize("seed", [103, 129, 145])
def test_experts_that_rounding_chooses_otherwise_are_no_fault(seed):
    def mixture(attention):
        torch.manual_seed(seed)
        shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
        shape |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 512}
        experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape, **experts), attn_implementation=attention)
        with torch.no_grad():
            for name, parameter in model.to(torch.bfloat16).named_parameters():
                parameter.mul_(1.0 if parameter.ndim == 1 else 10.0 if "lm_head" in name else 4.0)
        return model.eval()

    FunctionCheck(mixture("sdpa"), FakeEngine(mixture("eager"))).compare()


def test_weights_that_are_trained_in_float32_are_rounded_as_the_engine_holds_them(tmp_path):
    """Autocast leaves norms and embeddings in float32."""
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.0015 if "norm" in name else 1.3)
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16()
    texts, own = [[5, 9, 33, 12, 7, 41]], dict(model.named_parameters())
    plain = tail_logprobs(model, texts, 4)
    with as_engine(model, torch.bfloat16, "bfloat16"):
        assert torch.equal(tail_logprobs(model, texts, 4), tail_logprobs(rounded, texts, 4))
    assert torch.equal(tail_logprobs(model, texts, 4), plain)
    assert all(parameter is own[name] for name, parameter in model.named_parameters())
