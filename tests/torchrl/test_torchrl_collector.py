"""TorchRL's own collector, loss and trainer hook with our sender; the example as it stands."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sides import fake_engine, move, policy
from test_torchrl_scheme import agrees, joined
from torchrl.collectors import Collector
from torchrl.collectors.llm import LLMCollector
from torchrl.objectives.llm import GRPOLoss
from torchrl.trainers.trainers import UpdateWeights

from qlora_rl.demo.tiny_model import make_tokenizer
from qlora_rl.torchrl import AdapterSyncScheme

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrl_grpo.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("torchrl_grpo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PROMPTS = module.GROUP = 2  # the fake engine samples them one by one
    return module


def collecting(example, engine, batches):
    tokenizer = make_tokenizer()
    size = example.PROMPTS * example.GROUP
    return LLMCollector(
        example.Sums(tokenizer, batches),
        policy=example.Sampler(engine, tokenizer.pad_token_id),
        dialog_turns_per_batch=size,
        total_dialog_turns=size * batches,
        track_policy_version=True,
    )


def test_a_collectors_hook_pushes_a_version_after_each_batch(example, base32):
    model, engine = policy(base32), fake_engine(base32)
    sender, receiver = joined(model, engine)
    collector = collecting(example, engine, 3)
    collected = []
    collector.post_collect_hook = lambda batch: collected.append(engine.version)
    sender.register_collector(collector)
    for version, _ in enumerate(collector, 1):
        assert sender.version == receiver.version == engine.version == collector.policy_version == version
        assert receiver.poll_and_apply(0)
        assert agrees(model, engine)
        move(model, version)
    assert collected == [0, 1, 2]  # the hook that was there before, before each push
    collector.shutdown()


def test_a_collector_is_handed_the_scheme_itself_on_either_side(example, base32):
    model, engine = policy(base32), fake_engine(base32)
    sending = AdapterSyncScheme(timeout_s=20.0)
    receiving = AdapterSyncScheme(sending.rpc, sending.transfer, timeout_s=20.0)
    receiving.init_on_receiver(model_id="policy", model=engine, worker_idx=0)
    sending.init_on_sender(model_id="policy", model=model)
    tokenizer = make_tokenizer()
    size = example.PROMPTS * example.GROUP
    sampler = example.Sampler(engine, tokenizer.pad_token_id)
    options = {
        "policy": sampler,
        "frames_per_batch": size,
        "total_frames": size,
        "trust_policy": True,
        "use_buffers": False,
    }
    sampling = Collector(example.Sums(tokenizer, 2), **options, track_policy_version=True)
    sampling.register_scheme_receiver({"policy": receiving})
    training = Collector(example.Sums(tokenizer, 2), **options, weight_sync_schemes={"policy": sending})  # connects
    assert engine.version == 1
    move(model, 3)
    training.update_policy_weights_()
    assert engine.version == 2
    assert agrees(model, engine)
    before = sampling.policy_version
    sampling.receive_weights()
    assert sampling.policy_version == before + 1
    sampling.shutdown()
    training.shutdown()


def test_torchrls_loss_on_what_the_engine_drew_has_ratio_one_and_moves_the_adapter(example, base32):
    model, engine = policy(base32), fake_engine(base32)
    sender, _ = joined(model, engine)
    sender.update_weights()
    collector = collecting(example, engine, 1)
    sender.register_collector(collector, push_after_batch=False)
    batch = next(iter(collector))[:, 0].contiguous()
    size = batch.batch_size[0]
    batch["advantage"] = torch.linspace(-1, 1, size).view(-1, 1, 1).expand(-1, example.PROMPT + example.RESPONSE, 1)
    loss = GRPOLoss(example.Actor(model), entropy_bonus=False)(batch)
    assert abs(float(loss.kl_approx)) < 1e-5  # the engine's logprobs are the trainer's
    assert float(loss.clip_fraction) == 0.0
    loss.loss_objective.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for n, p in model.named_parameters() if "lora_B" in n)
    assert (sender.version, collector.policy_version) == (1, 0)
    sender.update_weights()
    assert (sender.version, collector.policy_version) == (2, 1)
    collector.shutdown()


def test_torchrls_trainer_hook_takes_the_sender(base32):
    model, engine = policy(base32), fake_engine(base32)
    sender, receiver = joined(model, engine)
    hook = UpdateWeights(update_weights_interval=2, sender=sender)
    for _ in range(4):
        hook()
    assert (sender.version, receiver.version) == (2, 2)


@pytest.mark.full  # 60 steps; above a few of its hook, and its loss
def test_the_example_learns():
    command = [sys.executable, str(EXAMPLE), "--steps", "60"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = map(float, re.search(r"trained on: ([\d.]+) before, ([\d.]+) after", done.stdout).groups())
    assert after > before + 0.4
    assert "version 60, policy_version 60" in done.stdout
