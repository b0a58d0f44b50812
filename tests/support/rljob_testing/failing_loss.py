"""A user's policy loss that fails on one rank only, after its trial run has passed: nobody must be left waiting in a
collective."""

from __future__ import annotations

from dataclasses import replace

import torch

from rljob_api.v1alpha1.algorithm import Algorithm, Function, Loss, LossType
from rljob_testing.replayed_steps import Replay, replayed_run
from rljob_trainer.algorithms import LossInputs, TokenLosses, policy_loss_function
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.errors import AlgorithmFunctionError

PATH = "rljob_testing.failing_loss:surrogate"
MESSAGE = "nothing to divide by"
FAILING: list[int] = []
"""Has an entry where the function is to fail: on the second of several ranks."""


@policy_loss_function()
def surrogate(inputs: LossInputs) -> TokenLosses:
    """The unclipped surrogate; raises ZeroDivisionError where it is told to."""
    if FAILING:
        raise ZeroDivisionError(MESSAGE)
    return TokenLosses(-inputs.advantages_N * torch.exp(inputs.logprobs_N - inputs.old_logprobs_N), {})


def failure_of(replay: Replay, context: WorkerContext) -> str:
    """What the first step with this loss raises; empty for none."""
    algorithm = Algorithm(loss=Loss(type=LossType.FUNCTION, function=Function(path=PATH)))
    run = replayed_run(replace(replay, algorithm=algorithm), context)
    FAILING.extend([context.rank] * (context.rank == 1))
    try:
        run.step(0)
    except AlgorithmFunctionError as error:
        return str(error)
    return ""
