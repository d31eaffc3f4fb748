"""A real server as teacher: `qlora-rl serve` says the likeliest tokens, of its base or of the adapter on it."""

import math

import pytest
import torch
from test_trainers import ROWS, adapter, fields, lines, mean
from trl import DistillationConfig

from qlora_rl import (
    AccessDeniedError,
    ConfigConflictError,
    EngineBrokenError,
    PromptTooLongError,
    QLoRADistillationTrainer,
    ServerEngine,
    export_adapter,
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
    with start_server(base, **options, vllm_options=["--max-logprobs", "50"]) as server:
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
