"""Every option of GRPOConfig, RLOOConfig and OnlineDPOConfig: a step with it, or the test that holds it, or why it is an exception."""

import dataclasses
import inspect
import math
import re

import pytest
from online_kinds import KINDS
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from qlora_rl.errors import ConfigConflictError

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
# Held by other tests, named in docs/trl-arguments.md.
ELSEWHERE = {"model_init_kwargs", "trust_remote_code", "generation_kwargs"}
# field -> what is said, and by whom. The first three are refused here; the others by TRL, with any trainer.
EXCEPTIONS = {
    "use_transformers_continuous_batching": (True, ConfigConflictError, "rollouts come from vLLM here"),
    "use_transformers_paged": (True, ConfigConflictError, "rollouts come from vLLM here"),
    "vllm_mode": ("server", ConfigConflictError, "rollout= says where rollouts come from"),
    "sync_ref_model": (True, NotImplementedError, "while using a PEFT model"),
    "router_aux_loss_coef": (0.1, ValueError, "is not a Mixture-of-Experts model"),
}
# Without effect where rollouts come from vLLM, or where there is nothing that they are for; they do no harm.
IDLE = {
    "cache_implementation": {"cache_implementation": "static"},
    "ds3_gather_for_generation": {"ds3_gather_for_generation": False},
    "log_multimodal": {"log_multimodal": False},
    "max_tool_calling_iterations": {"max_tool_calling_iterations": 2},
    "ref_model_mixup_alpha": {"ref_model_mixup_alpha": 0.5},
    "ref_model_sync_steps": {"ref_model_sync_steps": 8},
    "remove_unused_columns": {"remove_unused_columns": False},
    "transformers_continuous_batching_config": {"transformers_continuous_batching_config": {"block_size": 16}},
}
SAMPLING = {
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 8},
    "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "use_vllm": {"use_vllm": True},
    "learning_rate": {"learning_rate": 1e-3},
    "disable_dropout": {"disable_dropout": True},
    "reward_weights": {"reward_weights": [2.0]},
}
SHARED = {
    "num_generations": {"num_generations": 4},
    "num_generations_eval": {"num_generations_eval": 1},
    "max_completion_length": {"max_completion_length": 5},
    "shuffle_dataset": {"shuffle_dataset": False},
    "pad_to_multiple_of": {"pad_to_multiple_of": 8},
    "generation_batch_size": {"generation_batch_size": 8},
    "steps_per_generation": {"steps_per_generation": 2},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "beta": {"beta": 0.1},
    "num_iterations": {"num_iterations": 2},
    "epsilon": {"epsilon": 0.1},
    "epsilon_high": {"epsilon_high": 0.3},
    "mask_truncated_completions": {"mask_truncated_completions": True},
    "log_completions": {"log_completions": True, "num_completions_to_print": 1},
    "num_completions_to_print": {"num_completions_to_print": 1},
    "log_unique_prompts": {"log_completions": True, "log_unique_prompts": True},
}
WORKS = {
    "grpo": SAMPLING
    | SHARED
    | IDLE
    | {
        "cast_lm_head_to_fp32": {"cast_lm_head_to_fp32": True},
        "delta": {"delta": 2.0},
        "sapo_temperature_neg": {"loss_type": "sapo", "sapo_temperature_neg": 1.5},
        "sapo_temperature_pos": {"loss_type": "sapo", "sapo_temperature_pos": 0.5},
        "vespo_k_pos": {"loss_type": "vespo", "vespo_k_pos": 1.5},
        "vespo_lambda_pos": {"loss_type": "vespo", "vespo_lambda_pos": 2.5},
        "vespo_k_neg": {"loss_type": "vespo", "vespo_k_neg": 2.5},
        "vespo_lambda_neg": {"loss_type": "vespo", "vespo_lambda_neg": 1.5},
        "importance_sampling_level": {"importance_sampling_level": "sequence"},
        "multi_objective_aggregation": {"multi_objective_aggregation": "normalize_then_sum"},
        "scale_rewards": {"scale_rewards": "batch"},
        "loss_type": {"loss_type": "bnpo"},
        "top_entropy_quantile": {"top_entropy_quantile": 0.5},
        "entropy_coef": {"entropy_coef": 0.01},
        "use_adaptive_entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.01},
        "entropy_coef_min": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_coef_min": 0.001},
        "entropy_coef_max": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_coef_max": 0.1},
        "entropy_coef_delta": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_coef_delta": 0.001},
        "entropy_target": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 0.5},
        "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.5},
        "use_bias_correction_kl": {"use_bias_correction_kl": True, "beta": 0.1},
    },
    "rloo": SAMPLING
    | SHARED
    | {name: value for name, value in IDLE.items() if name != "max_tool_calling_iterations"}
    | {
        "normalize_advantages": {"normalize_advantages": True},
        "reward_clip_range": {"reward_clip_range": (0.0, 0.5)},
    },
    "online_dpo": SAMPLING
    | {name: IDLE[name] for name in ("cache_implementation", "ds3_gather_for_generation", "remove_unused_columns")}
    | {
        "reward_model_path": {"reward_model_path": None},  # TRL 1.16 reads it nowhere
        "max_new_tokens": {"max_new_tokens": 5},
        "max_length": {"max_length": 16},
        "missing_eos_penalty": {"missing_eos_penalty": 1.0},
        "beta": {"beta": [0.1, 0.2]},
        "loss_type": {"loss_type": "ipo"},
    },
}
# They talk to the hub, which no test does.
HUB = {"log_completions_hub_repo"}


def options(kind):
    """The fields that a config of TRL adds to transformers' own, but those of vLLM (tests/train/test_settings.py)."""
    config = GRPOConfig if kind == "grpo" else KINDS[kind][1]
    known = {f.name for f in dataclasses.fields(TrainingArguments)} - {"learning_rate", "remove_unused_columns"}
    return {f.name for f in dataclasses.fields(config)} - known - {"vllm_importance_sampling_cap"}


@pytest.mark.parametrize("kind", WORKS)
def test_no_option_of_trl_is_unknown_here(kind):
    found = {name for name in options(kind) if not name.startswith("vllm_")}
    named = {*WORKS[kind], *EXCEPTIONS, *ELSEWHERE, *HUB}
    assert found <= named, found - named
    assert set(WORKS[kind]) <= found, set(WORKS[kind]) - found
    vllm = {name for name in options(kind) if name.startswith("vllm_")}
    assert vllm <= {f.name for f in dataclasses.fields(GRPOConfig)}  # all of which test_settings.py walks


@pytest.fixture
def train(make_trainer, config, make_online):
    """One or two steps of a kind, with fields of its config; gives the trainer back."""

    def run(kind, fields):
        is_grpo = kind == "grpo"
        trainer = make_trainer(args=config(max_steps=2, **fields)) if is_grpo else make_online(kind, fields)
        trainer.train()
        return trainer

    return run


def assert_trained(trainer):
    assert trainer.state.global_step == 2
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)
    moved = [p for n, p in trainer.model.named_parameters() if "lora_B" in n and p.requires_grad and p.any()]
    assert moved


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, works in WORKS.items() for name in works])
def test_an_option_that_works_with_trl_works_here(kind, name, train):
    trainer = train(kind, WORKS[kind][name])
    if name == "mask_truncated_completions":  # all of these completions are cut off, so nothing is learnt from them
        assert trainer.state.global_step == 2
    else:
        assert_trained(trainer)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in WORKS for name in EXCEPTIONS if name in options(kind)]
)
def test_an_option_that_does_not_work_says_why(kind, name, train):
    value, error, words = EXCEPTIONS[name]
    with pytest.raises(error, match=words):
        train(kind, {name: value})


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_at_every_level_of_importance_sampling_trains(loss, level, train):
    """DAPO, Dr. GRPO, BNPO, LUSPO, CISPO, SAPO, VESPO; GSPO is grpo at the level of sequences."""
    trainer = train("grpo", {"loss_type": loss, "importance_sampling_level": level, "num_iterations": 2})
    assert_trained(trainer)
    assert trainer.loss_type == loss
    assert trainer.importance_sampling_level == level


def test_these_are_all_losses_that_trl_has():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    named = set(re.findall(r'self\.loss_type == "(\w+)"', source))
    for group in re.findall(r"self\.loss_type in \[([^\]]+)\]", source):
        named |= set(re.findall(r'"(\w+)"', group))
    assert named == set(LOSSES)
