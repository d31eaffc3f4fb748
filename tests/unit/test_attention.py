"""Attention that computes what a config says: softcapped scores, and arguments that an implementation does not have."""

import copy
import logging
import types

import pytest
import torch
import transformers
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from qlora_rl import ConfigConflictError, NotYetSupportedError
from qlora_rl.base.attention import attend as attending
from qlora_rl.base.attention import softcap as capped
from qlora_rl.base.attention.attend import NAME, attend, without_masks
from qlora_rl.base.attention.choice import apply_attention, attention_for
from qlora_rl.train.scoring.padding import row_inputs

WORDS, LENGTH = 97, 40


def gemma2(spread=0.3, of_scores=0.6, **fields):
    """Float32, with scores that reach the bound."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "max_position_embeddings": 256,
        "sliding_window": 16,
    }  # fmt: skip
    config = transformers.Gemma2Config(**shape | {"attn_logit_softcapping": 50.0} | fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, of_scores if "q_proj" in name or "k_proj" in name else spread)
    return model


def scored(model, **inputs):
    """Logprobs of a padded batch, and the gradient of their sum for queries and keys."""
    ids = torch.randint(0, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, 30:] = 0, 0
    model.zero_grad()
    logprobs = model(ids, attention_mask=mask, **inputs).logits[:, :-1].log_softmax(-1)
    is_read = (mask[:, 1:] & mask[:, :-1]).bool()
    kept = logprobs.gather(-1, ids[:, 1:, None])[..., 0][is_read]
    kept.sum().backward()
    named = model.named_parameters()
    return kept.detach(), torch.cat([p.grad.flatten() for n, p in named if "q_proj" in n or "k_proj" in n])


@pytest.mark.parametrize("most", [2**20, 300])
def test_softcapped_attention_is_that_of_eager(most, monkeypatch):
    model = gemma2()
    plain, _ = scored(model)
    model.set_attn_implementation("eager")
    wanted, wanted_gradient = scored(model)
    assert (plain - wanted).abs().max() > 0.3  # SDPA, without the bound
    model.set_attn_implementation(attention_for(model.config))
    monkeypatch.setitem(capped.SCORES, "cpu", most)
    found, gradient = scored(model)
    # Sums of float32 in another order.
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert (gradient - wanted_gradient).norm() < 1e-3 * wanted_gradient.norm()


def test_dropout_keeps_the_weights_of_all_queries():
    """With one seed each side drops others; that something is dropped, and that the mean is right, can be seen."""
    torch.manual_seed(0)
    query, key, value = torch.randn(4, 9, 8), torch.randn(2, 9, 8), torch.ones(2, 9, 8)
    cap = capped.Cap(0.3, 2.0, is_causal=True)
    found = torch.stack([capped.capped_attention(query, key, value, None, cap, 0.5) for _ in range(400)])
    assert found.std(0).max() > 0.1
    torch.testing.assert_close(found.mean(0), torch.ones(4, 9, 8), rtol=0, atol=0.25)


def test_autocast_does_not_lower_softcapped_scores():
    query, key, value = (torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    cap = capped.Cap(0.3, 2.0, is_causal=True)
    plain = capped.capped_attention(query, key, value, None, cap)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(capped.capped_attention(query, key, value, None, cap), plain)


def test_generation_with_a_cache_is_that_of_eager():
    model = gemma2().eval()
    ids = torch.randint(0, WORDS, (1, 30), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation(attention_for(model.config))
    found = model.generate(ids, max_new_tokens=20, do_sample=False)
    model.set_attn_implementation("eager")
    assert torch.equal(found, model.generate(ids, max_new_tokens=20, do_sample=False))


@pytest.mark.parametrize(
    ("bound", "wish", "found"),
    [
        (None, None, None),
        (None, "sdpa", "sdpa"),
        (50.0, None, NAME),
        (50.0, NAME, NAME),
        (50.0, "eager", "eager"),
        (50.0, "flash_attention_2", "flash_attention_2"),
        (50.0, "flex_attention", "flex_attention"),
        (50.0, "someone/kernel", "someone/kernel"),
        (50.0, "sdpa", "attn_logit_softcapping=50.0"),
        (50.0, {"": "sdpa"}, "attn_logit_softcapping=50.0"),
    ],
)
def test_an_implementation_that_leaves_out_the_bound_is_not_taken(bound, wish, found):
    config = transformers.Gemma2Config(attn_logit_softcapping=bound)
    if found and "=" in found:
        with pytest.raises(ConfigConflictError, match=found):
            attention_for(config, wish)
    else:
        assert attention_for(config, wish) == found


def test_a_model_that_was_loaded_with_sdpa_computes_with_the_bound_from_now_on(caplog):
    model = gemma2()
    wanted = copy.deepcopy(model)
    wanted.set_attn_implementation("eager")
    with caplog.at_level(logging.WARNING):
        apply_attention(model)
    assert "attn_logit_softcapping=50.0" in caplog.text
    torch.testing.assert_close(scored(model)[0], scored(wanted)[0], rtol=0, atol=1e-4)
    caplog.clear()
    apply_attention(model)
    apply_attention(wanted)
    assert not caplog.text
    assert wanted.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"sliding_window": 8}, "sliding_window=8 < 9"),
        ({"is_causal": False}, "is_causal=False"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"another": torch.zeros(1)}, "another"),
    ],
)
def test_an_argument_that_would_have_no_effect_is_an_error(given, reason):
    query, key, value = torch.randn(1, 4, 14, 8), torch.randn(1, 2, 14, 8), torch.randn(1, 2, 14, 8)
    module = types.SimpleNamespace(num_key_value_groups=2, is_causal=True)

    def found(**more):
        return attend(module, query, key, value, None, scaling=0.3, sequence_lengths=(9, 5), **more)[0]

    with pytest.raises(NotYetSupportedError, match=reason):
        found(**given)
    harmless = row_inputs(torch.zeros(1, 14), (9, 5))
    del harmless["input_ids"], harmless["sequence_lengths"]
    assert torch.equal(found(**harmless, sliding_window=9, is_causal=True, another=None), found())
    if "s_aux" in given:
        with pytest.raises(NotYetSupportedError, match=reason):
            attend(module, query, key, value, None, scaling=0.3, **given)


def test_a_module_that_attends_both_ways_has_no_row():
    parts = torch.randn(1, 4, 5, 8), torch.randn(1, 4, 5, 8), torch.randn(1, 4, 5, 8)
    with pytest.raises(NotYetSupportedError, match="is_causal"):
        attend(types.SimpleNamespace(is_causal=False), *parts, None, sequence_lengths=(5,))


def one_by_one(query, key, value, ends, scale, shares):
    """[N, Q, D], as the kernel for CUDA gives it."""
    found = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        parts = [part[start:end].transpose(0, 1)[None] for part in (query, key, value)]
        found.append(scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=shares)[0])
    return torch.cat([each.transpose(0, 1) for each in found])


def of_torch_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return one_by_one(query, key, value, cu_seq_q, scale, enable_gqa)


def of_torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    assert query.shape[1] == key.shape[1] == value.shape[1]
    return one_by_one(query, key, value, cu_seq_q, scale, False)


@pytest.mark.parametrize("kernel", [of_torch_2_13, of_torch_2_11])
@pytest.mark.parametrize("keys", [4, 2, 1])
def test_the_kernel_for_cuda_shares_keys_or_is_given_them_repeated(kernel, keys, monkeypatch):
    """torch's own runs on CUDA only; here are its signatures."""
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    query, key, value = torch.randn(1, 4, 14, 8), torch.randn(1, keys, 14, 8), torch.randn(1, keys, 14, 8)
    found = attending._one_kernel(query, key, value, (9, 5), 0.3, keys != 4)
    wanted = attending._by_length(query, key, value, (9, 5), 0.3, keys != 4, 0.0)
    assert torch.equal(found, wanted)


def test_a_softcapped_row_is_each_sequence_by_itself():
    parts = torch.randn(1, 4, 14, 8), torch.randn(1, 2, 14, 8), torch.randn(1, 2, 14, 8)
    module = types.SimpleNamespace(is_causal=True)
    with without_masks():
        row, _ = attend(module, *parts, None, scaling=0.3, softcap=2.0, sequence_lengths=(9, 5))
    alone = [
        attend(module, *(part[:, :, some] for part in parts), None, scaling=0.3, softcap=2.0)[0]
        for some in (slice(0, 9), slice(9, 14))
    ]
    torch.testing.assert_close(row, torch.cat(alone, dim=1), rtol=0, atol=1e-6)
