"""Layer inputs that wait in host memory are counted there, and what has no room there is said; plans of methods without
an engine."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from qlora_rl import ConfigConflictError, MemoryBudgetError, plan_memory
from qlora_rl.cli import main
from qlora_rl.memory.pace import pace_of
from qlora_rl.memory.plan import GIB, largest_length

FIELDS = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072, "tie_word_embeddings": False,
}  # fmt: skip
# 36 layer inputs of 40,960 tokens x 4096 numbers x 2 bytes, each in a block of 512 MiB; and as much again for blocks of
# shorter micro-batches, which torch keeps.
INPUTS_GIB = 2 * 18.0
LONG = {"max_length": 40_960, "batch_size": 1, "gpu_memory_gib": 24}


def plan(**request):
    return plan_memory(Qwen3Config(**FIELDS), **request)


def named(estimate):
    return {line.name: line for line in estimate.lines}


def test_layer_inputs_have_a_line_of_the_host_that_is_no_part_of_the_cards_peak():
    on_card, on_host = plan(**LONG, sleeps=True, offload=False), plan(**LONG, sleeps=True, offload=True)
    assert (on_card.host_bytes, on_host.host_bytes) == (0, INPUTS_GIB * GIB)
    assert named(on_host)["layer inputs"].when == "host"
    assert on_host.step_bytes < on_card.step_bytes
    assert "layer inputs" not in named(plan(**LONG, offload=True, gradient_checkpointing=False))


def test_pinned_blocks_are_powers_of_two_and_all_of_them_are_kept():
    one = 4096 * 2  # bytes of a token
    for tokens, each in ((1024, 1024), (1025, 2048), (1500, 2048), (2048, 2048)):
        assert plan(max_length=tokens, batch_size=1, offload=True).host_bytes == 2 * 36 * each * one


@pytest.mark.parametrize(
    ("host", "chosen"), [(None, ["offload"]), (INPUTS_GIB, ["offload"]), (INPUTS_GIB - 0.1, ["sleeps"])]
)
def test_the_plan_moves_layer_inputs_only_where_they_have_room(host, chosen):
    estimate = plan(**LONG, host_memory_gib=host)
    assert [way.field for way in estimate.chosen] == chosen
    assert estimate.fits == (chosen == ["offload"])
    assert ("36.00 GiB > 35.90 GiB of host memory" in str(estimate)) == (not estimate.fits)
    if not estimate.fits:
        assert not any("offload" in saving.advice for saving in estimate.savings())
        with pytest.raises(MemoryBudgetError, match="layer inputs"):
            estimate.raise_if_too_big()


def test_layer_inputs_that_the_user_wants_in_host_memory_and_that_have_no_room_are_an_error():
    estimate = plan(**LONG, sleeps=True, offload=True, host_memory_gib=4)
    assert not estimate.fits
    with pytest.raises(MemoryBudgetError, match=r"36\.00 GiB of host memory > 4\.00 GiB"):
        estimate.raise_if_too_big()
    assert estimate.changed(max_length=4096).fits
    assert plan(
        **LONG | {"gpu_memory_gib": None}, offload=True, device="cpu", host_memory_gib=4
    ).fits  # no limit of a CPU


def test_the_longest_length_counts_the_host_memory():
    lengths = [
        largest_length(plan(batch_size=1, gpu_memory_gib=24, host_memory_gib=host)) for host in (1, INPUTS_GIB, 128)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[1] < lengths[2]


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_a_method_without_an_engine_has_no_lines_of_one(method):
    estimate = plan(method=method, batch_size=4)
    grpo = plan(batch_size=8 if method == "dpo" else 4, sleeps=True)
    assert estimate.step_bytes == grpo.step_bytes  # DPO computes two sequences for a row
    assert not any("engine" in name or "rollout" in name or "vLLM" in name for name in named(estimate))
    assert named(estimate)["CUDA"].nbytes < named(grpo)["CUDA and vLLM"].nbytes
    assert (estimate.cache_bytes, estimate.chosen) == (0, ())
    assert f"{method}, " in str(estimate)
    assert [way.field for way in plan(method=method, max_length=65_536, batch_size=1, gpu_memory_gib=24).chosen] == [
        "offload"
    ]


def test_what_contradicts_a_method_is_rejected():
    with pytest.raises(ConfigConflictError, match="method='ppo'"):
        plan(method="ppo")
    with pytest.raises(ConfigConflictError, match="has_engine=False"):
        plan(method="sft", has_engine=True)


def test_a_teacher_on_the_students_base_adds_next_to_nothing_and_a_second_model_its_weights():
    grpo, shared = plan(padded=True, gpu_memory_gib=24), plan(method="distill", gpu_memory_gib=24)
    assert shared.held_bytes == grpo.held_bytes
    assert shared.held_bytes + shared.step_bytes < 1.02 * (grpo.held_bytes + grpo.step_bytes)
    second = plan(method="distill", teacher=Qwen3Config(**FIELDS), gpu_memory_gib=24)
    assert (
        second.held_bytes - shared.held_bytes == named(second)["base, teacher"].nbytes == second.request.teacher_bytes
    )
    assert named(second)["base, teacher"].nbytes == named(plan(shared=False))["base, trainer"].nbytes
    assert pace_of(second).train_s >= pace_of(shared).train_s > pace_of(grpo).train_s
    assert "remove_padding=True" not in [each.advice for each in shared.savings()]  # which the trainer does not have
    with pytest.raises(ConfigConflictError, match="method='grpo'"):
        plan(teacher=Qwen3Config(**FIELDS))


def test_what_a_teacher_reads_more_counts_once_its_own_pass_is_the_larger():
    peaks = {}
    for more in (0, 256, 32_768):
        estimate = plan(method="distill", teacher_more=more)
        peaks[more] = estimate.step_bytes
        assert f"x {estimate.request.max_length + more} tokens, without" in named(estimate)["teacher's pass"].why
    assert peaks[0] == peaks[256] < peaks[32_768]
    own = plan(method="distill", teacher_bytes=2**30)
    assert own.held_bytes - plan(method="distill").held_bytes == named(own)["adapter, teacher"].nbytes == 2**30
    asked = plan(method="distill", teacher_top_k=20)
    assert "teacher's pass" not in named(asked)
    # The part of the head that is multiplied with is lifted to float32.
    assert named(asked)["logits"].nbytes > 32_768 * FIELDS["hidden_size"] * 4
    with pytest.raises(ConfigConflictError, match="method='grpo'"):
        plan(teacher_top_k=20)


def test_the_command_plans_a_teacher(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(Qwen3Config(**FIELDS).to_json_string())
    asked = ["plan", str(path), "--batch-size", "1", "--method", "distill", "--json"]
    assert main(asked) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main([*asked, "--teacher", str(path)]) == 0
    taught = json.loads(capsys.readouterr().out)
    assert taught["held_bytes"] > alone["held_bytes"]
    assert taught["request"]["teacher"] == "qwen3"
    assert main([*asked, "--teacher", "http://host:8000"]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["teacher_top_k"] == 20
    save_file({"A": torch.zeros(2, 8)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main([*asked, "--teacher", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["teacher_bytes"] == 2 * 8 * 4
    assert main(["plan", str(path), "--teacher", str(path)]) == 2
    assert "--teacher with --method grpo, which has no teacher. Pass --method distill" in capsys.readouterr().err


def test_the_command_plans_methods_and_host_memory(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(Qwen3Config(**FIELDS).to_json_string())
    asked = ["plan", str(path), "--batch-size", "1", "--gpu-memory", "24"]
    assert main([*asked, "--method", "dpo", "--max-length", "4096"]) == 0
    said = capsys.readouterr().out
    assert "dpo, 2 x 4096 tokens" in said
    assert "  KV cache" not in said  # no engine, no line
    assert main([*asked, "--method", "dpo", "--max-length", "4096", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["method"] == "dpo"
    assert main([*asked, "--max-length", "32768", "--offload", "--host-memory", "4"]) == 3
    said = capsys.readouterr().out
    assert "host_memory" in said
    assert "14.000 GiB too much" in said
    assert "lower max_length" in said
    assert main([*asked, "--method", "sft", "--no-sleep", "--two-copies"]) == 2
    assert "--two-copies, --sleep with --method sft, which makes no engine" in capsys.readouterr().err
