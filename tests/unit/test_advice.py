"""`recommend`: what it says can be passed on, and fits."""

import json

import pytest
import transformers

from qlora_rl import ConfigConflictError, recommend
from qlora_rl.advice.settings import learning_rate
from qlora_rl.cli import main
from qlora_rl.fidelity import CORRECTION
from qlora_rl.memory.cards import ROOM
from qlora_rl.memory.pace import pace_of
from qlora_rl.methods import ESTIMATED, METHODS

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


@pytest.mark.parametrize("task", ESTIMATED)
def test_what_is_recommended_is_what_peft_and_trl_take(config_of, task, tmp_path):
    import trl
    from peft import LoraConfig

    advice = recommend(config_of("8b"), task, 80, device="cuda")
    assert advice.fits
    lora = LoraConfig(**advice.lora)
    assert (lora.target_modules, lora.lora_alpha) == ("all-linear", 32)
    kind = getattr(trl, METHODS[task].config)
    config = kind(output_dir=str(tmp_path), use_cpu=True, **advice.config)
    assert config.optim == "paged_adamw_8bit"
    assert config.learning_rate == pytest.approx(10 * kind.__dataclass_fields__["learning_rate"].default)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps in (32, 64)
    assert advice.base == {"quant": "nf4", "double_quant": True}
    assert (CORRECTION.items() <= advice.config.items()) == (task == "grpo")  # the others have no such fields
    for part in (advice.base, advice.lora, advice.config, advice.trainer):
        assert not [n for n in part if n not in advice.reasons and n not in ("task_type", "warmup_steps", *CORRECTION)]


def test_a_second_model_that_teaches_leaves_less_for_the_kv_cache(config_of):
    model = config_of("8b")
    alone, taught = (recommend(model, "distill", 24, teacher=teacher) for teacher in (None, model))
    assert alone.fits
    assert alone.trainer["gpu_memory"] == 24
    caches = [each.estimate.cache_gib for each in (alone, taught)]
    assert caches[0] > caches[1] > 0
    assert taught.estimate.request.teacher_bytes > 5 * 2**30
    assert taught.trainer["teacher_model"] == str(model)


def test_kto_gets_no_micro_batch_of_one_row(config_of):
    assert recommend(config_of("8b"), "sft", 10).config["per_device_train_batch_size"] == 1
    advice = recommend(config_of("8b"), "kto", 10)
    assert advice.config["per_device_train_batch_size"] == 2
    assert "8, 4 and 2 " in advice.reasons["per_device_train_batch_size"]


@pytest.mark.parametrize(("max_steps", "wanted"), [(5, 0), (40, 4), (200, 10)])
def test_a_short_run_is_not_all_warm_up(config_of, max_steps, wanted):
    assert recommend(config_of("8b"), "sft", 80, max_steps=max_steps).config["warmup_steps"] == wanted


@pytest.mark.parametrize("task", ["grpo", "sft"])
def test_a_smaller_card_gets_a_smaller_batch_or_a_shorter_length(config_of, task):
    batches, lengths = [], []
    for gib in (80, 24, 16, 12, 10):
        advice = recommend(config_of("8b"), task, gib, max_length=4096)
        batches.append(advice.config["per_device_train_batch_size"])
        lengths.append(advice.estimate.request.max_length)
        if advice.fits:
            assert advice.estimate.peak_bytes <= gib * 2**30
    assert (batches[0], lengths[0], batches[-1]) == (8, 4096, 1)
    if task == "sft":  # in grpo the fastest step counts
        assert batches == sorted(batches, reverse=True)
    else:
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[-1] < 4096


def test_the_micro_batch_leaves_the_rollouts_the_memory_with_which_a_step_is_fastest(config_of):
    advice = recommend(config_of("8b"), "grpo", 24, max_length=4096)
    estimate = advice.estimate
    assert advice.config["per_device_train_batch_size"] == estimate.request.batch_size < 8
    large = estimate.changed(batch_size=8, sleeps=False, offload=False)
    assert large.fits
    assert large.cache_sequences < estimate.cache_sequences / 4  # the largest that fits starves them
    for batch in (8, 4, 2, 1):
        for sleeps in (False, True):
            other = pace_of(estimate.changed(batch_size=batch, sleeps=sleeps, offload=False), 64)
            assert advice.pace.step_s <= other.step_s * 1.06
    assert estimate.budget_bytes - estimate.peak_bytes >= int(ROOM * estimate.budget_bytes) > 2**28
    assert advice.pace.step_s == advice.pace.rollout_s + advice.pace.train_s
    assert advice.pace.tokens_per_s * advice.pace.rollout_s == pytest.approx(64 * 2048)
    assert "tokens/s" in str(advice)
    assert advice.as_dict()["pace"]["step_s"] == advice.pace.step_s


def test_a_step_takes_longer_on_a_slower_card_with_longer_sequences_and_with_what_saves_memory(config_of):
    estimate = recommend(config_of("8b"), "grpo", 24).estimate
    usual = pace_of(estimate).step_s
    for change in ({"max_length": 4096}, {"gradient_checkpointing": True, "offload": True}, {"sequences": 128}):
        assert pace_of(estimate.changed(**change)).step_s > usual
    assert pace_of(estimate.changed(gpu_memory_gib=80)).step_s < usual
    assert pace_of(estimate.changed(gpu_memory_gib=22.5)).card == pace_of(estimate).card
    assert pace_of(estimate.changed(device="cpu")) is None
    assert pace_of(estimate.changed(gpu_memory_gib=None)) is None
    sft = recommend(config_of("8b"), "sft", 24)
    assert (sft.pace.rollout_s, sft.pace.tokens_per_s) == (0, 0)
    assert "tokens/s" not in str(sft.pace)


def test_what_only_costs_time_is_turned_on_before_the_length_is_lowered(config_of):
    asked = config_of("8b", positions=131_072)
    long = recommend(asked, "grpo", 24, max_length=80_000)
    assert (long.fits, long.config["vllm_max_model_length"], long.config["per_device_train_batch_size"]) == (
        True,
        80_000,
        1,
    )
    assert long.config["gradient_checkpointing_kwargs"] == {"offload": True}
    assert "does not fit without it" in long.reasons["gradient_checkpointing_kwargs"]
    assert "gradient_checkpointing_kwargs" not in recommend(asked, "grpo", 24, max_length=4096).config
    sft = recommend(asked, "sft", 24, max_length=65_536)
    assert sft.config["gradient_checkpointing_kwargs"] == {"offload": True}
    assert "vllm_enable_sleep_mode" not in sft.config


def test_the_command_and_the_function_plan_the_same_for_a_card_and_pass_its_size_on(config_of, capsys):
    path = str(config_of("8b"))
    budgets = [recommend(path, "grpo", 24).estimate.budget_bytes]
    for command in ("recommend", "plan"):
        main([command, path, "--gpu-memory", "24", "--json"])
        said = json.loads(capsys.readouterr().out)
        budgets.append(said.get("estimate", said)["budget_bytes"])
    assert len(set(budgets)) == 1
    assert budgets[0] < 23.64 * 2**30  # what an RTX 4090 reports
    advice = recommend(path, "grpo", 24)
    assert advice.trainer["gpu_memory"] == 24
    assert "a 24 GB card" in advice.reasons["gpu_memory"]
    assert recommend(path, "grpo", 22.5).reasons["gpu_memory"] == "GiB, the limit you gave"
    for command in ("recommend", "plan"):
        main([command, path, "--gpu-memory", "24GB", "--json"])
        said = json.loads(capsys.readouterr().out)
        assert said.get("estimate", said)["budget_bytes"] == budgets[0]
    assert recommend(path, "grpo", "24GiB").trainer["gpu_memory"] == 24
    with pytest.raises(ConfigConflictError, match="gpu_memory='24TB'"):
        recommend(path, "grpo", "24TB")


def test_large_models_get_half_the_rate_in_sft_and_a_cpu_no_paged_optimizer(config_of):
    assert recommend(config_of("32b"), "sft", 80).config["learning_rate"] == pytest.approx(1e-4)
    assert recommend(config_of("8b"), "sft", 80).config["learning_rate"] == pytest.approx(2e-4)
    assert recommend(config_of("8b"), "sft", device="cpu").config["optim"] == "adamw_torch_fused"
    assert recommend(config_of("8b", positions=1024), "sft").config["max_length"] == 1024


@pytest.mark.parametrize(("length", "completion"), [(None, 128), (512, 256)])
def test_a_first_run_on_a_cpu_is_small_and_says_why(config_of, length, completion):
    for task in ("grpo", "rloo"):
        advice = recommend(config_of("8b"), task, device="cpu", max_length=length)
        config = advice.config
        assert config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] == 16
        assert config["max_completion_length"] == completion
        assert advice.reasons["gradient_accumulation_steps"].startswith("no GPU here: 16 completions per step")
        assert advice.reasons["max_completion_length"].startswith("no GPU here: ") == (length is None)
        on_gpu = recommend(config_of("8b"), task, device="cuda", max_length=length)
        assert on_gpu.config["max_completion_length"] == (length or 2048) // 2
        assert "no GPU" not in str(on_gpu)


def test_small_models_and_short_runs_get_higher_rates():
    assert [learning_rate("grpo", size) for size in (32e9, 8e9, 0.6e9, 0.135e9, 0.001e9)] == [
        5e-6,
        1e-5,
        4e-5,
        8e-5,
        1e-4,
    ]
    assert learning_rate("grpo", 0.135e9, 40) == 1.2e-4
    assert [learning_rate("sft", size) for size in (32e9, 8e9, 0.135e9)] == [1e-4, 2e-4, 2e-4]
    assert learning_rate("sft", 8e9, 40) == 3e-4
    assert learning_rate("dpo", 0.5e9) == 4e-5


def test_a_rate_comes_with_its_reason(config_of, capsys):
    path = str(config_of("8b"))
    assert main(["recommend", path, "--json"]) == 0
    usual = json.loads(capsys.readouterr().out)
    assert (usual["config"]["max_steps"], usual["config"]["learning_rate"]) == (200, 1e-5)
    assert usual["reasons"]["learning_rate"].startswith("10 times TRL's default for full fine-tuning (LWR)")
    assert main(["recommend", path, "--json", "--max-steps", "40"]) == 0
    short = json.loads(capsys.readouterr().out)
    assert (short["config"]["max_steps"], short["config"]["learning_rate"]) == (40, 1.5e-5)
    assert "15 times" in short["reasons"]["learning_rate"]
    assert "sqrt(8 B / parameters) = 0.49" in recommend(config_of("32b"), "grpo", 80).reasons["learning_rate"]


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


def test_another_task_is_rejected(config_of):
    with pytest.raises(ConfigConflictError, match="task='ppo'"):
        recommend(config_of("8b"), "ppo")


def test_experts_are_4_bit_where_they_do_not_fit_in_16(tmp_path):
    config = transformers.Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, moe_intermediate_size=768, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        tie_word_embeddings=False, max_position_embeddings=40_960,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    small, large = (recommend(str(tmp_path / "config.json"), gpu_memory=size) for size in (24, 192))
    assert small.estimate.fits
    assert small.base == {"quant": "nf4", "double_quant": True, "quantize_experts": True}
    assert large.estimate.fits
    assert "quantize_experts" not in large.base
