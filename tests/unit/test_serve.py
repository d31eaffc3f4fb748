"""What `qlora-rl serve` refuses before anything is started."""

import pytest
import torch

from qlora_rl import ConfigConflictError, serve
from qlora_rl.contracts import AdapterBundle
from qlora_rl.engine.policy import misfits
from qlora_rl.engine.serve import check_adapter_dir, read_or_make_key

SIZES = {"model.q_proj": [4, 6]}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_a_host_that_others_can_reach_needs_a_key_that_exists(host, tmp_path):
    for file in (None, tmp_path / "none"):
        with pytest.raises(ConfigConflictError, match="--api-key-file"):
            serve(tmp_path, host=host, api_key_file=file)


def test_a_key_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    path = tmp_path / "keys" / "key"
    _, key = read_or_make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(key) >= 32
    assert read_or_make_key(path)[1] == key
    path.chmod(0o640)
    with pytest.raises(ConfigConflictError, match="chmod 600"):
        read_or_make_key(path)


@pytest.mark.parametrize("content", ["", "short", "two words in one key here", "schlüssel-mit-umlaut-x"])
def test_what_is_no_key_is_refused(content, tmp_path):
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text(content)
    with pytest.raises(ConfigConflictError, match="no key"):
        read_or_make_key(path)


def test_an_adapter_directory_that_others_can_write_into_is_refused(tmp_path):
    assert check_adapter_dir(tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigConflictError, match="chmod 700"):
        check_adapter_dir(tmp_path / "open")


def bundle(rank=2, **config):
    names = [f"base_model.model.model.q_proj.lora_{part}.weight" for part in "AB"]
    tensors = dict(zip(names, (torch.ones(rank, 4), torch.ones(6, rank)), strict=True))
    return AdapterBundle(tensors, {"r": rank, "lora_alpha": rank, **config})


def test_an_adapter_that_fits_has_no_misfits():
    assert misfits(bundle(), SIZES, 8) == []


@pytest.mark.parametrize(
    "config",
    [{"r": 0}, {"r": 9}, {"r": "2"}, {"r": 1}, {"rank_pattern": {"q": 1}}, {"alpha_pattern": {"q": 1}}, {"use_dora": True},
     {"lora_alpha": 4}, {"lora_alpha": float("nan")}, {"lora_alpha": "2"}, {"lora_alpha": None}, {"lora_alpha": True, "r": 1},
     {"use_rslora": True}, {"lora_bias": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}],
)  # fmt: skip
def test_a_config_that_vllm_would_serve_in_another_way_is_a_misfit(config):
    assert misfits(bundle(**config), SIZES, 8)


def test_values_that_no_training_gives_are_a_misfit():
    good = bundle()
    for value, reasons in ((99.0, []), (101.0, ["larger than 100"]), (-1e30, ["larger than 100"])):
        found = misfits(AdapterBundle({n: t * value for n, t in good.tensors.items()}, good.config), SIZES, 8)
        assert [word in found[0] for word in reasons] == [True] * len(found[:1])


def test_every_misfit_is_said():
    bad = bundle()
    names = list(bad.tensors)
    tensors = {names[0]: torch.full((2, 4), float("inf")), names[1]: torch.ones(7, 2), "x": torch.ones(1)}
    reasons = misfits(AdapterBundle(tensors, bad.config), SIZES, 8)
    assert [word in " ".join(reasons) for word in ("infinity", "another base", "x is no A or B")] == [True] * 3
    assert (
        "int8" in misfits(AdapterBundle({n: t.to(torch.int8) for n, t in bad.tensors.items()}, bad.config), SIZES, 8)[0]
    )


def test_a_4_bit_base_without_lora_is_refused_since_nothing_could_be_pushed(base):
    pytest.importorskip("vllm")
    with pytest.raises(ConfigConflictError, match="bake_base"):
        serve(base, max_lora_rank=0)
