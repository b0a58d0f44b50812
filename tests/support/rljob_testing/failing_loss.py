"""A user's policy loss that fails on one rank only, after its trial run has passed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rljob_trainer.algorithms import LossInputs, TokenLosses, policy_loss_function

PATH = "rljob_testing.failing_loss:surrogate"
MESSAGE = "nothing to divide by"


@policy_loss_function()
def surrogate(inputs: LossInputs) -> TokenLosses:
    """The unclipped surrogate; raises ZeroDivisionError on the second of several ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 1:
        raise ZeroDivisionError(MESSAGE)
    return TokenLosses(-inputs.advantages_N * torch.exp(inputs.logprobs_N - inputs.old_logprobs_N), {})
