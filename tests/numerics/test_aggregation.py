"""The loss of a mini-batch must not depend on how it was cut into micro-batches and workers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.v1alpha1.algorithm import LossAggregation
from rljob_trainer.algorithms.aggregation import Denominators, aggregate_loss, count_denominators

LOSS_BT = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
MASK_BT = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (LossAggregation.TOKEN_MEAN, 18 / 5),
        (LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN, (1.5 + 5.0) / 2),
        (LossAggregation.SEQUENCE_MEAN_TOKEN_SUM, (3.0 + 15.0) / 2),
    ],
)
def test_by_hand_with_a_padding_row(aggregation: LossAggregation, expected: float) -> None:
    denominators = count_denominators(MASK_BT)
    assert denominators == Denominators(num_tokens=5, num_sequences=2)
    assert aggregate_loss(LOSS_BT, MASK_BT, aggregation, denominators, dp_size=1).item() == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", list(LossAggregation))
@given(seed=st.integers(0, 10_000), dp_size=st.sampled_from([1, 2, 4]), micro_batch=st.integers(1, 8))
def test_value_and_gradient_do_not_depend_on_the_split(
    aggregation: LossAggregation, seed: int, dp_size: int, micro_batch: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    loss_BT = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    mask_BT = (torch.rand(8, 5, generator=generator) < 0.7).double()
    whole_BT, split_BT = loss_BT.clone().requires_grad_(), loss_BT.clone().requires_grad_()
    denominators = count_denominators(mask_BT)
    whole = aggregate_loss(whole_BT, mask_BT, aggregation, denominators, dp_size=1)
    torch.autograd.backward(whole)
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(dp_size):
        rows = torch.arange(rank, 8, dp_size)
        for part in torch.split(rows, micro_batch):
            total = total + aggregate_loss(split_BT[part], mask_BT[part], aggregation, denominators, dp_size)
    averaged = total / dp_size
    torch.autograd.backward(averaged)
    assert averaged.item() == pytest.approx(whole.item(), abs=1e-12)
    assert whole_BT.grad is not None
    assert split_BT.grad is not None
    torch.testing.assert_close(split_BT.grad, whole_BT.grad, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("aggregation", list(LossAggregation))
def test_nothing_to_train_on_is_zero_and_masked_nan_does_not_leak(aggregation: LossAggregation) -> None:
    loss_BT = torch.full((2, 3), float("nan"), requires_grad=True)
    mask_BT = torch.zeros(2, 3)
    loss = aggregate_loss(loss_BT, mask_BT, aggregation, count_denominators(mask_BT), dp_size=2)
    torch.autograd.backward(loss)
    assert loss.item() == 0.0
    assert loss_BT.grad is not None
    assert loss_BT.grad.abs().max().item() == 0.0


def test_counts_of_parts_add_up() -> None:
    parts = count_denominators(MASK_BT[:1]) + count_denominators(MASK_BT[1:])
    assert parts == count_denominators(MASK_BT)
