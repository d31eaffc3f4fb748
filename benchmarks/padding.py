"""A loss step (forward, loss, backward) on sequences of mixed lengths: padded with whole MLPs and norms, and as the
trainers do it.

    python benchmarks/padding.py [--jobs 512 8192] [--json benchmarks/results/padding.json]

The 0.1 B shape of `bench.py` as NF4, LoRA of rank 16 on every linear, gradient checkpointing, bf16 autocast, one
thread. Both sides are the same model, in turns, in one process. The trainers' side has no padding, MLPs and norms in
tiles, no copies of inputs, and layer inputs in host memory, which is not counted. Seconds of the processor, the peak of
live tensors (as a dispatch mode of torch sees them), and how far losses, logprobs and gradients are apart. About ten
minutes on an idle core; with --jobs the others keep their results.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

# Length of the longest sequence, of the shortest as a part of it, sequences of the micro-batch, layers of the model,
# rounds; with a number behind these all have one prompt of so many tokens. Two of the twelve layers at 512: the ratio
# is that of a layer.
JOBS = {
    "512": (512, 0.25, 8, 2, 3),
    "512, nearly equal": (512, 0.95, 8, 2, 3),
    "512, a prompt of 256": (512, 0.75, 8, 2, 3, 256),
    "8192": (8192, 0.25, 2, 12, 1),
}
PROMPT = 64


def make_batch(count: int, longest: int, least: float, shared: int = 0):
    """Sequences of evenly spread lengths between `least` and all of `longest`, prompts padded left and completions
    right, as TRL does."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (count, longest), generator=generator)
    mask = torch.zeros_like(ids)
    ids[:, :shared] = ids[:1, :shared]
    for row, length in enumerate(torch.linspace(least * longest, longest, count).long().tolist()):
        prompt = PROMPT - row * (PROMPT // 2) // max(1, count - 1)
        mask[row, 0 if shared else PROMPT - prompt : length] = 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : shared or PROMPT] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def make_model(directory: Path, layers: int):
    """A model as the trainer has it, and what makes it that of either side."""
    import shapes
    import torch
    from live_memory import uncounted
    from peft import LoraConfig, get_peft_model
    from trl.trainer.utils import add_fused_lm_head

    from qlora_rl import load_base, prepare_base
    from qlora_rl.adapter.inspected import shorten_lora
    from qlora_rl.train.scoring.logprobs import use_small_tiles
    from qlora_rl.train.scoring.padding import remove_padding
    from qlora_rl.train.setup.layer_inputs import keep_on_host
    from qlora_rl.train.setup.tiled_mlp import tile_layers

    source = shapes.make_model(
        directory / "model",
        replace(shapes.SIZES["0.1b"], layers=layers),
        positions=2 * max(longest for longest, *_ in JOBS.values()),
    )
    bare = load_base(prepare_base(source, out=directory / "base"))
    add_fused_lm_head(bare, outputs=("log_probs", "entropy"))
    use_small_tiles(bare, 1.0)
    forwards = {"padded": bare.forward}
    why = remove_padding(bare)
    if why:
        raise SystemExit(f"measuring without padding: {why}")
    forwards["one row"] = bare.forward
    torch.manual_seed(0)
    model = get_peft_model(bare, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.01)
    plain = {module: set(vars(module)) for module in bare.modules()}
    if why := tile_layers(bare):
        raise SystemExit(f"measuring with MLPs in tiles: {why}")
    shorten_lora(model)
    ours = [(module, name, vars(module)[name]) for module in plain for name in vars(module).keys() - plain[module]]
    keep_on_host(bare, uncounted)
    model.train()
    model.enable_input_require_grads()

    def be(side: str) -> None:
        bare.forward = forwards[side]
        for module, name, value in ours:
            vars(module).pop(name, None)
            if side != "padded":
                setattr(module, name, value)
        bare.gradient_checkpointing_enable({"use_reentrant": False, "offload": side != "padded"})

    return model, be


def step(model, batch):
    """Loss, logprobs and gradients of one micro-batch."""
    import torch

    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        found = model(**batch, fused_lm_head=True)
    found.loss.backward()
    gradients = [p.grad.detach().flatten().float() for p in model.parameters() if p.grad is not None]
    return found.loss.item(), found.log_probs.detach(), torch.cat(gradients)


def job(model, be, name: str) -> dict:
    """One kind of micro-batch: both sides in turns, the first as a warm-up; and how far padding alone moves the padded
    side."""
    import torch
    from live_memory import Live
    from rounds import compare

    longest, least, count, layers, rounds, *shared = JOBS[name]
    batch, sides = make_batch(count, longest, least, *shared), ("padded", "one row")
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    peaks, results = {}, {}
    for number in range(rounds):
        for side in sides[:: 1 if number % 2 else -1]:
            be(side)
            model.zero_grad()
            begun = time.process_time()
            with Live() as live:
                results[side] = step(model, batch)
            seconds[side].append(time.process_time() - begun)
            peaks[side] = live.peak
            print(name, side, f"{seconds[side][-1]:.2f} s, {live.peak / 2**20:.0f} MiB", flush=True)
    found = {}
    if longest <= 512:
        be("padded")
        wider = {
            key: torch.nn.functional.pad(values, (8, 0), value=-100 if key == "labels" else 0)
            for key, values in batch.items()
        }
        again = step(model, wider)
        found = {"padded_with_eight_more": differences(results["padded"], (again[0], again[1][:, 8:], again[2]))}
    return found | {
        "layers": layers,
        "sequences": count,
        "shared_prompt": sum(shared),
        "lengths": [int(least * longest), longest],
        "tokens": int(batch["attention_mask"].sum()),
        "padded_tokens": batch["attention_mask"].numel(),
        "cpu_seconds": seconds,
        "ratio": compare(seconds["one row"], seconds["padded"])["ratio"],
        "peak_bytes": peaks,
        "peak_ratio": peaks["one row"] / peaks["padded"],
        "padded_against_one_row": differences(results["padded"], results["one row"]),
    }


def differences(one, other) -> dict[str, float]:
    """Of two results of `step`."""
    return {
        "loss": abs(one[0] - other[0]),
        "logprob_mean": (one[1] - other[1]).abs().mean().item(),
        "logprob_max": (one[1] - other[1]).abs().max().item(),
        "gradient_relative": ((one[2] - other[2]).norm() / one[2].norm()).item(),
    }


def main() -> None:
    """Measure and print; with --json also write."""
    import torch
    from rounds import described

    from qlora_rl.cpu_matmul import Float32Products

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.jobs:
        # As a trainer multiplies on a processor without bf16 instructions.
        with tempfile.TemporaryDirectory() as directory, Float32Products(torch.bfloat16):
            found = {name: described({"size": "0.1b"} | job(*make_model(Path(directory), JOBS[name][3]), name))}
        print(json.dumps(found, indent=1))
        if arguments.json:
            known = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
            arguments.json.write_text(json.dumps(known | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
