"""Every policy loss against its formula, written token by token with autograd; its behaviour at extremes; and that it
does not depend on how rows are distributed.

Legend: B rows, N response tokens of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rljob_api.v1alpha1.policy_loss import NEEDS_BATCH_STATISTICS, LossType
from rljob_testing.training import token_rows
from rljob_trainer.algorithms.interfaces import OneWorker

Wire = Mapping[str, object]
SETTINGS: dict[str, Wire] = {
    "Clipped": {"clipped": {"clipRatioLow": 0.1, "clipRatioHigh": 0.3, "dualClipRatio": 2.0}},
    "GSPO": {"gspo": {"clipRatioLow": 0.05, "clipRatioHigh": 0.1}},
    "CISPO": {"cispo": {"clipRatioLow": 0.4, "clipRatioHigh": 0.5}},
    "SAPO": {"sapo": {"temperaturePositive": 1.5, "temperatureNegative": 2.0}},
    "GPG": {},
    "GMPO": {"gmpo": {"clipLogRatioLow": 0.15, "clipLogRatioHigh": 0.35}},
    "ClipCov": {"clipCov": {"tokenShare": 0.2, "covarianceLow": 0.05, "covarianceHigh": 2.0, "clipRatioHigh": 0.4}},
    "KLCov": {"klCov": {"tokenShare": 0.2, "coefficient": 0.7}},
    "DPPO": {"dppo": {"thresholdLow": 0.05, "thresholdHigh": 0.1, "maxRatio": 1.4}},
    "DPPO KL": {"dppo": {"divergence": "KL", "thresholdLow": 0.01, "thresholdHigh": 0.02, "maxRatio": 1.4}},
    "DRO": {"dro": {"beta": 0.4}},
}
WIRES: dict[str, Wire] = {name: {"type": name.split()[0], **settings} for name, settings in SETTINGS.items()}


def test_every_loss_is_tested() -> None:
    assert {wire["type"] for wire in WIRES.values()} == set(LossType) - {LossType.FUNCTION}


def test_losses_over_the_whole_mini_batch_are_known_without_the_trainer() -> None:
    assert {wire["type"] for wire in WIRES.values() if token_rows.named_loss(wire).whole_pass} == set(
        NEEDS_BATCH_STATISTICS
    )


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def clip(value: Tensor, low: float, high: float) -> Tensor:
    return torch.min(torch.max(value, number(low)), number(high))


def plain_clipped(x: Tensor, _: Tensor, old: Tensor, a: float, low: float, high: float) -> Tensor:
    del old
    return torch.max(-a * x.exp(), -a * clip(x.exp(), 1 - low, 1 + high))


def plain_dual_clipped(x: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
    loss = plain_clipped(x, new, old, a, 0.1, 0.3)
    return torch.min(loss, number(-a * 2.0)) if a < 0 else loss


def plain_cispo(x: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
    del old
    return -clip(x.exp(), 0.6, 1.5).detach() * a * new


def plain_sapo(x: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
    del new, old
    t = 1.5 if a > 0 else 2.0
    return -4 / t / (1 + (-t * (x.exp() - 1)).exp()) * a


def plain_dppo(x: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
    moved = math.exp(new.item()) - math.exp(old.item())
    is_out = moved > 0.1 if a > 0 else moved < -0.05
    return new * 0 if is_out else -a * clip(x.exp(), 0, 1.4).detach() * new


def plain_dppo_kl(x: Tensor, new: Tensor, old: Tensor, a: float) -> Tensor:
    p, q = math.exp(new.item()), math.exp(old.item())
    distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    is_out = p > q and distance > 0.02 if a > 0 else p < q and distance > 0.01
    return new * 0 if is_out else -a * clip(x.exp(), 0, 1.4).detach() * new


PLAIN: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "Clipped": plain_dual_clipped,
    "CISPO": plain_cispo,
    "SAPO": plain_sapo,
    "GPG": lambda _, new, __, a: -a * new,
    "DPPO": plain_dppo,
    "DPPO KL": plain_dppo_kl,
    "DRO": lambda x, new, _, a: -a * new + 0.2 * x * x,
}
"""One token's loss, from log-ratio, new and old log-probability, and advantage."""


def plain_gspo(x_T: Tensor, _: Tensor, a_T: Tensor) -> Tensor:
    """GSPO-token, equation 14 of the paper: each token has its own advantage."""
    ratio_T = x_T.mean().exp().detach() * (x_T - x_T.detach()).exp()
    return torch.max(-a_T * ratio_T, -a_T * clip(ratio_T, 0.95, 1.1)).mean()


def plain_gmpo(x_T: Tensor, _: Tensor, a_T: Tensor) -> Tensor:
    log_ratios = []
    for x, a in zip(x_T, a_T, strict=True):
        held = clip(x, -torch.inf, 0.35) if a > 0 else clip(x, -0.15, torch.inf)
        log_ratios.append(held if a != 0 else x.detach() * 0)
    return -a_T.mean() * torch.stack(log_ratios).mean().exp()


PLAIN_OF_ROWS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "GSPO": plain_gspo,
    "GMPO": plain_gmpo,
}
"""One response's loss, from log-ratios, new log-probabilities and advantages: the mean over its tokens."""

# Multiples of 1/64: no kink is hit except that of |0|.
LOGPROB = st.integers(-200, -1).map(lambda number: number / 64)
TOKEN = st.tuples(LOGPROB, LOGPROB, st.sampled_from([-1.5, -0.5, 0.0, 0.75, 2.0]))
ROWS = st.lists(st.lists(TOKEN, max_size=5), min_size=1, max_size=4)
Rows = list[list[tuple[float, float, float]]]


def batch_of(rows: Rows) -> token_rows.MiniBatch:
    columns = [torch.tensor([token[column] for row in rows for token in row]).double() for column in range(3)]
    return token_rows.MiniBatch(tuple(map(len, rows)), *columns, rollout_logprobs_N=columns[1].float())


def assert_found(found: token_rows.ComputedLoss, losses_N: Tensor, logprobs_N: Tensor) -> None:
    (gradients_N,) = torch.autograd.grad(losses_N.sum() + 0 * logprobs_N.sum(), logprobs_N)
    torch.testing.assert_close(found.losses_N, losses_N.detach(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.gradients_N, gradients_N, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=40, deadline=None)
@given(rows=ROWS)
def test_token_losses_equal_the_formula(name: str, rows: Rows) -> None:
    batch = batch_of(rows)
    logprobs_N = batch.logprobs_N.clone().requires_grad_()
    losses = [
        PLAIN[name](new - old, new, old, float(a))
        for new, old, a in zip(logprobs_N, batch.old_logprobs_N, batch.advantages_N, strict=True)
    ]
    losses_N = torch.stack(losses) if losses else logprobs_N * 0
    assert_found(token_rows.loss_of_micro_batch(token_rows.named_loss(WIRES[name]), batch, {}), losses_N, logprobs_N)


@pytest.mark.parametrize("name", PLAIN_OF_ROWS)
@settings(max_examples=40, deadline=None)
@given(rows=ROWS)
def test_response_losses_equal_the_formula_in_the_mean_over_each_response(name: str, rows: Rows) -> None:
    batch = batch_of(rows)
    segments = token_rows.segments_of(*batch.lengths)
    logprobs_N = batch.logprobs_N.clone().requires_grad_()
    found_B = segments.mean(token_rows.named_loss(WIRES[name]).compute(batch.inputs(logprobs_N, {})).losses_N)
    (gradients_N,) = torch.autograd.grad(found_B.sum(), logprobs_N)
    plain_N = batch.logprobs_N.clone().requires_grad_()
    losses = [
        PLAIN_OF_ROWS[name](x_T, new_T, a_T) if len(x_T) else torch.zeros(()).double()
        for x_T, new_T, a_T in zip(
            torch.split_with_sizes(plain_N - batch.old_logprobs_N, list(batch.lengths)),
            torch.split_with_sizes(plain_N, list(batch.lengths)),
            torch.split_with_sizes(batch.advantages_N, list(batch.lengths)),
            strict=True,
        )
    ]
    expected_B = torch.stack(losses)
    (expected_N,) = torch.autograd.grad(expected_B.sum() + 0 * plain_N.sum(), plain_N)
    torch.testing.assert_close(found_B.detach(), expected_B.detach(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradients_N, expected_N, rtol=1e-6, atol=1e-9)


def covariances(batch: token_rows.MiniBatch) -> list[float]:
    new_logprobs, advantages = batch.logprobs_N.tolist(), batch.advantages_N.tolist()
    means = [sum(each) / len(each) for each in (new_logprobs, advantages)]
    return [(new - means[0]) * (a - means[1]) for new, a in zip(new_logprobs, advantages, strict=True)]


@settings(max_examples=60, deadline=None)
@given(rows=ROWS.filter(lambda rows: any(rows)))
def test_kl_cov_penalises_the_tokens_of_the_largest_covariance(rows: Rows) -> None:
    batch = batch_of(rows)
    loss = token_rows.named_loss(WIRES["KLCov"])
    assert loss.whole_pass is not None
    whole = loss.whole_pass(batch.seen(), OneWorker())
    chosen = whole["is_chosen"].bool().tolist()
    of_tokens = covariances(batch)
    num_chosen = max(1, int(0.2 * len(of_tokens)))
    threshold = sorted(of_tokens, reverse=True)[num_chosen - 1]
    assert sum(chosen) >= num_chosen
    for is_chosen, covariance in zip(chosen, of_tokens, strict=True):
        if abs(covariance - threshold) > 1e-6:
            assert is_chosen == (covariance > threshold)
    logprobs_N = batch.logprobs_N.clone().requires_grad_()
    x_N = logprobs_N - batch.old_logprobs_N
    plain_N = -batch.advantages_N * x_N.exp() + 0.7 * x_N.abs() * torch.tensor(chosen)
    assert_found(token_rows.loss_of_micro_batch(loss, batch, whole), plain_N, logprobs_N)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS.filter(lambda rows: any(rows)))
def test_clip_cov_leaves_out_its_number_of_tokens_in_the_range(rows: Rows) -> None:
    batch = batch_of(rows)
    loss = token_rows.named_loss(WIRES["ClipCov"])
    assert loss.whole_pass is not None
    whole = loss.whole_pass(batch.seen(), OneWorker())
    chosen = whole["is_chosen"].bool().tolist()
    logprobs_N = batch.logprobs_N.clone().requires_grad_()
    x_N = logprobs_N - batch.old_logprobs_N
    plain_N = torch.stack(
        [
            plain_clipped(x, x, x, float(a), 0.2, 0.4) * (not is_chosen)
            for x, a, is_chosen in zip(x_N, batch.advantages_N, chosen, strict=True)
        ]
    )
    assert_found(token_rows.loss_of_micro_batch(loss, batch, whole), plain_N, logprobs_N)
    ratio_N = x_N.detach().exp()
    may_be = [
        0.05 < covariance < 2.0 and not (ratio > 1.4 if a > 0 else a < 0 and ratio < 0.8)
        for covariance, ratio, a in zip(covariances(batch), ratio_N.tolist(), batch.advantages_N.tolist(), strict=True)
    ]
    assert all(possible for is_chosen, possible in zip(chosen, may_be, strict=True) if is_chosen)
    # Equal responses draw alike, so there may be more.
    assert sum(chosen) >= min(sum(may_be), max(1, int(0.2 * len(chosen))))


SMOOTH = ("Clipped", "GSPO", "SAPO", "GPG", "GMPO", "ClipCov", "KLCov", "DRO")
"""Losses that use no ratio as a constant. In the sum over each row, the two on whole responses have the gradient of
a function."""


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_equal_finite_differences(name: str) -> None:
    batch = token_rows.random_mini_batch((4, 0, 3, 6), seed=4, dtype=torch.float64)
    loss = token_rows.named_loss(WIRES[name])
    whole = {} if loss.whole_pass is None else loss.whole_pass(batch.seen(), OneWorker())
    segments = token_rows.segments_of(*batch.lengths)

    def of_rows(logprobs_N: Tensor) -> Tensor:
        return segments.mean(loss.compute(batch.inputs(logprobs_N, whole)).losses_N)

    logprobs_N = batch.logprobs_N.clone().requires_grad_()
    assert torch.autograd.gradcheck(of_rows, (logprobs_N,), eps=1e-7)


LENGTHS = (5, 1, 0, 8, 3, 2, 7)
DISTRIBUTIONS = (
    ((0, 1, 2), (3, 4, 5, 6)),
    ((6, 2, 0), (), (3, 5, 1, 4)),
    tuple((row,) for row in range(7)),
    ((2,), (6, 5, 4, 3, 1, 0)),
)
"""Distributions of rows to workers; one worker has no rows, one has no tokens."""


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("workers", DISTRIBUTIONS)
def test_workers_and_micro_batches_do_not_matter(name: str, workers: tuple[tuple[int, ...], ...]) -> None:
    batch, loss = token_rows.random_mini_batch(LENGTHS, seed=11), token_rows.named_loss(WIRES[name])
    whole, parts = token_rows.losses_in_one_micro_batch(loss, batch), token_rows.losses_on_workers(loss, batch, workers)
    for row, found in parts.items():
        torch.testing.assert_close(found.losses_N, whole[row].losses_N, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.gradients_N, whole[row].gradients_N, rtol=1e-6, atol=1e-6)
    for sum_name, value in whole[0].sums.items():
        total = sum(found.sums.get(sum_name, 0.0) for found in parts.values())
        assert total == pytest.approx(value, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_log_ratios_of_any_size_give_finite_losses_and_gradients(name: str, advantage: float) -> None:
    new_N, old_N = torch.tensor([0.0, -500.0, 0.0, -90.0, -0.5]), torch.tensor([-500.0, 0.0, -90.0, 0.0, -0.5])
    batch = token_rows.MiniBatch((2, 3), new_N, old_N, torch.full((5,), advantage), old_N)
    for found in token_rows.losses_in_one_micro_batch(token_rows.named_loss(WIRES[name]), batch).values():
        assert found.losses_N.isfinite().all()
        assert found.gradients_N.isfinite().all()


@pytest.mark.parametrize("name", [name for name, wire in WIRES.items() if len(wire) > 1])
def test_the_smallest_and_largest_numbers_of_a_job_give_finite_losses_and_gradients(name: str) -> None:
    (block,) = set(WIRES[name]) - {"type"}
    numbers = WIRES[name][block]
    assert isinstance(numbers, dict)
    batch = token_rows.random_mini_batch((3, 4), seed=1)
    for field, value in numbers.items():
        ends = (0.01 if "temperature" in field else 1e-300, 1e12) if isinstance(value, float) else ()
        for end in ends if field != "tokenShare" else (1e-300, 1.0):
            loss = token_rows.named_loss({**WIRES[name], block: {**numbers, field: end}})
            for found in token_rows.losses_in_one_micro_batch(loss, batch).values():
                assert found.losses_N.isfinite().all(), (field, end)
                assert found.gradients_N.isfinite().all(), (field, end)


@pytest.mark.parametrize("name", WIRES)
def test_a_batch_without_trained_tokens_has_zero_loss(name: str) -> None:
    batch = token_rows.random_mini_batch((0, 0), seed=1)
    found = token_rows.losses_in_one_micro_batch(token_rows.named_loss(WIRES[name]), batch)
    assert all(len(row.losses_N) == 0 for row in found.values())
    assert all(value == 0 for value in found[0].sums.values())


@pytest.mark.parametrize("name", WIRES)
def test_the_first_update_of_a_step_is_the_plain_policy_gradient(name: str) -> None:
    """New and old policy are the same: nothing is clipped, and penalties have no gradient. Clip-Cov leaves some tokens
    out."""
    batch = token_rows.random_mini_batch((4, 3), seed=2)
    same = token_rows.MiniBatch(
        batch.lengths, batch.logprobs_N, batch.logprobs_N, batch.advantages_N, batch.rollout_logprobs_N
    )
    found = token_rows.losses_in_one_micro_batch(token_rows.named_loss(WIRES[name]), same)
    gradients_N = torch.cat([found[row].gradients_N for row in range(2)])
    kept_N = gradients_N != 0
    assert int(kept_N.sum()) >= (6 if name == "ClipCov" else 7)
    torch.testing.assert_close(gradients_N[kept_N], -batch.advantages_N[kept_N])
