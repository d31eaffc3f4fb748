"""Logprobs in small tiles: TRL's own numbers, on the tokens that count."""

from contextlib import contextmanager

import pytest
import torch
from support import make_model, randomise
from transformers import AutoModelForCausalLM
from trl.kernels import ChunkedLogProbFunction
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS
from trl.trainer.utils import add_fused_lm_head

from qlora_rl.contracts import SamplingSpec
from qlora_rl.sync.truncated_sampling import TruncatedSampling
from qlora_rl.train.scoring import logprobs


def tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 32, generator=generator, dtype=torch.bfloat16)
    weight = torch.randn(1000, 32, generator=generator, dtype=torch.bfloat16) * 0.3
    return hidden, weight, torch.randint(0, 1000, (count,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("count", [1, 127, 128, 129, 300])
def test_tiles_give_what_full_logits_give(dtype, softcap, count):
    hidden, weight, targets = tokens(count)
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype)
    ours, entropy = logprobs.score(hidden, weight, None, targets, 0.7, softcap)
    ours.sum().backward()
    exact = hidden.detach().double().requires_grad_()
    logits = exact @ weight.double().T
    logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) / 0.7
    all_logprobs = logits.log_softmax(-1)
    theirs = all_logprobs.gather(1, targets[:, None])[:, 0]
    theirs.sum().backward()
    # bf16 logits of size 10 are rounded by up to 0.03, divided by a temperature of 0.7; float32 ones by 1e-6.
    bound = {torch.float32: 1e-4, torch.bfloat16: 0.06}[dtype]
    assert (ours.double() - theirs).abs().max() < bound
    assert (entropy.double() + (all_logprobs.exp() * all_logprobs).sum(-1)).abs().max() < bound
    assert (hidden.grad.double() - exact.grad).abs().max() < bound


def test_whatever_trl_reads_of_a_token_is_that_of_one_large_tile():
    hidden, weight, targets = tokens(300)
    ours = logprobs.score(hidden, weight, None, targets, 0.7, None, 1.0, OPTIONAL_OUTPUTS)
    theirs = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 0.7, 1000, None, 1.0, OPTIONAL_OUTPUTS)
    assert len(ours) == 1 + len(OPTIONAL_OUTPUTS)
    for one, other in zip(ours, theirs, strict=True):
        # Products of fewer rows may add in another order, and are rounded to bf16.
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-3, atol=0.06)


def trained(trainer, loss):
    trainer.model.zero_grad()
    trainer.accelerator.backward(loss)
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def batch(trainer, prompt=5, completion=7):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (4, prompt + completion), generator=generator)
    prompt_mask, completion_mask = torch.ones(4, prompt, dtype=torch.long), torch.ones(4, completion, dtype=torch.long)
    prompt_mask[0, :2], completion_mask[1, 4:] = 0, 0
    return {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": prompt_mask,
        "completion_ids": ids[:, prompt:],
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]),
        "num_items_in_batch": completion_mask.sum(),
        "importance_sampling_ratio": torch.rand(4, completion, generator=generator) + 0.5,
    }


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_are_those_of_trls_tiles(checkpointing, make_trainer, config, monkeypatch, tmp_path):
    """Every row of a product is the same sum; only a matrix product of fewer rows may add in another order."""
    found = []
    for name, small in (("ours", True), ("trl", False)):
        if not small:
            monkeypatch.setattr("qlora_rl.train.online.use_small_tiles", lambda *_, **__: False)
        args = config(output_dir=str(tmp_path / name), gradient_checkpointing=checkpointing, temperature=0.8, seed=3)
        trainer = make_trainer(args=args, remove_padding=False)
        assert ("logprobs" in trainer.model.get_base_model().forward.__code__.co_filename) == small
        randomise(trainer.model)
        trainer.model.train()
        if checkpointing:
            trainer.model.gradient_checkpointing_enable()  # transformers does it in train()
        trainer.current_gradient_accumulation_steps = 1  # transformers sets it in train()
        loss = trainer._compute_loss(trainer.model, batch(trainer))
        found.append((loss.detach(), trained(trainer, loss)))
    (ours, our_gradients), (theirs, their_gradients) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert our_gradients.keys() == their_gradients.keys()
    assert any(g.abs().max() > 0 for g in our_gradients.values())
    for name, gradient in our_gradients.items():
        # Gradients of hidden states are rounded to bf16 (2^-8) on their way.
        torch.testing.assert_close(gradient, their_gradients[name], rtol=2**-6, atol=1e-6)


def test_a_call_without_the_fused_head_is_the_models_own(adapted):
    bare = adapted.get_base_model()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before = bare(ids, labels=ids)
        add_fused_lm_head(bare)
        assert logprobs.use_small_tiles(bare, 1.0)
        after = bare(ids, labels=ids)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.loss, after.loss)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("asked", ["call", "config"])
def test_a_mixture_keeps_its_loss_of_balance(architecture, asked, tmp_path):
    """Loss, balance and gradients are those of TRL's head, which makes all logits at once."""
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, architecture=architecture)).float()
    model.config.router_aux_loss_coef = 0.5
    model.config.output_router_logits = asked == "config"
    ids = torch.randint(3, 60, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    call = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "fused_lm_head": True}
    call |= {"output_router_logits": True} if asked == "call" else {}
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    found = []
    for is_ours in (False, True):
        assert not is_ours or logprobs.use_small_tiles(model, 1.0)
        model.zero_grad()
        out = model(**call)
        out.loss.backward()
        found.append((out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    (theirs, their_gradients), (ours, our_gradients) = found
    for name in ("loss", "aux_loss", "log_probs", "entropy", "label_mask"):
        torch.testing.assert_close(ours[name], theirs[name])
    assert ours.aux_loss > 0.5
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, their_gradients[name], rtol=1e-4, atol=1e-6)


def test_a_batch_in_which_nothing_counts_gives_a_zero_that_can_be_differentiated(adapted):
    bare = adapted.get_base_model()
    add_fused_lm_head(bare)
    logprobs.use_small_tiles(bare, 1.0)
    ids = torch.tensor([[5, 6, 7, 8]])
    out = bare(input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True)
    assert torch.equal(out.log_probs, torch.zeros(1, 3))
    out.log_probs.sum().backward()


@pytest.mark.parametrize(("field", "value", "scale"), [("logit_scale", 0.5, 0.5), ("logits_scaling", 4.0, 0.25)])
def test_a_model_that_scales_its_logits_is_scored_as_trl_scores_it(field, value, scale, adapted):
    bare, truncated = adapted.get_base_model(), TruncatedSampling(top_k=5)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    logits_NV = scale * bare(ids).logits[:, :-1].flatten(0, 1).float()
    setattr(bare.config, field, value)
    try:
        add_fused_lm_head(bare, outputs=("log_probs", "entropy"))
        theirs = bare(input_ids=ids, labels=ids, fused_lm_head=True)
        assert logprobs.use_small_tiles(bare, 1.0)
        ours = bare(input_ids=ids, labels=ids, fused_lm_head=True)
        assert logprobs.use_small_tiles(bare, 1.0, truncated=truncated)
        kept = bare(input_ids=ids, labels=ids, fused_lm_head=True)
    finally:
        delattr(bare.config, field)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs)
    torch.testing.assert_close(ours.entropy, theirs.entropy)
    of_kept = truncated.log_kept(logits_NV, ids[:, 1:].flatten()).view(2, 8)
    assert of_kept.min() < -0.1
    torch.testing.assert_close(kept.log_probs, theirs.log_probs - of_kept, atol=1e-2, rtol=1e-2)


TRUNCATED = [
    TruncatedSampling(top_k=5),
    TruncatedSampling(top_p=0.7),
    TruncatedSampling(4, 0.6),
    TruncatedSampling(0, 0.9, 0.3),
]


@pytest.mark.parametrize("truncated", TRUNCATED, ids=str)
def test_truncated_logprobs_and_gradients_are_those_of_a_softmax_over_what_is_kept(truncated, adapted):
    """Of a model that is sure of little, so that something is left out everywhere."""
    bare = adapted.get_base_model()
    temperature = 0.8
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    randomise(adapted)
    logits_NV = bare(ids).logits[:, :-1].flatten(0, 1).float() / temperature
    targets_N = ids[:, 1:].flatten()
    kept_NV = kept(truncated, logits_NV, targets_N)
    assert not kept_NV.all(1).any()
    wanted_N = logits_NV.masked_fill(~kept_NV, -torch.inf).log_softmax(-1).gather(1, targets_N[:, None])[:, 0]
    names, parameters = zip(*[(n, p) for n, p in adapted.named_parameters() if p.requires_grad], strict=True)
    add_fused_lm_head(bare, temperature=temperature, outputs=("log_probs", "entropy"))
    assert logprobs.use_small_tiles(bare, temperature, truncated=truncated)
    found_N = bare(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.flatten()
    agree_N = torch.isclose(found_N, wanted_N, atol=2e-2, rtol=1e-2)
    # Logits in bf16 put a token of one or two rows on the other side of the edge, other ones on another processor.
    assert agree_N.sum() >= 14
    wanted = torch.autograd.grad(wanted_N[agree_N].sum(), parameters)
    own_gradients = torch.autograd.grad(found_N[agree_N].sum(), parameters)
    for name, own, theirs in zip(names, own_gradients, wanted, strict=True):
        assert torch.nn.functional.cosine_similarity(own.flatten(), theirs.flatten(), 0) > 0.99, name


FALLING, EQUAL = [0.4, 0.3, 0.2, 0.1], [0.4, 0.2, 0.2, 0.2]


@pytest.mark.parametrize(
    ("shares", "truncated", "target", "mass"),
    [
        (FALLING, TruncatedSampling(top_k=2), 0, 0.7),
        (FALLING, TruncatedSampling(top_k=9), 3, 1.0),
        (FALLING, TruncatedSampling(top_p=0.65), 1, 0.7),  # the second passes it
        (FALLING, TruncatedSampling(top_p=0.75), 1, 0.9),
        (FALLING, TruncatedSampling(min_p=0.6), 0, 0.7),
        (FALLING, TruncatedSampling(3, 0.5), 0, 0.7),  # of nine tenths
        (FALLING, TruncatedSampling(top_k=2), 3, 0.8),  # sampled all the same
        # As vLLM keeps equal ones: on a CPU top_k all that are as likely as its last one, and top_p counts.
        (EQUAL, TruncatedSampling(top_k=2), 0, 1.0),
        (EQUAL, TruncatedSampling(top_p=0.5), 0, 0.6),
    ],
)
def test_what_truncated_sampling_keeps(shares, truncated, target, mass):
    found = truncated.log_kept(torch.tensor([shares]).log(), torch.tensor([target])).exp()
    torch.testing.assert_close(found, torch.tensor([mass]))


def test_a_vocabulary_of_which_few_words_are_not_enough_is_sorted_whole():
    logits_NV = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    targets_N = logits_NV.argmax(-1)
    for truncated in (TruncatedSampling(top_p=0.9), TruncatedSampling(0, 0.9, 0.01), TruncatedSampling(3000, 0.9)):
        wanted = logits_NV.softmax(-1).masked_fill(~kept(truncated, logits_NV, targets_N), 0).sum(-1)
        torch.testing.assert_close(truncated.log_kept(logits_NV, targets_N).exp(), wanted)


def kept(truncated, logits_NV, targets_N):
    """By the definition: min_p, of those top_k, of those top_p; and the target."""
    probs_NV = logits_NV.softmax(-1)
    probs_NV = probs_NV.where(probs_NV >= truncated.min_p * probs_NV.amax(-1, keepdim=True), 0)
    order_NV = probs_NV.argsort(-1, descending=True)
    sorted_NV = probs_NV.gather(1, order_NV)
    sorted_NV[:, truncated.top_k or len(sorted_NV[0]) :] = 0
    sorted_NV = sorted_NV / sorted_NV.sum(-1, keepdim=True)
    is_kept = (sorted_NV > 0) & (sorted_NV.cumsum(-1) - sorted_NV < truncated.top_p)
    return torch.zeros_like(is_kept).scatter(1, order_NV, is_kept).scatter(1, targets_N[:, None], True)


@pytest.mark.parametrize(
    ("sampling", "truncated"),
    [
        (SamplingSpec(), None),
        (SamplingSpec(top_k=-1), None),
        (SamplingSpec(top_p=0.9, temperature=0.0), None),
        (SamplingSpec(top_p=0.9), TruncatedSampling(top_p=0.9)),
        (SamplingSpec(extra={"top_k": None, "min_p": None}), None),
        (SamplingSpec(top_p=0.9, extra={"top_p": 0.5, "top_k": 7}), TruncatedSampling(7, 0.5)),
    ],
)
def test_truncated_sampling_is_read_as_the_engine_reads_it(sampling, truncated):
    assert TruncatedSampling.of(sampling) == truncated


def test_a_sharded_head_is_whole_again_where_the_backward_pass_computes_truncated_logits():
    """As under ZeRO-3: outside of the context there is nothing to multiply with."""
    weight = torch.nn.Parameter(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)), requires_grad=False)
    data = weight.data

    @contextmanager
    def gathers(*_):
        weight.data = data
        yield
        weight.data = torch.empty(0)

    weight.data = torch.empty(0)
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found = TruncatedSampling(top_k=3).log_kept_by_head(hidden, weight, None, torch.arange(5), 1.0, gathers=gathers)
    found.sum().backward()
    assert hidden.grad.abs().sum() > 0
