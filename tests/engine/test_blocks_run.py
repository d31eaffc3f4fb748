"""The README's own lines run as they stand: another model, fewer steps, nothing else."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from support import make_model

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_readmes_python_trains(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert "max_steps=100" in block
    assert '"Qwen/Qwen3-0.6B"' in block
    row = re.search(r"# (\{.*\})$", block, re.MULTILINE)[1]  # as the block shows one
    (tmp_path / "problems.jsonl").write_text(f"{row}\n" * 16)
    model = make_model(tmp_path / "model", positions=1024)
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    (Path(model) / "chat_template.jinja").write_text(template)
    shorter = f"max_steps=1, max_completion_length=8, use_cpu={not torch.cuda.is_available()}"
    script = block.replace('"Qwen/Qwen3-0.6B"', repr(str(model))).replace("max_steps=100", shorter)
    (tmp_path / "readme.py").write_text(script)
    environment = {**os.environ, "QLORA_RL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "readme.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for stage in ("loading the base", "starting vLLM on the base", "verifying that trainer and engine hold one base"):
        assert f"     {stage}\n" in done.stderr
    assert "the run is in runs/mine; look at it: qlora-rl report runs/mine" in done.stderr
    run = tmp_path / "runs" / "mine"
    assert json.loads((run / "metrics.jsonl").read_text())["rollout_tokens"] > 0
    assert (run / "adapter" / "adapter_model.safetensors").exists()
