"""The online trainers beside GRPO, and the least config with which each makes a step."""

import os

import torch
from trl import RLOOConfig

from qlora_rl import QLoRAOnlineDPOTrainer, QLoRARLOOTrainer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
from trl.experimental.online_dpo import OnlineDPOConfig


def by_place(completions, **_):
    """A reward that differs within every group and every pair of neighbours."""
    return [float(i % 2) for i in range(len(completions))]


TINY = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": not torch.cuda.is_available(),
    "bf16": True,
}
KINDS = {
    "rloo": (QLoRARLOOTrainer, RLOOConfig, {"num_generations": 2, "max_completion_length": 3}),
    "online_dpo": (QLoRAOnlineDPOTrainer, OnlineDPOConfig, {"max_new_tokens": 3, "max_length": 32}),
}
