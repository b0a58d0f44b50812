"""An advantage and a policy loss of one's own, both on tokens.

The trainer hands over the tokens of the responses only, those of all rows one after the other (N): no prompts, no
padding, no masks. `inputs.segments` knows the rows: it spreads a number per row over the row's tokens, and adds up or
averages the tokens of each row. Before a job loads its model, both functions are tried on small made-up inputs.
"""

from __future__ import annotations

from torch import Tensor

from rljob_trainer.algorithms import (
    LossInputs,
    Reduce,
    TokenInputs,
    TokenLosses,
    policy_loss_function,
    token_advantage,
    whitened,
)

DISCOUNT = 0.99
LOWEST_WEIGHT, HIGHEST_WEIGHT = 0.8, 1.2


@token_advantage()
def discounted_returns(inputs: TokenInputs, reduce: Reduce) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262) without its KL term: the reward comes with a response's last token and counts a
    hundredth less for each token before it; all tokens of the step together then get mean 0 and variance 1.

    It runs on every worker, on the rows that the worker holds; `reduce` adds up over the workers, so that the mean is
    that of all tokens. A function that is not decorated would run once, on the controller, on one number per response.
    """
    segments = inputs.segments
    num_later_N = segments.spread(segments.lengths_B) - 1 - segments.positions_N
    returns_N = segments.spread(inputs.rewards_B) * DISCOUNT**num_later_N
    return whitened(returns_N, reduce)


@policy_loss_function()
def cispo(inputs: LossInputs) -> TokenLosses:
    """CISPO (arXiv 2506.13585): bounds how much a token's sample counts, and so keeps the gradient of every token,
    where PPO's clipping drops that of tokens which have moved too far.

    Returns a loss per token; the job's `aggregation` makes one number of them. The sum `cispo_clipfrac`, divided by the
    number of tokens, is the metric `actor/cispo_clipfrac`. A tensor instead of `TokenLosses` is fine, too.
    """
    ratio_N = (inputs.logprobs_N.detach() - inputs.old_logprobs_N).exp()
    weights_N = ratio_N.clamp(LOWEST_WEIGHT, HIGHEST_WEIGHT)
    losses_N = -weights_N * inputs.advantages_N * inputs.logprobs_N
    return TokenLosses(losses_N, {"cispo_clipfrac": (weights_N != ratio_N).sum()})
