"""The gradient of distillation: that of the reverse KL, exactly, for a policy of one token.

Legend: V vocabulary, S sampled tokens (each one of V).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.kl import KlEstimator
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.training import token_rows
from rljob_trainer.algorithms.advantage_registry import advantage_estimator
from rljob_trainer.algorithms.interfaces import (
    KL_PENALTIES,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    LossInputs,
    OneWorker,
    TokenInputs,
)
from rljob_trainer.algorithms.kl import kl_estimate
from rljob_trainer.algorithms.loss_registry import policy_loss

ALGORITHM = resolve_algorithm(Algorithm.from_wire({"type": "Distillation"}))
TEACHER_V = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04], dtype=torch.float64).log()


def advantages(old_S: Tensor, teacher_S: Tensor) -> Tensor:
    for_tokens = advantage_estimator(ALGORITHM).for_tokens
    assert for_tokens is not None
    num = len(old_S)
    columns = {OLD_LOGPROBS: old_S, REF_LOGPROBS: teacher_S, KL_PENALTIES: torch.zeros_like(old_S)}
    # Rewards that differ widely, and one group for all: neither may matter.
    rewards_S, groups_S = torch.arange(num, dtype=torch.float64) * 100, torch.zeros(num, dtype=torch.int64)
    inputs = TokenInputs(rewards_S, groups_S, token_rows.segments_of(*[1] * num), columns)
    return for_tokens(inputs, OneWorker()).advantages_N


def losses(logprobs_S: Tensor, teacher_S: Tensor) -> Tensor:
    """The recipe's loss of each token in the first update of a step."""
    old_S = logprobs_S.detach()
    segments = token_rows.segments_of(*[1] * len(old_S))
    inputs = LossInputs(segments, logprobs_S, old_S, advantages(old_S, teacher_S))
    return policy_loss(ALGORITHM).compute(inputs).losses_N


def reverse_kl(logits_V: Tensor) -> Tensor:
    log_V = logits_V.log_softmax(0)
    return (log_V.exp() * (log_V - TEACHER_V)).sum()


@pytest.mark.parametrize("seed", range(3))
def test_the_expected_gradient_is_that_of_the_reverse_kl(seed: int) -> None:
    """Every token of the vocabulary, weighted by its probability under the policy, instead of samples."""
    logits_V = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    log_V = logits_V.log_softmax(0)
    [found_V] = torch.autograd.grad((log_V.exp().detach() * losses(log_V, TEACHER_V)).sum(), logits_V)
    [expected_V] = torch.autograd.grad(reverse_kl(logits_V), logits_V)
    assert found_V.tolist() == pytest.approx(expected_V.tolist(), rel=1e-9, abs=1e-12)
    assert expected_V.norm() > 0.01


def test_updates_on_samples_reduce_the_kl_to_nearly_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    before = float(reverse_kl(logits_V).detach())
    for _ in range(150):
        log_V = logits_V.log_softmax(0)
        sampled_S = torch.multinomial(log_V.detach().exp(), 64, replacement=True, generator=generator)
        [gradient_V] = torch.autograd.grad(losses(log_V[sampled_S], TEACHER_V[sampled_S]).mean(), logits_V)
        logits_V = (logits_V - 0.5 * gradient_V).detach().requires_grad_()
    assert before > 1.0
    assert float(reverse_kl(logits_V).detach()) < 0.01


def test_a_kl_term_of_k2_with_coefficient_1_has_the_same_gradient() -> None:
    """So a job combines rewards with a teacher by `kl` and another recipe (docs/algorithms.md)."""
    logits_V = torch.tensor([-2.0, 1.0, 0.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    sampled_S = torch.tensor([0, 1, 1, 4, 3])
    logprobs_S = logits_V.log_softmax(0)[sampled_S]
    teacher_S = TEACHER_V[sampled_S]
    [found_V] = torch.autograd.grad(losses(logprobs_S, teacher_S).sum(), logits_V, retain_graph=True)
    kl = kl_estimate(logprobs_S, teacher_S, KlEstimator.K2).sum()
    [of_kl_V] = torch.autograd.grad(kl, logits_V)
    assert found_V.tolist() == pytest.approx(of_kl_V.tolist(), rel=1e-9, abs=1e-12)
