"""Random Qwen2 models of four sizes, made on the fly, and what is needed to sample from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from qlora_rl.base.checkpoint import PreparedBase, load_base, prepare_base


@dataclass(frozen=True)
class Shape:
    """Of a Qwen2: hidden size, width of the feed-forward part, layers, heads of `head_dim`; words, by default those of
    the demo's tokenizer."""

    hidden: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    vocabulary: int | None = None


SIZES = {
    "demo": Shape(256, 768, 4, 4, 2),
    "0.1b": Shape(768, 3072, 12, 12, 4),
    "0.4b": Shape(1024, 4096, 24, 16, 4),
    "8b": Shape(4096, 14336, 32, 32, 8, head_dim=128, vocabulary=128_256),
}
RANK = 16


def make_model(directory: Path, shape: Shape, positions: int = 256) -> Path:
    """A bf16 checkpoint with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from qlora_rl.demo.tiny_model import make_tokenizer

    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=shape.vocabulary or len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_bases(directory: Path, shape: Shape) -> tuple[PreparedBase, PreparedBase]:
    """The NF4 base of a random model (double quantisation), and the same model in bf16."""
    model = make_model(directory / "model", shape)
    return prepare_base(model, out=directory / "nf4"), prepare_base(model, "none", out=directory / "bf16")


def make_adapter(base: PreparedBase, directory: Path) -> Path:
    """A canonical PEFT directory of rank 16 on all linears, with random A and B."""
    from peft import LoraConfig, get_peft_model

    from qlora_rl.adapter.export import export_adapter
    from qlora_rl.adapter.store import write_adapter

    torch.manual_seed(0)
    model = get_peft_model(load_base(base), LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.01)
    directory.mkdir()
    write_adapter(export_adapter(model, dtype=torch.bfloat16), directory)
    return directory
