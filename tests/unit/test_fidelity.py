import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qlora_rl.fidelity import FidelityMonitor, measure


def test_equal_sides_have_distance_zero():
    logprobs = torch.log(torch.rand(4, 5) + 0.1)
    found = measure(logprobs, logprobs.clone(), torch.ones(4, 5))
    assert (found.mismatch_kl, found.logprob_diff_mean, found.logprob_diff_max) == (0.0, 0.0, 0.0)
    assert (found.ratio_p01, found.ratio_p50, found.ratio_p99, found.ess) == (1.0, 1.0, 1.0, 1.0)
    assert found.tokens == 20


def test_the_numbers_of_a_case_done_by_hand():
    trainer = torch.tensor([[-1.0, -2.0, 0.0]])
    engine = torch.tensor([[-1.5, -2.0, -9.0]])
    found = measure(trainer, engine, torch.tensor([[1, 1, 0]]))
    k3 = (math.exp(0.5) - 1 - 0.5) / 2
    assert found.mismatch_kl == pytest.approx(k3, rel=1e-6)
    assert found.logprob_diff_mean == pytest.approx(0.25)
    assert found.logprob_diff_max == pytest.approx(0.5)
    assert found.tokens == 2


def test_padding_does_not_count():
    trainer, engine = torch.zeros(2, 4), torch.zeros(2, 4)
    engine[:, 2:] = -50.0
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0]])
    assert measure(trainer, engine, mask).logprob_diff_max == 0.0


def test_tokens_without_an_engine_logprob_are_left_out_and_counted():
    engine = torch.tensor([[0.0, float("nan"), 0.0, 0.0]])
    found = measure(torch.zeros(1, 4), engine, torch.ones(1, 4))
    assert found.masked_share == 0.25
    assert found.mismatch_kl == 0.0


def test_nothing_known_is_nan_and_not_a_perfect_match():
    found = measure(torch.zeros(1, 2), torch.full((1, 2), float("nan")), torch.ones(1, 2))
    assert math.isnan(found.mismatch_kl)
    assert found.masked_share == 1.0


def test_one_heavy_sequence_lowers_the_effective_sample_size():
    trainer = torch.zeros(4, 1)
    trainer[0] = 20.0
    assert measure(trainer, torch.zeros(4, 1), torch.ones(4, 1)).ess == pytest.approx(0.25, abs=1e-6)


def test_no_rare_token_carries_the_scaled_difference_away():
    engine = torch.full((1, 100), -1.0)
    engine[0, 0] = -20.0
    trainer = engine + 0.01
    trainer[0, 0] = 0.0  # 20 nats apart
    found = measure(trainer, engine, torch.ones(1, 100))
    assert found.logprob_diff_mean > 0.2
    assert found.scaled_diff == pytest.approx((99 * 0.01 + 0.5) / 100, rel=1e-4)
    trainer[0, 0] = -20.2  # 16-bit logits are rounded in proportion to their size
    assert measure(trainer, engine, torch.ones(1, 100)).scaled_diff == pytest.approx(0.01, rel=1e-4)


def test_the_profile_says_where_in_a_completion_the_sides_part():
    engine = torch.zeros(2, 16)
    trainer = engine.clone()
    trainer[:, 14:] = 0.5
    found = measure(trainer, engine, torch.ones(2, 16))
    assert found.by_position == (0.0,) * 7 + (0.5,)
    mask = torch.ones(2, 16)
    mask[:, 4:8] = 0
    places = measure(trainer, engine, mask).by_position
    assert [math.isnan(p) for p in places] == [False, False, True, True, False, False, False, False]
    assert len(measure(engine[:, :3], engine[:, :3], torch.ones(2, 3)).by_position) == 8


def test_shapes_that_differ_are_rejected():
    with pytest.raises(ValueError, match="three \\[B, T\\] tensors"):
        measure(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3))


@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=30))
def test_the_kl_is_never_negative_and_ess_lies_between_one_sample_and_all(pairs):
    trainer = torch.tensor([[a] for a, _ in pairs], dtype=torch.float64)
    engine = torch.tensor([[b] for _, b in pairs], dtype=torch.float64)
    found = measure(trainer, engine, torch.ones(len(pairs), 1))
    assert found.mismatch_kl >= 0
    assert 1 / len(pairs) - 1e-9 <= found.ess <= 1 + 1e-9


def test_the_monitor_keeps_the_newest_last():
    monitor = FidelityMonitor()
    assert monitor.last is None
    monitor.observe(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    newest = monitor.observe(torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    assert monitor.last is newest
    assert len(monitor.history) == 2
