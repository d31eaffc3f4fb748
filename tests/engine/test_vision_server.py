"""Prompts with images through servers and Ray: the same numbers as in process, and what is hostile is an error of one
request."""

import base64
import io
import json
import random
import re
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoProcessor
from trl import GRPOConfig
from vision import make_vision_model, picture

from qlora_rl import (
    ConfigConflictError,
    EngineUnsupportedError,
    LocalEngine,
    NotYetSupportedError,
    PromptTooLongError,
    QLoRAGRPOTrainer,
    ServerEngine,
    bake_base,
    connect,
    export_adapter,
    load_base,
    prepare_base,
)
from qlora_rl.adapter.merged_weights import iter_weights
from qlora_rl.adapter.store import write_adapter
from qlora_rl.engine.images import ImagePrompt, pack, unpack
from qlora_rl.engine.server import start_server

pytest.importorskip("torchvision", reason="set-up installs it where the package index has it")
OPTIONS = {"max_model_length": 128, "max_num_seqs": 8, "max_lora_rank": 8}
LANGUAGE = r"model\.language_model\..*_proj"
SAMPLING = {"max_tokens": 8, "seed": 3, "temperature": 1.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    made = make_vision_model(tmp_path_factory.mktemp("vision") / "model")
    return prepare_base(made, out=tmp_path_factory.mktemp("bases") / "base")


@pytest.fixture(scope="module")
def asked(base):
    """Prompts: three times the same image, two images, none, and a larger one."""
    processor = AutoProcessor.from_pretrained(base.path)

    def prompt(*images):
        content = [*[{"type": "image"}] * len(images), {"type": "text", "text": "1+1="}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        ids = processor(text=[text], images=list(images) or None)["input_ids"][0]
        return ImagePrompt(ids, images) if images else list(ids)

    first = picture(0)
    return [*[prompt(first)] * 3, prompt(picture(1), picture(2)), prompt(), prompt(picture(5, 84, 112))]


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    torch.manual_seed(0)
    model = get_peft_model(load_base(base), LoraConfig(r=8, target_modules=LANGUAGE))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    directory = tmp_path_factory.mktemp("adapter")
    write_adapter(export_adapter(model, dtype=torch.bfloat16), directory)
    return directory


@pytest.fixture(scope="module")
def local(base, asked, adapter):
    """What an engine in process says: about its base, and under base and adapter."""
    with LocalEngine(base, **OPTIONS) as engine:
        bare = engine.generate(asked, **SAMPLING), engine.score(asked)
        engine.load_adapter(adapter, 1)
        return engine.describe_base().digest, bare, (engine.generate(asked, **SAMPLING), engine.score(asked))


@pytest.fixture(scope="module")
def server(base):
    with start_server(base.path, **OPTIONS) as server:
        yield server


@pytest.fixture
def remote(server):
    with ServerEngine(server.url, api_key=server.key) as engine:
        engine.drop_adapter()
        yield engine


def same(engine, asked, wanted):
    rollout, scores = engine.generate(asked, **SAMPLING), engine.score(asked)
    assert (rollout.completion_ids, rollout.logprobs, scores) == (
        wanted[0].completion_ids,
        wanted[0].logprobs,
        wanted[1],
    )


def test_a_server_gives_what_the_engine_in_process_gives_before_and_after_a_push(remote, asked, local, adapter):
    digest, bare, adapted = local
    assert remote.capabilities().takes_images
    assert remote.describe_base().digest == digest  # tower and processor included
    same(remote, asked, bare)
    remote.load_adapter(adapter, 1)
    same(remote, asked, adapted)
    assert adapted[1] != bare[1]
    remote.drop_adapter()
    same(remote, asked, bare)
    image = {130, 131}  # tokens that stand for images and videos
    many = remote.generate([asked[0]] * 8, max_tokens=60, temperature=2.0, seed=1)
    assert not image & {token for row in many.completion_ids for token in row}


def header(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    begin = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + begin + chunk(b"IEND", b"")


def png(image):
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def test_what_is_hostile_is_an_error_of_its_request_alone(server, remote, asked, local):
    good = pack(asked[:1])
    ids, whole = good["rows"][0]["ids"], base64.b64decode(good["images"][0])
    text = lambda data: base64.b64encode(data).decode()  # noqa: E731
    row = {"ids": ids, "images": [0]}
    hostile = {
        "image 0: it is damaged": ([row], [text(whole[: len(whole) // 2])]),
        "image 0: .*(pixels, more than|too large)": ([row], [text(header(32_768, 32_768))]),
        "image 0: it is no image": ([row], [text(b"GIF89a")]),
        "image 0: Only base64|image 0: .*[Pp]adding|image 0: .*base64": ([row], ["no base64!"]),
        "image 0: argument should be": ([row], [7]),
        "image 1 of 1 is asked for": ([{"ids": ids, "images": [1]}], good["images"]),
        "image -1 of 1": ([{"ids": ids, "images": [-1]}], good["images"]),
        "image /etc/passwd of 1": ([{"ids": ids, "images": ["/etc/passwd"]}], good["images"]),
        "prompt 0 has 9 images; the server takes 8": ([{"ids": ids, "images": [0] * 9}], good["images"]),
        "a prompt is no list of token ids": ([{"ids": [-1], "images": [0]}], good["images"]),
        "they are not in the prompt": ([{"ids": [5, 6, 7], "images": [0]}], good["images"]),
        "image tokens, and its 1 images": ([{"ids": [*ids, 130], "images": [0]}], good["images"]),
        "and they are not in the prompt": ([row], [text(png(picture(0, 112, 112)))]),
    }  # fmt: skip
    client = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {server.key}"}, timeout=60)

    def send(rows, images):
        body = {"prompts": rows, "images": images, "sampling": {"max_tokens": 1}}
        return client.post("/qlora/v1/generate", json=body)

    with ThreadPoolExecutor(4) as pool:
        beside = pool.submit(remote.generate, asked, **SAMPLING)
        answers = {said: pool.submit(send, *what) for said, what in hostile.items()}
        for said, answer in answers.items():
            found = answer.result()
            assert found.status_code == 400, (said, found.text)
            assert re.search(said, found.json()["error"]["message"]), (said, found.text)
        assert beside.result().completion_ids == local[1][0].completion_ids
    same(remote, asked, local[1])


def test_nothing_is_fetched_for_a_chat(server):
    # A connection for each request: vLLM closes that of a request which it fails over, as over file://.
    options = {"headers": {"authorization": f"Bearer {server.key}"}, "timeout": 60}
    model = httpx.get(f"{server.url}/v1/models", **options).json()["data"][0]["id"]

    def chat(url):
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "a"}]
        body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, **options)

    for url in ("http://127.0.0.1:1/a.png", "https://example.com/a.png"):
        assert chat(url).status_code == 400
        assert "must be from one of the allowed domains" in chat(url).text
    assert chat("file:///etc/passwd").status_code >= 400
    assert chat(f"data:image/png;base64,{base64.b64encode(png(picture(0))).decode()}").status_code == 200


def test_a_client_says_what_cannot_be_sent(remote, asked, monkeypatch):
    with pytest.raises(ConfigConflictError, match="str"):
        remote.generate([ImagePrompt([1], ("a.png",))])
    with pytest.raises(PromptTooLongError):
        remote.generate([ImagePrompt([1] * 200, asked[0].images)])
    monkeypatch.setitem(remote._about, "max_body_bytes", 1000)
    with pytest.raises(EngineUnsupportedError, match="--max-body-mib"):
        remote.score(asked)
    monkeypatch.setitem(remote._about, "most_images", 0)
    with pytest.raises(EngineUnsupportedError, match="takes none"):
        remote.score(asked)


def test_packed_prompts_hold_each_image_once_and_come_back_as_they_were(asked):
    packed = json.loads(json.dumps(pack(asked)))
    assert len(packed["images"]) == 4
    found = unpack(packed["rows"], packed["images"], 8)
    for ours, theirs in zip(asked, found, strict=True):
        if isinstance(ours, ImagePrompt):
            assert list(ours.ids) == list(theirs.ids)
            assert [i.tobytes() for i in ours.images] == [i.tobytes() for i in theirs.images]
        else:
            assert ours == theirs
    assert found[0].images[0] is found[1].images[0]  # decoded once, and so processed once


def training(out, **fields):
    usual = {
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4, "max_steps": 2,
        "learning_rate": 1e-3,
        "use_cpu": True, "bf16": True, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
    }  # fmt: skip
    return GRPOConfig(output_dir=str(out), **usual | fields)


def test_a_policy_is_trained_with_rollouts_of_a_server(base, server, tmp_path, monkeypatch):
    monkeypatch.setenv("QLORA_RL_API_KEY", server.key)
    rows = [
        {"prompt": [{"role": "user", "content": "1+1="}], "images": [picture(i)] if i % 4 else []} for i in range(16)
    ]
    arguments = {
        "model": base, "train_dataset": Dataset.from_list(rows), "peft_config": LoraConfig(r=8,
        target_modules=LANGUAGE),
        "reward_funcs": lambda completions, **_: [random.Random(str(each)).random() for each in completions],
    }  # fmt: skip
    found = {}
    for where in (server.url, "colocate"):
        out = tmp_path / where[:4]
        length = {} if where == server.url else {"vllm_max_model_length": 128}
        with QLoRAGRPOTrainer(args=training(out, **length), rollout=where, **arguments) as trainer:
            trainer.train()
        found[where] = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in found[server.url]:
        assert line["base_verified"] == 1.0
        assert line["mismatch_kl"] < 1e-3
    # The same tokens whoever samples: the first step has the same rewards.
    assert found[server.url][0]["reward"] == found["colocate"][0]["reward"]
    assert found[server.url][0]["mismatch_kl"] == pytest.approx(found["colocate"][0]["mismatch_kl"], rel=1e-3)


def test_a_fleet_of_two_gives_what_one_gives(server, base, asked, local):
    with start_server(base.path, key=server.key, **OPTIONS) as other:
        with connect([server.url, other.url], api_key=server.key) as fleet:
            fleet.drop_adapter()
            assert fleet.capabilities().takes_images
            same(fleet, asked, local[1])
            assert all(speed for speed in fleet.speeds.values())  # both have sampled


@pytest.mark.full  # a server does, and test_ray.py has actors that give what one gives
def test_an_actor_of_ray_gives_the_same(base, asked, local):
    ray = pytest.importorskip("ray")
    from qlora_rl import RayFleet

    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
    try:
        with RayFleet(base, replicas=1, **OPTIONS) as fleet:
            assert fleet.capabilities().takes_images
            same(fleet, asked, local[1])
    finally:
        ray.shutdown()


def test_text_models_take_no_images_through_a_server(base, tmp_path):
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "1"}], "image": picture(0)}] * 4)
    with pytest.raises(NotYetSupportedError, match="takes none"):
        QLoRAGRPOTrainer(
            model="/nowhere", args=training(tmp_path), reward_funcs=len, train_dataset=rows, rollout="server"
        )


def test_full_weights_reach_the_tower_of_a_server_for_every_client(base, asked, tmp_path):
    """Of clients that speak OpenAI's language too: vLLM keeps what a tower has made of an image."""
    baked = bake_base(base, "float32", out=tmp_path / "baked")
    model = get_peft_model(load_base(baked), LoraConfig(r=4,
    target_modules=r"model\.visual\..*\.(qkv|proj|gate_proj|up_proj|down_proj)", exclude_modules=r".*patch_embed.*",
    init_lora_weights=False))  # fmt: skip
    inputs = AutoProcessor.from_pretrained(base.path)(
        text=["<|vision_start|><|image_pad|><|vision_end|>2"], images=[picture(0)], return_tensors="pt"
    )
    prompt = ImagePrompt(inputs["input_ids"][0].tolist(), (picture(0),))
    url = f"data:image/png;base64,{base64.b64encode(png(picture(0))).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "a"}]
    body = {"max_tokens": 1, "temperature": 0, "logprobs": True, "messages": [{"role": "user", "content": content}]}
    options = {"max_model_length": 128, "max_num_seqs": 8, "max_lora_rank": 0}
    with start_server(baked, **options) as server, ServerEngine(server.url, api_key=server.key) as engine:
        client = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {server.key}"}, timeout=60)
        named = client.get("/v1/models").json()["data"][0]["id"]
        said = []
        for version in (1, 2):
            with torch.no_grad():
                torch._foreach_mul_([p for n, p in model.named_parameters() if "lora_B" in n], 4.0)
                logprobs = model(**inputs).logits[0].float().log_softmax(-1)[:-1]
            engine.load_dense(iter_weights(model, dtype=torch.float32), version)
            theirs = torch.tensor(engine.score([prompt])[0])
            assert (theirs - logprobs.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]).abs().max() < 1e-3
            answer = client.post("/v1/chat/completions", json={"model": named, **body}).json()
            said.append(answer["choices"][0]["logprobs"]["content"][0])
        assert abs(said[0]["logprob"] - said[1]["logprob"]) > 0.01 or said[0]["token"] != said[1]["token"]
