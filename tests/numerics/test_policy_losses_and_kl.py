"""Clipped surrogate and KL: values worked out by hand, gradients in float64, and that each setting has an effect.

Legend: N response tokens.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rljob_api.v1alpha1.kl import KlEstimator
from rljob_api.v1alpha1.policy_loss import NO_DUAL_CLIP, Clipped
from rljob_testing.training import token_rows
from rljob_trainer.algorithms.interfaces import LossInputs, TokenLosses
from rljob_trainer.algorithms.kl import kl_estimate, kl_in_reward, kl_sums
from rljob_trainer.algorithms.policy_losses import clipped_surrogate


def computed(
    logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, *, low: float, high: float, dual: float
) -> TokenLosses:
    settings = Clipped(clip_ratio_low=low, clip_ratio_high=high, dual_clip_ratio=dual)
    return clipped_surrogate(
        LossInputs(token_rows.segments_of(len(logprobs_N)), logprobs_N, old_logprobs_N, advantages_N), settings
    )


def surrogate(
    ratios: list[float],
    advantages: list[float],
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float = NO_DUAL_CLIP,
) -> tuple[TokenLosses, Tensor]:
    """The losses, and the gradient of their sum by the log-probabilities, [N]."""
    logprobs_N = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    advantages_N = torch.tensor(advantages, dtype=torch.float64)
    found = computed(
        logprobs_N,
        torch.zeros_like(logprobs_N),
        advantages_N,
        low=low,
        high=high,
        dual=dual,
    )
    torch.autograd.backward(found.losses_N.sum())
    assert logprobs_N.grad is not None
    return found, logprobs_N.grad


def assert_losses(found: TokenLosses, expected: list[float]) -> None:
    torch.testing.assert_close(found.losses_N.detach(), torch.tensor(expected, dtype=torch.float64))


def test_the_four_corners_match_values_by_hand() -> None:
    # Ratio above the range with A > 0: clipped at 1.2. Above with A < 0: not. Below with A > 0: not. Below with A < 0:
    # at 0.8.
    found, gradient_N = surrogate([1.5, 1.5, 0.5, 0.5, 1.5], [2.0, -2.0, 2.0, -2.0, 0.0])
    assert_losses(found, [-2.4, 3.0, -1.0, 1.6, 0.0])
    torch.testing.assert_close(gradient_N, torch.tensor([0.0, 3.0, -1.0, 0.0, 0.0], dtype=torch.float64))
    assert found.sums["pg_clipfrac"] == 2
    assert found.sums["pg_clipfrac_lower"] == 0
    assert found.sums["ppo_kl"].item() == pytest.approx(-3 * math.log(1.5) - 2 * math.log(0.5))


@pytest.mark.parametrize(("low", "high", "expected"), [(0.05, 0.3, [-1.3, 0.95]), (0.4, 0.01, [-1.01, 0.6])])
def test_each_clip_bound_works_by_itself(low: float, high: float, expected: list[float]) -> None:
    found, _ = surrogate([1.5, 0.5], [1.0, -1.0], low=low, high=high)
    assert_losses(found, expected)


def test_dual_clip_bounds_negative_advantages_only() -> None:
    found, gradient_N = surrogate([10.0, 10.0, 2.0, 10.0], [-1.0, 1.0, -1.0, 0.0], dual=3.0)
    assert_losses(found, [3.0, -1.2, 2.0, 0.0])
    torch.testing.assert_close(gradient_N, torch.tensor([0.0, 0.0, 2.0, 0.0], dtype=torch.float64))
    assert found.sums["pg_clipfrac_lower"] == 1
    without, _ = surrogate([10.0], [-1.0], dual=NO_DUAL_CLIP)
    assert_losses(without, [10.0])


def test_a_huge_ratio_stays_finite() -> None:
    logprobs_N = torch.tensor([0.0, -500.0, 0.0], requires_grad=True)
    found = computed(
        logprobs_N,
        torch.tensor([-500.0, 0.0, -500.0]),
        torch.tensor([-1.0, -1.0, 0.0]),
        low=0.2,
        high=0.2,
        dual=NO_DUAL_CLIP,
    )
    assert found.losses_N.tolist() == pytest.approx([math.exp(20), 0.8, 0.0], rel=1e-5)
    torch.autograd.backward(found.losses_N.sum())
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == [0.0, 0.0, 0.0]


def test_values_that_are_not_finite_appear_in_loss_and_gradient() -> None:
    found, gradient_N = surrogate([1.5, 1.1], [math.nan, 1.0], dual=3.0)
    assert found.losses_N.isnan().tolist() == [True, False]
    assert gradient_N.isnan().tolist() == [True, False]


def test_old_logprobs_of_this_pass_give_the_policy_gradient() -> None:
    logprobs_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = computed(
        logprobs_N,
        logprobs_N.detach(),
        torch.tensor([0.5, -2.0]),
        low=0.2,
        high=0.2,
        dual=3.0,
    )
    torch.autograd.backward(found.losses_N.sum())
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == [-0.5, 2.0]
    assert logprobs_N.tolist() == [-1.0, -2.0]


LOGPROB = st.floats(min_value=-8, max_value=0, allow_nan=False)


@given(st.lists(st.tuples(LOGPROB, LOGPROB, st.sampled_from([-2.0, -0.5, 0.5, 1.5])), min_size=1, max_size=6))
def test_surrogate_and_gradient_equal_a_scalar_implementation(tokens: list[tuple[float, float, float]]) -> None:
    logprobs_N = torch.tensor([token[0] for token in tokens], dtype=torch.float64, requires_grad=True)
    found = computed(
        logprobs_N,
        torch.tensor([token[1] for token in tokens], dtype=torch.float64),
        torch.tensor([token[2] for token in tokens], dtype=torch.float64),
        low=0.1,
        high=0.3,
        dual=2.0,
    )
    torch.autograd.backward(found.losses_N.sum())
    assert logprobs_N.grad is not None
    num_clipped = num_bounded = 0
    for n, (new, old, advantage) in enumerate(tokens):
        ratio = math.exp(new - old)
        in_region = min(max(ratio, 0.9), 1.3)
        loss = max(-advantage * ratio, -advantage * in_region)
        flows = loss == -advantage * ratio
        num_clipped += not flows
        if advantage < 0 and loss > -advantage * 2.0:
            loss, flows = -advantage * 2.0, False
            num_bounded += 1
        assert found.losses_N[n].item() == pytest.approx(loss, rel=1e-9)
        assert logprobs_N.grad[n].item() == pytest.approx(-advantage * ratio if flows else 0.0, rel=1e-9)
    assert found.sums["pg_clipfrac"] == num_clipped
    assert found.sums["pg_clipfrac_lower"] == num_bounded


def test_kl_estimates_match_values_by_hand() -> None:
    logprobs_N, reference_N = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    expected = {
        KlEstimator.K1: [0.5, -1.0],
        KlEstimator.K2: [0.125, 0.5],
        KlEstimator.K3: [math.exp(-0.5) - 1 + 0.5, math.e - 1 - 1],
        KlEstimator.ABSOLUTE: [0.5, 1.0],
    }
    assert set(expected) == set(KlEstimator)
    for estimator, values in expected.items():
        torch.testing.assert_close(kl_estimate(logprobs_N, reference_N, estimator), torch.tensor(values))


@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_gradients_of_kl_estimates_equal_finite_differences(estimator: KlEstimator) -> None:
    logprobs_N = torch.tensor([-1.0, -2.0, -0.1, -4.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference_N = torch.tensor([-1.5, -1.0, -0.1, -1.0, 0.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x_N: kl_estimate(x_N, reference_N, estimator), (logprobs_N,))


@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_straight_through_keeps_the_value_and_uses_the_gradient_of_k2(estimator: KlEstimator) -> None:
    logprobs_N = torch.tensor([-1.0, -2.0, 0.0, -100.0], dtype=torch.float64, requires_grad=True)
    reference_N = torch.tensor([-1.5, -1.0, 0.0, 0.0], dtype=torch.float64)
    plain_N = kl_estimate(logprobs_N, reference_N, estimator)
    straight_N = kl_estimate(logprobs_N, reference_N, estimator, straight_through=True)
    assert torch.equal(straight_N, plain_N)
    (gradient_N,) = torch.autograd.grad(straight_N.sum(), logprobs_N)
    # K3 is clamped beyond its bounds, but its straight-through form still has a gradient.
    assert gradient_N.tolist() == [0.5, -1.0, 0.0, -100.0]


@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_straight_through_of_an_impossible_token_has_no_gradient(estimator: KlEstimator) -> None:
    logprobs_N = torch.tensor([-torch.inf, -1.0, -1.0], requires_grad=True)
    reference_N = torch.tensor([-1.0, -torch.inf, -1.5])
    plain_N = kl_estimate(logprobs_N, reference_N, estimator)
    straight_N = kl_estimate(logprobs_N, reference_N, estimator, straight_through=True)
    assert torch.equal(straight_N, plain_N)
    (gradient_N,) = torch.autograd.grad(straight_N.sum(), logprobs_N)
    assert gradient_N.tolist() == [0.0, 0.0, 0.5]


def test_the_gradient_of_k3_near_0_is_as_exact_as_logprobs_are() -> None:
    reference_N = torch.full((2_001,), -1.0)
    logprobs_N = (reference_N + torch.linspace(-0.01, 0.01, 2_001)).requires_grad_()
    (gradient_N,) = torch.autograd.grad(kl_estimate(logprobs_N, reference_N, KlEstimator.K3).sum(), logprobs_N)
    expected_N = -(reference_N - logprobs_N.detach()).double().expm1()
    torch.testing.assert_close(gradient_N.double(), expected_N, rtol=0.0, atol=7e-8)


def test_a_rounding_difference_has_no_gradient() -> None:
    logprobs_N = torch.tensor([-1.0 + 2e-6, -1.0 - 2e-6, -1.001, -0.999], requires_grad=True)
    found_N = kl_estimate(logprobs_N, torch.full((4,), -1.0), KlEstimator.ABSOLUTE)
    (gradient_N,) = torch.autograd.grad(found_N.sum(), logprobs_N)
    assert gradient_N.tolist() == [0.0, 0.0, -1.0, 1.0]


def test_k3_is_bounded() -> None:
    logprobs_N = torch.tensor([-100.0, 0.0, -1.0], requires_grad=True)
    far_N = kl_estimate(logprobs_N, torch.tensor([0.0, -100.0, -2.0]), KlEstimator.K3)
    torch.testing.assert_close(far_N.detach(), torch.tensor([10.0, 10.0, math.exp(-1)]))
    torch.autograd.backward(far_N.sum())
    assert logprobs_N.grad is not None
    torch.testing.assert_close(logprobs_N.grad, torch.tensor([0.0, 0.0, 1 - math.exp(-1)]))


def test_k1_and_k3_average_to_the_true_kl() -> None:
    policy_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference_V = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    true_kl = 0.5 * math.log(2.5) + 0.2 * math.log(0.4)
    for estimator in (KlEstimator.K1, KlEstimator.K3):
        estimate_V = kl_estimate(policy_V.log(), reference_V.log(), estimator)
        assert (policy_V * estimate_V).sum().item() == pytest.approx(true_kl, rel=1e-9)


def test_kl_in_reward_sums_over_response_tokens_without_gradient() -> None:
    kl_N = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    rewards_B = kl_in_reward(torch.tensor([1.0, 0.0, 0.5]), kl_sums(kl_N, token_rows.segments_of(2, 1, 0)), 0.1)
    torch.testing.assert_close(rewards_B, torch.tensor([0.85, -0.2, 0.5]))
    assert not rewards_B.requires_grad
