"""Advantages and losses of a user: valid ones, and ones that fail on request after their trial run has passed. When a
policy loss fails on one rank only, no other rank may wait in a collective.

Legend: B responses, N response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.policy_loss import Loss, LossType
from rljob_api.v1alpha1.user_function import Function
from rljob_testing.training import replays
from rljob_trainer.algorithms import (
    LossInputs,
    Reduce,
    ResponseInputs,
    TokenInputs,
    TokenLosses,
    WholeInputs,
    policy_loss_function,
    token_advantage,
)
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.errors import AlgorithmFunctionError

COVARIANCE_PATH = "rljob_testing.training.user_algorithms:covariance_loss"


def covariances(inputs: WholeInputs, reduce: Reduce) -> Mapping[str, Tensor]:
    """The product of log-probability and advantage per token, both minus their mean over all workers, and the largest
    absolute value of it."""
    ones_N = torch.ones_like(inputs.logprobs_N)
    sums = torch.stack([each.double().sum() for each in (inputs.logprobs_N, inputs.advantages_N, ones_N)])
    logprobs, advantages, count = reduce.sum(sums).unbind()
    products_N = (inputs.logprobs_N - logprobs / count.clamp(min=1)) * (
        inputs.advantages_N - advantages / count.clamp(min=1)
    )
    largest = reduce.max(torch.cat([products_N.abs(), products_N.new_zeros(1)]).max())
    return {"covariance": products_N.float(), "largest": largest.float()}


@policy_loss_function(needs=["rollout_logprobs"], entropy=True, squares=True, whole_pass=covariances)
def covariance_loss(inputs: LossInputs) -> TokenLosses:
    """The unclipped surrogate with a weight per token from the whole mini-batch and from the model's head."""
    assert inputs.entropy_N is not None
    assert inputs.squares_N is not None
    weights_N = (1 + inputs.whole["covariance"] / (1 + inputs.whole["largest"])) * (
        inputs.entropy_N + inputs.squares_N + inputs.columns["rollout_logprobs"].exp()
    )
    losses_N = -inputs.advantages_N * (inputs.logprobs_N - inputs.old_logprobs_N).exp() * weights_N
    return TokenLosses(losses_N, {"weights": weights_N.detach().sum()})


BASELINE_ON_RESPONSES_PATH = "rljob_testing.training.user_algorithms:baseline_on_responses"
BASELINE_ON_TOKENS_PATH = "rljob_testing.training.user_algorithms:baseline_on_tokens"
MAX_GROUPS = 16


def baseline_on_responses(inputs: ResponseInputs) -> Tensor:
    """An advantage per response, [B]."""
    group_means = [inputs.rewards_B[inputs.groups_B == group].mean() for group in inputs.groups_B]
    return inputs.rewards_B - (torch.stack(group_means) + inputs.rewards_B.mean()) / 3


@token_advantage(needs=["kl_penalties"])
def baseline_on_tokens(inputs: TokenInputs, reduce: Reduce) -> Tensor:
    """The same advantage per token, [N], also when a group is distributed over several workers."""
    all_rewards_B = inputs.rewards_B - inputs.segments.sum(inputs.columns["kl_penalties"])
    rewards_G, counts_G = torch.zeros(2, MAX_GROUPS)
    rewards_G = reduce.sum(rewards_G.index_add(0, inputs.groups_B, all_rewards_B))
    counts_G = reduce.sum(counts_G.index_add(0, inputs.groups_B, torch.ones_like(all_rewards_B)))
    group_means_B = (rewards_G / counts_G.clamp(min=1))[inputs.groups_B]
    mean = rewards_G.sum() / counts_G.sum().clamp(min=1)
    return inputs.segments.spread(all_rewards_B - (group_means_B + mean) / 3)


FAILING_PATH = "rljob_testing.training.user_algorithms:failing_surrogate"
FAILING_WHOLE_PASS_PATH = "rljob_testing.training.user_algorithms:surrogate_after_failing_pass"
NO_NUMBER_PATH = "rljob_testing.training.user_algorithms:surrogate_or_no_number"
FAILING_ADVANTAGE_PATH = "rljob_testing.training.user_algorithms:failing_advantage"
MESSAGE = "nothing to divide by"
FAILING: list[int] = []
"""Not empty while the functions must fail. `failure_of` fills it on the second of several ranks."""


@policy_loss_function()
def failing_surrogate(inputs: LossInputs) -> TokenLosses:
    """The unclipped surrogate. Raises ZeroDivisionError on request."""
    _fail_if_told()
    return TokenLosses(-inputs.advantages_N * torch.exp(inputs.logprobs_N - inputs.old_logprobs_N), {})


def whole_pass(inputs: WholeInputs, reduce: Reduce) -> Mapping[str, Tensor]:
    """Raises ZeroDivisionError on request, while other ranks may be in `reduce`."""
    _fail_if_told()
    return {"largest": reduce.max(inputs.advantages_N.abs().max() if len(inputs.advantages_N) else torch.zeros(()))}


@policy_loss_function(whole_pass=whole_pass)
def surrogate_after_failing_pass(inputs: LossInputs) -> Tensor:
    """The unclipped surrogate, divided by the largest advantage."""
    weights_N = -inputs.advantages_N / inputs.whole["largest"].clamp(min=1)
    return weights_N * torch.exp(inputs.logprobs_N - inputs.old_logprobs_N)


@policy_loss_function()
def surrogate_or_no_number(inputs: LossInputs) -> Tensor:
    """The unclipped surrogate. Returns NaN on request."""
    losses_N = -inputs.advantages_N * torch.exp(inputs.logprobs_N - inputs.old_logprobs_N)
    return losses_N * torch.nan if FAILING else losses_N


@token_advantage()
def failing_advantage(inputs: TokenInputs, reduce: Reduce) -> Tensor:
    """Rewards divided by the largest reward. Raises ZeroDivisionError on request, while other ranks may be in
    `reduce`."""
    _fail_if_told()
    largest = reduce.max(inputs.rewards_B.abs().max() if len(inputs.rewards_B) else torch.zeros(()))
    return inputs.segments.spread(inputs.rewards_B / largest.clamp(min=1))


def algorithm_with_loss(path: str) -> Algorithm:
    """An algorithm with one of the losses."""
    return Algorithm(loss=Loss(type=LossType.FUNCTION, function=Function(path=path)))


@contextmanager
def failing() -> Iterator[None]:
    """Makes the functions of this process fail within the context."""
    FAILING.append(0)
    try:
        yield
    finally:
        FAILING.clear()


def failure_of(replay: replays.Replay, context: WorkerContext) -> str:
    """The error of the first step with the failing loss; empty if there is none."""
    run = replays.replayed_run(replace(replay, algorithm=algorithm_with_loss(FAILING_PATH)), context)
    FAILING.extend([context.rank] * (context.rank == 1))
    try:
        run.step(0)
    except AlgorithmFunctionError as error:
        return str(error)
    return ""


def _fail_if_told() -> None:
    if FAILING:
        raise ZeroDivisionError(MESSAGE)
