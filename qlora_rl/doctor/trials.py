"""Each library imported, and used for something small, in a process of its own: one that crashes takes none of ours
with it.

`python -m qlora_rl.doctor.trials FILE NAME ...` runs the trials of those names and writes one line of JSON for each
into FILE.
"""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from qlora_rl.doctor.finding import Finding

PART = "works"
LIMIT_S = 300.0


def _torch() -> str:
    import torch

    from qlora_rl.cpu_features import processor
    from qlora_rl.memory.cards import RESERVE_GIB

    said = [str(processor()), f"threads: {torch.get_num_threads()}"]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(i)
            x = torch.ones(64, 64, dtype=torch.bfloat16, device=f"cuda:{i}")
            assert bool((x @ x == 64).all()), f"a product of ones on {card.name} is wrong"
            free = torch.cuda.mem_get_info(i)[0] / 2**30
            said.append(
                f"{card.name}, capability {card.major}.{card.minor}, {card.total_memory / 2**30:.1f} GiB, "
                f"{free - RESERVE_GIB:.1f} usable now"
            )
        said.append(f"CUDA {torch.version.cuda}")
    elif Path("/proc/driver/nvidia/version").exists():
        raise RuntimeError(
            f"there is an NVIDIA driver, but torch {torch.__version__} finds no card: it may be a CPU build, the "
            "driver too old, or CUDA_VISIBLE_DEVICES empty"
        )
    else:
        said.append("no NVIDIA driver")
    return "; ".join(said)


def _bitsandbytes() -> str:
    """A weight quantised and decoded by its kernels is what plain torch makes of the codes."""
    import torch

    from qlora_rl.base.decode import decode_plainly, decoder
    from qlora_rl.base.quant import QuantSpec, dequantize_exactly, quantize_linear, require_bitsandbytes
    from qlora_rl.engine.linears.cpu_kernel import codes_kernel

    weight = torch.linspace(-1, 1, 64 * 128).reshape(64, 128).bfloat16()
    tensors = quantize_linear(weight, QuantSpec(double_quant=False))
    codes, absmax = tensors.pop("weight"), tensors["weight.absmax"]
    exact = dequantize_exactly(codes, absmax, tensors["weight.quant_map"], 64, weight.shape).bfloat16()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = require_bitsandbytes().functional.QuantState.from_dict(tensors, device=torch.device(device))
    assert torch.equal(decode_plainly(codes.to(device), state).cpu(), exact), (
        f"4-bit weights are decoded wrongly on {device}"
    )
    if device == "cuda":
        return "NF4 decoded on the GPU, bit for bit what plain torch gives"
    out = torch.empty_like(weight)
    if (decode := decoder("nf4", 64)) is None:
        return "NF4 decoded in plain torch: no compiled CPU kernels here, so this is slow"
    decode(codes, absmax, out)
    assert torch.equal(out, exact), "4-bit weights are decoded wrongly by its CPU kernel"
    kernel = codes_kernel()
    if isinstance(kernel, str):
        return (
            "NF4 decoded by its CPU kernel, bit for bit what plain torch gives; rollouts without our kernel for "
            f"codes: {kernel}"
        )
    kernel.decode(codes, absmax, tensors["weight.quant_map"], out, 64)
    assert torch.equal(out, exact), f"4-bit weights are decoded wrongly by our kernel for {kernel.instructions}"
    return f"NF4 decoded by its CPU kernel and by ours for {kernel.instructions}, bit for bit what plain torch gives"


def _trainers() -> str:
    """The names of `train/` and `adapter/`: what transformers, PEFT, TRL and accelerate must hold for us."""
    import qlora_rl

    for name in ("QLoRAGRPOTrainer", "QLoRARLOOTrainer", "QLoRASFTTrainer", "QLoRADPOTrainer", "judge_adapter"):
        getattr(qlora_rl, name)
    return "transformers, peft, trl and the trainers can be imported"


def _vllm() -> str:
    from qlora_rl.engine.compat import platform_is_cpu, require_bitsandbytes_support, vllm_version

    version, where = vllm_version(), require_bitsandbytes_support()
    # What an engine starts with; its package alone imports little.
    importlib.import_module("vllm.entrypoints.llm")
    return f"{version} can be imported, {'CPU' if platform_is_cpu() else 'GPU'} backend, bitsandbytes from {where}"


def _torchvision() -> str:
    """With a build for another torch, imports inside transformers fail."""
    importlib.import_module("torchvision")
    return "fits this torch"


TRIALS: dict[str, Callable[[], str]] = {
    "torch": _torch,
    "bitsandbytes": _bitsandbytes,
    "torchvision": _torchvision,
    "trainers": _trainers,
    "vllm": _vllm,
}


# A torchvision of another build takes transformers and vLLM with it.
_ADVICE = {
    "torchvision": "pip uninstall -y torchvision torchaudio torchcodec: models of text need none of them; for images "
    "install the torchvision that was built for this torch"
}


def run_trials(names: list[str], limit_s: float = LIMIT_S) -> list[Finding]:
    """A finding for each trial, in their order; where one ends the process, the others run in another."""
    found: list[Finding] = []
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "found"
        while left := names[len(found) :]:
            file.touch()
            command = [sys.executable, "-m", "qlora_rl.doctor.trials", str(file), *left]
            before = len(found)
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, errors="replace")
                end = _ending(done.returncode, done.stderr)
            except subprocess.TimeoutExpired:
                end = f"no answer within {limit_s:.0f} s"
            found += [Finding(PART, **json.loads(line)) for line in file.read_text().splitlines()]
            file.unlink()
            if len(found) - before < len(left):
                found.append(Finding(PART, names[len(found)], end, "problem", "import it by itself to see more"))
    return found


def _ending(code: int, errors: str) -> str:
    """How the process of a trial ended without an answer; SIGILL is a build for another processor."""
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    last = errors.strip().splitlines()[-1:] or [""]
    return f"the process ended with {code} {last[0]}".strip()


def main(file: str, *names: str) -> None:
    """Run the trials of these names; a failed one is a line too."""
    for name in names:
        try:
            line = {"name": name, "found": TRIALS[name]()}
        except Exception as error:
            first = str(error).strip().splitlines()[:1] or [""]
            line = {
                "name": name, "found": f"{type(error).__name__}: {first[0]}", "state": "problem",
                "advice": _ADVICE.get(name, "see the versions above; docs/troubleshooting.md"),
            }  # fmt: skip
        with open(file, "a") as out:
            print(json.dumps(line), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
