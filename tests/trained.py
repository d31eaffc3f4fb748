"""Run directories as a trainer leaves them, without training; and models whose tokenizer is a byte-level BPE."""

from __future__ import annotations

import warnings
from pathlib import Path

from support import make_model, randomise

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "In 1969 there were 3 people in the capsule; 2 of them walked. It's a long way!",
    "def add(a, b):\n    return a + b\n\nprint(add(12, 345))",
    "She said: what's the answer? The answer is 42, isn't it?",
]


def make_run(base, directory: Path, config=None, *, seed: int = 0, steps: int = 3) -> Path:
    """A finished run with a random adapter on `base`."""
    import torch
    from peft import LoraConfig, get_peft_model

    from qlora_rl import load_base
    from qlora_rl.train.run import CONFIG, METRICS, SUMMARY, RunDirectory, describe_versions

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load_base(base), config or LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    randomise(model, seed=seed)
    run = RunDirectory(directory)
    run.write_json(
        CONFIG,
        {
            "model": base.path.name,
            "base": {"path": str(base.path), "identity": base.identity, **base.spec.as_dict()},
            "grpo": {"bf16": True, "learning_rate": 1e-5, "temperature": 1.0},
            "lora": {"r": 8, "peft_type": "LORA"},
            "versions": describe_versions(),
        },
    )
    for step in range(1, steps + 1):
        run.append(
            METRICS, {"step": step, "reward": step / steps, "mismatch_kl": 1e-6 * step, "completion_length": 3.0}
        )
    run.save_adapter(model, base.parent or base.identity)
    run.write_json(SUMMARY, {"status": "finished", "steps": steps})
    return directory


def make_bpe_model(directory: Path, architecture: str, *, seed: int = 0, spare: int = 8, head_dim: int = 0) -> Path:
    """A random tiny model of an architecture, with a tokenizer that llama.cpp knows how to split for."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    make_model(
        directory,
        architecture=architecture,
        head_dim=head_dim or (128 if architecture == "qwen3" else 32),
        tied=architecture != "llama",
        seed=seed,
    )
    for file in directory.glob("*token*"):
        file.unlink()
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    digits = r"\p{N}{1,3}" if architecture == "llama" else r"\p{N}"
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    fast.save_pretrained(directory)
    _resize(directory, len(fast) + spare, seed)  # larger than the vocabulary, as real models are
    assert AutoTokenizer.from_pretrained(directory).encode(TEXT[0]) == fast.encode(TEXT[0])
    return directory


def _resize(directory: Path, size: int, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    config.vocab_size, config.pad_token_id, config.eos_token_id = size, 0, 0
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim == 2 else parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(directory)
