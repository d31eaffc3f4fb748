"""Promises of `qlora_rl.demo`: the splits, the reward, the tokenizer and the cache of the tiny model."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qlora_rl import cpu_features as module
from qlora_rl.cpu_features import SETTING
from qlora_rl.demo import pretraining, tiny_model
from qlora_rl.demo.task import SPLITS, Problem, grpo_rows, problems, reward_exact_match
from qlora_rl.demo.tiny_model import Recipe, make_tiny_model, make_tokenizer


def unordered(split):
    return {tuple(sorted((p.left, p.right))) for p in problems(split)}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(SPLITS, 2)))
def test_no_sum_is_in_two_splits_not_even_with_its_operands_swapped(one, other):
    assert not unordered(one) & unordered(other)


def test_the_splits_together_are_all_sums_of_two_digit_numbers():
    asked = [problem for split in SPLITS for problem in problems(split)]
    assert sorted(asked) == [Problem(a, b) for a in range(10, 100) for b in range(10, 100)]


def test_the_splits_are_the_same_in_every_process():
    code = "from qlora_rl.demo.task import problems; print([p.prompt for p in problems('held_out')])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str([p.prompt for p in problems("held_out")])


@pytest.mark.parametrize(
    ("left", "right", "answer", "careless"),
    [
        (37, 85, "122", "12"),
        (12, 34, "46", "46"),
        (82, 45, "127", "27"),
        (38, 45, "83", "73"),
        (55, 55, "110", "00"),
        (99, 99, "198", "88"),
    ],
)
def test_the_pupils_differ_exactly_where_something_carries(left, right, answer, careless):
    problem = Problem(left, right)
    assert (problem.prompt, problem.answer, problem.careless_answer) == (f"{left}+{right}=", answer, careless)
    assert problem.has_carry == (answer != careless)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("122", 1.0), (" 122\n", 1.0), ("12", 0.0), ("1222", 0.0), ("1 22", 0.0), ("0122", 0.0), ("", 0.0), ("x", 0.0)],
)
def test_only_the_exact_answer_is_rewarded(completion, reward):
    assert reward_exact_match([completion], answer=["122"]) == [reward]


def test_the_reward_takes_what_trl_passes():
    text = reward_exact_match(prompts=["1+1=", "2+2="], completions=["2", "5"], answer=["2", "4"], trainer_state=None)
    chat = reward_exact_match([[{"role": "assistant", "content": "2"}]], ["2"])
    assert (text, chat) == ([1.0, 0.0], [1.0])


def test_grpo_rows_are_sums_of_the_rl_split_and_equal_for_equal_seeds():
    rows = grpo_rows(seed=3, count=1500)
    known = {p.prompt: p.answer for p in problems("rl")}
    assert len(rows) == 1500
    assert all(known[row["prompt"]] == row["answer"] for row in rows)
    assert rows == grpo_rows(seed=3, count=1500)
    assert rows != grpo_rows(seed=4, count=1500)


def test_every_ascii_text_comes_back_from_the_tokenizer_one_token_per_character(tmp_path):
    from transformers import AutoTokenizer

    make_tokenizer().save_pretrained(tmp_path)
    # A checkpoint of type qwen2 has its tokenizer class overridden on loading; the file must survive that.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "37+85=122 " + "".join(map(chr, range(2, 128)))
    for tokenizer in (make_tokenizer(), loaded):
        ids = tokenizer(text)["input_ids"]
        assert ids == [ord(character) for character in text]
        assert tokenizer.decode(ids) == text
        assert len(tokenizer) == 128
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_a_chat_of_one_user_message_is_the_plain_prompt():
    tokenizer = make_tokenizer()
    user = [{"role": "user", "content": "37+85="}]
    ids = tokenizer.apply_chat_template(user, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer("37+85=")["input_ids"]
    both = [*user, {"role": "assistant", "content": "122"}]
    assert tokenizer.apply_chat_template(both, tokenize=False) == "37+85=122<eos>"


def test_equal_seeds_give_equal_weights_and_the_second_call_is_served_from_the_cache(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    weights, calls = [], []
    for home in ("a", "b"):
        monkeypatch.setenv("QLORA_RL_CACHE", str(tmp_path / home))
        path = make_tiny_model(steps=2, progress=lambda *step: calls.append(step))
        assert make_tiny_model(steps=2, progress=lambda *step: calls.append(step)) == path
        weights.append(load_file(path / "model.safetensors"))
        assert [entry.name for entry in (tmp_path / home).iterdir()] == [path.name]
    assert [step for step, _, _ in calls] == [1, 2, 1, 2]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    # 4-bit blocks are 64 values long, and no row may end inside one.
    linears = [w for name, w in weights[0].items() if w.ndim == 2]
    assert all(w.dtype == torch.bfloat16 and w.shape[0] % 64 == 0 and w.shape[1] % 64 == 0 for w in linears)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["cache", "gradient checkpointing, which keeps none"])
def test_sums_are_answered_with_a_cache_as_they_are_token_by_token(is_checkpointed):
    torch.manual_seed(0)
    tokenizer, asked = make_tokenizer(), problems("held_out")[:50]
    model = tiny_model._build_model(Recipe(), tokenizer).train()
    with torch.no_grad():  # else each repeats the last token
        for weight in model.model.layers.parameters():
            weight *= 20 if weight.ndim > 1 else 1
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    expected = []
    with torch.no_grad():
        for problem in asked:
            ids = torch.tensor(tokenizer([problem.prompt])["input_ids"])
            read = ids.shape[1]
            for _ in range(tiny_model.LONGEST_ANSWER + 1):
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
            expected.append(tokenizer.decode(ids[0, read:]).partition(tiny_model.EOS)[0])
    assert len(set(expected)) > 10
    assert tiny_model.answer_greedily(model, tokenizer, asked, batch_size=32) == expected


def test_a_directory_with_something_else_in_it_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setenv("QLORA_RL_CACHE", str(tmp_path / "cache"))
    copy = make_tiny_model(tmp_path / "copy", steps=1)
    assert make_tiny_model(tmp_path / "copy", steps=1) == copy
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")  # a copy that another processor made is one, too
    assert make_tiny_model(tmp_path / "copy", steps=1) == copy
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose")
    with pytest.raises(FileExistsError, match="empty directory"):
        make_tiny_model(tmp_path / "mine", steps=1)
    assert [entry.name for entry in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def _of_another_processor(monkeypatch):
    monkeypatch.setattr(module, "_name_and_identity", lambda: ("AMD EPYC", "family 25, model 1, stepping 1"))


@pytest.mark.parametrize(
    "change",
    [
        _of_another_processor,
        lambda patch: patch.setenv(SETTING, "float32"),
        lambda patch: patch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
        lambda patch: patch.setenv("MKL_CBWR", "COMPATIBLE"),
        lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    ],
    ids=["model", "setting", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"],
)
def test_what_changes_the_order_of_sums_changes_the_names_of_models_made_on_the_spot(monkeypatch, change):
    monkeypatch.setattr(module, "_name_and_identity", lambda: ("AMD EPYC", "family 25, model 17, stepping 1"))
    for name in (SETTING, "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(SETTING, "native")
    monkeypatch.setattr(pretraining, "put_directory", lambda directory, fill: None)
    before = make_tiny_model()
    assert make_tiny_model() == before
    change(monkeypatch)
    assert make_tiny_model() != before


def test_torchs_own_kernels_are_among_the_numerics():
    """`ATEN_CPU_CAPABILITY` is read when torch is imported."""
    code = "from qlora_rl.demo.pretraining import numerics; print(numerics()['processor']['torch_kernels'])"
    # Not on the path: tests/avx2, which sets it too.
    package = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": package}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("DEFAULT", "NO AVX")


def _chat_model(out):
    from qlora_rl.demo.chat_model import make_chat_model

    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    make_chat_model([talk, talk], out, steps=1, batch_size=2, hidden_size=64, layers=1)


def _picture_model(out):
    pytest.importorskip("torchvision", reason="set-up installs it where the package index has it")
    from qlora_rl.demo.picture_model import make_picture_model

    make_picture_model(out, pictures=2, steps=1, batch_size=2)


@pytest.mark.parametrize(("setting", "is_on"), [("native", True), ("float32", False)])
@pytest.mark.parametrize("make", [lambda out: make_tiny_model(out, steps=1), _chat_model, _picture_model])
def test_models_are_pretrained_in_bf16_only_where_it_is_multiplied_fast(tmp_path, monkeypatch, make, setting, is_on):
    monkeypatch.setenv(SETTING, setting)
    monkeypatch.setenv("QLORA_RL_CACHE", str(tmp_path / "cache"))
    found = []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda *_: found.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
    )
    with hook:
        make(tmp_path / "model")
    assert set(found) == {(is_on, torch.bfloat16)}
