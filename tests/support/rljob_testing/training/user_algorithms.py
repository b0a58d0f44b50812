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

from rljob_api.v1alpha1.advantage import Function
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.policy_loss import Loss, LossType
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


"""The source text of a user's module with advantages and losses, valid and invalid ones."""

ALGORITHM_MODULE = """
import torch
from rljob_trainer.algorithms import TokenLosses, policy_loss_function, token_advantage

def centered(inputs):
    return inputs.rewards_B - inputs.rewards_B.mean()

def by_length(inputs):
    return (inputs.rewards_B * inputs.lengths_B).int()

def normalized(inputs):
    table = inputs.rewards_B.reshape(3, -1)
    return ((table - table.mean(1, True)) / table.std(1, keepdim=True)).reshape(-1)

def of_tokens(inputs, reduce):
    return inputs.segments.spread(inputs.rewards_B)

@token_advantage()
def largest(inputs, reduce):
    rewards_N = inputs.segments.spread(inputs.rewards_B)
    return rewards_N - reduce.max(rewards_N.max() if len(rewards_N) else torch.tensor(-torch.inf))

@token_advantage(needs=["ref_logprobs", "old_logprobs"])
def distance(inputs, reduce):
    return inputs.columns["old_logprobs"] - inputs.columns["ref_logprobs"]

@token_advantage()
def needs_rows(inputs, reduce):
    return inputs.segments.spread(inputs.rewards_B - inputs.rewards_B[0])

@token_advantage(needs="values")
def unfitted(inputs, reduce):
    return inputs.columns["values"]

@token_advantage(needs="worth")
def valued(inputs, reduce):
    return inputs.columns["worth"]

def reinforce(inputs):
    return -inputs.advantages_N * inputs.logprobs_N

@policy_loss_function(needs=["rollout_logprobs"], entropy=True, squares=True)
def informed(inputs):
    weights_N = (inputs.old_logprobs_N - inputs.columns["rollout_logprobs"]).exp()
    factors_N = inputs.entropy_N / inputs.squares_N
    return TokenLosses(-weights_N * factors_N * inputs.logprobs_N, {"weight": weights_N.sum()})

def below_the_mean(inputs, reduce):
    total, count = reduce.sum(torch.stack([inputs.logprobs_N.sum(), torch.tensor(float(len(inputs.logprobs_N)))]))
    below_N = inputs.logprobs_N < total / count + 0.01
    return {"chosen": below_N, "count": reduce.sum(below_N.sum())}

@policy_loss_function(whole_pass=below_the_mean)
def of_the_chosen(inputs):
    return -inputs.whole["chosen"].float() * inputs.logprobs_N / inputs.whole["count"]

@policy_loss_function(whole_pass=lambda inputs, reduce: {"mean": inputs.logprobs_N.mean(dim=0, keepdim=True)})
def whole_of_wrong_shape(inputs):
    return inputs.logprobs_N

@policy_loss_function(whole_pass=lambda inputs, reduce: {"mean": inputs.advantages_N.mean()})
def whole_of_one_worker(inputs):
    return inputs.logprobs_N * inputs.whole["mean"]

@policy_loss_function(whole_pass=lambda inputs, reduce: {"rank": inputs.logprobs_N.argsort().argsort().float()})
def whole_ranks_of_one_worker(inputs):
    return inputs.logprobs_N * inputs.whole["rank"]

@policy_loss_function(whole_pass=lambda inputs, reduce: {"one": inputs.advantages_N.clone().squeeze()})
def whole_squeezed(inputs):
    return inputs.logprobs_N

def names_by_rows(inputs, reduce):
    return {"seen": inputs.logprobs_N} if len(inputs.logprobs_N) else {"none": torch.zeros(())}

@policy_loss_function(whole_pass=names_by_rows)
def whole_of_other_names(inputs):
    return inputs.logprobs_N

@policy_loss_function(whole_pass=lambda inputs, reduce: {"log": (inputs.advantages_N - 9).log()})
def whole_no_number(inputs):
    return inputs.logprobs_N

@policy_loss_function(whole_pass=lambda inputs, reduce: {"old_logprobs": inputs.logprobs_N})
def whole_over_a_column(inputs):
    return inputs.logprobs_N

@policy_loss_function(whole_pass=lambda inputs, reduce: inputs.logprobs_N)
def whole_tensor(inputs):
    return inputs.logprobs_N

@policy_loss_function(needs=["old_logprobs"])
def asks_for_what_it_has(inputs):
    return inputs.logprobs_N

def per_row(inputs):
    return inputs.segments.mean(inputs.logprobs_N)

def number(inputs):
    return float(inputs.logprobs_N.detach().sum())

def detached(inputs):
    return -inputs.advantages_N * inputs.logprobs_N.detach()

def elsewhere(inputs):
    return torch.ones_like(inputs.logprobs_N, requires_grad=True) * 2

def infinite(inputs):
    return inputs.logprobs_N / (inputs.logprobs_N - inputs.old_logprobs_N)

def steep(inputs):
    return (inputs.logprobs_N - inputs.old_logprobs_N).abs().sqrt()

def of_the_micro_batch(inputs):
    return inputs.logprobs_N - inputs.logprobs_N.mean()

def raises(inputs):
    return inputs.logprobs_N * inputs.no_such_thing

def sums_per_token(inputs):
    return TokenLosses(inputs.logprobs_N, {"logprobs": inputs.logprobs_N})

def sum_over_a_metric(inputs):
    return TokenLosses(inputs.logprobs_N, {"entropy": inputs.logprobs_N.sum()})

def sum_that_is_added_up(inputs):
    return TokenLosses(inputs.logprobs_N, {"kl_sum": inputs.logprobs_N.sum()})

def sum_with_a_bad_name(inputs):
    return TokenLosses(inputs.logprobs_N, {"KL sum": inputs.logprobs_N.sum()})

def exits(inputs):
    raise SystemExit(0)

def draws(inputs):
    return inputs.rewards_B + torch.rand(len(inputs.rewards_B))

def huge(inputs):
    return inputs.rewards_B.double() + 1e300

def sparse(inputs):
    return inputs.rewards_B.to_sparse()

def sums_in_a_list(inputs):
    return TokenLosses(inputs.logprobs_N, [1])

class Unsigned(Exception):
    pass

class Estimator:
    def __init__(self, inputs):
        pass

class Awaited:
    async def __call__(self, inputs):
        return inputs.rewards_B

awaited = Awaited()
largest_of_all = max

def piecewise(inputs):
    yield inputs.rewards_B

def later(inputs):
    return inputs.logprobs_N / later_is

later_is = 2.0
NUMBER = 3
"""
