"""GRPO on a 4-bit base in forty lines: the demo's task by the public API, or your own model with --model.

python examples/grpo.py                                  # the tiny model, two CPU cores, about a minute
python examples/grpo.py --model Qwen/Qwen3-0.6B --steps 50   # a hub model, on a GPU
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig

from qlora_rl import QLoRAGRPOTrainer, prepare_base
from qlora_rl.demo.task import grpo_rows, reward_exact_match
from qlora_rl.demo.tiny_model import make_tiny_model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="hub name or checkpoint directory (default: the demo's tiny model)")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--out", default="runs/example-grpo")
arguments = parser.parse_args()

base = prepare_base(arguments.model or make_tiny_model())

config = GRPOConfig(
    output_dir=arguments.out,
    max_steps=arguments.steps,
    per_device_train_batch_size=64,
    num_generations=8,
    max_completion_length=8,
    learning_rate=1e-3 if arguments.model is None else 1e-5,
    vllm_max_model_length=64,
    use_cpu=not torch.cuda.is_available(),
    gradient_checkpointing=arguments.model is not None,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
)

with QLoRAGRPOTrainer(
    model=base,
    reward_funcs=reward_exact_match,
    args=config,
    train_dataset=Dataset.from_list(grpo_rows(seed=0, count=400)),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    existing_run="overwrite",
) as trainer:
    trainer.train()
    trainer.sync()  # the last step's policy, for the question below
    rollout = trainer.engine.generate(["37+85=", "58+67="], temperature=0.0, max_tokens=8)
    for ids in rollout.completion_ids:
        print(trainer.engine.tokenizer.decode(ids, skip_special_tokens=True))
