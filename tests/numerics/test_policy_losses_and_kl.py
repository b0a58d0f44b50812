"""Clipped surrogate and KL: hand-worked values, gradients in 64 bits, and that each knob turns something."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rljob_api.v1alpha1.algorithm import KlEstimator
from rljob_trainer.algorithms.kl import kl_estimate, kl_in_reward, kl_sums
from rljob_trainer.algorithms.policy_losses import SurrogateStats, clipped_surrogate


def surrogate(
    ratios: list[float],
    advantages: list[float],
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    mask: list[float] | None = None,
) -> tuple[Tensor, SurrogateStats, Tensor]:
    """One sequence; returns the loss [T], the statistics and the gradient of the loss's sum by logprob [T]."""
    logprobs_BT = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    advantages_BT = torch.tensor([advantages], dtype=torch.float64)
    mask_BT = torch.tensor([mask or [1.0] * len(ratios)])
    loss_BT, stats = clipped_surrogate(
        logprobs_BT,
        torch.zeros_like(logprobs_BT),
        advantages_BT,
        mask_BT,
        clip_ratio_low=low,
        clip_ratio_high=high,
        dual_clip_ratio=dual,
    )
    torch.autograd.backward(loss_BT.sum())
    assert logprobs_BT.grad is not None
    return loss_BT.detach()[0], stats, logprobs_BT.grad[0]


def test_the_four_corners_by_hand() -> None:
    # Ratio above with A > 0: clipped at 1.2. Above with A < 0: not. Below with A > 0: not. Below with A < 0: at 0.8.
    loss_T, stats, gradient_T = surrogate([1.5, 1.5, 0.5, 0.5], [2.0, -2.0, 2.0, -2.0])
    torch.testing.assert_close(loss_T, torch.tensor([-2.4, 3.0, -1.0, 1.6], dtype=torch.float64))
    torch.testing.assert_close(gradient_T, torch.tensor([0.0, 3.0, -1.0, 0.0], dtype=torch.float64))
    assert stats.num_clipped == 2
    assert stats.num_dual_clipped == 0


@pytest.mark.parametrize(("low", "high", "expected"), [(0.05, 0.3, [-1.3, 0.95]), (0.4, 0.01, [-1.01, 0.6])])
def test_each_clip_bound_works_by_itself(low: float, high: float, expected: list[float]) -> None:
    loss_T, _, _ = surrogate([1.5, 0.5], [1.0, -1.0], low=low, high=high)
    torch.testing.assert_close(loss_T, torch.tensor(expected, dtype=torch.float64))


def test_dual_clip_bounds_negative_advantages_only() -> None:
    loss_T, stats, gradient_T = surrogate([10.0, 10.0, 2.0], [-1.0, 1.0, -1.0], dual=3.0)
    torch.testing.assert_close(loss_T, torch.tensor([3.0, -1.2, 2.0], dtype=torch.float64))
    torch.testing.assert_close(gradient_T, torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64))
    assert stats.num_dual_clipped == 1
    without_T, _, _ = surrogate([10.0], [-1.0], dual=None)
    assert without_T.item() == pytest.approx(10.0)


def test_statistics_leave_masked_tokens_out_and_add_up() -> None:
    _, stats, _ = surrogate([1.5, 1.5, math.e], [1.0, 1.0, 1.0], mask=[1.0, 0.0, 1.0])
    assert stats.num_tokens == 2
    assert stats.num_clipped == 2
    assert stats.kl_sum.item() == pytest.approx(-math.log(1.5) - 1.0)
    total = stats + stats
    assert total.num_tokens == 4
    assert total.num_clipped == 4
    assert total.kl_sum.item() == pytest.approx(2 * stats.kl_sum.item())


def test_a_huge_ratio_stays_finite() -> None:
    logprobs_BT = torch.tensor([[0.0, -500.0]])
    loss_BT, _ = clipped_surrogate(
        logprobs_BT,
        torch.tensor([[-500.0, 0.0]]),
        torch.tensor([[-1.0]]),
        torch.ones(1, 2),
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        dual_clip_ratio=None,
    )
    assert loss_BT[0, 0].item() == pytest.approx(math.exp(20), rel=1e-5)
    assert loss_BT[0, 1].item() == pytest.approx(0.8)


LOGPROB = st.floats(min_value=-8, max_value=0, allow_nan=False)


@given(st.lists(st.tuples(LOGPROB, LOGPROB, st.sampled_from([-2.0, -0.5, 0.5, 1.5])), min_size=1, max_size=6))
def test_surrogate_and_gradient_equal_a_scalar_implementation(tokens: list[tuple[float, float, float]]) -> None:
    logprobs_BT = torch.tensor([[token[0] for token in tokens]], dtype=torch.float64, requires_grad=True)
    loss_BT, _ = clipped_surrogate(
        logprobs_BT,
        torch.tensor([[token[1] for token in tokens]], dtype=torch.float64),
        torch.tensor([[token[2] for token in tokens]], dtype=torch.float64),
        torch.ones(1, len(tokens)),
        clip_ratio_low=0.1,
        clip_ratio_high=0.3,
        dual_clip_ratio=2.0,
    )
    torch.autograd.backward(loss_BT.sum())
    assert logprobs_BT.grad is not None
    for t, (new, old, advantage) in enumerate(tokens):
        ratio = math.exp(new - old)
        in_region = min(max(ratio, 0.9), 1.3)
        loss = max(-advantage * ratio, -advantage * in_region)
        flows = loss == -advantage * ratio
        if advantage < 0 and loss > -advantage * 2.0:
            loss, flows = -advantage * 2.0, False
        assert loss_BT[0, t].item() == pytest.approx(loss, rel=1e-9)
        assert logprobs_BT.grad[0, t].item() == pytest.approx(-advantage * ratio if flows else 0.0, rel=1e-9)


def test_kl_estimates_by_hand() -> None:
    logprobs_BT, reference_BT = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    expected = {
        KlEstimator.K1: [0.5, -1.0],
        KlEstimator.K2: [0.125, 0.5],
        KlEstimator.K3: [math.exp(-0.5) - 1 + 0.5, math.e - 1 - 1],
    }
    for estimator, values in expected.items():
        torch.testing.assert_close(kl_estimate(logprobs_BT, reference_BT, estimator), torch.tensor([values]))


def test_k3_is_bounded() -> None:
    far_BT = kl_estimate(torch.tensor([[-100.0, 0.0]]), torch.tensor([[0.0, -100.0]]), KlEstimator.K3)
    torch.testing.assert_close(far_BT, torch.tensor([[10.0, 19.0]]).clamp(max=10.0))


def test_k1_and_k3_average_to_the_true_kl() -> None:
    policy_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference_V = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    true_kl = 0.5 * math.log(2.5) + 0.2 * math.log(0.4)
    for estimator in (KlEstimator.K1, KlEstimator.K3):
        estimate_V = kl_estimate(policy_V.log(), reference_V.log(), estimator)
        assert (policy_V * estimate_V).sum().item() == pytest.approx(true_kl, rel=1e-9)


def test_kl_in_reward_sums_over_response_tokens_without_gradient() -> None:
    kl_BT = torch.tensor([[0.5, 1.0, 9.0], [2.0, 9.0, 9.0]], requires_grad=True)
    mask_BT = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    rewards_B = kl_in_reward(torch.tensor([1.0, 0.0]), kl_sums(kl_BT, mask_BT), 0.1)
    torch.testing.assert_close(rewards_B, torch.tensor([0.85, -0.2]))
    assert not rewards_B.requires_grad
