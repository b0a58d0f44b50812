"""A user's functions that fail when they are told to, after their trial run has passed. Where a policy loss fails on
one rank only, nobody must be left waiting in a collective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.policy_loss import Loss, LossType
from rljob_api.v1alpha1.user_function import Function
from rljob_testing.replayed_steps import Replay, replayed_run
from rljob_trainer.algorithms import (
    LossInputs,
    Reduce,
    TokenInputs,
    TokenLosses,
    WholeInputs,
    policy_loss_function,
    token_advantage,
)
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.errors import AlgorithmFunctionError

PATH = "rljob_testing.failing_loss:surrogate"
WHOLE_PASS_PATH = "rljob_testing.failing_loss:surrogate_after_a_pass"
NO_NUMBER_PATH = "rljob_testing.failing_loss:surrogate_or_no_number"
ADVANTAGE_PATH = "rljob_testing.failing_loss:advantage"
MESSAGE = "nothing to divide by"
FAILING: list[int] = []
"""Has an entry where the functions are to fail: in `failure_of` on the second of several ranks."""


@policy_loss_function()
def surrogate(inputs: LossInputs) -> TokenLosses:
    """The unclipped surrogate; raises ZeroDivisionError where it is told to."""
    _fail_if_told()
    return TokenLosses(-inputs.advantages_N * torch.exp(inputs.logprobs_N - inputs.old_logprobs_N), {})


def whole_pass(inputs: WholeInputs, reduce: Reduce) -> Mapping[str, Tensor]:
    """Raises ZeroDivisionError where it is told to, when others may be in `reduce`."""
    _fail_if_told()
    return {"largest": reduce.max(inputs.advantages_N.abs().max() if len(inputs.advantages_N) else torch.zeros(()))}


@policy_loss_function(whole_pass=whole_pass)
def surrogate_after_a_pass(inputs: LossInputs) -> Tensor:
    """The unclipped surrogate, by the largest advantage."""
    weights_N = -inputs.advantages_N / inputs.whole["largest"].clamp(min=1)
    return weights_N * torch.exp(inputs.logprobs_N - inputs.old_logprobs_N)


@policy_loss_function()
def surrogate_or_no_number(inputs: LossInputs) -> Tensor:
    """The unclipped surrogate; NaN where it is told to fail."""
    losses_N = -inputs.advantages_N * torch.exp(inputs.logprobs_N - inputs.old_logprobs_N)
    return losses_N * torch.nan if FAILING else losses_N


@token_advantage()
def advantage(inputs: TokenInputs, reduce: Reduce) -> Tensor:
    """By the largest reward; raises ZeroDivisionError where it is told to, when others may be in `reduce`."""
    _fail_if_told()
    largest = reduce.max(inputs.rewards_B.abs().max() if len(inputs.rewards_B) else torch.zeros(()))
    return inputs.segments.spread(inputs.rewards_B / largest.clamp(min=1))


def with_loss(path: str) -> Algorithm:
    """The learning rule with one of the losses."""
    return Algorithm(loss=Loss(type=LossType.FUNCTION, function=Function(path=path)))


@contextmanager
def failing() -> Iterator[None]:
    """Within it, the functions of this process fail."""
    FAILING.append(0)
    try:
        yield
    finally:
        FAILING.clear()


def failure_of(replay: Replay, context: WorkerContext) -> str:
    """What the first step with the loss that fails raises; empty for none."""
    run = replayed_run(replace(replay, algorithm=with_loss(PATH)), context)
    FAILING.extend([context.rank] * (context.rank == 1))
    try:
        run.step(0)
    except AlgorithmFunctionError as error:
        return str(error)
    return ""


def _fail_if_told() -> None:
    if FAILING:
        raise ZeroDivisionError(MESSAGE)
