"""Exports: what is written is loaded again, is the policy, and appears whole or not at all."""

import ast
import json
import shlex
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from support import make_model
from trained import TEXT, make_bpe_model, make_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from qlora_rl import (
    AdapterRejectedError,
    BaseIncompleteError,
    BaseMismatchError,
    ConfigConflictError,
    ExportError,
    MissingDependencyError,
    NotYetSupportedError,
    RunDirectoryError,
    iter_weights,
    load_base,
    open_trained,
    prepare_base,
)
from qlora_rl.base.quant import require_bitsandbytes
from qlora_rl.cli import main
from qlora_rl.engine.linears.cpu_kernel import codes_kernel
from qlora_rl.export import check, job
from qlora_rl.export.gguf import _ollama_template, _other_decoders, write_modelfile
from qlora_rl.export.job import LIMIT, LIMIT_FLOAT32, LIMITS, Distance, _model_name, export_run
from qlora_rl.export.vocabulary import check_vocabulary
from qlora_rl.sync.forward import in_float32
from qlora_rl.train.setup.linears import has_kernel

bnb = require_bitsandbytes()
export = partial(export_run, prompts=6)
IDS = torch.tensor([[40, 41, 42, 43, 44]])


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    return make_run(base, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def copy(run, tmp_path):
    """One of the run, to be changed."""
    return shutil.copytree(run, tmp_path / "run")


@pytest.fixture
def reload():
    return lambda path: AutoModelForCausalLM.from_pretrained(path, dtype="auto")


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", LIMIT), ("float16", LIMIT), ("float32", LIMIT_FLOAT32)])
def test_the_merged_model_is_the_policy(run, tmp_path, reload, dtype, limit):
    done = export(run, "merged", out=tmp_path / "merged", dtype=dtype)
    assert 0 <= done.distance.kl_mean < limit
    assert done.distance.tokens > 100
    model = reload(done.path)
    assert model.dtype == getattr(torch, dtype)
    expected = dict(iter_weights(open_trained(run).load(), dtype=model.dtype))
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, weight in model.named_parameters():
        assert torch.equal(weight, expected[name]), name


def test_a_wrong_weight_shows_in_the_distance(run, tmp_path, monkeypatch):
    """The proof can fail: one matrix whose adapter was forgotten is enough."""
    name = "model.layers.1.mlp.down_proj.weight"
    bare = dict(iter_weights(load_base(open_trained(run).base)))[name]

    def forgetful(model, *, dtype):
        return ((n, bare.to(dtype) if n == name else weight) for n, weight in iter_weights(model, dtype=dtype))

    monkeypatch.setattr(job, "iter_weights", forgetful)
    with pytest.raises(ExportError, match="above the limit"):
        export(run, "merged", out=tmp_path / "merged", dtype="float32")
    assert list(tmp_path.iterdir()) == []


def test_what_16_bits_cost_the_policy_moves_the_limit(run, tmp_path, monkeypatch, capsys):
    """A policy that is far from its own float32 pass: so is each 16-bit computation of it."""
    real = check.Witness

    class Rounded(real):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            assert 0 < self.rounding < LIMIT
            self.rounding = rounding

    monkeypatch.setattr("qlora_rl.export.job.Witness", Rounded)
    monkeypatch.setattr("qlora_rl.export.job.LIMIT", 0.0)
    rounding = 0.0
    with pytest.raises(ExportError, match="--max-kl"):
        export(run, "merged", out=tmp_path / "a")
    rounding = 1e-3
    capsys.readouterr()
    assert main(["export", str(run), "--out", str(tmp_path / "a")]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path / 'a'}: written; KL to the trained policy ")
    assert second == "  as close as 16-bit rounding allows; a mean KL up to 4.0e-03 per token was accepted"


def test_shards_tokenizer_and_template_are_all_there(run, tmp_path, reload, base, monkeypatch):
    whole = export(run, "merged", out=tmp_path / "whole")
    monkeypatch.setattr("qlora_rl.export.job.SHARD_BYTES", 300_000)
    cut = export(run, "merged", out=tmp_path / "cut")
    index = json.loads((cut.path / "model.safetensors.index.json").read_text())
    files = sorted(cut.path.glob("model-*.safetensors"))
    assert len(files) > 2
    assert {f.name for f in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(p.numel() * 2 for p in reload(whole.path).parameters())
    assert torch.equal(reload(cut.path)(IDS).logits, reload(whole.path)(IDS).logits)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (cut.path / name).read_bytes() == (base.path / name).read_bytes()
    assert "quantization_config" not in json.loads((cut.path / "config.json").read_text())


def test_onto_the_original_it_is_another_function_and_that_is_said(run, tmp_path, model_dir):
    exact = export(run, "merged", out=tmp_path / "exact")
    done = export(run, "merged-original", out=tmp_path / "original")  # the base knows what it was made from
    assert done.distance.kl_mean > 3 * exact.distance.kl_mean
    assert f"{done.distance.kl_mean:.2e}" in (done.path / "README.md").read_text()
    again = export(run, "merged-original", out=tmp_path / "named", original=model_dir)
    assert again.distance == done.distance


def test_an_original_of_pickled_weights_is_read_as_prepare_reads_it(run, tmp_path, model_dir):
    from safetensors.torch import load_file

    pickled = tmp_path / "pickled"
    shutil.copytree(model_dir, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    done = export(run, "merged-original", out=tmp_path / "a", original=pickled)
    assert done.distance == export(run, "merged-original", out=tmp_path / "b", original=model_dir).distance


def test_what_a_checkpoint_says_of_sampling_does_not_reach_the_comparison(run):
    from qlora_rl.export.check import Witness

    policy = open_trained(run).load()
    plain = Witness(policy, [[40, 41], [42]])
    own = policy.generation_config
    own.num_beams, own.min_p, own.num_return_sequences, own.repetition_penalty = 2, 0.9, 2, 3.0
    assert Witness(policy, [[40, 41], [42]])._cases == plain._cases
    assert policy.generation_config is own


def with_ends(run, directory, ends):
    """A copy of a run whose tokenizer had another EOS than the base's."""
    config = json.loads((shutil.copytree(run, directory) / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"ends": ends}))
    return directory


def test_an_export_ends_where_the_run_s_completions_did(run, base, tmp_path):
    from qlora_rl.export.check import Witness

    ended = with_ends(run, tmp_path / "run", [1, 60])
    for kind in ("merged", "adapter"):
        done = export(ended, kind, out=tmp_path / kind, check=False)
        assert json.loads((done.path / "generation_config.json").read_text())["eos_token_id"] == [1, 60]
    assert done.load["vllm"].endswith(f"--lora-modules policy={done.path} --generation-config {done.path}")
    assert "generation-config" not in export(run, "adapter", out=tmp_path / "as before", check=False).load["vllm"]
    policy = open_trained(run).load()
    whole = Witness(policy, [[40, 41], [42]])._cases
    end = whole[0][0][3]  # the second token that it says
    place = whole[0][0].index(end, 2)
    assert Witness(policy, [[40, 41], [42]], ends=[end])._cases[0] == (whole[0][0][: place + 1], 2)


TALK = [{"role": "user", "content": "1"}]


@pytest.mark.parametrize(
    "template", ["<é{{ messages[0]['content'] }}>\n", {"default": "<2>", "tool_use": "<3>"}], ids=type
)
def test_an_export_has_the_chat_template_that_the_run_was_trained_with(copy, tmp_path, template):
    before = export(copy, "adapter", out=tmp_path / "before", check=False)
    assert "chat-template" not in before.load["vllm"]
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"chat_template": template}))
    for kind in ("merged", "adapter", "merged-original"):
        done = export(copy, kind, out=tmp_path / kind, check=False)
        found = AutoTokenizer.from_pretrained(done.path)
        assert found.chat_template == template
        assert found("1+1=") == AutoTokenizer.from_pretrained(before.path)("1+1=")
        if kind == "adapter":
            assert done.load["vllm"].endswith(f" --chat-template {done.path}/chat_template.jinja")


def test_a_policy_with_softcapped_attention_is_exported(tmp_path):
    """What is loaded again has its bound, too, which transformers' default leaves out."""
    run = make_run(prepare_base(make_model(tmp_path / "model", architecture="gemma2"), "none"), tmp_path / "run")
    assert export(run, "merged", out=tmp_path / "merged").distance.kl_mean < LIMIT


def test_a_policy_is_loaded_with_the_kernel_that_a_trainer_multiplies_with(run):
    """bitsandbytes decodes each weight for each token: of a model of 135 M an export took minutes."""
    trained = open_trained(run)
    kinds = trained.load(), trained.load_base_alone(), trained.with_adapter(trained.adapter)
    linears = [[m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)] for model in kinds]
    has_one = not isinstance(codes_kernel(), str)
    assert all(found and all(has_kernel(each) == has_one for each in found) for found in linears)


def test_sequences_of_several_lengths_are_scored_together_as_each_alone(run):
    from qlora_rl.export.check import _logprobs

    policy = open_trained(run).load()
    cases = [([40, 41, 42, 43], 1), ([50, 51, 52, 53, 54, 55, 56], 5), ([44, 45, 46], 1)]
    with in_float32(policy, 8):
        together = list(_logprobs(policy, cases))
        alone = [next(_logprobs(policy, [case])) for case in cases]
    assert [len(each) for each in together] == [len(ids) - start for ids, start in cases]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)  # float32's own rounding


def test_the_adapter_alone_is_the_policy_on_its_base(base, tmp_path):
    config = LoraConfig(
        r=8, lora_alpha=12, target_modules="all-linear", rank_pattern={"q_proj": 4}, alpha_pattern={"down_proj": 3}
    )
    run = make_run(base, tmp_path / "run", config)
    done = export(run, "adapter", out=tmp_path / "adapter")
    # A scale that is no power of two moves where autocast rounds to bf16.
    assert done.distance.kl_mean < LIMIT
    written = json.loads((done.path / "adapter_config.json").read_text())
    assert not written.get("rank_pattern")  # vLLM drops patterns
    assert written["lora_alpha"] == written["r"]
    assert json.loads((done.path / "qlora_adapter.json").read_text()) == {"base_identity": base.identity}
    assert (done.path / "tokenizer.json").is_file()
    assert "vllm" in done.load


def test_dora_is_merged_and_travels_in_its_own_form_only(base, tmp_path, caplog):
    run = make_run(base, tmp_path / "run", LoraConfig(r=8, use_dora=True, target_modules="all-linear"))
    assert export(run, "merged", out=tmp_path / "merged").distance.kl_mean < LIMIT
    caplog.set_level("INFO", "qlora_rl.stages")
    done = export(run, "adapter", out=tmp_path / "adapter")
    assert done.distance.kl_mean < LIMIT
    assert "vllm" not in done.load
    assert any("as PEFT has saved it" in line and "DoRA" in line for line in caplog.messages)
    assert "As PEFT has saved it" in (done.path / "README.md").read_text()


def test_a_checkpoint_is_exported_as_a_run_is(run, copy, tmp_path):
    (copy / "adapter").rename(copy / "checkpoint-2")
    with pytest.raises(RunDirectoryError):
        export(copy)
    done = export(copy / "checkpoint-2", out=tmp_path / "merged")
    assert done.distance == export(run, out=tmp_path / "other").distance


def test_another_base_is_rejected_and_a_moved_one_is_named(run, base, other_model_dir, tmp_path):
    with pytest.raises(BaseMismatchError):
        export(run, out=tmp_path / "a", base=prepare_base(other_model_dir))
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    config = json.loads((copy / "config.json").read_text())
    config["base"]["path"] = str(tmp_path / "gone")
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(BaseIncompleteError):
        export(copy, out=tmp_path / "a")
    assert export(copy, out=tmp_path / "a", base=base).distance.kl_mean < LIMIT


def test_an_adapter_of_another_base_is_rejected(run, copy, tmp_path):
    (copy / "adapter" / "qlora_adapter.json").write_text(json.dumps({"base_identity": "0" * 64}))
    with pytest.raises(AdapterRejectedError, match="identity 0000"):
        export(copy, out=tmp_path / "a")


def test_what_is_there_is_never_touched(run, tmp_path):
    directory, link = tmp_path / "out", tmp_path / "link"
    directory.mkdir()
    link.symlink_to(tmp_path / "nowhere")
    for target in (directory, link):
        with pytest.raises(ConfigConflictError, match=target.name):
            export(run, out=target)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_an_export_that_does_not_finish_leaves_nothing(run, tmp_path, monkeypatch, kind):
    def fail(*_):
        raise kind("full")

    monkeypatch.setattr(job, "write_card", fail)
    with pytest.raises(kind):
        export(run, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_card_says_what_it_is_and_names_no_path_of_this_machine(run, base, tmp_path):
    done = export(run, out=tmp_path / "merged")
    card = (done.path / "README.md").read_text()
    for said in (
        f"{done.distance.kl_mean:.2e}",
        base.identity,
        "random tokens",
        'LLM("merged")',
        "| transformers |",
    ):
        assert said in card
    assert str(tmp_path) not in card
    assert str(base.path.parent) not in card
    numbers = json.loads((done.path / "export.json").read_text())
    assert numbers["distance"] == vars(done.distance)


def test_prompts_come_from_the_rollouts_of_the_run_or_a_file(run, copy, tmp_path):
    rollouts = {
        when: {"step": step, "prompt": f"{step}+1=", "rollouts": []} for when, step in (("first", 1), ("last", 3))
    }
    (copy / "rollouts.json").write_text(json.dumps(rollouts))
    done = export(copy, out=tmp_path / "r", prompts=3)
    assert done.prompts == "rollouts of the run"
    assert 3 < done.distance.tokens <= 72  # 3 completions of 24 tokens at most
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}]}) + "\n")
    done = export(copy, out=tmp_path / "b", data=data)
    assert (done.prompts, done.distance.tokens <= 24) == ("data.jsonl", True)
    data.write_text(json.dumps({"prompt": "1+1=" * 200}) + "\n")  # longer than the model has positions
    assert export(copy, out=tmp_path / "d", data=data).distance.tokens > 0
    for rows, named in (('{"prompt": ""}\n', "empty"), ('{"question": "1"}\n', "question"), ("", "empty")):
        data.write_text(rows)
        with pytest.raises(ConfigConflictError, match=named):
            export(copy, out=tmp_path / "c", data=data)


def test_prompts_of_a_file_are_made_as_the_run_made_its_own_and_a_path_with_spaces_is_quoted(run, copy, tmp_path):
    (copy / "run.toml").write_text('[data]\ntrain = "rows.jsonl"\nprompt_template = "{question}="\n')
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1+1"}\n')
    done = export(copy, "adapter", out=tmp_path / "an export", data=data)
    assert done.prompts == "data.jsonl"
    assert shlex.split(done.load["vllm"])[-1] == f"policy={tmp_path / 'an export'}"
    assert ast.literal_eval(done.load["transformers"].rpartition(", ")[2][:-1]) == str(tmp_path / "an export")


def test_the_card_of_a_run_without_rewards_shows_its_loss_and_of_a_checkpoint_its_step(run, copy, tmp_path):
    lines = [{"step": step, "step_seconds": 1.0, "loss": 1 / step, "mean_token_accuracy": 0.5} for step in (1, 2, 3)]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copytree(copy / "adapter", copy / "checkpoint-2")
    done = export(copy / "checkpoint-2", "adapter", out=tmp_path / "a")
    card = (done.path / "README.md").read_text()
    for there in (
        "| exported | as it was after step 2 |",
        "| loss at last | 0.333 |",
        "| step | loss | mean token accuracy |",
        "| 3 | 0.333 | 0.5 |",
    ):
        assert there in card
    assert "reward" not in card.lower().replace("rewards", "")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"to": "onnx"}, "onnx"),
        ({"to": "adapter", "dtype": "float32"}, "dtype"),
        ({"to": "merged", "original": "x"}, "merged-original"),
        ({"to": "merged-original", "original": "/nowhere"}, "/nowhere"),
        ({"to": "merged", "prompts": 0}, "prompts"),
    ],
)
def test_arguments_that_contradict_are_rejected(run, tmp_path, fields, says):
    with pytest.raises(ConfigConflictError, match=says):
        export(run, out=tmp_path / "a", **fields)


def test_the_command_prints_the_distance_and_ends_with_zero(run, tmp_path, capsys):
    assert main(["export", str(run), "--out", str(tmp_path / "a"), "--prompts", "2", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["kl_mean"] < LIMIT
    stages = [line.strip() for line in said.err.splitlines() if line.startswith("     ")]
    for stage in (
        "checking the base",
        "loading the policy",
        "sampling from the policy",
        "writing merged",
        "loading it again",
    ):
        assert any(line.startswith(stage) for line in stages), stage
    assert main(["export", str(run), "--out", str(tmp_path / "a")]) == 1
    assert "already exists" in capsys.readouterr().err


def test_without_the_check_it_is_the_same_export_and_the_card_says_that_nobody_has_compared(
    run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("qlora_rl.export.job.Witness", lambda *_, **__: pytest.fail("sampled"))
    monkeypatch.setattr("qlora_rl.export.job._load_again", lambda *_: pytest.fail("loaded again"))
    target = tmp_path / "a"
    assert main(["export", str(run), "--out", str(target), "--no-check"]) == 0
    assert f"{target}: written; not checked" in capsys.readouterr().out
    card = (target / "README.md").read_text()
    assert "It was not checked" in card
    assert "KL" not in card.split("## The run")[0]
    assert "distance" not in json.loads((target / "export.json").read_text())
    monkeypatch.undo()
    checked = export(run, "merged", out=tmp_path / "b")
    assert (target / "model.safetensors").read_bytes() == (checked.path / "model.safetensors").read_bytes()
    with pytest.raises(ConfigConflictError, match="max_kl"):
        export(run, out=tmp_path / "c", check=False, max_kl=1.0)


# --- GGUF -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_a_gguf_file_is_the_policy(tmp_path, architecture):
    pytest.importorskip("gguf")
    base = prepare_base(make_bpe_model(tmp_path / "model", architecture))
    run = make_run(base, tmp_path / "run")
    assert export(run, "gguf", out=tmp_path / "a").distance.kl_mean < LIMIT
    done = export(run, "gguf", out=tmp_path / "b", dtype="float32")
    assert done.distance.kl_mean < LIMIT_FLOAT32
    _check_vocabulary(next(done.path.glob("*.gguf")), base.path, "llama-bpe" if architecture == "llama" else "qwen2")


def test_heads_of_another_size_than_transformers_assumes_are_read_from_the_file(tmp_path):
    """transformers' reader gives every Qwen3 heads of 128; the line that would load it there is left out."""
    pytest.importorskip("gguf")
    run = make_run(prepare_base(make_bpe_model(tmp_path / "model", "qwen3", head_dim=32)), tmp_path / "s f t")
    done = export(run, "gguf", out=tmp_path / "a")
    assert done.distance.kl_mean < LIMIT
    assert list(done.load) == ["ollama", "llama.cpp"]
    assert done.load["ollama"].startswith("ollama create s-f-t -f ")


@pytest.mark.parametrize(
    ("run", "model"),
    [("s f t", "s-f-t"), ("Run_1.5", "run_1.5"), (".a/b:ü", "a-b"), ("步", "policy"), ("qwen-3", "qwen-3")],
)
def test_ollama_gets_a_name_that_it_takes(run, model):
    assert _model_name(run) == model


def _check_vocabulary(file, base, splits):
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert [tokens[i] for i in tokenizer(TEXT[1]).input_ids] == tokenizer.tokenize(TEXT[1])
    assert tokens[-1].startswith("[PAD")  # the embedding is larger
    assert fields["tokenizer.ggml.token_type"].contents()[0] == 3
    assert fields["tokenizer.ggml.pre"].contents() == splits
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 0
    assert fields["tokenizer.chat_template"].contents() == tokenizer.chat_template


ASKED = ["12 + 7 = 19, isn't it?", "  Two  LINES\n\n", "na\u00efve \U0001f642"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A function: a GGUF file with the vocabulary of a tiny model, and the tokenizer of its base."""
    pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    from qlora_rl.export.gguf import write_gguf

    def write(architecture, change=_unchanged):
        directory = tmp_path_factory.mktemp("gguf")
        model = make_bpe_model(directory / "model", architecture)
        change(model)
        base = prepare_base(model, "none")
        tokenizer = AutoTokenizer.from_pretrained(base.path)
        write_gguf(load_base(base), base, tokenizer, directory / "a.gguf", "float32", name="a")
        return directory / "a.gguf", tokenizer

    return write


def test_a_tokenizer_made_of_the_files_own_fields_gives_every_text_the_same_ids(written):
    import gguf

    for architecture, change, splits in (
        ("qwen2", _unchanged, "qwen2"),
        ("llama", _unchanged, "llama-bpe"),
        ("llama", _splits_digits, "smollm"),
        ("llama", _with_bos, "llama-bpe"),
    ):
        file, tokenizer = written(architecture, change)
        assert check_vocabulary(file, tokenizer, ASKED) > 200
        assert gguf.GGUFReader(file).fields["tokenizer.ggml.pre"].contents() == splits
        assert (tokenizer("a").input_ids[0] == 0) == (change is _with_bos)


def _unchanged(model):
    """As it was made."""


def _splits_digits(model):
    """As SmolLM2's tokenizer.json has it, with the flag and the empty normalizer that a conversion from GGUF leaves."""
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    own = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, own]}
    content["normalizer"] = {"type": "Sequence", "normalizers": []}
    content["model"]["byte_fallback"] = True
    file.write_text(json.dumps(content))


def _with_bos(model):
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    file.write_text(json.dumps(content))
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|endoftext|>"}))


def _with_marks_beyond(model):
    """Marks without use, for which the embedding has no row: the base is prepared all the same, with a warning."""
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    for number in range(len(content["model"]["vocab"]), 400):
        content["added_tokens"].append({"id": number, "content": f"<{number}\nFROM elsewhere>", **flags})
    file.write_text(json.dumps(content))


def test_a_file_has_as_many_tokens_as_the_embedding_has_rows(written):
    """llama.cpp loads no other."""
    import gguf

    file, tokenizer = written("llama", _with_marks_beyond)
    reader = gguf.GGUFReader(file)
    (embedding,) = (each for each in reader.tensors if each.name == "token_embd.weight")
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == embedding.shape[1] < len(tokenizer)
    assert check_vocabulary(file, tokenizer, ASKED) > 200


@pytest.mark.parametrize(
    ("decoder", "is_by_bytes"),
    [
        ({"type": "ByteLevel"}, True),
        # As SmolLM2's is stored: the first three find nothing among tokens of bytes.
        (["ByteFallback", "Fuse", "\u2581", "ByteLevel"], True),
        (["Fuse", "a", "ByteLevel"], False),
        (["Strip", "ByteLevel"], False),
        (["ByteFallback", "Fuse"], False),
        (None, False),
    ],
)
def test_a_decoder_of_several_steps_is_by_bytes_where_no_other_step_finds_anything(decoder, is_by_bytes):
    if isinstance(decoder, list):
        kinds = ("ByteFallback", "Fuse", "ByteLevel", "Strip")
        replace = {"type": "Replace", "content": " "}
        steps = [{"type": each} if each in kinds else {**replace, "pattern": {"String": each}} for each in decoder]
        decoder = {"type": "Sequence", "decoders": steps}
    content = {"model": {"vocab": {"a": 0, "\u0120b": 1}}, "added_tokens": [{"content": "<|end|>"}], "decoder": decoder}
    assert (_other_decoders(content) == []) == is_by_bytes


FIELDS = {
    "tokens": ("add_token_list", lambda tokens: [*tokens[:40], tokens[41], tokens[40], *tokens[42:]]),
    "merges": ("add_token_merges", lambda merges: merges[::-1]),
    "fewer merges": ("add_token_merges", lambda merges: merges[:-1]),
    "splitting": ("add_tokenizer_pre", lambda name: "llama-bpe"),
    "splitting of another kind": ("add_tokenizer_pre", lambda name: "gpt-2"),
    "types": ("add_token_types", lambda types: [1] * len(types)),
    "eos": ("add_eos_token_id", lambda number: number + 1),
    "template": ("add_chat_template", lambda text: text + " "),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_field_of_the_vocabulary_is_found(written, field, monkeypatch):
    import gguf

    name, change = FIELDS[field]
    real = getattr(gguf.GGUFWriter, name)
    monkeypatch.setattr(gguf.GGUFWriter, name, lambda self, value: real(self, change(value)))
    file, tokenizer = written("qwen2")
    with pytest.raises(ExportError, match="GGUF file's vocabulary"):
        check_vocabulary(file, tokenizer)


def _appends_eos(model):
    _with_bos(model)
    content = json.loads((model / "tokenizer.json").read_text())
    content["post_processor"]["single"].reverse()
    (model / "tokenizer.json").write_text(json.dumps(content))


def _takes_no_words(model):
    """A word that is a token, to which no merges lead: llama.cpp takes it all the same in vocabularies of Llama 3's
    kind."""
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["vocab"]["qzqz"] = len(content["model"]["vocab"])
    (model / "tokenizer.json").write_text(json.dumps(content))


def _strips(model):
    content = json.loads((model / "tokenizer.json").read_text())
    content["added_tokens"][0]["lstrip"] = True
    (model / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize("change", [_appends_eos, _takes_no_words, _strips])
def test_what_a_file_cannot_say_of_a_tokenizer_ends_the_export(tmp_path, change):
    pytest.importorskip("gguf")
    model = make_bpe_model(tmp_path / "model", "llama")
    change(model)
    run = make_run(prepare_base(model), tmp_path / "run")
    with pytest.raises(ExportError, match="convert_hf_to_gguf"):
        export(run, "gguf", out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_gguf_of_what_is_not_known_is_rejected_with_the_way_out(run, tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(NotYetSupportedError, match="merges"):
        export(run, "gguf", out=tmp_path / "a")
    model = make_bpe_model(tmp_path / "model", "llama")
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotYetSupportedError, match="positions are scaled"):
        export(make_run(prepare_base(model), tmp_path / "run"), "gguf", out=tmp_path / "a")
    other = make_bpe_model(tmp_path / "mistral", "mistral")
    with pytest.raises(NotYetSupportedError, match="model_type='mistral'"):
        export(make_run(prepare_base(other), tmp_path / "other"), "gguf", out=tmp_path / "a")


def test_without_the_gguf_package_it_is_said_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match="pip install 'gguf"):
        export(run, "gguf", out=tmp_path / "a")


# --- llama.cpp ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen2", marks=pytest.mark.full), "qwen3"])
def bpe_run(request, tmp_path_factory):
    """A run on a base that GGUF can hold."""
    directory = tmp_path_factory.mktemp(request.param)
    base = prepare_base(make_bpe_model(directory / "model", request.param), out=directory / "base")
    return make_run(base, directory / "run")


def test_a_gguf_file_names_the_ends_of_the_run(tmp_path):
    gguf = pytest.importorskip("gguf")
    base = prepare_base(make_bpe_model(tmp_path / "model", "qwen2"), out=tmp_path / "base")
    run = with_ends(make_run(base, tmp_path / "first"), tmp_path / "run", [0, 260, 261])
    config = json.loads((run / "config.json").read_text())
    config["grpo"]["generation_kwargs"] = {"stop": ["\n\n", "Human:"]}
    (run / "config.json").write_text(json.dumps(config))
    done = export(run, "gguf", out=tmp_path / "a", check=False)
    fields = gguf.GGUFReader(next(done.path.glob("*.gguf"))).fields
    found = [fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("eos", "eot", "eom")]
    assert found == [0, 260, 261]
    stops = [line for line in (done.path / "Modelfile").read_text().splitlines() if line.startswith("PARAMETER stop")]
    assert len(stops) == 3
    assert stops[-1] == 'PARAMETER stop "Human:"'
    assert (
        r'pass them as `stop` (transformers: `stop_strings`): `["\n\n", "Human:"]`'
        in (done.path / "README.md").read_text()
    )


def test_rows_that_llama_cpp_would_rotate_otherwise_are_found(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    from qlora_rl.export import gguf as own

    base = prepare_base(make_bpe_model(tmp_path / "model", "llama"), out=tmp_path / "base")
    monkeypatch.setattr(own, "_interleaved", lambda weight, heads: weight)
    with pytest.raises(ExportError, match="above the limit"):
        export(make_run(base, tmp_path / "run"), "gguf", out=tmp_path / "a", dtype="float32")
    assert not (tmp_path / "a").exists()


def test_eight_bits_are_close_and_without_llama_cpp_it_is_said_that_nobody_asked_it(
    bpe_run, tmp_path, monkeypatch, caplog
):
    pytest.importorskip("gguf")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    caplog.set_level("INFO", "qlora_rl.stages")
    done = export(bpe_run, "gguf", out=tmp_path / "a", dtype="q8_0")
    assert LIMIT_FLOAT32 < done.distance.kl_mean < LIMITS["q8_0"]
    assert f"FROM ./{next(done.path.glob('*.gguf')).name}" in (done.path / "Modelfile").read_text()
    assert done.llama_cpp is None
    assert any("llama.cpp itself was not asked" in line for line in caplog.messages)
    assert "llama.cpp was not installed" in (done.path / "README.md").read_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "q8_0"])
def test_llama_cpp_computes_the_policy(bpe_run, tmp_path, dtype):
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python, which compiles llama.cpp")
    done = export(bpe_run, "gguf", out=tmp_path / "a", dtype=dtype)
    limit = LIMITS.get(dtype, LIMIT)
    assert done.distance.kl_mean < limit
    assert 0 < done.llama_cpp.kl_mean < limit
    assert f"| llama.cpp | {done.llama_cpp.kl_mean:.2e} |" in (done.path / "README.md").read_text()


def test_what_is_no_number_is_beyond_the_limit(bpe_run, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    from qlora_rl.export import job

    monkeypatch.setattr(job, "in_llama_cpp", lambda *_: Distance(float("nan"), float("nan"), 0.0, 1))
    with pytest.raises(ExportError, match="above the limit"):
        export(bpe_run, "gguf", out=tmp_path / "a", dtype="q8_0")
    assert list(tmp_path.iterdir()) == []


def test_a_modelfile_says_of_no_template_that_it_is_in_the_file_which_is_not(tmp_path):
    """transformers takes several templates by name; of those none is written."""
    for template, says in (("{{ messages }}", True), ({"default": "{{ messages }}"}, False), (None, False)):
        write_modelfile(tmp_path, SimpleNamespace(chat_template=template), model="./a.gguf")
        assert ("is in the GGUF file" in (tmp_path / "Modelfile").read_text()) is says


def test_ollama_gets_a_template_that_is_known_and_no_other():
    from jinja2 import Template

    def tokenizer(template):
        return SimpleNamespace(
            chat_template=template,
            apply_chat_template=lambda messages, tokenize, add_generation_prompt: Template(template).render(
                messages=messages, add_generation_prompt=add_generation_prompt
            ),
        )

    chatml = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    found, stops = _ollama_template(tokenizer(chatml))
    assert found.startswith("{{ range .Messages }}<|im_start|>{{ .Role }}\n")
    assert stops == ["<|im_end|>"]
    assert _ollama_template(tokenizer("{{ messages[0].content }}")) == ("", [])
    assert _ollama_template(SimpleNamespace(chat_template=None)) == ("", [])
