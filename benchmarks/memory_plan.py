"""What fits on which card: the estimate of public shapes, by `qlora-rl plan`. No weight is loaded, no GPU is asked.

python benchmarks/memory_plan.py [--json benchmarks/results/memory_plan.json]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

import transformers
from rounds import measured_at

from qlora_rl.cli import main as command
from qlora_rl.train.run import describe_versions

SHAPES = {
    "Qwen2.5-0.5B": transformers.Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=32_768,
    ),
    "Qwen3-8B": transformers.Qwen3Config(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, max_position_embeddings=40_960,
    ),
    "Llama-3.1-8B": transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False, max_position_embeddings=131_072,
    ),
}  # fmt: skip
CARDS = (16, 24, 48, 80)
WAYS = {
    "one base": [],
    "one base, `--no-sleep --no-offload`": ["--no-sleep", "--no-offload"],
    "two bases": ["--two-copies"],
}
ONE = ["--gpu-memory", "24", "--max-length", "4096", "--batch-size", "1", "--num-generations", "8"]


def written(directory: str, name: str, shape: transformers.PretrainedConfig) -> Path:
    """The config.json of a shape."""
    config = Path(directory) / name / "config.json"
    config.parent.mkdir(exist_ok=True)
    config.write_text(shape.to_json_string())
    return config


def plan(config: Path, *options: str) -> dict:
    """What the command prints with --json."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command(["plan", str(config), *options, "--json"])
    return json.loads(out.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "memory_plan.json")
    arguments = parser.parse_args()
    commit = measured_at()
    result: dict = {
        "command": "python benchmarks/memory_plan.py",
        "commit": commit,
        "versions": describe_versions(),
        "one_options": ONE,
        "longest": {},
    }
    with tempfile.TemporaryDirectory() as directory:
        for name, shape in SHAPES.items():
            config = written(directory, name, shape)
            if name == "Qwen3-8B":
                result["one"] = plan(config, *ONE)
                result["two"] = plan(config, *ONE, "--two-copies")
            for card in CARDS:
                for way, switches in WAYS.items():
                    options = ["--gpu-memory", str(card), "--batch-size", "1", "--num-generations", "8", *switches]
                    key = f"{name}, {way}"
                    result["longest"].setdefault(key, {})[str(card)] = plan(config, *options)["longest_max_length"]
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["longest"], indent=1))


if __name__ == "__main__":
    main()
