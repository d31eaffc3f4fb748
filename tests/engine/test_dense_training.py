"""Full weights under the trainer: a model without PEFT, and adapters whose start rewrites the base."""

import json

import pytest
import torch
from kinds import lora
from peft import get_peft_model
from test_training import lines, make
from transformers import AutoModelForCausalLM, AutoTokenizer

from qlora_rl import AdapterRejectedError, ConfigConflictError, judge_adapter, prepare_base


def test_a_model_without_peft_is_trained_itself_and_every_push_is_verified(model_dir, tmp_path):
    """bf16 in the engine, float32 master weights in the trainer; `adapter_dtype` is theirs."""
    base = prepare_base(model_dir, quant="none")
    with make(base, tmp_path, peft_config=None, sync="weights", canary_every=1, learning_rate=1e-4) as trainer:
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        assert all(p.requires_grad and p.dtype == torch.float32 for p in trainer.model.parameters())
        trainer.train()
        moved = [n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])]
        assert len(moved) == len(before)
        trainer.sync()
        trainer.bridge.strategy.verify()  # every weight in vLLM is the trainer's, rounded once
        trained = {n: p.detach().to(torch.bfloat16) for n, p in trainer.model.named_parameters()}
    assert all(
        row["mode"] == "weights" and row["canary_difference"] is not None for row in lines(tmp_path, "sync.jsonl")
    )
    assert json.loads((tmp_path / "config.json").read_text())["lora"] == {}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert all(torch.equal(p, trained[n]) for n, p in saved.named_parameters())
    AutoTokenizer.from_pretrained(tmp_path / "model")


def test_a_model_that_is_trained_itself_may_have_its_output_head_multiplied_in_float32(model_dir, tmp_path):
    """Its weights are float32 in the trainer anyway, and every push brings the engine what they have become."""
    base = prepare_base(model_dir, quant="none")
    with make(
        base, tmp_path, peft_config=None, sync="weights", canary_every=1, learning_rate=1e-4, cast_lm_head_to_fp32=True
    ) as trainer:
        assert trainer.base_check.is_verified
        trainer.train()
        assert trainer.state.global_step == 3
    assert all(row["mismatch_kl"] < 1e-3 for row in lines(tmp_path))


def test_what_trains_itself_is_no_further_from_the_engine_than_rounding(model_dir, tmp_path):
    """At a rate that moves all weights, a head that is tied to the embedding among them."""
    base = prepare_base(model_dir, quant="none")
    fields = {"canary_every": 1, "learning_rate": 1e-3, "max_steps": 5}
    with make(base, tmp_path, peft_config=None, sync="weights", beta=0.1, **fields) as trainer:
        trainer.alarm.threshold = 1e-4  # each batch is examined
        trainer.train()
        found = [each.cause for each in trainer.alarm.diagnoses.values()]
        assert set(found) == {"noise"}
        limit = trainer.alarm.threshold
    assert limit < 0.1


def test_a_4_bit_base_itself_cannot_be_trained_and_a_bare_model_must_be_meant(base, model_dir, tmp_path):
    with pytest.raises(ConfigConflictError, match="cannot be trained itself"):
        make(base, tmp_path / "1", peft_config=None, sync="weights")
    plain = prepare_base(model_dir, quant="none")
    with pytest.raises(ConfigConflictError, match="sync='weights'"):
        make(plain, tmp_path / "2", peft_config=None)
    with pytest.raises(ConfigConflictError, match="share_base"):
        make(plain, tmp_path / "3", peft_config=None, sync="weights", share_base=True)
    with pytest.raises(ConfigConflictError, match="gpu_memory"):
        make(plain, tmp_path / "4", peft_config=None, sync="weights", gpu_memory=8.0)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_start_out_of_the_base_leaves_the_base_and_only_the_adapter_is_synced(base, tmp_path, start):
    with make(base, tmp_path, peft_config=lora(init_lora_weights=start), canary_every=1) as trainer:
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora_" not in n}
        trainer.train()
        assert trainer.plan.strategy == "lora_adapter"
        assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if n in before)
        for a, b, fixed_RI, fixed_OR in trainer.model.qlora_start._held:
            assert a.weight[:4].any()
            assert torch.equal(a.weight[4:], fixed_RI)
            assert torch.equal(b.weight[:, :4], fixed_OR + b.weight[:, 4:])
    assert all(row["canary_difference"] is not None for row in lines(tmp_path, "sync.jsonl"))
    assert all(row["mismatch_kl"] < 1e-3 for row in lines(tmp_path))
    told = json.loads((tmp_path / "config.json").read_text())
    assert (told["adapter_start"], told["lora"]["r"]) == (start, 8)
    assert judge_adapter(tmp_path / "adapter", base=base.path).rank == 8


def test_a_start_that_needs_data_is_rejected_before_anything_is_loaded(base, tmp_path):
    with pytest.raises(AdapterRejectedError, match="batches"):
        make(base, tmp_path / "rejected", peft_config=lora(init_lora_weights="eva"))
    assert not (tmp_path / "rejected").exists()


def test_an_adapter_whose_start_by_peft_has_rewritten_the_base_is_sent_as_full_weights(model_dir, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    model = get_peft_model(plain, lora(init_lora_weights="pissa"))
    with make(None, tmp_path / "works", model=model, peft_config=None, canary_every=1) as trainer:
        trainer.train()
        assert trainer.plan.strategy == "weights"
        assert trainer.base_check.is_verified
    assert all(row["canary_difference"] is not None for row in lines(tmp_path / "works", "sync.jsonl"))
