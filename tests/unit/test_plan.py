import dataclasses

import pytest

from qlora_rl import AdapterRefusedError, ConfigConflictError, NotYetSupportedError, plan_sync
from qlora_rl.adapter.verdict import Verdict
from qlora_rl.contracts import LORA_RANK_CLASSES, EngineCapabilities, rank_class
from qlora_rl.errors import EngineUnsupportedError

GOOD = Verdict("adapter", (), 8)
DORA = Verdict("full_weights", ("It is DoRA.",), 8)
PROMPT = Verdict("refuse", ("It is a prompt.", "And merged."), 0)
ENGINE = EngineCapabilities("test", True, False, 16, 64, "bfloat16", False)


@pytest.mark.parametrize(
    ("verdict", "wish", "result"),
    [
        (GOOD, "auto", "lora_adapter"),
        (GOOD, "lora_adapter", "lora_adapter"),
        (GOOD, "weights", (NotYetSupportedError, "Use sync='lora_adapter'")),
        (GOOD, "fastest", (ConfigConflictError, "sync='fastest' is not one of")),
        (DORA, "auto", (NotYetSupportedError, "It is DoRA.")),
        (DORA, "lora_adapter", (AdapterRefusedError, "It is DoRA.")),
        (PROMPT, "auto", (AdapterRefusedError, "And merged.")),
        (PROMPT, "lora_adapter", (AdapterRefusedError, "It is a prompt.")),
    ],
)
def test_the_plan_for_every_verdict_and_wish(verdict, wish, result):
    if isinstance(result, str):
        plan = plan_sync(verdict, ENGINE, wish)
        assert plan.strategy == result
        assert "rank 8" in str(plan)
        return
    with pytest.raises(result[0], match=result[1]):
        plan_sync(verdict, ENGINE, wish)


def test_an_engine_that_cannot_hold_the_adapter_is_named():
    with pytest.raises(ConfigConflictError, match="rank=8 > max_lora_rank=4 of test"):
        plan_sync(GOOD, dataclasses.replace(ENGINE, max_lora_rank=4))
    with pytest.raises(ConfigConflictError, match="started without LoRA"):
        plan_sync(GOOD, dataclasses.replace(ENGINE, takes_adapters=False))


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
