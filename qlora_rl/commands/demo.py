"""`qlora-rl demo`: the small real job."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from qlora_rl.commands.codes import COUNT, INTERRUPTED, POSITIVE, UsageError


def add(commands: Any) -> None:
    """The command's arguments."""
    demo = commands.add_parser("demo", help="train a tiny model on this machine: no download, a few minutes")
    demo.add_argument(
        "--model",
        choices=["tiny", "smollm2"],
        default="tiny",
        help="smollm2: SmolLM2-135M-Instruct, downloaded, learns to add, in a few minutes on two cores; of "
        "the other options it takes --steps and --out (default: %(default)s)",
    )
    demo.add_argument("--steps", type=COUNT, help="optimizer steps (default: 100; of smollm2 40)")
    demo.add_argument(
        "--seed", type=int, default=0, help="seed of adapter, data order and sampling (default: %(default)s)"
    )
    demo.add_argument(
        "--out", type=Path, metavar="DIR", help="directory (default: a new one under runs/, or smollm2-demo)"
    )
    demo.add_argument(
        "--sync",
        choices=["lora_adapter", "weights", "trl-merge"],
        default="lora_adapter",
        help="how the policy is synced to vLLM; trl-merge is TRL's own way, for comparison (default: %(default)s)",
    )
    demo.add_argument(
        "--rollout",
        default="colocate",
        metavar="WHERE",
        help="colocate, server (one is started on this host), ray (two actors), or a URL with the key in "
        "QLORA_RL_API_KEY (default: %(default)s)",
    )
    demo.add_argument(
        "--adapter",
        choices=["lora", "dora", "ia3"],
        default="lora",
        help="what is trained; the others need --sync weights (default: %(default)s)",
    )
    demo.add_argument(
        "--temperature", type=POSITIVE, default=1.0, help="sampling temperature of the rollouts (default: %(default)s)"
    )
    demo.add_argument("--quiet", action="store_true", help="no progress bars")
    of_tiny = ("seed", "sync", "rollout", "adapter", "temperature", "quiet")
    demo.set_defaults(run=run, of_tiny={name: demo.get_default(name) for name in of_tiny})


def run(arguments: argparse.Namespace) -> int:
    """Train; an interrupted run says what it left."""
    if arguments.model == "smollm2":
        if wrong := [f"--{name}" for name, usual in arguments.of_tiny.items() if getattr(arguments, name) != usual]:
            raise UsageError(
                f"starting the demo: {', '.join(wrong)} is for the tiny model. Leave it out, or change the run.toml "
                "that this one writes."
            )
        from qlora_rl.demo.real_run import run_real

        return run_real(arguments.out or Path("smollm2-demo"), arguments.steps)
    from qlora_rl.demo.job import DemoSettings, default_out, run_demo, table
    from qlora_rl.engine.loading import loading
    from qlora_rl.train.run import RunDirectory

    settings = DemoSettings(
        steps=arguments.steps or DemoSettings.steps,
        seed=arguments.seed,
        sync=arguments.sync,
        temperature=arguments.temperature,
        rollout=arguments.rollout,
        adapter=arguments.adapter,
    )
    out = arguments.out or default_out(settings)
    opened = RunDirectory(out)  # one that holds a run is rejected now, not after seconds of imports
    with loading("qlora_rl.train.grpo", quietly=True):  # and TRL and vLLM with it
        pass
    from qlora_rl.engine.compat import restored_environment

    try:
        with restored_environment("VLLM_PLUGINS"):  # TorchRL's, where it is installed, brings in all of TorchRL
            os.environ.setdefault("VLLM_PLUGINS", "bitsandbytes")
            summary = run_demo(settings, opened.path, show_progress=not arguments.quiet)
    except KeyboardInterrupt:
        kept = (
            "the run so far and the last adapter are"
            if (out / "adapter").is_dir()
            else "no step was finished; the files so far are"
        )
        print(f"\nqlora-rl: interrupted; {kept} in {out}", file=sys.stderr)
        return INTERRUPTED
    print(f"\n{table(summary)}\n\n  run directory: {out}")
    if settings.sync != "trl-merge":  # whose base is no longer the one on disk
        program = "qlora-rl" if shutil.which("qlora-rl") else Path(sys.executable).parent / "qlora-rl"
        command, named = shlex.quote(str(program)), shlex.quote(str(out))
        kind = "merged" if settings.sync == "weights" else "adapter"
        print(f"  talk to it:     {command} chat {named}\n  take it along:  {command} export {named} --to {kind}")
    return 0
