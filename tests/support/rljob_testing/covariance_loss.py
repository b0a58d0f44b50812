"""A user's policy loss that asks for all that a loss can ask for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rljob_trainer.algorithms import LossInputs, Reduce, TokenLosses, WholeInputs, policy_loss_function

PATH = "rljob_testing.covariance_loss:weighted"


def covariances(inputs: WholeInputs, reduce: Reduce) -> Mapping[str, Tensor]:
    """Of log-probability and advantage, token by token, about the means of all workers, and the largest of them."""
    ones_N = torch.ones_like(inputs.logprobs_N)
    sums = torch.stack([each.double().sum() for each in (inputs.logprobs_N, inputs.advantages_N, ones_N)])
    logprobs, advantages, count = reduce.sum(sums).unbind()
    products_N = (inputs.logprobs_N - logprobs / count.clamp(min=1)) * (
        inputs.advantages_N - advantages / count.clamp(min=1)
    )
    largest = reduce.max(torch.cat([products_N.abs(), products_N.new_zeros(1)]).max())
    return {"covariance": products_N.float(), "largest": largest.float()}


@policy_loss_function(needs=["rollout_logprobs"], entropy=True, squares=True, whole_pass=covariances)
def weighted(inputs: LossInputs) -> TokenLosses:
    """The unclipped surrogate, each token weighted by what the whole mini-batch and the model's head say of it."""
    assert inputs.entropy_N is not None
    assert inputs.squares_N is not None
    weights_N = (1 + inputs.whole["covariance"] / (1 + inputs.whole["largest"])) * (
        inputs.entropy_N + inputs.squares_N + inputs.columns["rollout_logprobs"].exp()
    )
    losses_N = -inputs.advantages_N * (inputs.logprobs_N - inputs.old_logprobs_N).exp() * weights_N
    return TokenLosses(losses_N, {"weights": weights_N.detach().sum()})
