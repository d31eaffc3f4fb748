"""A real server as teacher: `qlora-rl serve` says the likeliest tokens, of its base or of the adapter on it; and vLLM's
own."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from test_trainers import ROWS, adapter, fields, lines, mean
from transformers import AutoModelForCausalLM
from trl import DistillationConfig

from qlora_rl import (
    AccessDeniedError,
    ConfigConflictError,
    EngineBrokenError,
    FakeEngine,
    PromptTooLongError,
    QLoRADistillationTrainer,
    ServerEngine,
    export_adapter,
    load_base,
    start_server,
)
from qlora_rl.adapter.store import pack_adapter
from qlora_rl.engine.client import PromptLogprobs
from qlora_rl.inference.chat import Conversation
from qlora_rl.inference.trained import open_trained

SEQUENCES = [[40, 41, 42, 43, 44, 45], [60, 9, 33, 12, 7]]


@pytest.fixture
def server(base, monkeypatch):
    options = {"max_lora_rank": 8, "max_model_length": 64, "max_num_seqs": 32, "timeout_s": 180}
    # What a request leaves out: a base may say so in its generation_config.json.
    defaults = ["--override-generation-config", '{"repetition_penalty": 1.5, "top_k": 2}']
    with start_server(base, **options, vllm_options=["--max-logprobs", "50", *defaults]) as server:
        monkeypatch.setenv("QLORA_RL_API_KEY", server.key)
        yield server


def test_a_server_says_the_likeliest_tokens_teaches_and_dies(server, base, adapted, tmp_path):
    key = tmp_path / "key"
    key.write_text(server.key)
    served = PromptLogprobs(server.url, api_key_file=key, wait_s=0.5)
    assert served.max_length == 64
    with ServerEngine(server.url) as remote:
        said = served.score(SEQUENCES, [1, 2], 50)
        for row, start, scored in zip(said, (1, 2), remote.score(SEQUENCES), strict=True):
            assert [place[0][1] for place in row] == pytest.approx(scored[start - 1 :], abs=1e-3)
            assert all(0.5 < math.fsum(math.exp(each) for _, each in place) < 1.001 for place in row)
        of_base = served.digest()
        blob = pack_adapter(export_adapter(adapted, dtype=torch.bfloat16))
        remote.load_packed(blob, 1)
        policy = PromptLogprobs(server.url, api_key_file=key)
        assert (served.model, policy.model) == ("base", "policy")
        assert of_base == served.digest() != policy.digest()
        assert policy.score(SEQUENCES, [1, 2], 5) != served.score(SEQUENCES, [1, 2], 5)
        remote.drop_adapter()
    for wrong, message in (((51,), "51.*--max-logprobs"), ((5,), "room for 64")):
        with pytest.raises((ConfigConflictError, PromptTooLongError), match=message):
            served.score([[40] * (64 if wrong == (5,) else 8)], [1], *wrong)
    with pytest.raises(AccessDeniedError, match="teacher_key_file"):
        PromptLogprobs(server.url)

    torch.manual_seed(0)
    own = {"max_completion_length": 4, "per_device_train_batch_size": 16, "max_steps": 10}
    with QLoRADistillationTrainer(
        base,
        args=DistillationConfig(**fields(tmp_path / "run", **own)),
        train_dataset=ROWS.map(lambda row: {"told": f"7777{row['prompt']}"}),
        peft_config=adapter(),
        teacher_url=server.url,
        teacher_key_file=key,
        teacher_model="base",
        teacher_prompt="told",
        rollout=server.url,  # the student samples where the teacher is asked
    ) as made:
        assert made._taught_by["digest"] == of_base
        made.train()
        losses = [step["loss"] for step in lines(tmp_path / "run")]
        print("losses", losses, "mismatch", [step["mismatch_kl"] for step in lines(tmp_path / "run")])
        assert mean(losses[-3:]) < 0.6 * mean(losses[:2])
        talk = Conversation(open_trained(tmp_path / "run"), temperature=0.0, max_tokens=6, uses_template=False)
        ids = [talk.tokenizer(text).input_ids for text in ("777712+34=", "".join(talk.with_teacher().answer("12+34=")))]
        likely = served.score([ids[0] + ids[1]], [len(ids[0])], 1)[0]
        assert len(likely) == 6
        assert all(place[0][1] >= max(logprob for _, logprob in place[1:]) for place in likely if len(place) > 1)
        server.process.kill()
        server.process.wait()
        with pytest.raises(EngineBrokenError, match="stayed away"):
            served.score(SEQUENCES, [1, 2], 5)


@pytest.fixture
def plain_server(other_model_dir, tmp_path):
    """vLLM's own OpenAI server, which knows nothing of ours, on another model in 16 bits."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = {"model": other_model_dir, "host": "127.0.0.1", "port": port, "served-model-name": "big"}
    words |= {"max-model-len": 64, "max-num-seqs": 16, "max-logprobs": 50}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [str(word) for name, value in words.items() for word in (f"--{name}", value)]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        url, ends = f"http://127.0.0.1:{port}", time.monotonic() + 300
        while time.monotonic() < ends and process.poll() is None:
            try:
                yield PromptLogprobs(url, wait_s=1.0), process
                break
            except EngineBrokenError:
                continue
        else:
            pytest.fail((tmp_path / "log.txt").read_text()[-2000:])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def test_vllms_own_server_teaches(plain_server, base, other_model_dir, tmp_path):
    served, process = plain_server
    assert (served.model, served.max_length, served.digest()) == ("big", 64, "")
    model = AutoModelForCausalLM.from_pretrained(other_model_dir).eval()
    for ids, said in zip(SEQUENCES, served.score(SEQUENCES, [1, 1], 50), strict=True):
        with torch.no_grad():
            logprobs_TV = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        for row, place in zip(logprobs_TV, said, strict=False):
            tokens, logprobs = zip(*place, strict=True)
            assert torch.allclose(row[list(tokens)], torch.tensor(logprobs), atol=0.05)  # of bfloat16
    torch.manual_seed(0)
    own = {"max_completion_length": 4, "per_device_train_batch_size": 16, "max_steps": 12, "learning_rate": 0.02}
    with (
        FakeEngine(load_base(base), max_model_length=64) as engine,
        QLoRADistillationTrainer(
            base,
            args=DistillationConfig(**fields(tmp_path / "run", **own)),
            train_dataset=ROWS,
            peft_config=adapter(),
            teacher_url=served.url,
            teacher_top_k=50,
            rollout=engine,
        ) as made,
    ):
        made.train()
        assert (made._taught_by["model"], len(made._taught_by["logprobs"]) > 8) == ("big", True)
    losses = [step["loss"] for step in lines(tmp_path / "run")]
    print("losses", losses)
    assert mean(losses[-3:]) < 0.8 * mean(losses[:3])
    talk = Conversation(open_trained(tmp_path / "run"), temperature=0.0, max_tokens=6, uses_template=False)
    assert "".join(talk.with_teacher().answer("12+34="))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(EngineBrokenError, match="stayed away"):
        served.score(SEQUENCES, [1, 1], 5)
