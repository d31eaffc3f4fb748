"""What a user of Tinker's own client runs, unmodified: `python tinker_client.py KIND URL KEY MODEL`, one JSON line.

It imports nothing of this package: the client may be installed in another environment than the server.
"""

import hashlib
import json
import random
import sys
import urllib.request

import tinker
from tinker import types


def datum(prompt, completion, **inputs):
    """A row whose targets are its tokens moved by one; inputs are 0 in front of the completion."""
    ids = [*prompt, *completion]
    before = [0.0] * (len(prompt) - 1)
    values = {name: before + list(each) for name, each in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], **values}
    )


def sums(count, seed):
    """Sums of two numbers, as text; one token is one character, and its id the character's code."""
    generator = random.Random(seed)
    return [(a, b) for a, b in ((generator.randint(10, 99), generator.randint(10, 99)) for _ in range(count))]


def encoded(text):
    return [ord(letter) for letter in text]


def supervised(service, model, steps=12):
    """Cross-entropy on the sums that the model mostly gets wrong: nats a token, step by step."""
    client = service.create_lora_training_client(base_model=model, rank=16, seed=0).result()
    found = []
    for step in range(steps):
        rows = [
            datum(encoded(f"{a}+{b}="), [*encoded(str(a + b)), 1], weights=[1.0] * (len(str(a + b)) + 1))
            for a, b in sums(32, step)
        ]
        passed = client.forward_backward(rows, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        tokens = sum(sum(row.loss_fn_inputs["weights"].data) for row in rows)
        found.append(passed.result().metrics["loss:sum"] / tokens)
    return {"nats": found}


def reinforced(service, model, steps=20, loss="importance_sampling"):
    """Eight completions of eight sums a step, rewarded where they are right: mean rewards, step by step."""
    client = service.create_lora_training_client(base_model=model, rank=16, seed=0).result()
    found = []
    for step in range(steps):
        sampler = client.save_weights_and_get_sampling_client().result()
        asked, rows, rewards = sums(8, 1000 + step), [], []
        params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=step)
        prompts = [encoded(f"{a}+{b}=") for a, b in asked]
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), 8, params) for prompt in prompts]
        for (a, b), prompt, future in zip(asked, prompts, futures, strict=True):
            group = future.result().sequences
            gains = [float(list(each.tokens) == [*encoded(str(a + b)), 1]) for each in group]
            rewards += gains
            mean = sum(gains) / len(gains)
            for each, gain in zip(group, gains, strict=True):
                if gain != mean:
                    advantages = [gain - mean] * len(each.tokens)
                    rows.append(datum(prompt, each.tokens, logprobs=each.logprobs, advantages=advantages))
        found.append(sum(rewards) / len(rewards))
        if rows:
            client.forward_backward(rows, loss)
            client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    return {"rewards": found}


def interrupted(service, model, rounds=4):
    """One training as the server comes, and the same again: digests of both, and their model's names.

    Whoever runs this may kill the server, and start it again, while the first line is being worked on.
    """
    found = []
    for _ in range(2):
        client = service.create_lora_training_client(base_model=model, rank=4, seed=3).result()
        print(json.dumps({"model": client.model_id}), flush=True)
        metrics = []
        for number in range(rounds):
            rows = [
                datum([2 + (11 * number + 7 * i) % 120], [2 + (7 * i + j) % 120 for j in range(58)], weights=[1.0] * 58)
                for i in range(60)
            ]
            passed, stepped = client.forward_backward(rows, "cross_entropy"), client.optim_step(types.AdamParams())
            metrics.append([passed.result().metrics["loss:sum"], stepped.result().metrics["step"]])
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, seed=1)
        tokens = list(sampler.sample(types.ModelInput.from_ints([40, 41]), 1, params).result().sequences[0].tokens)
        found.append([metrics, tokens, weights_digest(client)])
    return {"found": found}


def sampled(service, model):
    """One step, a long sample, and a step on what was sampled; and the same again: tokens and digests of both.

    Whoever runs this may kill the server, and start it again, while the first line is being worked on.
    """
    found = []
    for _ in range(2):
        client = service.create_lora_training_client(base_model=model, rank=4, seed=3).result()
        client.forward_backward([datum([40, 41], [42, 43, 44], weights=[1.0] * 3)], "cross_entropy")
        steps = [client.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics["step"]]
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=1000, seed=1, stop=[])
        future = sampler.sample(types.ModelInput.from_ints([40, 41]), 8, params)
        print(json.dumps({"model": client.model_id}), flush=True)
        made = [list(each.tokens) for each in future.result().sequences]
        rows = [datum([40, 41], tokens[:500], weights=[1.0] * 500) for tokens in made]
        client.forward_backward(rows, "cross_entropy")
        steps.append(client.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics["step"])
        found.append([made, steps, weights_digest(client)])
    return {"found": found}


def weights_digest(client):
    """Of the adapter's matrices, as it is downloaded."""
    path = client.save_weights_external("end").result().path
    urls = tinker.RestClient(base_url=url, api_key=key).get_external_weights_urls(path).result().urls
    return hashlib.sha256(urllib.request.urlopen(urls["adapter_model.safetensors"]).read()).hexdigest()


def steady(service, model, seed, rounds):
    """Steps, each with samples of what it has made: tokens and the digest of the end."""
    client = service.create_lora_training_client(base_model=model, rank=4, seed=seed).result()
    tokens = []
    for number in range(rounds):
        rows = [datum([2 + (11 * number + 7 * i + seed) % 120], [40, 41, 42, 43], weights=[1.0] * 4) for i in range(8)]
        client.forward_backward(rows, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=40, seed=number)
        found = sampler.sample(types.ModelInput.from_ints([40, 41]), 4, params).result()
        tokens.append([list(each.tokens) for each in found.sequences])
        print(json.dumps({"model": client.model_id, "round": number}), flush=True)
    return {"found": [tokens, weights_digest(client)]}


def endless(service, model):
    """Gradients that wait for a step, and a sample without end; whoever runs this kills it."""
    client = service.create_lora_training_client(base_model=model, rank=4, seed=3).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    client.forward_backward([datum([40, 41], [42, 43, 44], weights=[1.0] * 3)], "cross_entropy").result()
    params = types.SamplingParams(max_tokens=1000, seed=1, stop=[])
    print(json.dumps({"model": client.model_id}), flush=True)
    while True:
        sampler.sample(types.ModelInput.from_ints([40, 41]), 64, params).result()


if __name__ == "__main__":
    kind, url, key, name, *rest = sys.argv[1:]
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        print(json.dumps(globals()[kind](service, name, *map(int, rest))), flush=True)
