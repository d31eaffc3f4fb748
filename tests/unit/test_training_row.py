"""A row to train on: made of a prompt and a completion, of whatever the numbers come in."""

import numpy as np
import pytest
import torch

from qlora_rl import ConfigConflictError, TrainingRow
from qlora_rl.train.scoring.losses import TokenLoss

PROMPT, COMPLETION, LOGPROBS = [5, 6, 7], [8, 9], [-0.5, -0.25]


def test_a_completion_is_scored_behind_its_prompt_and_the_prompt_is_not():
    row = TrainingRow.of(PROMPT, COMPLETION, LOGPROBS, 2.0)
    assert row == TrainingRow(
        [5, 6, 7, 8], [6, 7, 8, 9], {"logprobs": [0.0, 0.0, -0.5, -0.25], "advantages": [0.0, 0.0, 2.0, 2.0]}
    )
    each = TrainingRow.of(PROMPT, COMPLETION, LOGPROBS, [1.0, -1.0])
    assert each.inputs["advantages"] == [0.0, 0.0, 1.0, -1.0]
    taught = TrainingRow.of(PROMPT, COMPLETION)
    assert taught == TrainingRow([5, 6, 7, 8], [6, 7, 8, 9], {"weights": [0.0, 0.0, 1.0, 1.0]})
    assert TrainingRow.of([5], [6], weights=0.5).inputs == {"weights": [0.5]}
    for loss, made in (("importance_sampling", row), ("ppo", each), ("cross_entropy", taught)):
        TokenLoss(loss).check([made], vocabulary=10, longest=4)


@pytest.mark.parametrize(
    "kind",
    [
        np.array,
        torch.tensor,
        tuple,
        lambda values: list(np.array(values)),
        lambda values: list(torch.tensor(values)),
        lambda values: iter(values),
    ],
    ids=["array", "tensor", "tuple", "numbers of numpy", "numbers of torch", "iterator"],
)
def test_numbers_may_come_from_anywhere(kind):
    wanted = TrainingRow.of(PROMPT, COMPLETION, LOGPROBS, [1.0, 0.5])
    found = TrainingRow.of(kind(PROMPT), kind(COMPLETION), kind(LOGPROBS), kind([1.0, 0.5]))
    assert found == wanted
    assert {type(token) for token in found.tokens} == {int}
    assert {type(value) for values in found.inputs.values() for value in values} == {float}
    inputs = {name: kind(values) for name, values in wanted.inputs.items()}
    assert TrainingRow(kind(wanted.tokens), kind(wanted.targets), inputs) == wanted
    TokenLoss("ppo").check([found], vocabulary=10, longest=4)


@pytest.mark.parametrize("one", [np.float32(0.5), torch.tensor(0.5), np.array(0.5)])
def test_one_number_may_be_numpys_or_torchs(one):
    assert TrainingRow.of(PROMPT, COMPLETION, LOGPROBS, one) == TrainingRow.of(PROMPT, COMPLETION, LOGPROBS, 0.5)
    assert TokenLoss("ppo", {"clip_low_threshold": one}).config == {"clip_low_threshold": 0.5}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: TrainingRow.of([], COMPLETION), "prompt is empty"),
        (
            lambda: TrainingRow.of(PROMPT, COMPLETION, LOGPROBS, 1.0, weights=[0.0, 1.0]),
            "weights are for cross_entropy",
        ),
        (lambda: TrainingRow.of("What is 3 plus 4?", COMPLETION), "prompt is no list of numbers"),
        (lambda: TrainingRow.of({"input_ids": PROMPT}, COMPLETION), "prompt is no list of numbers"),
        (lambda: TrainingRow.of(7, COMPLETION), "prompt is no list of numbers"),
        (lambda: TrainingRow.of([PROMPT], COMPLETION), "prompt is no list of numbers"),
        (lambda: TrainingRow.of(torch.tensor([PROMPT]), COMPLETION), "prompt is no list of numbers"),
        (lambda: TrainingRow.of(PROMPT, COMPLETION, LOGPROBS), "go together"),
        (lambda: TrainingRow.of(PROMPT, COMPLETION, advantages=1.0), "go together"),
        (lambda: TrainingRow.of(PROMPT, COMPLETION, [0.0, *LOGPROBS], 1.0), "3 logprobs for a completion of 2"),
        (lambda: TrainingRow.of(PROMPT, COMPLETION, LOGPROBS, [1.0]), "1 advantages for a completion of 2"),
        (lambda: TrainingRow.of(PROMPT, COMPLETION, LOGPROBS, "1.0"), "advantages is no list of numbers"),
    ],
)
def test_what_is_no_row_is_rejected_where_it_is_made(make, why):
    with pytest.raises(ConfigConflictError, match=why):
        make()


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (TrainingRow.of(PROMPT, [8.0, 9.5], LOGPROBS, 1.0), "no whole number"),
        (TrainingRow.of(PROMPT, COMPLETION, [None, -0.5], 1.0), "logprobs that are not finite"),
        (TrainingRow.of(PROMPT, COMPLETION, LOGPROBS, float("nan")), "advantages that are not finite"),
        (TrainingRow.of(PROMPT, COMPLETION), "has weights; this loss takes logprobs and advantages"),
        (TrainingRow([5, 6], [6, 7]), "no logprobs for 2 target_tokens; this loss takes logprobs and advantages"),
    ],
)
def test_a_row_that_a_loss_cannot_take_is_named_with_what_it_takes(row, why):
    with pytest.raises(ConfigConflictError, match=f"row 1 .*{why}"):
        TokenLoss("ppo").check([TrainingRow.of(PROMPT, COMPLETION, LOGPROBS, 1.0), row], vocabulary=10, longest=4)
