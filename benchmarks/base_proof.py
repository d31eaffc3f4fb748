"""What the repair of the scales is worth: mismatch KL of trainer and vLLM on the bare base, as loaded and repaired.

    python benchmarks/base_proof.py [--json benchmarks/results/base_proof.json]

The demo's model as NF4 with double quantisation, scored in bf16; and its float32 baked form on both sides, where
nothing but float32 rounding is left. About two minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from rounds import measured_at

from qlora_rl import LocalEngine, bake_base, compare, fingerprint_base, load_base, prepare_base, verify_base
from qlora_rl.demo import task
from qlora_rl.demo.job import quieten
from qlora_rl.demo.tiny_model import make_tiny_model
from qlora_rl.fidelity import measure
from qlora_rl.train.run import describe_machine, describe_versions

BATCHES, SIZE = 12, 128


def distances(model, engine) -> list[dict[str, float]]:
    """The fidelity of BATCHES batches of rollouts, trainer under bf16 autocast if it is not float32."""
    problems = task.problems("rl")
    found = []
    for batch in range(BATCHES):
        prompts = [engine.tokenizer.encode(p.prompt) for p in problems[batch * 97 :: 7][:SIZE]]
        rollout = engine.generate(prompts, max_tokens=4, seed=batch)
        width = max(map(len, rollout.completion_ids))
        ours, theirs, mask = (torch.zeros(len(prompts), width) for _ in range(3))
        for i, (prompt, ids, logprobs) in enumerate(
            zip(prompts, rollout.completion_ids, rollout.logprobs, strict=True)
        ):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.bfloat16):
                logits_TV = model(torch.tensor([prompt + ids])).logits[0].float()
            own = logits_TV.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]
            ours[i, : len(ids)], theirs[i, : len(ids)], mask[i, : len(ids)] = own, torch.tensor(logprobs), 1
        found.append(measure(ours, theirs, mask).as_dict())
    return found


def fingerprint_large() -> dict[str, float]:
    """Seconds and extra memory of both sides' fingerprints on a random 0.4 B Qwen2 shape."""
    import gc
    import tempfile
    import threading

    import psutil
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from qlora_rl.demo.tiny_model import make_tokenizer

    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=20, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=512,
        )  # fmt: skip
        source = Qwen2ForCausalLM(config).to(torch.bfloat16)
        parameters = sum(p.numel() for p in source.parameters())
        base = prepare_base(source, tokenizer=make_tokenizer(), out=Path(directory) / "base")
        del source
        model = load_base(base)
        process, peak, running = psutil.Process(), [0], [True]

        def watch() -> None:
            while running[0]:
                peak[0] = max(peak[0], process.memory_info().rss)
                time.sleep(0.002)

        fingerprint_base(model)  # the weights are mapped from the file: let them be read before memory is measured
        gc.collect()
        before = process.memory_info().rss
        watcher = threading.Thread(target=watch)
        watcher.start()
        trainer = []
        for _ in range(3):
            started = time.perf_counter()
            ours = fingerprint_base(model)
            trainer.append(time.perf_counter() - started)
        running[0] = False
        watcher.join()
        with LocalEngine(
            base, max_model_length=64, max_num_seqs=4, repair_scales=False, use_tqdm_on_load=False
        ) as engine:
            engine_seconds = []
            for _ in range(3):
                started = time.perf_counter()
                theirs = engine.describe_base()
                engine_seconds.append(time.perf_counter() - started)
            started = time.perf_counter()
            repaired = engine.repair_base()
            repair = time.perf_counter() - started
            proof = verify_base(ours, engine)
    return {
        "parameters": parameters,
        "state_as_loaded": compare(ours, theirs).state,
        "repaired": len(repaired),
        "state_after_repair": proof.diff.state,
        "trainer_seconds": sorted(trainer)[1],
        "engine_seconds": sorted(engine_seconds)[1],
        "repair_seconds": repair,
        "extra_mib": (peak[0] - before) / 2**20,
        "largest_weight_mib": 151_936 * 896 * 2 / 2**20,
    }


def median(found: list[dict[str, float]], key: str) -> float:
    return sorted(f[key] for f in found)[len(found) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "base_proof.json")
    arguments = parser.parse_args()
    quieten()
    base = prepare_base(make_tiny_model())
    model = load_base(base)
    started = time.perf_counter()
    ours = fingerprint_base(model)
    fingerprint_seconds = time.perf_counter() - started
    options = {"max_model_length": 32, "max_num_seqs": SIZE, "use_tqdm_on_load": False}
    with LocalEngine(base, repair_scales=False, **options) as engine:
        as_loaded = compare(ours, engine.describe_base())
        before = distances(model, engine)
        proof = verify_base(model, engine)
        after = distances(model, engine)
    baked = bake_base(base, "float32")
    with LocalEngine(baked, **options) as engine:
        exact = load_base(baked)
        baked_proof = verify_base(exact, engine)
        floor = distances(exact, engine)
    commit = measured_at()
    keys = ("mismatch_kl", "logprob_diff_mean", "logprob_diff_max")
    result = {
        "command": "python benchmarks/base_proof.py",
        "commit": commit,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "weights_4bit": len(as_loaded.modules),
        "state_as_loaded": as_loaded.state,
        "differences_as_loaded": sorted({entry.how for entry in as_loaded.entries}),
        "largest_relative_scale_error": max(proof.repaired.values()),
        "state_after_repair": proof.diff.state,
        "float32_baked_is_verified": baked_proof.is_verified,
        "fingerprint_seconds": fingerprint_seconds,
        "fingerprint_0.4b": fingerprint_large(),
        "as_loaded": {k: median(before, k) for k in keys},
        "repaired": {k: median(after, k) for k in keys},
        "float32_baked": {k: median(floor, k) for k in keys},
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
