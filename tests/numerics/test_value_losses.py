"""The critic's loss: against numbers of verl 0.9.1, against autograd, and by hand.

Legend: N response tokens.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rljob_testing.golden import loss_cases, verl_cases
from rljob_trainer.algorithms.interfaces import OneWorker
from rljob_trainer.algorithms.several_workers import on_workers
from rljob_trainer.algorithms.value_losses import clipped_value_loss, explained_variance


def test_the_clipped_loss_equals_verls() -> None:
    verl_cases.check(loss_cases.VALUE_LOSS_CASE)


@pytest.mark.parametrize("clip_range", [None, 0.25])
def test_the_gradient_equals_that_of_the_formula(clip_range: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    values_N, old_N, returns_N = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    slow_N = values_N.clone().requires_grad_()
    losses_N = (slow_N - returns_N).square()
    if clip_range is not None:
        held_N = torch.clamp(slow_N, old_N - clip_range, old_N + clip_range)
        losses_N = torch.maximum(losses_N, (held_N - returns_N).square())
    weights_N = torch.rand(200, generator=generator, dtype=torch.float64)
    torch.autograd.backward((0.5 * losses_N * weights_N).sum())
    values_N.requires_grad_()
    found = clipped_value_loss(values_N, old_N, returns_N, clip_range)
    torch.autograd.backward((found.losses_N * weights_N).sum())
    torch.testing.assert_close(found.losses_N.detach(), 0.5 * losses_N.detach())
    torch.testing.assert_close(values_N.grad, slow_N.grad)
    if clip_range is not None:
        assert values_N.grad is not None
        assert 0 < int((values_N.grad == 0).sum()) < 200


def test_explained_variance_covers_all_workers() -> None:
    values_N = torch.tensor([0.0, 1.0, 2.0, 5.0])
    returns_N = torch.tensor([1.0, 1.0, 3.0, 3.0])
    # Errors 1, 0, 1, -2: variance 1.5; returns: variance 1.
    assert explained_variance(values_N, returns_N, OneWorker()) == pytest.approx(-0.5)
    assert explained_variance(returns_N - 7, returns_N, OneWorker()) == pytest.approx(1.0)
    assert explained_variance(values_N, torch.ones(4), OneWorker()) == 0.0
    # What a float32 sum of the values keeps of ones; a spread of a thousandth is lost.
    assert explained_variance(values_N, torch.ones(4) + values_N * 2**-23, OneWorker()) == 0.0
    assert explained_variance(values_N, torch.ones(4) + values_N * 1e-3, OneWorker()) < -9e5
    parts = [(values_N[:3], returns_N[:3]), (values_N[3:], returns_N[3:]), (values_N[:0], returns_N[:0])]

    def explained(part: tuple[Tensor, Tensor], reduce: OneWorker) -> float:
        return explained_variance(*part, reduce)

    assert on_workers(parts, explained) == pytest.approx([-0.5] * 3)
