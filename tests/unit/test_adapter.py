"""Verdict, export and store on live PEFT models; no engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import lora
from peft import PeftModel, get_peft_model
from support import randomise

from qlora_rl import SyncError, export_adapter, judge_adapter, load_base
from qlora_rl.adapter.directory import saved_names
from qlora_rl.adapter.store import AdapterStore, pack_adapter, read_tensors, unpack_adapter, write_adapter
from qlora_rl.contracts import EngineCapabilities

PROMPT = torch.tensor([[40, 41, 42, 43, 44]])
ENGINE = EngineCapabilities("test", True, False, 8, 64, "bfloat16", False)


@pytest.fixture(scope="module")
def plain(model_dir):
    """Makes PeftModels on the dense tiny model, quickly."""
    from transformers import AutoModelForCausalLM

    def make(config):
        torch.manual_seed(0)
        return get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), config)

    return make


def test_the_engines_own_limit_counts(plain):
    assert judge_adapter(plain(lora(r=8)), ENGINE).kind == "adapter"
    assert "rank=9 > 8" in judge_adapter(plain(lora(r=9)), ENGINE).reasons[0]


def test_merged_disabled_and_broken_adapters_are_rejected(plain):
    model = plain(lora())
    model.merge_adapter()
    reason = judge_adapter(model).reasons[0]
    assert "merged into the base" in reason
    assert "unmerge_adapter() does not restore" in reason
    model.unmerge_adapter()
    with model.disable_adapter():
        assert "disabled" in judge_adapter(model).reasons[0]
    assert judge_adapter(model).kind == "adapter"
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_A" in n)[0, 0] = float("nan")
    assert "NaN" in judge_adapter(model).reasons[0]


def test_all_reasons_are_given_at_once(plain):
    verdict = judge_adapter(plain(lora(use_dora=True, bias="all", modules_to_save=["norm"])))
    assert len(verdict.reasons) == 3


@settings(max_examples=25, deadline=None)
@given(
    rank=st.integers(1, 9),
    alpha=st.integers(1, 40),
    rslora=st.booleans(),
    rank_pattern=st.dictionaries(st.sampled_from(["q_proj", "down_proj"]), st.integers(1, 12)),
    alpha_pattern=st.dictionaries(st.sampled_from(["k_proj", "up_proj"]), st.integers(1, 70)),
    factor=st.sampled_from([None, 0.3, 2.5]),
)
def test_the_canonical_form_is_the_same_function(
    plain, tmp_path_factory, rank, alpha, rslora, rank_pattern, alpha_pattern, factor
):
    fields = {"rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern}
    model = plain(lora(r=rank, lora_alpha=alpha, use_rslora=rslora, **fields))
    randomise(model)
    if factor is not None:
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", factor)
    bundle = export_adapter(model)
    directory = tmp_path_factory.mktemp("canonical")
    write_adapter(bundle, directory)
    loaded = PeftModel.from_pretrained(plain(lora()).unload(), directory)
    assert torch.allclose(loaded(PROMPT).logits, model(PROMPT).logits, atol=1e-4, rtol=1e-4)
    assert {t.shape[0] for n, t in bundle.tensors.items() if "lora_A" in n} == {bundle.rank}
    assert bundle.rank == judge_adapter(model).rank == bundle.config["lora_alpha"]


def test_exporting_changes_nothing_and_shares_nothing(adapted):
    before = {n: p.detach().clone() for n, p in adapted.named_parameters()}
    bundle = export_adapter(adapted)
    for tensor in bundle.tensors.values():
        tensor.zero_()
    assert all(torch.equal(p, before[n]) for n, p in adapted.named_parameters())


def test_a_power_of_two_scaling_is_folded_without_rounding(adapted):
    bundle = export_adapter(adapted, dtype=torch.bfloat16)
    layer = adapted.get_base_model().model.layers[0].self_attn.q_proj
    stored = bundle.tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    assert torch.equal(stored, (layer.lora_B["default"].weight.to(torch.bfloat16) * 2))


def test_bytes_and_modules_of_a_bundle_are_what_lies_on_disk(adapted, tmp_path):
    from safetensors.torch import load_file

    bundle = export_adapter(adapted, dtype=torch.bfloat16)
    write_adapter(bundle, tmp_path)
    on_disk = load_file(tmp_path / "adapter_model.safetensors")
    assert on_disk.keys() == bundle.tensors.keys()
    assert all(torch.equal(on_disk[n], t) for n, t in bundle.tensors.items())
    assert bundle.nbytes == sum(t.numel() * t.element_size() for t in on_disk.values())
    assert len(bundle.modules) == 14
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 8


def test_a_bundle_survives_the_way_through_bytes(adapted):
    bundle = export_adapter(adapted, dtype=torch.bfloat16)
    blob = pack_adapter(bundle)
    there = unpack_adapter(blob)
    assert there.config == bundle.config
    assert there.tensors.keys() == bundle.tensors.keys()
    assert all(
        torch.equal(there.tensors[n], t) and there.tensors[n].dtype == t.dtype for n, t in bundle.tensors.items()
    )
    for broken in (b"", blob[:100], blob[:-1], b"\x80\x04" + blob, b"\xff" * 64):
        with pytest.raises(SyncError, match=f"of {len(broken)} bytes"):
            unpack_adapter(broken)


def test_the_store_keeps_a_ring_of_fresh_paths(adapted, tmp_path):
    store, bundle = AdapterStore(tmp_path, keep=2), export_adapter(adapted)
    paths = []
    for version in range(1, 6):
        paths.append(store.publish(bundle, version))
        store.retire()
    assert len(set(paths)) == 5
    assert [p.exists() for p in paths] == [False, False, False, True, True]
    same_version = store.publish(bundle, 5)
    assert same_version not in paths
    store.close()
    assert list(tmp_path.iterdir()) == []


_ROOT = Path(__file__).parents[2]
STORE = """
import pathlib, sys, time
sys.path[:0] = [sys.argv[2]]
from qlora_rl.adapter import store
store.default_root = lambda: pathlib.Path(sys.argv[1])
own = store.AdapterStore()
print(own.root, flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_has_stored_goes_with_the_next_store(tmp_path, monkeypatch):
    monkeypatch.setattr("qlora_rl.adapter.store.default_root", lambda: tmp_path)
    here = AdapterStore()
    killed, living = (
        subprocess.Popen([sys.executable, "-c", STORE, tmp_path, _ROOT], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    try:
        roots = [Path(process.stdout.readline().strip()) for process in (killed, living)]
        killed.kill()
        killed.wait()
        for root in (*roots, here.root):
            os.utime(root, (0, 0))
        another = AdapterStore()
        assert set(tmp_path.iterdir()) == {roots[1], here.root, another.root}
        os.utime(roots[1], (0, 0))
        living.kill()
        living.wait()
        AdapterStore(tmp_path)  # a place that was named is not swept
        assert roots[1].exists()
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate()


def test_a_version_appears_whole_or_not_at_all(adapted, tmp_path, monkeypatch):
    store, bundle = AdapterStore(tmp_path), export_adapter(adapted)
    good = store.publish(bundle, 1)
    monkeypatch.setattr(os, "rename", _reject)
    with pytest.raises(SyncError, match="No space left"):
        store.publish(bundle, 2)
    assert list(store.root.iterdir()) == [good]


def _reject(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_says_how_much_is_needed_and_how_much_is_free(adapted, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this machine does not let root mount a tmpfs: {mounted.stderr.strip()}")
    try:
        store = AdapterStore(small)
        with pytest.raises(SyncError, match=r"MiB are free.*sync_dir="):
            store.publish(export_adapter(adapted), 1)
        assert list(store.root.iterdir()) == []
        store.close()
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize(
    "fields", [{}, {"use_dora": True}, {"modules_to_save": ["norm"]}, {"trainable_token_indices": [3, 4]}], ids=str
)
def test_what_is_trained_is_found_again_in_the_file_that_peft_writes(base, fields, tmp_path):
    model = get_peft_model(load_base(base), lora(**fields))
    randomise(model)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    live, saved, names = dict(model.named_parameters()), read_tensors(tmp_path), saved_names(model)
    assert set(names) == {name for name, parameter in live.items() if parameter.requires_grad}
    assert sorted(names.values()) == sorted(saved)
    assert all(torch.equal(live[name], saved[of_file]) for name, of_file in names.items())
