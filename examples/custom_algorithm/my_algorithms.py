"""An advantage and a policy loss of your own, both per token.

The functions get response tokens only, of all rows one after the other (dimension N): no prompts, no padding, no masks.
`inputs.segments` knows which tokens belong to which row: it copies a number per row to the row's tokens, and adds up or
averages the tokens of each row. Before a job loads its model, the trainer calls both functions with small test inputs.
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
    """REINFORCE++ (arXiv 2501.03262) without its KL term: discounted returns, whitened. The shape is [N].

    The reward belongs to the last token of a response; each token before it gets 0.99 times the return of the next one.
    Then all tokens of the step together are scaled to mean 0 and variance 1.

    The function runs on every worker, with the worker's rows. `reduce` sums over all workers, so mean and variance are
    those of all tokens. A function without the decorator runs once, on the controller, with one number per response.
    """
    segments = inputs.segments
    num_later_N = segments.spread(segments.lengths_B) - 1 - segments.positions_N
    returns_N = segments.spread(inputs.rewards_B) * DISCOUNT**num_later_N
    return whitened(returns_N, reduce)


@policy_loss_function()
def cispo(inputs: LossInputs) -> TokenLosses:
    """CISPO (arXiv 2506.13585): bounds the weight of a token and keeps the gradient of every token.

    In contrast, PPO's clipping removes the gradient of tokens whose probability has moved too far.

    Returns a loss per token, [N], which the job's `aggregation` combines into one number. The sum `cispo_clipfrac`,
    divided by the number of tokens, is logged as the metric `actor/cispo_clipfrac`. The function may also return only
    the tensor of losses.
    """
    ratio_N = (inputs.logprobs_N.detach() - inputs.old_logprobs_N).exp()
    weights_N = ratio_N.clamp(LOWEST_WEIGHT, HIGHEST_WEIGHT)
    losses_N = -weights_N * inputs.advantages_N * inputs.logprobs_N
    return TokenLosses(losses_N, {"cispo_clipfrac": (weights_N != ratio_N).sum()})
