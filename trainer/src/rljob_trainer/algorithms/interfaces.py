"""What an advantage estimator and a policy loss are: what they are given, what they give, what they declare.

Legend: B rows (one response each), N response tokens of these rows, row after row.

Advantages and losses see response tokens only: no prompt, no padding, no mask. Nothing here may depend on how rows were
dealt out to workers and micro-batches; what a whole batch must be known for goes through `Reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from torch import Tensor

from rljob_trainer.algorithms.segments import Segments


class Level(Enum):
    """What an advantage estimator looks at, and where it runs."""

    RESPONSE = auto()
    """One number per response, on the controller, which has all responses of the step."""
    TOKEN = auto()
    """One number per token, on the workers, each with its own rows."""


class Reduce(Protocol):
    """From the numbers of every data-parallel worker to one result, which all get. Collective: all workers must call
    in the same order with tensors of the same shape, those without any token, too. What is passed stays as it is."""

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise over the workers, in the dtype of `values`."""

    def max(self, values: Tensor) -> Tensor:
        """Elementwise over the workers, in the dtype of `values`."""


class OneWorker:
    """`Reduce` where there is nobody else."""

    def sum(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values.clone()

    def max(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values.clone()


@dataclass(frozen=True)
class ResponseInputs:
    """All responses of a step, without those of groups that are left out; at least one. Responses that were cut off
    are among them, also where they are not learned from."""

    rewards_B: Tensor
    """float32: score less the KL penalty, where the job puts that into the reward."""
    groups_B: Tensor
    """int64: equal for responses to the same prompt; otherwise any numbers."""
    lengths_B: Tensor
    """int64: response tokens."""
    is_learned_B: Tensor | None = field(default=None, kw_only=True)
    """bool: False for those that are not learned from; None where all are."""
    greedy_rewards_B: Tensor | None = field(default=None, kw_only=True)
    """float32: the score of the greedy response to the same prompt; None unless GREEDY_REWARDS is needed."""
    named_rewards: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    """float32 [B] each: the job's rewards one by one, without weights and without KL; empty unless NAMED_REWARDS is
    needed."""
    reward_weights: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    """Of `named_rewards`."""

    @property
    def learned_lengths_B(self) -> Tensor:
        """int64: tokens that are learned from."""
        return self.lengths_B if self.is_learned_B is None else self.lengths_B * self.is_learned_B


@dataclass(frozen=True)
class TokenInputs:
    """One worker's responses of a step, without those that are not learned from."""

    rewards_B: Tensor
    """float32: the scores. A KL penalty in the reward is in none of them: see KL_PENALTIES."""
    groups_B: Tensor
    """As in `ResponseInputs`. Responses to one prompt may be with several workers."""
    segments: Segments
    """The rows of N."""
    columns: Mapping[str, Tensor]
    """[N] each: those that the estimator declares."""


@dataclass(frozen=True)
class TokenAdvantages:
    """Of one worker's responses."""

    advantages_N: Tensor
    returns_N: Tensor | None = None
    """What a critic's values are fitted to; None where the estimator has no use for a critic."""


@dataclass(frozen=True)
class AdvantageEstimator:
    """From rewards to advantages. Has one of the two functions."""

    name: str
    for_responses: Callable[[ResponseInputs], Tensor] | None = None
    """Gives [B]: the advantage of every token of a response."""
    for_tokens: Callable[[TokenInputs, Reduce], TokenAdvantages] | None = None
    needs: frozenset[str] = frozenset()
    """Of `ResponseInputs`: GREEDY_REWARDS, NAMED_REWARDS. Of the columns of `TokenInputs`: those of ADVANTAGE_COLUMNS,
    VALUES and SQUARES."""

    def __post_init__(self) -> None:
        if (self.for_responses is None) == (self.for_tokens is None):
            raise ValueError(f"advantage {self.name}: give it for_responses or for_tokens, one of the two")

    @property
    def level(self) -> Level:
        """Which of the two it has."""
        return Level.RESPONSE if self.for_responses is not None else Level.TOKEN


@dataclass(frozen=True)
class Wanted:
    """What the model's head is to give for a loss beside log-probabilities; neither carries a gradient."""

    entropy: bool = False
    """In nats, of the distribution that the token was sampled from."""
    squares: bool = False
    """Sum of the squared probabilities of the whole vocabulary."""


@dataclass(frozen=True)
class WholeInputs:
    """One worker's part of the whole mini-batch, for a pass without gradient before the mini-batch's first update."""

    segments: Segments
    logprobs_N: Tensor
    """By the weights as they are before the update."""
    old_logprobs_N: Tensor
    advantages_N: Tensor
    columns: Mapping[str, Tensor]
    """[N] each: those that the loss declares."""


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch on one worker; rows are complete."""

    segments: Segments
    logprobs_N: Tensor
    """float32, with the gradient to the weights."""
    old_logprobs_N: Tensor
    """By the weights of the rollout; equal to `logprobs_N` in the only update of a step."""
    advantages_N: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] each: those that the loss declares."""
    entropy_N: Tensor | None = None
    """None unless wanted."""
    squares_N: Tensor | None = None
    """None unless wanted."""
    whole: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] and 0-d: what the pass over the whole mini-batch gave, of [N] the part for this micro-batch."""


@dataclass(frozen=True)
class TokenLosses:
    """Of one micro-batch."""

    losses_N: Tensor
    """What `aggregation` makes one number of."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """0-d, without gradient: sums over response tokens, of any name. `actor/<name>` in the metrics is the sum over all
    micro-batches and workers by the number of response tokens."""


@dataclass(frozen=True)
class PolicyLoss:
    """A loss per token, and what it takes."""

    name: str
    compute: Callable[[LossInputs], TokenLosses]
    needs: frozenset[str] = frozenset()
    """Columns of `LossInputs`, of `LOSS_COLUMNS`."""
    wanted: Wanted = Wanted()
    whole_pass: Callable[[WholeInputs, Reduce], Mapping[str, Tensor]] | None = None
    """Runs before each update: values per token [N] and numbers 0-d by names of its own. Costs one more forward pass
    over the mini-batch."""


OLD_LOGPROBS = "old_logprobs"
ROLLOUT_LOGPROBS = "rollout_logprobs"
REF_LOGPROBS = "ref_logprobs"
LOSS_COLUMNS = (ROLLOUT_LOGPROBS, REF_LOGPROBS)
"""What a loss may need. The old log-probabilities are always there."""
KL_PENALTIES = "kl_penalties"
"""What each token's KL to the reference takes off the reward, by the job's estimator and coefficient; zeros where the
job puts no KL into the reward. Where it does, an estimator on tokens must need these: it alone can place them."""
VALUES = "values"
"""By the critic, before the update: what it expects of the rewards from each token on."""
SQUARES = "squared_probabilities"
"""Sum of the squared probabilities of the whole vocabulary at each token, by the weights of OLD_LOGPROBS."""
GREEDY_REWARDS = "greedy_rewards"
NAMED_REWARDS = "named_rewards"
ADVANTAGE_COLUMNS = (OLD_LOGPROBS, ROLLOUT_LOGPROBS, REF_LOGPROBS, KL_PENALTIES, VALUES)
"""What a user's own estimator on tokens may need."""
