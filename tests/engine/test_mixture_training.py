"""GRPO of small mixtures with real vLLM, in one process and through a server."""

import json

import pytest
from datasets import Dataset
from peft import LoraConfig
from support import make_model, tiny_training
from transformers import TrainerCallback
from trl import GRPOConfig, RLOOConfig

from qlora_rl import PolicyMismatchError, QLoRAGRPOTrainer, QLoRARLOOTrainer, prepare_base
from qlora_rl.base.experts import ATTENTION

STEPS = 3


def by_length(completions, **_):
    return [float(len(completion) % 3) for completion in completions]


@pytest.mark.parametrize(
    ("architecture", "rollout", "replay", "kind"),
    [
        ("mixtral", "colocate", False, (QLoRAGRPOTrainer, GRPOConfig)),
        ("qwen3_moe", "colocate", True, (QLoRAGRPOTrainer, GRPOConfig)),
        ("olmoe", "colocate", True, (QLoRARLOOTrainer, RLOOConfig)),
        ("olmoe", "server", False, (QLoRAGRPOTrainer, GRPOConfig)),
    ],
)
def test_a_mixture_is_trained_with_adapters_on_attention(architecture, rollout, replay, kind, tmp_path):
    base = prepare_base(make_model(tmp_path / "model", architecture=architecture, tied=False), out=tmp_path / "base")
    options = tiny_training(
        output_dir=str(tmp_path / "run"), num_generations=4, max_steps=STEPS, per_device_train_batch_size=8
    )
    trainer_class, config_class = kind
    with trainer_class(
        model=base,
        args=config_class(**options | {"max_completion_length": 16}),
        peft_config=LoraConfig(r=8, target_modules=list(ATTENTION)),
        rollout=rollout,
        routing_replay=replay,
        engine_options={"max_model_length": 64},
        reward_funcs=by_length,
        train_dataset=Dataset.from_list([{"prompt": f"{i}+1="} for i in range(16)]),
    ) as trainer:
        loan = getattr(trainer.model.get_base_model(), "qlora_loan", None)
        assert (loan is not None) == (rollout == "colocate")
        if loan is not None:  # codes are shared, mixtures are not
            assert not any(".self_attn." in name and "norm" not in name for name in loan.copied)
            assert (
                sum(".experts." in name for name in loan.copied)
                == 2 * 3 * trainer.model.get_base_model().model.layers[0].mlp.gate.num_experts
            )
        trainer.train()
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["policy_version"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["base_verified"] for step in steps)
    assert max(step["mismatch_kl"] for step in steps) < 5e-3
    # What the engine chose is known of one in this process.
    assert all(("routing_agreement" in step) == (rollout == "colocate") for step in steps)
    assert min(step.get("routing_agreement", 1.0) for step in steps) > 0.9
    assert all(("routing_weight_diff_mean" in step) == (rollout == "colocate") for step in steps)
    assert max(step.get("routing_weight_diff_mean", 0.0) for step in steps) < 0.02
    rejected = [step["routing_weights_rejected"] for step in steps if "routing_weights_rejected" in step]
    assert len(rejected) == (STEPS if replay else 0)
    assert all(share < 0.01 for share in rejected)


def roll(router):
    """Each expert gets the logit of its neighbour; on a processor with AVX-512 vLLM has packed the weight away."""
    if router.weight.numel():
        router.weight.data.copy_(router.weight.data.roll(1, 0))
    else:
        product = router.cpu_linear
        router.cpu_linear = lambda x, weight, bias: product(x, weight, bias).roll(1, -1)


def test_a_router_that_becomes_another_one_is_noticed_while_its_routing_is_replayed(tmp_path):
    base = prepare_base(make_model(tmp_path / "model", architecture="qwen3_moe", tied=False), out=tmp_path / "base")
    options = tiny_training(
        output_dir=str(tmp_path / "run"), num_generations=4, max_steps=4, per_device_train_batch_size=8
    )
    with QLoRAGRPOTrainer(
        model=base,
        args=GRPOConfig(**options | {"max_completion_length": 16}),
        peft_config=LoraConfig(r=8, target_modules=list(ATTENTION)),
        rollout="colocate",
        routing_replay=True,
        engine_options={"max_model_length": 64},
        reward_funcs=by_length,
        train_dataset=Dataset.from_list([{"prompt": f"{i}+1="} for i in range(16)]),
        canary_every=0,
    ) as trainer:

        class Rolls(TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                if state.global_step == 2:
                    runner = trainer.bridge.engine.llm.llm_engine.model_executor.driver_worker.model_runner
                    for name, module in runner.get_model().named_modules():
                        if name.endswith(".mlp.gate"):
                            roll(module)

        trainer.add_callback(Rolls())
        with pytest.raises(PolicyMismatchError) as caught:
            trainer.train()
    assert caught.value.cause == "base"
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    assert all(step["routing_weights_rejected"] < 0.01 for step in steps)
    # The third step has no line, because the alarm ends it; TRL's log has its value, next to those before.
    assert trainer._metrics["train"]["qlora_rl/routing_weights_rejected"][-1] > 0.1
