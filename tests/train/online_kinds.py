"""The online trainers beside GRPO, and the least config with which each makes a step."""

import os

from support import tiny_training
from trl import RLOOConfig

from qlora_rl import QLoRAOnlineDPOTrainer, QLoRARLOOTrainer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
from trl.experimental.online_dpo import OnlineDPOConfig


def by_place(completions, **_):
    """A reward that differs within every pair of neighbours, and between every two that are half of all apart, which
    online DPO compares."""
    half = len(completions) // 2
    return [float((i + (half % 2 == 0 and i >= half)) % 2) for i in range(len(completions))]


TINY = tiny_training(max_steps=2)
KINDS = {
    "rloo": (QLoRARLOOTrainer, RLOOConfig, {"num_generations": 2, "max_completion_length": 3}),
    "online_dpo": (QLoRAOnlineDPOTrainer, OnlineDPOConfig, {"max_new_tokens": 3, "max_length": 32}),
}
