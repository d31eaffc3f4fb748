"""Whether the base is held once or twice, and in which order model and engine are made."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from recorded import Recorded

from qlora_rl import load_base
from qlora_rl.errors import AdapterRejectedError, CannotShareError, ConfigConflictError
from qlora_rl.train.setup.engine_order import _is_same


def held(trainer):
    return json.loads((trainer.run.path / "config.json").read_text())["base_held"]


def test_an_engine_that_lends_nothing_leaves_two_copies_and_the_log_says_why(make_trainer, colocate, caplog):
    with caplog.at_level("INFO"):
        trainer = make_trainer(rollout="colocate")
    assert held(trainer)["copies"] == 2
    assert "has no tensors to lend" in held(trainer)["reason"]
    assert "the base is held twice" in caplog.text
    assert len(colocate) == 1  # the one that was asked to lend serves
    trainer.train()


def test_a_wish_to_share_that_cannot_be_met_is_an_error_and_closes_the_engine(make_trainer, colocate):
    with pytest.raises(CannotShareError, match="lend"):
        make_trainer(rollout="colocate", share_base=True)
    assert [engine._is_closed for engine in colocate] == [True]
    with pytest.raises(CannotShareError, match="lend"):
        make_trainer(share_base=True)  # a FakeEngine that was passed: it is not ours to close


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"rollout": "colocate", "share_base": False}, "share_base=False"),
        ({}, "the engine was passed as an object"),
    ],
)
def test_two_copies_where_sharing_was_not_asked_for(make_trainer, colocate, arguments, reason):
    trainer = make_trainer(**arguments)
    assert held(trainer)["copies"] == 2
    assert reason in held(trainer)["reason"]


@pytest.mark.parametrize("kind", ["model", "PeftModel"])
def test_a_model_object_is_its_own_copy(make_trainer, colocate, base, lora, kind):
    def arguments():
        model = load_base(base)
        if kind == "model":
            return {"model": model, "rollout": "colocate"}
        return {"model": get_peft_model(model, lora), "peft_config": None, "rollout": "colocate"}

    with pytest.raises(ConfigConflictError, match="share_base=True"):
        make_trainer(**arguments(), share_base=True)
    assert not colocate
    trainer = make_trainer(**arguments())
    assert "passed as an object" in held(trainer)["reason"]


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
        LoraConfig(r=600, target_modules=["q_proj"]),
        LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa"),
    ],
    ids=["DoRA", "rank", "an initialisation that needs values"],
)
def test_an_adapter_that_cannot_travel_is_rejected_before_the_engine_is_started(make_trainer, colocate, config):
    with pytest.raises((AdapterRejectedError, ConfigConflictError, TypeError, ValueError)):
        make_trainer(rollout="colocate", peft_config=config)
    assert not colocate


def test_the_engines_rank_is_the_largest_of_the_adapters_patterns(make_trainer, colocate):
    config = LoraConfig(r=4, target_modules="all-linear", rank_pattern={"down_proj": 24})
    trainer = make_trainer(rollout="colocate", peft_config=config)
    assert colocate[0].options["max_lora_rank"] == 24
    assert trainer.model.peft_config["default"].rank_pattern == {"down_proj": 24}


def test_a_rejection_after_the_engine_was_started_closes_it(make_trainer, colocate):
    with pytest.raises(ValueError, match="No reward source"):
        make_trainer(rollout="colocate", reward_funcs=None)
    assert [engine._is_closed for engine in colocate] == [True]


def test_a_start_that_fails_leaves_nothing_behind(make_trainer, colocate, monkeypatch):
    def fails(self, *_):
        raise ZeroDivisionError

    monkeypatch.setattr(Recorded, "describe_base", fails)
    with pytest.raises(ZeroDivisionError):
        make_trainer(rollout="colocate")
    assert [engine._is_closed for engine in colocate] == [True]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("cpu", "cpu", True), ("cuda", "cuda:0", True), ("cuda:1", "cuda", False), ("cpu", "cuda", False)],
)
def test_a_device_may_be_named_with_or_without_its_number(one, other, same):
    assert _is_same(torch.device(one), torch.device(other)) is same
