"""Micro-batches as one row on an NVIDIA GPU: `make gpu`. Written on machines without one; not yet seen to pass."""

import pytest
import torch
import transformers
from trl.trainer.utils import add_fused_lm_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch built for it"),
]

DEVICE = "cuda"
PROMPT, LONGEST, WORDS = 40, 64, 97


def make_batch(alike):
    """Six sequences of different lengths, prompts padded left: all of one prompt, or each of its own."""
    ids = torch.randint(3, WORDS, (6, LONGEST), generator=torch.Generator().manual_seed(0))
    if alike:
        ids[:, :PROMPT] = ids[0, :PROMPT]
    mask = torch.ones_like(ids)
    for row in range(6):
        mask[row, : 3 if alike else row] = 0
        mask[row, LONGEST - 2 * row :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPT] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: values.to(DEVICE) for name, values in batch.items()}


def step(model, batch):
    model.zero_grad()
    found = model(**batch, fused_lm_head=True)
    found.log_probs.sum().backward()
    return found.log_probs.detach(), torch.cat([p.grad.flatten().float() for p in model.parameters()])


@pytest.mark.parametrize("alike", [False, True], ids=["whole sequences", "a shared prompt"])
def test_a_row_gives_what_a_padded_batch_gives(alike, monkeypatch):
    """By `varlen_attn` in bf16, which rounds: the bounds are wide."""
    from qlora_rl.train.scoring import padding

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(DEVICE)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    batch = make_batch(alike)
    padded, padded_gradient = step(model, batch)
    assert padding.apply_padding(model) == {"removed": True, "shares_prompts": True}
    rows, of_batch = [], padding.make_row
    monkeypatch.setattr(padding, "make_row", lambda *args, **named: rows.append(of_batch(*args, **named)) or rows[-1])
    found, gradient = step(model, batch)
    assert ("sources" in rows[0].inputs) == alike
    assert (found - padded).abs().max() < 0.05
    assert (gradient - padded_gradient).norm() < 0.05 * padded_gradient.norm()
