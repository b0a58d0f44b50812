"""The loss of a mini-batch must not depend on how it was split into micro-batches and workers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.v1alpha1.algorithm import LossAggregation
from rljob_testing.training import token_rows
from rljob_trainer.algorithms.aggregation import Denominators, aggregate_loss, count_denominators

MAX_NEW_TOKENS = 16
LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (LossAggregation.TOKEN_MEAN, 18 / 5),
        (LossAggregation.TOKEN_SUM, 18.0),
        (LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN, (1.5 + 5.0) / 2),
        (LossAggregation.SEQUENCE_MEAN_TOKEN_SUM, (3.0 + 15.0) / 2),
        (LossAggregation.SEQUENCE_MEAN_TOKEN_SUM_NORM, (3.0 + 15.0) / 2 / 16),
    ],
)
def test_aggregation_matches_a_case_by_hand_with_an_empty_row(aggregation: LossAggregation, expected: float) -> None:
    segments = token_rows.segments_of(2, 3, 0)
    losses_N = torch.tensor([1.0, 2.0, 4.0, 5.0, 6.0])
    denominators = count_denominators(segments)
    assert denominators == Denominators(num_tokens=5, num_sequences=2)
    loss = aggregate_loss(losses_N, segments, aggregation, denominators, 1, MAX_NEW_TOKENS)
    assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", list(LossAggregation))
def test_a_single_token_has_its_own_loss(aggregation: LossAggregation) -> None:
    """The denominators, which are at least 1, are exactly 1."""
    segments = token_rows.segments_of(0, 1)
    loss = aggregate_loss(torch.tensor([3.0]), segments, aggregation, count_denominators(segments), 1, 1)
    assert loss.item() == 3.0


@pytest.mark.parametrize("aggregation", list(LossAggregation))
@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, dp_size=st.sampled_from([1, 2, 4]), micro_batch=st.integers(1, 8), seed=st.integers(0, 99))
def test_value_and_gradient_do_not_depend_on_the_split(
    aggregation: LossAggregation, lengths: list[int], dp_size: int, micro_batch: int, seed: int
) -> None:
    losses_N = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    whole_N, split_N = losses_N.clone().requires_grad_(), losses_N.clone().requires_grad_()
    denominators = count_denominators(token_rows.segments_of(*lengths))
    whole = aggregate_loss(whole_N, token_rows.segments_of(*lengths), aggregation, denominators, 1, MAX_NEW_TOKENS)
    torch.autograd.backward(whole)
    rows = torch.split_with_sizes(split_N, lengths)
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(dp_size):
        mine = range(rank, len(lengths), dp_size)
        for start in range(0, len(mine), micro_batch):
            part = mine[start : start + micro_batch]
            part_N = torch.cat([rows[row] for row in part])
            part_rows = token_rows.segments_of(*(lengths[row] for row in part))
            total = total + aggregate_loss(part_N, part_rows, aggregation, denominators, dp_size, MAX_NEW_TOKENS)
    averaged = total / dp_size
    torch.autograd.backward(averaged)
    assert averaged.item() == pytest.approx(whole.item(), abs=1e-12)
    assert whole_N.grad is not None
    assert split_N.grad is not None
    torch.testing.assert_close(split_N.grad, whole_N.grad, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("aggregation", list(LossAggregation))
def test_nothing_to_train_on_is_zero_with_a_gradient(aggregation: LossAggregation) -> None:
    losses_N = torch.zeros(0, requires_grad=True)
    segments = token_rows.segments_of(0, 0)
    loss = aggregate_loss(losses_N, segments, aggregation, count_denominators(segments), 2, MAX_NEW_TOKENS)
    torch.autograd.backward(loss)
    assert loss.item() == 0.0
    assert losses_N.grad is not None
