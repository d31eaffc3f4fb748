"""Every option of GRPOConfig, RLOOConfig and OnlineDPOConfig: a step with it, or the test that holds it, or why it is
an exception."""

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
# Held by other tests, named in rows.toml.
ELSEWHERE = {"model_init_kwargs", "trust_remote_code", "generation_kwargs"}
# field -> what is said, and by whom. A ConfigConflictError is ours; the others are TRL's, with any trainer.
EXCEPTIONS = {
    "use_transformers_continuous_batching": (True, ConfigConflictError, "rollouts come from vLLM here"),
    "use_transformers_paged": (True, ConfigConflictError, "rollouts come from vLLM here"),
    "vllm_mode": ("server", ConfigConflictError, "rollout='server' starts a server next to the trainer"),
    "sync_ref_model": (True, NotImplementedError, "while using a PEFT model"),
    "cast_lm_head_to_fp32": (True, ConfigConflictError, "lifts the output head of the trainer's base"),
    "router_aux_loss_coef": (0.1, ValueError, "is not a Mixture-of-Experts model"),
}
# Without effect where rollouts come from vLLM, or where there is nothing that they are for; they do no harm.
IDLE = {"cache_implementation": "static", "ds3_gather_for_generation": False, "remove_unused_columns": False}
IDLE_IN_GROUPS = {
    "log_multimodal": False,
    "ref_model_mixup_alpha": 0.5,
    "ref_model_sync_steps": 8,
    "transformers_continuous_batching_config": {"block_size": 16},
}
PLAIN = {"use_vllm": True, "learning_rate": 1e-3, "disable_dropout": True, "reward_weights": [2.0]}
# FakeEngine samples by temperature alone; these reach a stand-in for LocalEngine, which notes them.
FILTERS = {"top_p": 0.9, "top_k": 8, "min_p": 0.05, "repetition_penalty": 1.1}
IN_GROUPS = [
    PLAIN
    | IDLE
    | IDLE_IN_GROUPS
    | {"shuffle_dataset": False, "pad_to_multiple_of": 8, "num_generations_eval": 1}
    | {"chat_template_kwargs": {"enable_thinking": False}},
    FILTERS | {"temperature": 0.7, "max_completion_length": 5},
    {"num_generations": 4, "generation_batch_size": 8},
    {"steps_per_generation": 2, "num_iterations": 2, "epsilon": 0.1, "epsilon_high": 0.3},
    {"log_completions": True, "num_completions_to_print": 1, "log_unique_prompts": True},
    {"mask_truncated_completions": True},
]
# Its weights are of sequences already, and take a correction of tokens only.
VESPO = {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"}
# Options that go together, tried in one training.
WORKS = {
    "grpo": [
        *IN_GROUPS,
        {"beta": 0.1, "use_bias_correction_kl": True, "delta": 2.0, "max_tool_calling_iterations": 2},
        {"loss_type": "sapo", "sapo_temperature_neg": 1.5, "sapo_temperature_pos": 0.5},
        VESPO | {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.5},
        {"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum", "top_entropy_quantile": 0.5},
        {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_coef_min": 0.001, "entropy_coef_max": 0.1}
        | {"entropy_coef_delta": 0.001, "entropy_target": 0.5},
        {"importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.5},
    ],
    "rloo": [*IN_GROUPS, {"beta": 0.1, "normalize_advantages": True, "reward_clip_range": (0.0, 0.5)}, {"beta": 0.0}],
    "online_dpo": [
        PLAIN | IDLE | {"max_new_tokens": 5, "max_length": 16, "missing_eos_penalty": 1.0},
        FILTERS | {"temperature": 0.7},
        {"beta": [0.1, 0.2], "loss_type": "ipo"},
        {"reward_model_path": None},  # TRL 1.16 reads it nowhere
    ],
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
    tried = {name for fields in WORKS[kind] for name in fields if not name.startswith("vllm_")}
    assert found <= tried | {*EXCEPTIONS, *ELSEWHERE, *HUB}
    assert tried <= found
    vllm = {name for name in options(kind) if name.startswith("vllm_")}
    assert vllm <= {f.name for f in dataclasses.fields(GRPOConfig)}  # all of which test_settings.py walks


@pytest.fixture
def train(make_trainer, config, make_online, request):
    """Two steps of a kind, with fields of its config; gives the trainer back."""

    def run(kind, fields):
        arguments = {}
        if any(name in fields for name in FILTERS):
            request.getfixturevalue("colocate")
            arguments = {"rollout": "colocate"}
            if kind == "grpo":  # the stand-in reports the whole vocabulary's: far off, which TRL would leave out
                fields = fields | {"vllm_importance_sampling_mode": "token_truncate"}
        if kind == "grpo":
            trainer = make_trainer(args=config(max_steps=2, **fields), **arguments)
        else:
            trainer = make_online(kind, fields, **arguments)
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
@pytest.mark.parametrize(
    ("kind", "fields"),
    [(kind, fields) for kind, works in WORKS.items() for fields in works],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_what_works_with_trl_works_here(kind, fields, train):
    trainer = train(kind, fields)
    if "mask_truncated_completions" in fields:  # all of these completions are cut off, so nothing is learnt from them
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
        train(kind, {name: value} | ({"beta": 0.1} if name == "sync_ref_model" else {}))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_at_every_level_of_importance_sampling_trains(loss, level, train):
    """DAPO, Dr. GRPO, BNPO, LUSPO, CISPO, SAPO, VESPO; GSPO is grpo at the level of sequences."""
    fields = {"loss_type": loss, "importance_sampling_level": level, "num_iterations": 2}
    trainer = train("grpo", (VESPO if loss == "vespo" else {}) | fields)
    assert_trained(trainer)
    assert trainer.loss_type == loss
    assert trainer.importance_sampling_level == level


def test_these_are_all_losses_that_trl_has():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    named = set(re.findall(r'self\.loss_type == "(\w+)"', source))
    for group in re.findall(r"self\.loss_type in \[([^\]]+)\]", source):
        named |= set(re.findall(r'"(\w+)"', group))
    assert named == set(LOSSES)
