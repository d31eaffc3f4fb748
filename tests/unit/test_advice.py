"""`recommend`: what it says can be passed on, and fits."""

import json

import pytest
import transformers

from qlora_rl import ConfigConflictError, recommend
from qlora_rl.cli import main
from qlora_rl.fidelity import CORRECTION

SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "32b": {"hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 64, "num_attention_heads": 40},
}


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    def write(name, positions=40_960):
        path = tmp_path_factory.mktemp("configs") / f"{name}.json"
        fields = {"model_type": "qwen3", "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
        path.write_text(json.dumps(fields | SHAPES[name] | {"max_position_embeddings": positions}))
        return path

    return write


@pytest.mark.parametrize("task", ["grpo", "rloo", "sft", "dpo"])
def test_what_is_recommended_is_what_peft_and_trl_take(config_of, task, tmp_path):
    import trl
    from peft import LoraConfig

    advice = recommend(config_of("8b"), task, 80, device="cuda")
    assert advice.fits
    lora = LoraConfig(**advice.lora)
    assert (lora.target_modules, lora.lora_alpha) == ("all-linear", 32)
    kind = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig, "sft": trl.SFTConfig, "dpo": trl.DPOConfig}[task]
    config = kind(output_dir=str(tmp_path), use_cpu=True, **advice.config)
    assert config.optim == "paged_adamw_8bit"
    assert config.learning_rate == pytest.approx(10 * kind.__dataclass_fields__["learning_rate"].default)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps in (32, 64)
    assert advice.base == {"quant": "nf4", "double_quant": True}
    assert (CORRECTION.items() <= advice.config.items()) == (task == "grpo")  # the others have no such fields
    for part in (advice.base, advice.lora, advice.config, advice.trainer):
        assert not [n for n in part if n not in advice.reasons and n not in ("task_type", "warmup_steps", *CORRECTION)]


def test_a_smaller_card_gets_a_smaller_batch_and_then_a_shorter_length(config_of):
    batches, lengths = [], []
    for gib in (80, 24, 16, 12, 10):
        advice = recommend(config_of("8b"), "grpo", gib, max_length=4096)
        batches.append(advice.config["per_device_train_batch_size"])
        lengths.append(advice.config["vllm_max_model_length"])
        if advice.fits:
            assert advice.ledger.peak_bytes <= gib * 2**30
    assert batches == sorted(batches, reverse=True)
    assert lengths == sorted(lengths, reverse=True)
    assert (batches[0], lengths[0]) == (8, 4096)
    assert batches[-1] == 1
    assert lengths[-1] < 4096


def test_what_only_costs_time_is_turned_on_before_the_length_is_lowered(config_of):
    asked = config_of("8b", positions=131_072)
    long = recommend(asked, "grpo", 24, max_length=80_000)
    assert (long.fits, long.config["vllm_max_model_length"], long.config["per_device_train_batch_size"]) == (
        True,
        80_000,
        1,
    )
    assert long.config["gradient_checkpointing_kwargs"] == {"offload": True}
    assert "fits only so" in long.reasons["gradient_checkpointing_kwargs"]
    assert "gradient_checkpointing_kwargs" not in recommend(asked, "grpo", 24, max_length=4096).config
    sft = recommend(asked, "sft", 24, max_length=65_536)
    assert sft.config["gradient_checkpointing_kwargs"] == {"offload": True}
    assert "vllm_enable_sleep_mode" not in sft.config


def test_the_command_and_the_function_plan_the_same_for_a_card_and_pass_its_size_on(config_of, capsys):
    path = str(config_of("8b"))
    budgets = [recommend(path, "grpo", 24).ledger.budget_bytes]
    for command in ("recommend", "plan"):
        main([command, path, "--gpu-memory", "24", "--json"])
        said = json.loads(capsys.readouterr().out)
        budgets.append(said.get("ledger", said)["budget_bytes"])
    assert len(set(budgets)) == 1
    assert budgets[0] < 23.64 * 2**30  # what an RTX 4090 reports
    advice = recommend(path, "grpo", 24)
    assert advice.trainer["gpu_memory"] == 24
    assert "card of 24 GB" in advice.reasons["gpu_memory"]
    assert recommend(path, "grpo", 22.5).reasons["gpu_memory"] == "as asked"
    for command in ("recommend", "plan"):
        main([command, path, "--gpu-memory", "24GB", "--json"])
        said = json.loads(capsys.readouterr().out)
        assert said.get("ledger", said)["budget_bytes"] == budgets[0]
    assert recommend(path, "grpo", "24GiB").trainer["gpu_memory"] == 24
    with pytest.raises(ConfigConflictError, match="gpu_memory='24TB' is not a size"):
        recommend(path, "grpo", "24TB")


def test_large_models_get_half_the_rate_in_sft_and_a_cpu_no_paged_optimizer(config_of):
    assert recommend(config_of("32b"), "sft", 80).config["learning_rate"] == pytest.approx(1e-4)
    assert recommend(config_of("8b"), "sft", 80).config["learning_rate"] == pytest.approx(2e-4)
    assert recommend(config_of("8b"), "sft", device="cpu").config["optim"] == "adamw_torch_fused"
    assert recommend(config_of("8b", positions=1024), "sft").config["max_length"] == 1024


def test_the_command_says_what_and_why_and_whether_it_fits(config_of, capsys):
    path = str(config_of("8b"))
    assert main(["recommend", path, "--task", "dpo", "--gpu-memory", "48"]) == 0
    said = capsys.readouterr().out
    assert "learning_rate = 1e-05" in said
    assert "LWR" in said
    assert main(["recommend", path, "--gpu-memory", "2"]) == 3
    capsys.readouterr()
    assert main(["recommend", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lora"]["r"] == 16


def test_another_task_is_refused(config_of):
    with pytest.raises(ConfigConflictError, match="task='ppo' is not one of"):
        recommend(config_of("8b"), "ppo")


def test_experts_are_4_bit_where_they_do_not_fit_in_16(tmp_path):
    config = transformers.Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, moe_intermediate_size=768, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        tie_word_embeddings=False, max_position_embeddings=40_960,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    small, large = (recommend(str(tmp_path / "config.json"), gpu_memory=size) for size in (24, 192))
    assert small.ledger.fits
    assert small.base == {"quant": "nf4", "double_quant": True, "quantize_experts": True}
    assert large.ledger.fits
    assert "quantize_experts" not in large.base
