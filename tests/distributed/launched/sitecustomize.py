"""Python runs this first in every process below `test_launched.py`. In a rank of the command it stands in for what the
test cannot pass:

that the CPU is an accelerator, as accelerate wants for FSDP and DeepSpeed, and a note of what the rank's engine holds
after each push.
"""

import json
import os
import sys
from pathlib import Path

RANK = os.environ.get("RANK", "")

if RANK and "qlora_rl.cli" in sys.orig_argv:  # not the launcher, nor what a rank starts
    if "true" in (os.environ.get("ACCELERATE_USE_FSDP"), os.environ.get("ACCELERATE_USE_DEEPSPEED")):
        from job import cpu_as_accelerator
        from transformers import training_args

        cpu_as_accelerator()
        training_args.is_torch_bf16_gpu_available = lambda: True  # transformers asks a GPU unless it is told use_cpu
    from qlora_rl.train.rollouts.bridge import EngineBridge

    push, held = EngineBridge.sync_weights, []

    def pushed(bridge: EngineBridge) -> None:
        """As before, and noted."""
        push(bridge)
        held.append(dict(bridge.engine.held_adapter(8)))
        Path(os.environ["HELD"] + f"-{RANK}.json").write_text(json.dumps(held))

    EngineBridge.sync_weights = pushed
