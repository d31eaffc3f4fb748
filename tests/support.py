"""What tests of several rooms share."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

# Of two trainings that must end alike: that many show a difference in any one step; the others show one that grows.
STEPS = [5, pytest.param(20, marks=pytest.mark.full)]
# What a training on vLLM in its process imports.
FOR_AN_ENGINE = (
    "qlora_rl.train.grpo",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
)

# Of the kernel for 4-bit codes: "emulated" is its code for AVX-512 on any x86-64 processor, with `avx512/emulated.h`
# for instructions.
BUILDS = ("avx512_bf16", "emulated", "avx2")

# Of the tests marked `gpu`: DEVICE=cpu rehearses what a CPU can do of them (scripts/gpu_check.py --device cpu).
DEVICE = os.environ.get("DEVICE", "cuda")
needs_card = pytest.mark.skipif(DEVICE != "cuda", reason="needs a card")

ARCHITECTURES = {
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "llama": ("LlamaConfig", {}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "gemma": ("GemmaConfig", {"hidden_activation": "gelu_pytorch_tanh"}),
}
# The length of Gemma 2's window must be that of the engine, or longer. vLLM has no code of its own for SmolLM3, and
# runs it with transformers'.
OTHERS = {
    "gemma2": ("Gemma2Config", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 1, "sliding_window": 4096}),
    "smollm3": ("SmolLM3Config", {}),
    # Their checkpoints hold linears as one that vLLM fuses by itself elsewhere.
    "glm": ("GlmConfig", {}),
    "glm4": ("Glm4Config", {}),
    "phi3": ("Phi3Config", {}),
}

MIXTURES = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "qwen3_moe-dense": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [0]},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}),
}

# Bases that trainer and engine must both hold.
MATRIX = [
    # architecture, tied, kv heads, quant, double, blocksize, skip
    ("qwen2", True, 2, "nf4", True, 64, ()),
    ("qwen3", False, 1, "nf4", True, 128, ("layers.1.mlp", "o_proj")),
    ("llama-bias", False, 4, "fp4", False, 64, ()),
    ("mistral", False, 2, "nf4", False, 64, ()),
    ("gemma", True, 1, "fp4", True, 64, ()),
    ("llama", True, 2, "none", False, 64, ()),
]
FULL_MATRIX = [
    (architecture, tied, kv_heads, quant, double, blocksize, skip)
    for architecture in ARCHITECTURES
    for tied in (True, False)
    for kv_heads in (1, 4)
    for quant, double, blocksize in (("nf4", True, 64), ("nf4", False, 128), ("fp4", True, 128), ("fp4", False, 64))
    for skip in ((), ("layers.0.self_attn.o_proj",))
    if architecture != "gemma" or tied
]


@functools.cache
def program(path: str) -> Any:
    """A program of the repository as a module, such as "benchmarks/live_memory.py"."""
    file = Path(__file__).parents[1] / path
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # for what it imports of those beside it
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def since_vllm(version: str, what: str) -> pytest.MarkDecorator:
    """A mark: skipped on an older vLLM, which lacks `what`. Where we reject it ourselves, conftest.py skips with that
    message."""
    from qlora_rl.engine.compat import MissingDependencyError, release, vllm_version

    try:
        installed = vllm_version()
    except MissingDependencyError:
        installed = version
    is_older = release(installed) < release(version)
    return pytest.mark.skipif(is_older, reason=f"vLLM {installed} is older than {version}, the first with {what}")


def on_a_card() -> pytest.MarkDecorator:
    """A mark: skipped where there is no NVIDIA GPU, but for rehearsals."""
    import torch

    lacks = DEVICE == "cuda" and not torch.cuda.is_available()
    return pytest.mark.skipif(lacks, reason="needs an NVIDIA GPU, and torch built for it")


def make_model(
    directory: Path,
    *,
    architecture: str = "qwen2",
    seed: int = 0,
    tied: bool = True,
    head_dim: int = 32,
    kv_heads: int = 2,
    positions: int = 128,
    **fields: Any,
) -> Path:
    """A random two-layer model with the demo's tokenizer; `fields` of its config win."""
    import torch
    import transformers

    from qlora_rl.demo.tiny_model import make_tokenizer

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    name, extra = (ARCHITECTURES | OTHERS | MIXTURES)[architecture]
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 4 * head_dim,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config = getattr(transformers, name)(**shape | extra | fields)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # far enough from uniform that a wrong weight shows
                parameter.mul_(3.0)
            else:  # norms and biases are not all ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def quantised_in_flight(source: Path, target: Path, *skip: str, auto: str = "AutoModelForCausalLM") -> Path:
    """A 4-bit checkpoint as others publish them: transformers' own NF4, with `skip` as its `llm_int8_skip_modules`."""
    import torch
    import transformers

    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=[*skip],
    )
    model = getattr(transformers, auto).from_pretrained(source, quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(target)
    kind = "AutoTokenizer" if auto == "AutoModelForCausalLM" else "AutoProcessor"
    getattr(transformers, kind).from_pretrained(source).save_pretrained(target)
    return target


def move_a_scale(source: Path, target: Path) -> Path:
    """A copy of a base, as a plain 4-bit checkpoint, with one weight's offset rounded the other way."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    for name in ("qlora_base.json", "fingerprint.json"):
        (target / name).unlink()
    file = target / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("bitsandbytes__nf4"))
    state = json.loads(bytes(tensors[name].tolist()))
    offset = torch.tensor(state["nested_offset"], dtype=torch.float32)
    state["nested_offset"] = torch.nextafter(offset, offset * 2).item()
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def randomise(model, scale: float = 0.05, seed: int = 0) -> None:
    """Give every trainable B a value."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def score(model, prompts: list[list[int]], rollout, temperature: float = 1.0):
    """|trainer - engine| for every sampled token, [tokens]."""
    import torch

    model.train()
    differences = []
    for prompt, ids, logprobs in zip(prompts, rollout.completion_ids, rollout.logprobs, strict=True):
        with torch.no_grad():
            logits_TV = model(torch.tensor([prompt + ids])).logits[0].float() / temperature
        own_T = logits_TV.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]
        differences.append((own_T - torch.tensor(logprobs)).abs())
    return torch.cat(differences)


def tiny_training(**fields):
    """The least that every config of TRL is told for a short training; `fields` replace and add."""
    import torch

    return {
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
        **fields,
    }


def cpu_seconds(pid: int) -> float:
    """That a process and all below it have computed: how far it is with something, however busy or quick the machine
    is."""
    import psutil

    top = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in (top, *top.children(recursive=True)))


def forking():
    """A context for processes of `run` (resumed.py) and of actors.py: forked, in milliseconds, from a server that has
    imported everything.

    A process has one such server, whoever starts it first: it imports for all of them.
    """
    context = multiprocessing.get_context("forkserver")
    # TRL imports DeepSpeed, where it is installed, in the middle of a training. frozen.py comes last.
    known = [
        "trl",
        "peft",
        "deepspeed",
        *FOR_AN_ENGINE,
        "qlora_rl.engine.fake",
        "resumed",
        "actors",
        "frozen",
    ]
    context.set_forkserver_preload(known)
    here, kept = Path(__file__).resolve().parent, os.environ.get("PYTHONPATH")
    # The server reads it when it starts; sys.path it does not know.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*map(str, (here / "torchrl", here / "distributed", here)), *filter(None, [kept])]
    )
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if kept is None else os.environ.update(PYTHONPATH=kept)
    return context


def fused(sizes=(96, 32, 32), quant="nf4", blocksize=64, columns=128, seed=0):
    """A parameter as vLLM's plugin holds a fused linear, and its parts' own codes and states."""
    import torch

    from qlora_rl.base.quant import require_bitsandbytes

    functional = require_bitsandbytes().functional
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        functional.quantize_4bit(
            torch.randn(size, columns, generator=generator).to(torch.bfloat16), blocksize=blocksize, quant_type=quant
        )
        for size in sizes
    ]
    weight = torch.nn.Parameter(torch.cat([codes for codes, _ in pairs]), requires_grad=False)
    weight.bnb_quant_state = {i: state for i, (_, state) in enumerate(pairs)}
    weight.bnb_shard_offsets = torch.tensor([0, *torch.tensor([len(codes) for codes, _ in pairs]).cumsum(0).tolist()])
    return weight


def built(instructions):
    """One of `BUILDS` of the kernel for 4-bit codes, where this processor has the instructions."""
    from qlora_rl.cpu_features import processor
    from qlora_rl.engine.linears import cpu_kernel

    if processor().architecture != "x86_64" or (
        instructions == "avx512_bf16" and processor().codes_kernel != instructions
    ):
        return None
    found = _emulated() if instructions == "emulated" else cpu_kernel._built(instructions)
    assert not isinstance(found, str), found
    return found


@functools.cache
def _emulated():
    from qlora_rl.engine.linears import cpu_kernel

    header = Path(__file__).with_name("avx512") / "emulated.h"
    text = hashlib.sha256(header.read_bytes()).hexdigest()  # a library is kept under its command and `codes.cpp` alone
    real, cpu_kernel.AVX512_FLAGS = cpu_kernel.AVX512_FLAGS, ("-include", str(header), f"-DEMULATED_{text}")
    try:
        return cpu_kernel._built.__wrapped__("avx512_bf16")
    finally:
        cpu_kernel.AVX512_FLAGS = real


def wait_for_all(fleet) -> None:
    """Until each replica that was lost is back."""
    end = time.monotonic() + 300
    while len(fleet.live) < len(fleet.replicas):
        assert time.monotonic() < end
        time.sleep(0.5)
        fleet.wake()


def command(*arguments, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`qlora-rl` in a process of its own that need not import anything."""
    return forked(_command, [*map(str, arguments)], environment=environment)


def _command(words: list[str]) -> None:
    from qlora_rl.cli import main

    sys.exit(main(words))


def forked(
    work: Callable[[list[str]], None], words: list[str], *, environment: Mapping[str, str], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` for a function: it is forked, as `forking` says."""
    with tempfile.TemporaryDirectory() as said:
        out, errors = Path(said) / "out", Path(said) / "errors"
        process = forking().Process(target=_obey, args=(work, words, dict(environment), out, errors))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout, stderr=errors.read_bytes() if errors.exists() else b"")
        return subprocess.CompletedProcess(words, process.exitcode, out.read_text(), errors.read_text())


def _obey(work, words: list[str], environment: dict[str, str], out: Path, errors: Path) -> None:
    for number, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    work(words)
