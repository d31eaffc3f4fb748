"""The trainer on an NVIDIA GPU: `make gpu`. Written on machines without one; not yet seen to pass."""

import pytest
import torch
import transformers
from support import DEVICE, needs_card, on_a_card, program
from trl.trainer.utils import add_fused_lm_head

from qlora_rl import load_base, plan_memory, prepare_base

pytestmark = [pytest.mark.gpu, on_a_card()]

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


@needs_card
@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_estimate_is_right_on_the_card(tmp_path, checkpointing):
    """Within 10 % for what is counted; the peak of a step, an estimate, within a factor of 1.5."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from qlora_rl.demo.tiny_model import make_tokenizer

    config = Qwen2Config(
        vocab_size=32_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    source = Qwen2ForCausalLM(config).to(torch.bfloat16)
    base = prepare_base(source, tokenizer=make_tokenizer(), out=tmp_path / "base")
    estimate = plan_memory(
        config, spec=base.spec, batch_size=4, max_length=512, gradient_checkpointing=checkpointing, shared=False
    )
    lines = {line.name: line.nbytes for line in estimate.lines}
    readings = [torch.cuda.memory_allocated()]
    model = load_base(base)
    readings.append(torch.cuda.memory_allocated())
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    readings.append(torch.cuda.memory_allocated())
    for name, before, after in zip(("base, trainer", "adapter"), readings, readings[1:], strict=False):
        assert after - before == pytest.approx(lines[name], rel=0.1), name
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(5, 60, (4, 512), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with torch.autocast("cuda", torch.bfloat16):
        hidden = model.get_base_model().model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    hidden.backward(torch.ones_like(hidden))
    peak = torch.cuda.max_memory_allocated() - readings[-1]
    planned = sum(x.nbytes for x in estimate.lines if x.when in ("step", "layer"))
    assert peak / 1.5 < planned < peak * 1.5


@needs_card
def test_a_push_in_place_waits_for_nothing(base, adapted):
    """The hot path must not synchronise with the device: it only enqueues copies."""
    from qlora_rl.adapter.live import LiveAdapter

    live = LiveAdapter(adapted.to("cuda"), torch.bfloat16)
    live.look()
    places = {name: tensor.cuda() for name, tensor in live.bundle().tensors.items()}
    live.write_into(places)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        live.look()
        live.write_into(places)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all(torch.equal(places[n].cpu(), t) for n, t in live.bundle().tensors.items())


def test_layer_inputs_in_host_memory_change_no_bit(base):
    step, found = program("benchmarks/live_memory.py").Step(base, 2, 192, DEVICE), []
    for offload in (False, True):
        step.model.gradient_checkpointing_enable(offload=offload)
        for _ in range(3):  # memory is used again
            loss = step.run()
        found.append((loss, {name: p.grad.clone() for name, p in step.trained.items()}))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in step.trained)
