"""Full weights into a server's worker by NCCL. Written without GPUs; not yet seen to pass."""

import pytest
import torch
from kinds import FULL_WEIGHTS
from pair import Pair, trained

from qlora_rl import Canary, DenseSync, ServerEngine, bake_base, start_server, verify_base

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
OPTIONS = {"max_lora_rank": 0, "max_model_length": 32, "max_num_seqs": 8, "gpu_memory_utilization": 0.3}


def test_pushes_past_http_are_verified_and_the_ones_before_them_are_gone(base, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # of the server; this process has looked already
    baked = bake_base(base)
    with (
        start_server(baked, timeout_s=280, **OPTIONS) as server,
        ServerEngine(server.url, api_key=server.key, weights_by="nccl") as engine,
    ):
        pair = Pair(engine, baked, tmp_path)
        model = trained(pair.base, FULL_WEIGHTS["dora"])
        assert next(model.parameters()).is_cuda
        assert verify_base(model, engine).is_verified
        canary = Canary(model, engine)
        canary.calibrate()
        strategy = DenseSync(model, engine, canary)
        for scale in (1.0, 1.5):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.mul_(scale)
            report = strategy.push()
            assert report.transport == "nccl"
            assert report.canary_difference < canary.threshold
        strategy.verify()
