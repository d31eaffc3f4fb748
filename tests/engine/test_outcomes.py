"""What a run has trained, in real vLLM: exports loaded as they lie, base and policy evaluated in one engine."""

import json
import os
import shutil
import subprocess
import sys
from statistics import fmean

import pytest
import torch
from peft import LoraConfig
from trained import make_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from qlora_rl import ConfigConflictError, SamplingSpec, export_run, load_base, open_trained
from qlora_rl.cli import main
from qlora_rl.data.load import read_file
from qlora_rl.engine.local import LocalEngine
from qlora_rl.inference.evaluation import evaluate

SEQUENCES = [[40, 41, 42, 43, 44, 45, 46, 47], [60, 9, 33, 12, 7, 41, 5, 21]]
# bf16 against bf16 of another library on a random model, see test_local.py; a missing adapter is above 0.1.
MEAN_TOLERANCE = 0.03

# What a user types; the rest makes vLLM small.
PLAIN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=64, max_num_seqs=4, enforce_eager=True, gpu_memory_utilization=0.2)
prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), use_tqdm=False)
pairs = [zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:]) for o in outputs]
print("\\n" + json.dumps([[e[t].logprob for t, e in each] for each in pairs]))
"""


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    return make_run(base, tmp_path_factory.mktemp("runs") / "run")


def scores(model):
    """Natural logs of the probabilities of every token of `SEQUENCES` but the first, [2, 7]."""
    with torch.no_grad():
        logprobs_BTV = model(torch.tensor(SEQUENCES)).logits.float().log_softmax(-1)
    return logprobs_BTV[:, :-1].gather(2, torch.tensor(SEQUENCES)[:, 1:, None])[..., 0]


def test_a_merged_model_is_the_policy_in_vllm_as_it_comes(run, base, tmp_path):
    done = export_run(run, out=tmp_path / "merged", prompts=2)
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    said = subprocess.run(
        [sys.executable, "-c", PLAIN_VLLM, str(done.path), json.dumps(SEQUENCES)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert said.returncode == 0, said.stderr[-2000:]
    theirs = torch.tensor(json.loads(said.stdout.strip().splitlines()[-1]))
    ours = scores(AutoModelForCausalLM.from_pretrained(done.path, dtype="auto"))
    assert (ours - theirs).abs().mean() < MEAN_TOLERANCE
    assert (scores(load_base(base)) - theirs).abs().mean() > 3 * MEAN_TOLERANCE


def test_an_exported_adapter_is_the_policy_in_vllm(engine, run, tmp_path):
    done = export_run(run, "adapter", out=tmp_path / "adapter", prompts=2)
    engine.load_adapter(done.path, 1)
    theirs = torch.tensor(engine.score(SEQUENCES))
    bare = torch.tensor(engine.score(SEQUENCES, bare=True))
    ours = scores(open_trained(run).load())
    assert (ours - theirs).abs().mean() < MEAN_TOLERANCE
    assert (bare - theirs).abs().mean() > 3 * MEAN_TOLERANCE


def by_text(completions, **columns):
    """A reward that any change of the text changes."""
    return [float(sum(map(ord, text)) % 97) for text in completions]


@pytest.fixture
def sampled(monkeypatch):
    """The completions of each call of an engine."""
    seen, generate = [], LocalEngine.generate

    def watch(*given, **named):
        rollout = generate(*given, **named)
        seen.append(rollout.completion_ids)
        return rollout

    monkeypatch.setattr(LocalEngine, "generate", watch)
    return seen


def test_base_and_policy_are_sampled_by_one_engine_and_scored_alike(run, base, tmp_path, capsys, sampled):
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{10 + i}+{11 + i}=", "answer": str(21 + 2 * i)}) + "\n" for i in range(6))
    )
    source = tmp_path / "mine.py"
    source.write_text(
        "def by_text(completions, **_):\n    return [float(sum(map(ord, text)) % 97) for text in completions]\n"
    )
    command = [
        "eval",
        str(run),
        "--data",
        str(data),
        "--reward",
        "exact",
        f"{source}:by_text",
        "--max-tokens",
        "8",
        "--json",
    ]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompts"] == 6
    assert found["lengths"] == [fmean(len(ids) for ids in side) for side in sampled]
    ends = {AutoTokenizer.from_pretrained(base.path).eos_token_id}
    assert {ids[-1] for side in sampled for ids in side if len(ids) < 8} <= ends  # what ends a completion in vLLM
    cut_off = [fmean(ids[-1] not in ends for ids in side) for side in sampled]
    assert found["cut_off"] == cut_off
    assert any(cut_off)
    name = "by_text"
    rows = json.loads((run / "eval.json").read_text())["rows"]
    expected = {"before": load_base(base), "after": open_trained(run).load()}
    for side, model in expected.items():
        texts = _greedy(model, base, [row["prompt"] for row in read_file(data)])
        agree = sum(row[side] == text for row, text in zip(rows, texts, strict=True))
        assert agree >= 4  # of 6: the two libraries round differently, and a random model is nearly undecided
        assert [row[f"{side}_rewards"][name] for row in rows] == by_text([row[side] for row in rows])
    values = [row["after_rewards"][name] - row["before_rewards"][name] for row in rows]
    assert found["rewards"][name]["difference"]["value"] == pytest.approx(sum(values) / 6)
    assert any(values)


def test_without_a_limit_it_is_that_of_the_training_or_the_models_last_position(run, sampled):
    rows = [{"prompt": f"{i}+{i}="} for i in range(10, 16)]
    found = evaluate(open_trained(run), rows, {"by_text": by_text})
    assert found.sampling.max_tokens == 256
    lengths = [len(ids) for side in sampled for ids in side]
    assert max(lengths) == 128 - 6  # a token for each character of a prompt
    assert sum(found.cut_off) * 6 == pytest.approx(lengths.count(128 - 6))


def test_a_text_ends_completions_as_in_the_training(run, base, tmp_path, sampled):
    path, stop = shutil.copytree(run, tmp_path / "run"), [*"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    config = json.loads((path / "config.json").read_text())
    config["grpo"]["generation_kwargs"] = {"stop": stop, "include_stop_str_in_output": True}
    (path / "config.json").write_text(json.dumps(config))
    rows, sampling = [{"prompt": f"{i}+{i}="} for i in range(10, 34)], SamplingSpec(max_tokens=8, temperature=0.0)
    found = evaluate(open_trained(path), rows, {"by_text": by_text}, sampling=sampling)
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    for ids, cut_off in zip(sampled, found.cut_off, strict=True):
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        assert not any({*stop} & {*text[:-1]} for text in texts)
        has_ended = [row[-1] == 1 or text[-1:] in stop for row, text in zip(ids, texts, strict=True)]
        assert cut_off == fmean(not each for each in has_ended)
        assert 0 < cut_off < 1


def _greedy(model, base, prompts):
    from qlora_rl.inference.sampling import sample

    tokenizer = AutoTokenizer.from_pretrained(base.path)
    ids = [list(sample(model, tokenizer(p).input_ids, 8, torch.Generator(), temperature=0.0)) for p in prompts]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


@pytest.mark.full  # that DoRA is served exactly is test_dense.py's; that `evaluate` takes this way, only here
def test_what_is_no_plain_lora_is_evaluated_as_full_weights(base, tmp_path):
    run = make_run(base, tmp_path / "run", LoraConfig(r=8, use_dora=True, target_modules="all-linear"))
    rows = [{"prompt": f"{i}+{i}="} for i in range(10, 16)]
    sampling = SamplingSpec(max_tokens=8, temperature=0.0)
    found = evaluate(open_trained(run), rows, {"by_text": by_text}, sampling=sampling)
    texts = _greedy(open_trained(run).load(), base, [row["prompt"] for row in rows])
    assert sum(row["after"] == text for row, text in zip(found.rows, texts, strict=True)) >= 4


def test_what_cannot_be_evaluated_is_rejected_before_an_engine_starts(run):
    trained = open_trained(run)
    with pytest.raises(ConfigConflictError, match='needs a column "prompt"'):
        evaluate(trained, [{"question": "1"}], {"by_text": by_text})
    with pytest.raises(ConfigConflictError, match="at temperature 0 are all equal"):
        evaluate(trained, [{"prompt": "1"}], {"by_text": by_text}, samples=2)


def test_before_a_run_its_file_says_what_the_base_answers_and_whether_the_rewards_teach(base, tmp_path, capsys):
    rows = [{"prompt": f"{10 + i}+{11 + i}=", "answer": str(21 + 2 * i)} for i in range(3)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(
        "def by_text(completions, **_):\n    return [float(sum(map(ord, text)) % 97) for text in completions]\n"
        "def never(completions, **_):\n    return [0.0] * len(completions)\n"
    )
    file = tmp_path / "run.toml"
    file.write_text(
        f"""method = "grpo"
[base]
model = {json.dumps(str(base.path))}
[data]
train = "data.jsonl"
[[rewards]]
use = "mine.py:never"
[[rewards]]
use = "mine.py:by_text"
weight = 0.5
[train]
max_completion_length = 8
"""
    )
    command = ["eval", str(file), "--samples", "4", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["prompts"], found["samples"], found["sampling"]["temperature"]) == (3, 4, 1.0)
    assert found["sampling"]["max_tokens"] == 8
    texts = [[each["text"] for each in row["completions"]] for row in found["rows"]]
    assert len({text for group in texts for text in group}) > 3
    sums = [[0.5 * value for value in by_text(group)] for group in texts]
    assert [[each["reward"] for each in row["completions"]] for row in found["rows"]] == sums
    assert all(group == sorted(group, reverse=True) for group in sums)
    assert found["teaching"] == sum(len(set(group)) > 1 for group in sums) > 0
    assert found["rewards"]["by_text"]["value"] == pytest.approx(2 * fmean(map(fmean, sums)))
    assert found["rewards"]["never"]["value"] == 0
    command = ["eval", str(file), "--samples", "2", "--limit", "1", "--set", "rewards.1.weight=0"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "1 prompts, 2 completions each" in said
    assert "nothing to learn from" in said
