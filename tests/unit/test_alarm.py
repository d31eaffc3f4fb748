"""What the alarm makes of distances and examinations; the examinations themselves: tests/engine/test_mismatch.py."""

import dataclasses
import logging
import re

import pytest
import torch

from qlora_rl import PolicyMismatchError, SamplingSpec
from qlora_rl.errors import ConfigConflictError
from qlora_rl.fidelity import measure
from qlora_rl.sync.mismatch_debugger import Diagnosis, MismatchDebugger, Sampled, _first_seen, _is_nearer
from qlora_rl.train.metrics.alarm import MismatchAlarm, filters_of, merged, sampled_from

LIKE = measure(torch.zeros(2, 8), torch.zeros(2, 8), torch.ones(2, 8))


class Examined:
    """An examination that finds what it is told to, and counts."""

    def __init__(self, cause="noise", is_verified=False):
        self.cause, self.is_verified, self.limits = cause, is_verified, []

    def __call__(self, sampled, limit):
        self.limits.append(limit)
        module = "layers.0" if self.cause == "layer" else None
        return Diagnosis(self.cause, f"it is {self.cause}", module, is_verified=self.is_verified)


def alarm_that_saw(*distances, cause="noise", is_verified=False, **arguments):
    examined = Examined(cause, is_verified)
    alarm = MismatchAlarm(examined, **arguments)
    for distance in distances:
        see(alarm, distance)
    return alarm, examined


def see(alarm, distance):
    return alarm.observe(dataclasses.replace(LIKE, scaled_diff=distance), lambda: Sampled([], [], []))


def test_the_first_batch_calibrates_and_what_is_near_it_is_not_examined():
    alarm, examined = alarm_that_saw(1e-3, 2.9e-3, 1e-5)
    assert alarm.threshold == pytest.approx(3e-3)
    assert not examined.limits


def test_no_threshold_is_so_low_that_rounding_is_examined():
    assert alarm_that_saw(0.0)[0].threshold == 1e-3
    assert alarm_that_saw(0.0, dtype="float32")[0].threshold == 1e-6


def test_a_first_batch_that_is_as_far_as_the_models_rounding_is_not_examined():
    """SmolLM2-135M in bf16 is 0.012 from its float32 pass, and its first batch 0.02 from the engine's."""
    alarm, examined = alarm_that_saw(0.03, rounding=0.012)
    assert not examined.limits
    assert alarm.threshold == pytest.approx(0.09)
    assert alarm_that_saw(0.099, rounding=0.033)[0].threshold == 0.1  # no noise is larger
    assert alarm_that_saw(0.03)[1].limits == [0.01]
    assert alarm_that_saw(0.2, rounding=0.012)[1].limits == [pytest.approx(0.036)]
    assert alarm_that_saw(0.2, rounding=1.0)[1].limits == [0.1]


def test_noise_raises_the_threshold_and_is_not_examined_twice():
    alarm, examined = alarm_that_saw(1e-3, 4e-3, 7e-3, 4e-3)
    assert len(examined.limits) == 1
    assert alarm.threshold == pytest.approx(8e-3)
    assert {n: d.cause for n, d in alarm.diagnoses.items()} == {2: "noise"}


@pytest.mark.parametrize(
    ("cause", "arguments", "most"),
    [
        ("noise", {}, 0.1),
        ("dropout", {}, 0.25),
        ("unknown", {"expected": ["top_p=0.9"]}, 0.25),
        ("unknown", {"on_mismatch": "warn"}, 0.25),
    ],
)
def test_whatever_was_normal_an_engine_that_has_nothing_to_do_with_the_policy_is_examined(cause, arguments, most):
    """The measure is at most 0.5: a threshold near that would hear nothing."""
    alarm, examined = alarm_that_saw(1e-3, *[0.2857] * 3, cause=cause, **arguments)
    assert alarm.threshold == pytest.approx(most)
    before = len(examined.limits)
    see(alarm, 0.5)
    assert len(examined.limits) == before + 1


def test_a_first_batch_that_is_far_off_is_examined_before_it_calibrates():
    alarm, examined = alarm_that_saw(0.02)
    assert examined.limits == [0.01]
    assert alarm.threshold == pytest.approx(0.04)
    with pytest.raises(PolicyMismatchError):
        alarm_that_saw(0.02, cause="scale", is_verified=True)


@pytest.mark.parametrize("cause", ["scale", "stale", "layer", "bare", "adapter", "base", "sampling"])
@pytest.mark.parametrize("is_verified", [True, False], ids=["by bytes", "by tokens"])
def test_what_was_shown_to_be_wrong_stops_at_once_by_bytes_and_in_the_second_step_by_tokens(cause, is_verified):
    alarm, _ = alarm_that_saw(1e-3, cause=cause, is_verified=is_verified)
    if not is_verified:
        assert see(alarm, 4e-3).cause == cause
        assert alarm.threshold == pytest.approx(3e-3)  # what may be a fault is not learnt as noise
    with pytest.raises(PolicyMismatchError, match=f"it is {cause}.*on_mismatch='warn'") as stopped:
        see(alarm, 4e-3)
    assert stopped.value.cause == cause
    assert stopped.value.module == ("layers.0" if cause == "layer" else None)


def test_another_function_stops_in_the_second_batch_and_filters_may_be_why():
    alarm, _ = alarm_that_saw(0.02, cause="function")
    assert alarm.threshold is None  # not learnt as normal
    with pytest.raises(PolicyMismatchError) as stopped:
        see(alarm, 0.02)
    assert stopped.value.cause == "function"
    alarm, _ = alarm_that_saw(0.02, 0.02, cause="function", expected=("top_p=0.9",))
    assert alarm.diagnoses[1].cause == "unknown"


def test_a_suspicion_that_the_next_batch_does_not_share_is_forgotten():
    alarm, examined = alarm_that_saw(1e-3, 4e-3, 1e-3, 4e-3, cause="scale")
    examined.cause = "stale"
    see(alarm, 4e-3)
    examined.cause = "noise"
    see(alarm, 4e-3)
    assert [d.cause for d in alarm.diagnoses.values()] == ["scale", "scale", "stale", "noise"]


def test_one_token_is_no_evidence_and_many_are():
    here = torch.full((64,), 1e-3)
    here[0] = 0.5
    there = here * torch.where(torch.arange(64) % 2 == 0, 0.9, 1.1)
    there[0] = 0.0  # in the mean a thousand times nearer
    every = torch.ones(64, dtype=torch.bool)
    assert there.mean() < here.mean() / 3
    assert not _is_nearer(there, here, every)
    assert _is_nearer(here * 0.3, here, every)
    assert not _is_nearer(here * 0.3, here, torch.arange(64) < 8)  # too few of them
    copies = Sampled([[1], [1], [2]], [[5, 6], [5, 7], [5, 6]], [[-1.0, -1.0]] * 3)
    assert _first_seen(copies).tolist() == [True, True, False, True, True, True]


def test_a_large_distance_that_nothing_explains_stops_in_its_second_step():
    alarm, _ = alarm_that_saw(1e-3, 0.2, cause="unknown")
    with pytest.raises(PolicyMismatchError, match="it is unknown"):
        see(alarm, 0.2)
    alarm, _ = alarm_that_saw(1e-3, 0.2, 1e-3, 0.2, 1e-3, cause="unknown")
    assert len(alarm.diagnoses) == 2


def test_a_small_distance_that_nothing_explains_is_a_warning(caplog):
    alarm, _ = alarm_that_saw(1e-3, 5e-3, cause="unknown")
    assert [d.cause for d in alarm.diagnoses.values()] == ["noise"]
    assert not caplog.records
    alarm_that_saw(1e-3, 0.02, 0.05, 0.08, 0.09, cause="dtype")
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]


def test_filters_and_dropout_make_a_distance_that_stops_nothing():
    alarm_that_saw(0.3, 0.5, 0.3, cause="unknown", expected=["top_p=0.9"])
    alarm_that_saw(0.3, 0.3, 0.3, cause="dropout")
    with pytest.raises(PolicyMismatchError):  # what is shown to be wrong stops all the same
        alarm_that_saw(0.3, cause="stale", is_verified=True, expected=["top_p=0.9"])


def test_warn_says_it_and_goes_on(caplog):
    with caplog.at_level(logging.WARNING):
        alarm, _ = alarm_that_saw(1e-3, 0.2, 0.2, 0.2, cause="scale", is_verified=True, on_mismatch="warn")
    assert "it is scale" in caplog.text
    assert len(alarm.diagnoses) == 1
    with pytest.raises(ConfigConflictError, match="on_mismatch='ignore'"):
        MismatchAlarm(Examined(), on_mismatch="ignore")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"masked_share": 0.001}, "for 0.1 % of the sampled tokens a side has no logprob"),
        ({"masked_share": 1.0, "tokens": 0, "scaled_diff": float("nan")}, "for 100 % of"),
        ({"scaled_diff": float("nan")}, "a logprob of a sampled token is infinite"),
    ],
    ids=["some", "all", "infinite"],
)
def test_tokens_without_a_logprob_stop_in_the_second_step_in_a_row(fields, said, caplog):
    def seen(alarm, **fields):
        return alarm.observe(dataclasses.replace(LIKE, scaled_diff=1e-3) if not fields else broken, lambda: None)

    broken = dataclasses.replace(LIKE, **{"scaled_diff": 1e-3, **fields})
    alarm, _ = alarm_that_saw(1e-3)
    assert seen(alarm, **fields).cause == "nan"
    assert said in caplog.text
    assert seen(alarm) is None
    seen(alarm, **fields)
    again, _ = alarm_that_saw(1e-3)
    again.restore(alarm.state())
    with pytest.raises(PolicyMismatchError, match=re.escape(said)) as caught:
        seen(again, **fields)
    assert caught.value.cause == "nan"
    for arguments in ({"expected": ("top_p=0.9",)}, {"on_mismatch": "warn"}):
        alarm, _ = alarm_that_saw(1e-3, **arguments)
        assert [seen(alarm, **fields).cause for _ in range(3)] == ["nan"] * 3


def test_what_is_scored_anew_without_gaps_does_not_speak_for_what_was_sampled():
    """NaN where tokens are sampled one by one, and none where all are scored at once."""
    sampled = Sampled([[1]], [[4, 5]], [[-1.0, -1.0]])
    alarm = MismatchAlarm(Examined("noise", False), lambda _: (sampled, 1e-4))
    gaps = dataclasses.replace(LIKE, masked_share=0.3)
    assert alarm.observe_gaps(gaps).cause == "nan"
    assert alarm.observe_again(sampled)[1] is None
    with pytest.raises(PolicyMismatchError, match="for 30 % of the sampled tokens"):
        alarm.observe_gaps(gaps)


@pytest.mark.parametrize("completions", [[[4, 5]], [[]]])
def test_what_is_scored_anew_and_has_no_logprob_is_no_agreement(completions):
    sampled = Sampled([[1]], completions, [[None] * len(completions[0])])
    alarm = MismatchAlarm(Examined("noise", False), lambda _: (sampled, float("nan")))
    _, found = alarm.observe_again(sampled)
    if not completions[0]:
        assert found is None
        return
    assert found.cause == "nan"
    with pytest.raises(PolicyMismatchError):
        alarm.observe_again(sampled)


def test_nothing_sampled_is_no_distance():
    alarm, examined = alarm_that_saw()
    nothing = measure(torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(2, 8))
    assert [alarm.observe(nothing, lambda: None) for _ in range(3)] == [None] * 3
    assert alarm.threshold is None
    assert not examined.limits


def test_filters_are_what_the_trainer_does_not_know():
    assert filters_of(SamplingSpec(temperature=0.3, max_tokens=4, extra={"stop": ["\n"]})) == ()
    assert filters_of(SamplingSpec(top_p=0.9, top_k=-1, extra={"logit_bias": {1: 2.0}})) == (
        "top_p=0.9",
        "logit_bias={1: 2.0}",
    )
    assert filters_of(SamplingSpec(extra={"min_tokens": 6})) == ("min_tokens=6",)
    plain = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "logit_bias": None}
    plain |= {"min_tokens": 0, "include_stop_str_in_output": True, "top_k": -1}
    assert filters_of(SamplingSpec(extra=plain)) == ()
    assert filters_of(SamplingSpec(extra={"presence_penalty": 0.5, "top_p": 0.9})) == (
        "top_p=0.9",
        "presence_penalty=0.5",
    )


def test_sampled_takes_padding_tools_and_missing_logprobs_out():
    output = {
        "prompt_ids": torch.tensor([[0, 5, 6], [7, 8, 9]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]]),
        "sampling_per_token_logps": torch.tensor([[-1.0, -2.0, -3.0, 0.0], [-1.0, float("nan"), -3.0, -4.0]]),
    }
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]])
    sampled = sampled_from(output, mask, 0.7, ("top_k=5",))
    assert sampled.prompts == [[5, 6], [7, 8, 9]]
    assert sampled.completions == [[1, 2, 3], [4, 5, 6, 7]]
    assert sampled.logprobs == [[-1.0, None, -3.0], [-1.0, None, -3.0, -4.0]]
    assert (sampled.temperature, sampled.filters) == (0.7, ("top_k=5",))
    many = {k: v.repeat(50, 1) for k, v in output.items()}
    assert len(sampled_from(many, mask.repeat(50, 1), 1.0).prompts) == 2  # each text once
    many["prompt_ids"] = many["prompt_ids"] + torch.arange(100)[:, None]
    assert 8 <= len(sampled_from(many, mask.repeat(50, 1), 1.0).prompts) <= 16


def test_prompts_with_images_are_not_scored_again_without_them():
    output = {
        "prompt_ids": torch.tensor([[4, 5]]),
        "prompt_mask": torch.ones(1, 2),
        "completion_ids": torch.tensor([[6]]),
        "sampling_per_token_logps": torch.zeros(1, 1),
    }
    seen = {
        name: sampled_from(output | more, torch.ones(1, 1), 1.0)
        for name, more in {"none": {}, "pixels": {"pixel_values": torch.zeros(1)}, "said": {"has_images": True}}.items()
    }
    assert {name: sampled.has_images for name, sampled in seen.items()} == {"none": False, "pixels": True, "said": True}
    assert merged([seen["none"], seen["said"]]).has_images
    found = MismatchDebugger(None, None, None, None)._tried(seen["said"], 0.1)
    assert found.cause == "unknown"
    assert "images are not scored again" in found.sentence


@pytest.mark.parametrize(
    ("is_announced", "cause", "said"),
    [
        (True, "noise", "batch 2 was examined and nothing is wrong: rounding is that large"),
        (True, "unknown", "trainer and engine are 0.005 apart"),
        (False, "noise", ""),
    ],
)
def test_an_examination_that_was_announced_tells_what_it_has_found(caplog, is_announced, cause, said):
    class Tried(MismatchDebugger):
        def _bases(self):
            return None

        def _tried(self, sampled, limit):
            self._is_announced = is_announced
            return Diagnosis(cause, "rounding is that large")

    alarm = MismatchAlarm(Tried(None, None, None, None).examine, dtype="float32" if cause == "unknown" else "bfloat16")
    for distance in (1e-4, 5e-3):
        see(alarm, distance)
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(told) == bool(said)
    assert said in "".join(told)
