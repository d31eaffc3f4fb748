"""Codes that are chosen by what layers see, with real bitsandbytes, and what a base costs."""

import json
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from qlora_rl import ConfigConflictError, QuantSpec, load_base, prepare_base, recommend
from qlora_rl.base import checkpoint
from qlora_rl.base.calibration import blocks
from qlora_rl.base.calibration.blocks import chooser, quantise_by_blocks
from qlora_rl.base.calibration.codes import choose_codes
from qlora_rl.base.calibration.text import digest_rows, shipped_text, token_sequences
from qlora_rl.base.checkpoint import MANIFEST, measure_quantisation, open_base
from qlora_rl.base.quant import exact_absmax, quantize_linear
from qlora_rl.base.reader import StoredTensors, read_4bit
from qlora_rl.cli import main
from qlora_rl.data.calibration import calibration_rows
from qlora_rl.demo.tiny_model import make_tokenizer
from qlora_rl.errors import UnsupportedQuantError
from qlora_rl.memory.calibrating import calibration_cost
from qlora_rl.memory.shape import read_config, read_shape

ROWS = ["The quick brown fox jumps over the lazy dog. " * 2, "def f(x):\n    return [y * 2 for y in x if y > 3]\n" * 2]
SPECS = [
    QuantSpec(quant, double, blocksize)
    for quant in ("nf4", "fp4")
    for double in (True, False)
    for blocksize in (64, 128)
]


def weights_and_moments(rows=(48, 16), columns=256, seed=0):
    """Weights with one input, and the sums over an input whose columns go together."""
    torch.manual_seed(seed)
    x = torch.randn(512, columns) @ (torch.eye(columns) + 0.3 * torch.randn(columns, columns))
    return [torch.randn(each, columns).mul_(0.05).to(torch.bfloat16) for each in rows], x.T @ x


def dequantised_by_bitsandbytes(tensors):
    """What bitsandbytes' own layer multiplies with, float32."""
    import bitsandbytes.functional as functional

    parts = {key.removeprefix("weight."): value for key, value in tensors.items() if key != "weight"}
    state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
    assert state.nested == ("nested_absmax" in parts)
    plain = functional.QuantState(
        absmax=exact_absmax(state), shape=state.shape, code=state.code, blocksize=state.blocksize,
        quant_type=state.quant_type, dtype=torch.float32,
    )  # fmt: skip
    return functional.dequantize_4bit(tensors["weight"], plain)


def weighted_error(weight_OI, quantised_OI, moments_II):
    """trace((W - Q) H (W - Q)^T)."""
    difference = weight_OI.float() - quantised_OI
    return float((difference @ moments_II * difference).sum(dtype=torch.float64))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.label)
def test_chosen_codes_have_less_weighted_error_and_are_what_bitsandbytes_reads(spec):
    weights, moments = weights_and_moments()
    for weight, chosen in zip(weights, choose_codes(weights, spec, moments), strict=True):
        plain = quantize_linear(weight, spec)
        assert {key: (value.dtype, value.shape) for key, value in chosen.tensors.items()} == {
            key: (value.dtype, value.shape) for key, value in plain.items()
        } or spec.double_quant  # there the state holds the offset as digits
        assert chosen.tensors.keys() == plain.keys()
        assert torch.equal(dequantised_by_bitsandbytes(chosen.tensors), chosen.weight)
        assert torch.equal(read_4bit(chosen.tensors, "weight").dequantised(), chosen.weight)
        before = weighted_error(weight, read_4bit(plain, "weight").dequantised(), moments)
        assert weighted_error(weight, chosen.weight, moments) < 0.7 * before


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
def test_without_input_and_search_it_is_plain_rounding(quant):
    weights, _ = weights_and_moments()
    spec = QuantSpec(quant, False)
    for moments in (None, torch.eye(256), torch.zeros(256, 256)):
        for weight, chosen in zip(weights, choose_codes(weights, spec, moments, scales=[1.0]), strict=True):
            plain = quantize_linear(weight, spec)
            assert torch.equal(read_4bit(plain, "weight").dequantised(), chosen.weight)
            if quant == "nf4":  # FP4 has two codes for zero
                assert all(torch.equal(plain[key], value) for key, value in chosen.tensors.items())


def test_codes_are_nearest_to_the_scales_that_double_quantisation_stores():
    (weight, *_), _ = weights_and_moments()
    (chosen,) = choose_codes([weight], QuantSpec(), None)
    stored = read_4bit(chosen.tensors, "weight")
    scaled = weight.float().view(-1, 64) / stored.absmax[:, None]
    nearest = stored.table[(scaled[..., None] - stored.table).abs().argmin(-1)]
    assert torch.equal((nearest * stored.absmax[:, None]).view_as(chosen.weight), chosen.weight)


def test_a_search_of_scales_alone_has_less_error():
    (weight, *_), _ = weights_and_moments()
    spec = QuantSpec()
    (chosen,) = choose_codes([weight], spec, None)
    plain = read_4bit(quantize_linear(weight, spec), "weight").dequantised()
    assert (chosen.weight - weight).square().sum() < (plain - weight).square().sum()


def test_inputs_that_are_zero_or_go_together_wholly_are_no_obstacle():
    weights, _ = weights_and_moments()
    x = torch.randn(4, 256)  # of rank 4
    x[:, 7], x[:, 9] = 0, x[:, 8]
    weights[0][3] = 0  # a row, too
    for chosen in choose_codes(weights, QuantSpec(), x.T @ x):
        assert bool(chosen.weight.isfinite().all())
    assert choose_codes(weights, QuantSpec(double_quant=False), x.T @ x)[0].weight[3].count_nonzero() == 0


@pytest.fixture(scope="module")
def calibrated(model_dir, tmp_path_factory):
    """The tiny checkpoint as a base that is calibrated on two rows."""
    return prepare_base(model_dir, calibrate=ROWS, out=tmp_path_factory.mktemp("calibrated") / "base")


def test_a_calibrated_base_is_another_one_in_the_same_format(base, calibrated, model_dir, tmp_path):
    plain, chosen = load_file(base.path / "model.safetensors"), load_file(calibrated.path / "model.safetensors")
    assert plain.keys() == chosen.keys()
    assert calibrated.spec == base.spec
    assert calibrated.identity != base.identity
    untouched = [name for name in plain if ".weight." not in name and f"{name}.absmax" not in plain]
    assert "model.embed_tokens.weight" in untouched
    assert all(torch.equal(plain[name], chosen[name]) for name in untouched)
    assert json.loads((calibrated.path / "config.json").read_text()) == json.loads(
        (base.path / "config.json").read_text()
    )
    again = prepare_base(model_dir, calibrate=ROWS, out=tmp_path / "again")
    assert (again.identity, again.inputs) == (calibrated.identity, calibrated.inputs)
    other = prepare_base(model_dir, calibrate=ROWS[:1], out=tmp_path / "other")
    assert other.identity != calibrated.identity
    assert other.calibrated_on != calibrated.calibrated_on == digest_rows([*ROWS, "1"])


def test_a_calibrated_base_is_closer_to_its_source_and_says_so(base, calibrated, model_dir):
    opened = open_base(calibrated.path)
    assert opened.measured.as_dict() == json.loads((calibrated.path / MANIFEST).read_text())["measured"]
    assert opened.measured == calibrated.measured
    assert opened.measured.tokens > 200
    assert base.measured is None  # nobody asked
    found = measure_quantisation(calibrated, model_dir)
    assert found == opened.measured
    before, after = (measure_quantisation(each, model_dir, text=ROWS) for each in (base, calibrated))
    assert after.kl < 0.5 * before.kl
    assert after.perplexity_source == before.perplexity_source
    assert f"KL to its source {found.kl:.4f}" in str(found)


def test_what_is_measured_is_what_the_whole_models_say(base, model_dir):
    from transformers import AutoModelForCausalLM

    found = measure_quantisation(base, model_dir, text=ROWS[:1])
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.tensor([make_tokenizer()(ROWS[0])["input_ids"]])
    with torch.no_grad():
        source = torch.log_softmax(model(ids).logits[0], -1)[:-1]
        stored = StoredTensors(base.path)
        for name, parameter in model.named_parameters():
            if (coded := stored.read_4bit(name)) is not None:
                parameter.copy_(coded.dequantised())
        held = torch.log_softmax(model(ids).logits[0], -1)[:-1]
    kl = (source.exp() * (source - held)).sum(-1).mean()
    loss = -held.gather(1, ids[0, 1:, None]).mean()
    assert found.tokens == ids.shape[1] - 1
    torch.testing.assert_close(torch.tensor([found.kl, found.perplexity_base]), torch.stack([kl, loss.exp()]))


def test_skipped_modules_stay_as_they_are(model_dir, tmp_path):
    base = prepare_base(model_dir, calibrate=ROWS, skip_modules=["layers.0.mlp", "o_proj"], out=tmp_path / "base")
    stored, source = StoredTensors(base.path), StoredTensors(model_dir)
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.o_proj.weight"):
        assert torch.equal(stored[name], source[name])
    assert "model.layers.1.mlp.down_proj.weight.absmax" in stored
    load_base(base)


@pytest.mark.parametrize("architecture", ["llama-bias", "qwen3", "gemma2", "phi3", "glm4"])
def test_blocks_of_many_models_are_found(architecture, tmp_path):
    source = make_model(tmp_path / "model", architecture=architecture)
    base = prepare_base(source, calibrate=ROWS, out=tmp_path / "base")
    plain = prepare_base(source, out=tmp_path / "plain")
    stored, before = StoredTensors(base.path), StoredTensors(plain.path)
    coded = [name for name in stored if f"{name}.absmax" in stored]
    assert coded
    assert all(not torch.equal(stored[name], before[name]) for name in coded)
    kl, kl_before = (measure_quantisation(each, source, text=ROWS).kl for each in (base, plain))
    assert kl < 0.7 * kl_before


def test_a_model_of_another_family_is_calibrated_too():
    """With its linears in one, and a list of blocks and arguments of its own."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    model = transformers.GPTNeoXForCausalLM(config).to(torch.bfloat16)
    weights = {name: value for name, value in model.state_dict().items() if value.ndim == 2 and ".layers." in name}
    assert len(weights) == 8
    found = {}
    text = token_sequences(ROWS, make_tokenizer(), model)
    assert max(map(len, text)) == 64
    spec = QuantSpec()
    measured = quantise_by_blocks(model, spec, weights, chooser(spec, weights, found), text, text)
    assert found.keys() == weights.keys()
    assert measured.kl < 0.1


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_experts_are_calibrated_one_by_one(architecture, tmp_path):
    source = make_model(tmp_path / "model", architecture=architecture, tied=False)
    base = prepare_base(source, calibrate=ROWS, quantize_experts=True, out=tmp_path / "base")
    plain = prepare_base(source, quantize_experts=True, out=tmp_path / "plain")
    stored, before = StoredTensors(base.path), StoredTensors(plain.path)
    experts = [name for name in stored if ".experts." in name and f"{name}.absmax" in stored]
    assert experts
    changed = [name for name in experts if not torch.equal(stored[name], before[name])]
    assert len(changed) == len(experts)
    load_base(base)
    kl, kl_before = (measure_quantisation(each, source, text=ROWS).kl for each in (base, plain))
    assert kl < kl_before


def test_a_model_object_is_as_it_was(model_dir, calibrated, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    base = prepare_base(model, calibrate=ROWS, out=tmp_path / "base")
    assert base.identity == calibrated.identity
    assert model.training
    after = model.state_dict()
    assert all(after[name].dtype == value.dtype and torch.equal(after[name], value) for name, value in before.items())
    assert not [each for each in model.modules() if "forward" in vars(each)]


def test_inputs_that_are_not_finite_are_left_out_with_a_warning(model_dir, caplog):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    model.model.embed_tokens.weight.data[ord("q")] = float("nan")
    weights = {name: value for name, value in model.state_dict().items() if name.endswith("_proj.weight")}
    found = {}
    text = token_sequences(ROWS[:1], make_tokenizer(), model)
    quantise_by_blocks(model, QuantSpec(), weights, chooser(QuantSpec(), weights, found), text)
    assert "inputs of layers were NaN or infinite" in caplog.text
    assert all(bool(read_4bit(each, "weight").dequantised().isfinite().all()) for each in found.values())


def test_what_cannot_be_calibrated_is_said(base, calibrated, model_dir, tmp_path):
    with pytest.raises(ConfigConflictError, match="quant='none' has no codes"):
        prepare_base(model_dir, "none", calibrate=True)
    with pytest.raises(ConfigConflictError, match=r"prepared base already, and its codes cannot be chosen"):
        prepare_base(base.path, calibrate=True)
    with pytest.raises(ConfigConflictError, match=r"4-bit already, and its codes cannot"):
        prepare_base(load_base(base), calibrate=True, out=tmp_path / "object")
    assert prepare_base(calibrated.path, calibrate=ROWS).identity == calibrated.identity
    with pytest.raises(ConfigConflictError, match="the rows hold no text"):
        prepare_base(model_dir, calibrate=[""], out=tmp_path / "base")
    with pytest.raises(ConfigConflictError, match="token 5000 has no row in the embedding"):
        prepare_base(model_dir, calibrate=[[1, 5000]], out=tmp_path / "base")
    with pytest.raises(ConfigConflictError, match=r"settings|was asked for"):
        prepare_base(model_dir, out=calibrated.path)
    with pytest.raises(UnsupportedQuantError, match="in a list of blocks"):
        quantise_by_blocks(torch.nn.Linear(64, 64), QuantSpec(), ["weight"], lambda names, moments: {})


def test_a_base_that_cannot_be_measured_is_prepared_all_the_same(model_dir, base, tmp_path, caplog):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = "{{ raise_exception('not these') }}"
    made = prepare_base(model_dir, tokenizer=tokenizer, measure=True, out=tmp_path / "base")
    assert made.measured is None
    assert "was not measured" in caplog.text
    before, after = (load_file(each.path / "model.safetensors") for each in (base, made))
    assert all(torch.equal(before[name], value) for name, value in after.items())


def test_a_base_that_was_made_before_is_measured_where_that_is_asked_for(model_dir, base, tmp_path):
    out = tmp_path / "base"
    assert prepare_base(model_dir, out=out).measured is None
    found = prepare_base(model_dir, out=out, measure=True).measured
    assert found == open_base(out).measured == measure_quantisation(base, model_dir)
    assert prepare_base(out, measure=True).measured == found
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    prepare_base(model, out=tmp_path / "object")
    assert prepare_base(model, out=tmp_path / "object", measure=True).measured == found
    for made in (base.path, load_base(base)):
        with pytest.raises(ConfigConflictError, match="measure=True does not know its source"):
            prepare_base(made, measure=True)


@pytest.mark.parametrize("last", ["in the middle of a block", "after a block"])
def test_a_calibration_that_was_killed_goes_on_where_it_was(last, calibrated, model_dir, tmp_path, monkeypatch):
    """With bits that are those of one that was not interrupted."""
    whole, out = {"in the middle of a block": 6, "after a block": 4}[last], tmp_path / "base"
    code = f"""
import os, signal
from qlora_rl import prepare_base
from qlora_rl.base.calibration import blocks
calls, choose = [], blocks.choose_codes
def counted(*arguments):
    calls.append(arguments)
    if len(calls) > {whole}:
        os.kill(os.getpid(), signal.SIGKILL)
    return choose(*arguments)
blocks.choose_codes = counted
prepare_base({str(model_dir)!r}, calibrate={ROWS!r}, out={str(out)!r})
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -signal.SIGKILL
    (kept,) = tmp_path.glob(".base.chosen-*")
    assert len(list(kept.iterdir())) == whole
    shutil.copytree(kept, tmp_path / ".base.chosen-of-another-text")
    damaged = next(kept.glob("model.layers.0.mlp.down_proj*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    calls = []
    monkeypatch.setattr(blocks, "choose_codes", lambda *given: calls.append(given) or choose_codes(*given))
    again = prepare_base(model_dir, calibrate=ROWS, out=out)
    assert len(calls) == 8 - whole + 1
    assert (again.identity, again.inputs, again.measured) == (
        calibrated.identity, calibrated.inputs, calibrated.measured
    )  # fmt: skip
    names = [file.name for file in calibrated.path.iterdir() if file.name != MANIFEST]
    assert sorted(names) == sorted(file.name for file in out.iterdir() if file.name != MANIFEST)
    assert all((calibrated.path / name).read_bytes() == (out / name).read_bytes() for name in names)
    assert not list(tmp_path.glob(".base.chosen-*"))


def test_what_another_text_has_chosen_is_not_taken(calibrated, model_dir, tmp_path, monkeypatch):
    def interrupted(names):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "fingerprint_stored", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_base(model_dir, calibrate=ROWS[:1], out=tmp_path / "base")
    assert len(list(tmp_path.glob(".base.chosen-*/*"))) == 8
    assert prepare_base(model_dir, calibrate=ROWS, out=tmp_path / "base").identity == calibrated.identity


def test_the_shipped_text_is_small_and_of_several_kinds():
    rows, held_out = shipped_text(), shipped_text(held_out=True)
    assert 20 <= len(rows) <= 24
    assert len(held_out) == 4
    assert not [row for row in held_out if row in rows]
    assert {type(row) for row in rows} == {type(row) for row in held_out} == {str, list}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "as it is", "prompt": "p"}, "as it is"),
        ({"messages": [{"role": "user", "content": "a"}]}, [("user", "a")]),
        ({"prompt": "p", "completion": "c"}, [("user", "p"), ("assistant", "c")]),
        ({"prompt": [{"role": "user", "content": "p"}], "answer": "4"}, [("user", "p"), ("assistant", "4")]),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, [("user", "p"), ("assistant", "c")]),
        ({"question": "q", "answer": "a"}, [("user", "q"), ("assistant", "a")]),
        ({"instruction": "i", "input": "x", "output": "o"}, [("user", "i\n\nx"), ("assistant", "o")]),
        ({"instruction": "i", "input": "", "output": "o"}, [("user", "i"), ("assistant", "o")]),
        ({"title": "t", "body": "b"}, "t\n\nb"),
    ],
)
def test_a_row_is_calibrated_on_as_what_is_said_in_it(row, said, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (found,) = calibration_rows(str(file))
    assert said == (found if isinstance(found, str) else [(each["role"], each["content"]) for each in found])


def test_any_other_file_is_calibrated_on_as_text(tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    assert calibration_rows(str(tmp_path / "text.txt")) == ["some text"]
    (tmp_path / "text.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigConflictError, match=r"text\.txt is not in UTF-8"):
        calibration_rows(str(tmp_path / "text.txt"))
    with pytest.raises(ConfigConflictError, match="there is no file"):
        calibration_rows(str(tmp_path / "nothing.txt"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\nno JSON\n')
    with pytest.raises(ConfigConflictError, match=r"calibrate: .*rows\.jsonl:2 is no JSON"):
        calibration_rows(str(tmp_path / "rows.jsonl"))


def test_the_command_calibrates_on_a_file_and_prints_how_far_the_base_is_from_its_source(model_dir, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    assert main(["prepare", str(model_dir), str(tmp_path / "base"), "--calibrate", str(rows)]) == 0
    assert "KL to its source" in capsys.readouterr().out
    assert open_base(tmp_path / "base").calibrated_on == digest_rows([*ROWS, "1"])
    assert main(["prepare", str(model_dir), str(tmp_path / "plain")]) == 0
    assert "KL to its source" in capsys.readouterr().out
    assert main(["prepare", str(model_dir), str(tmp_path / "silent"), "--no-measure"]) == 0
    assert "KL to its source" not in capsys.readouterr().out


def test_recommend_and_plan_name_what_was_measured_and_what_can_be_calibrated(
    base, calibrated, model_dir, tmp_path, capsys
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    for model, said in ((calibrated.path, str(calibrated.measured)), (base.path, ""), (model_dir, "")):
        advice = recommend(model)
        assert ("calibrate" in advice.reasons) == (model == model_dir)
        assert said in advice.reasons["quant"]
        assert ("KL" in advice.reasons["quant"]) == bool(said)
        assert main(["recommend", str(model), "--data", str(rows), "--toml"]) == 0
        file = capsys.readouterr().out
        assert ("\n# calibrate = true  # " in file) == (model == model_dir)
        assert tomllib.loads(file.replace("\n# calibrate", "\ncalibrate"))["base"]["quant"] == "nf4"
        assert main(["plan", str(model)]) == 0
        planned = capsys.readouterr().out
        assert ("KL to its source" in planned) == bool(said)
        assert ("to calibrate the base (prepare --calibrate): about 0 seconds" in planned) == (model == model_dir)
    assert main(["plan", str(calibrated.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["measured"], found["calibration"]) == (calibrated.measured.as_dict(), None)


def test_no_cost_is_planned_with_experts_or_of_what_is_quantised_already(model_dir, tmp_path, capsys):
    mixture = Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4
    )
    fields = json.loads((model_dir / "config.json").read_text())
    quantised = fields | {"quantization_config": QuantSpec().transformers_config()}
    for config, has_cost in ((mixture.to_dict(), False), (quantised, False), (fields, True)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["plan", str(tmp_path / "config.json"), "--json"]) == 0
        assert (json.loads(capsys.readouterr().out)["calibration"] is not None) == has_cost


def test_what_a_calibration_takes_is_planned_about_as_it_was_measured():
    """As benchmarks/calibrating.py has measured it; seconds on cores that other programs used, too."""
    rows = json.loads((Path(__file__).parents[2] / "benchmarks/results/calibrating.json").read_text())["rows"]
    measured = [row for row in rows.values() if "measured" in row]
    assert len(measured) >= 3
    for row in measured:
        assert 0.67 < row["planned"]["seconds"] / row["measured"]["seconds"] < 1.5
        assert 0.9 < row["planned"]["bytes"] / row["measured"]["bytes"] < 1.1
    shape = read_shape(read_config("Qwen/Qwen3-8B"))
    cost = calibration_cost(shape)
    assert cost.seconds == pytest.approx(rows["8B"]["planned"]["seconds"], rel=0.05)
    assert "hours of one CPU core" in str(cost)
    assert calibration_cost(shape, 16_384).nbytes > cost.nbytes


def test_recommend_names_float16_where_it_rounds_less_and_fits_and_follows_a_base_in_it(model_dir, tmp_path):
    half = prepare_base(model_dir, compute_dtype="float16", double_quant=False, out=tmp_path / "half")
    advice = recommend(half.path)
    assert (advice.base["compute_dtype"], advice.config["bf16"]) == ("float16", False)
    assert prepare_base(half.path, **advice.base) == half
    assert "`qlora-rl prepare MODEL DIR` measures" in recommend(model_dir).reasons["bf16"]
    exact = prepare_base(model_dir, compute_dtype="float32", measure=True, out=tmp_path / "exact")
    assert exact.measured.rounds_less
    assert "less mismatch" not in recommend(exact.path).reasons["bf16"]
    made = prepare_base(model_dir, measure=True, out=tmp_path / "base")
    assert 0 < 4 * made.measured.kl_float16 < made.measured.kl_bfloat16 < 0.01  # three bits more: about 64 times
    assert 0 < made.measured.largest < 100
    file = made.path / MANIFEST
    manifest = json.loads(file.read_text())

    def said(**measured):
        file.write_text(json.dumps(manifest | {"measured": manifest["measured"] | measured}))
        advice = recommend(made.path)
        assert advice.config["bf16"]
        assert "compute_dtype" not in advice.base
        return advice.reasons["bf16"]

    assert "--compute-dtype float16" in said(kl_bfloat16=2e-3, kl_float16=3e-5, largest=24e3)
    assert "float16" not in said(kl_float16=3e-3, kl_bfloat16=2e-3)
    assert "float16" not in said(largest=5e4)  # another text may reach the end of its range
    assert "float16" not in said(kl_float16=None, largest=None)
    del manifest["measured"]["kl_float16"]  # of a base that was measured before
    assert "float16" not in said()


def test_values_that_float16_does_not_hold_are_measured_as_none(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model", tied=False), dtype="auto")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1e5
    model.save_pretrained(tmp_path / "model")
    measured = prepare_base(tmp_path / "model", measure=True, out=tmp_path / "base").measured
    assert measured.kl_bfloat16 is not None
    assert (measured.kl_float16, measured.largest, measured.rounds_less) == (None, None, "")


def test_sums_are_shared_by_linears_with_one_input(model_dir):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    weights = {name: value for name, value in model.state_dict().items() if name.endswith("_proj.weight")}
    groups = []

    def seen(names, moments):
        groups.append([name.split(".")[-2] for name in names])
        assert moments.shape[0] == weights[names[0]].shape[1]
        return {name: weights[name].float() for name in names}

    text = token_sequences(ROWS, make_tokenizer(), model)
    measured = quantise_by_blocks(model, QuantSpec(), weights, seen, text, text)
    assert groups == 2 * [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert measured.kl == 0


def test_the_date_of_today_is_not_part_of_a_base(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "model"))
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    (ids,) = token_sequences([[{"role": "user", "content": "hi"}]], tokenizer, model)
    assert tokenizer.decode(ids) == "26 Jul 2024hi"


def test_the_name_of_a_file_is_no_text(tmp_path):
    with pytest.raises(ConfigConflictError, match="is no list of rows"):
        prepare_base(make_model(tmp_path / "model"), calibrate="rows.jsonl", out=tmp_path / "base")


def test_a_full_disk_does_not_end_a_calibration(calibrated, model_dir, tmp_path, monkeypatch, caplog):
    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blocks, "replace_file", full)
    made = prepare_base(str(model_dir), "nf4", calibrate=ROWS, out=tmp_path / "base[1]")
    assert made.identity == calibrated.identity
    assert "not kept" in caplog.text
    assert not list(tmp_path.glob(".base*.chosen-*"))


def test_a_base_that_is_not_to_be_measured_is_not_measured_by_a_later_call(model_dir, tmp_path):
    first = prepare_base(str(model_dir), "nf4", calibrate=ROWS, measure=False, out=tmp_path / "base")
    assert first.measured is None
    assert prepare_base(str(model_dir), "nf4", calibrate=ROWS, out=tmp_path / "base").measured is None
