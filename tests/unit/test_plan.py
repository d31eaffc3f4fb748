import dataclasses

import pytest

from qlora_rl import AdapterRejectedError, BaseMismatchError, ConfigConflictError, plan_sync
from qlora_rl.adapter.verdict import Verdict
from qlora_rl.base.fingerprint import Diff, LeafDiff
from qlora_rl.contracts import LORA_RANK_CLASSES, EngineCapabilities, rank_class
from qlora_rl.errors import EngineUnsupportedError

GOOD = Verdict("adapter", (), 8)
DORA = Verdict("full_weights", ("It is DoRA.",), 8)
PROMPT = Verdict("reject", ("It is a prompt.", "And merged."), 0)
ENGINE = EngineCapabilities("test", True, False, 16, 64, "bfloat16", False)


@pytest.mark.parametrize(
    ("fields", "transport", "says"),
    [
        ({}, "directory", "both sides see"),
        ({"takes_bytes": True}, "http", "body of a request"),
        ({"takes_bytes": True, "byte_way": "object_store"}, "object_store", "once for all of them"),
        ({"takes_in_place": True}, "in_place", "its buffers"),
        ({"takes_in_place": True, "takes_bytes": True}, "in_place", "its buffers"),
    ],
)
def test_the_shortest_way_that_the_engine_has_is_taken_and_named(fields, transport, says):
    plan = plan_sync(GOOD, dataclasses.replace(ENGINE, **fields))
    assert plan.transport == transport
    assert says in str(plan)


@pytest.mark.parametrize(
    ("verdict", "wish", "result"),
    [
        (GOOD, "auto", "lora_adapter"),
        (GOOD, "lora_adapter", "lora_adapter"),
        (GOOD, "weights", (ConfigConflictError, "bake_base")),
        (GOOD, "fastest", (ConfigConflictError, "sync='fastest' is not one of")),
        (DORA, "auto", (ConfigConflictError, "It is DoRA.")),
        (DORA, "weights", (ConfigConflictError, "rollout='colocate'")),
        (DORA, "lora_adapter", (AdapterRejectedError, "It is DoRA.")),
        (PROMPT, "auto", (AdapterRejectedError, "And merged.")),
        (PROMPT, "lora_adapter", (AdapterRejectedError, "It is a prompt.")),
        (PROMPT, "weights", (AdapterRejectedError, "It is a prompt.")),
    ],
)
def test_the_plan_for_every_verdict_and_wish(verdict, wish, result):
    if isinstance(result, str):
        plan = plan_sync(verdict, ENGINE, wish=wish)
        assert plan.strategy == result
        assert "rank 8" in str(plan)
        return
    with pytest.raises(result[0], match=result[1]):
        plan_sync(verdict, ENGINE, wish=wish)


@pytest.mark.parametrize("way", ["stream", "http", "object_store"])
def test_every_way_of_full_weights_has_a_plan_that_describes_it(way):
    engine = dataclasses.replace(ENGINE, takes_adapters=False, takes_dense=True, max_lora_rank=0, dense_way=way)
    plan = plan_sync(DORA, engine)
    assert (plan.strategy, plan.transport) == ("weights", way)
    assert "adapted in float32 and " in str(plan)


@pytest.mark.parametrize(("verdict", "wish"), [(GOOD, "weights"), (DORA, "weights"), (DORA, "auto")])
def test_full_weights_travel_to_an_engine_that_takes_them_and_the_plan_says_why(verdict, wish):
    dense = dataclasses.replace(ENGINE, takes_adapters=False, takes_dense=True, max_lora_rank=0)
    for capabilities in (dense, None):
        plan = plan_sync(verdict, capabilities, EQUAL, wish)
        assert (plan.strategy, plan.transport) == ("weights", "stream")
        assert (verdict.reasons or ("was asked for",))[0] in str(plan)
    with pytest.raises(AdapterRejectedError, match="Use sync='weights'"):
        plan_sync(DORA, dense, wish="lora_adapter")
    with pytest.raises(BaseMismatchError):
        plan_sync(DORA, dense, OTHER)


def test_an_engine_that_cannot_hold_the_adapter_is_named():
    with pytest.raises(ConfigConflictError, match="rank=8 > max_lora_rank=4 of test"):
        plan_sync(GOOD, dataclasses.replace(ENGINE, max_lora_rank=4))
    with pytest.raises(ConfigConflictError, match="started without LoRA"):
        plan_sync(GOOD, dataclasses.replace(ENGINE, takes_adapters=False))


EQUAL = Diff()
ROUNDED = Diff((LeafDiff("a.weight", "scales", "1", "2"),))
OTHER = Diff((LeafDiff("a.weight", "values", "1", "2"), LeafDiff("b.weight", "missing", "1", "2")))


def test_the_plan_says_in_one_line_what_it_knows_of_the_base():
    for diff, words in [(EQUAL, "Both sides hold the same base."), (ROUNDED, "scales are rounded at 1 weights")]:
        plan = plan_sync(GOOD, ENGINE, diff)
        assert words in str(plan)
        assert "\n" not in str(plan)
    assert "base" not in str(plan_sync(GOOD, ENGINE))
    assert "another base (2 differences)" in str(plan_sync(GOOD, ENGINE, OTHER, allow_base_mismatch=True))


def test_an_adapter_is_not_planned_for_another_base():
    with pytest.raises(BaseMismatchError, match="another base") as caught:
        plan_sync(GOOD, ENGINE, OTHER)
    assert caught.value.module == "a.weight"
    assert len(caught.value.reasons) == 2


def test_the_rank_class_is_the_smallest_that_fits():
    for rank in range(1, 513):
        found = rank_class(rank)
        assert found >= rank
        assert found in LORA_RANK_CLASSES
        assert all(c < rank for c in LORA_RANK_CLASSES if c < found)
    with pytest.raises(EngineUnsupportedError, match="rank=513"):
        rank_class(513)


def test_vllm_has_the_rank_classes_that_we_think():
    from typing import get_args

    lora = pytest.importorskip("vllm.config.lora", reason="unit tests run without vLLM too")
    assert set(get_args(lora.MaxLoRARanks)) == set(LORA_RANK_CLASSES)
