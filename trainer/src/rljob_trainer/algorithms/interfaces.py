"""The interfaces of advantage estimators and policy losses: their inputs, their results and what they declare.

Legend: B responses (one per row), N response tokens of these rows, row after row.

Advantages and losses see response tokens only: no prompt, no padding, no mask. Their results must not depend on how
rows are distributed across workers and micro-batches. Statistics of the whole batch go through `Reduce`.

A response may have several rows of tokens. Advantages see it as one response, whose tokens are those of its rows, one
row after the other. Losses see its rows, which may be in different micro-batches and on different workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from torch import Tensor

from rljob_trainer.algorithms.segments import Segments


class Level(Enum):
    """Whether an advantage estimator computes a number per response or per token. This decides where it runs."""

    RESPONSE = auto()
    """One number per response, on the controller, which has all responses of the step."""
    TOKEN = auto()
    """One number per token, on the workers, each with its own rows."""


class Reduce(Protocol):
    """Combines tensors of all data-parallel workers into one result that every worker receives.

    Collective: all workers, also one without any token, must make the same calls in the same order with tensors of the
    same shape. The argument is not changed."""

    def sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over the workers, in the dtype of `values`."""

    def max(self, values: Tensor) -> Tensor:
        """The elementwise maximum over the workers, in the dtype of `values`."""


class OneWorker:
    """`Reduce` for a single worker: returns a copy of the given values."""

    def sum(self, values: Tensor) -> Tensor:
        """A copy of the values."""
        return values.clone()

    def max(self, values: Tensor) -> Tensor:
        """A copy of the values."""
        return values.clone()


@dataclass(frozen=True)
class ResponseInputs:
    """All responses of a step (at least one), on the controller. Groups that were filtered out and responses without a
    score are not included, so groups may have different sizes. Truncated responses are included, even if they are not
    trained on."""

    rewards_B: Tensor
    """float32: the score of each response, minus its KL penalty if the job puts KL into the reward."""
    groups_B: Tensor
    """int64: the group of each response. Responses to the same prompt have equal numbers; the numbers are arbitrary."""
    lengths_B: Tensor
    """int64: the number of response tokens."""
    is_trained_B: Tensor | None = field(default=None, kw_only=True)
    """bool: False for responses that are not trained on; None if all are trained on."""
    greedy_rewards_B: Tensor | None = field(default=None, kw_only=True)
    """float32: the score of the greedy response to the same prompt. None unless the estimator needs GREEDY_REWARDS."""
    named_rewards: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    """float32 [B] each: each of the job's rewards with a weight other than 0 by its name, unweighted and without KL.
    Empty unless the estimator needs NAMED_REWARDS."""
    reward_weights: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    """The weight of each of `named_rewards`, for example `{"correct": 1.0, "format": 0.2}`."""

    @property
    def trained_lengths_B(self) -> Tensor:
        """int64: the number of response tokens; 0 for a response that is not trained on."""
        return self.lengths_B if self.is_trained_B is None else self.lengths_B * self.is_trained_B


@dataclass(frozen=True)
class TokenInputs:
    """The responses of a step that one worker holds and that are trained on; each with all of its rows."""

    rewards_B: Tensor
    """float32: the score of each response. It never includes a KL penalty: see KL_PENALTIES."""
    groups_B: Tensor
    """int64: the group of each response, as in `ResponseInputs`. A group may be spread over several workers."""
    segments: Segments
    """How the N tokens are divided into B responses."""
    columns: Mapping[str, Tensor]
    """[N] each: the columns that the estimator declares in `needs`."""


@dataclass(frozen=True)
class TokenAdvantages:
    """The result of an estimator that computes advantages per token, for one worker's responses."""

    advantages_N: Tensor
    returns_N: Tensor | None = None
    """The targets of the critic's values; None if the estimator does not use a critic."""


@dataclass(frozen=True)
class AdvantageEstimator:
    """Computes advantages from rewards. Exactly one of `for_responses` and `for_tokens` is set."""

    name: str
    for_responses: Callable[[ResponseInputs], Tensor] | None = None
    """Returns [B]: one advantage per response, which all of its tokens share."""
    for_tokens: Callable[[TokenInputs, Reduce], TokenAdvantages] | None = None
    """Returns one advantage per token."""
    needs: frozenset[str] = frozenset()
    """The optional inputs that the estimator reads. `for_responses` can read GREEDY_REWARDS and NAMED_REWARDS,
    `for_tokens` can read ADVANTAGE_COLUMNS, and in estimators of this package SQUARES."""
    compares_groups: bool = True
    """Whether the estimator may compare the responses to a prompt with each other. Then a response that is left alone,
    because all others of its group were excluded, is not used. (With groupSize 1 all are alone, and used.)"""

    def __post_init__(self) -> None:
        if (self.for_responses is None) == (self.for_tokens is None):
            raise ValueError(f"advantage {self.name}: set either for_responses or for_tokens")

    @property
    def level(self) -> Level:
        """RESPONSE if `for_responses` is set, otherwise TOKEN."""
        return Level.RESPONSE if self.for_responses is not None else Level.TOKEN


@dataclass(frozen=True)
class HeadOutputs:
    """Which outputs of the model's output head a loss needs in addition to log-probabilities. They have no gradient."""

    entropy: bool = False
    """Whether the loss needs, for each token, the entropy in nats of the current policy's distribution (at the sampling
    temperature)."""
    squares: bool = False
    """Whether the loss needs, for each token, the sum of the squared probabilities of the whole vocabulary."""


@dataclass(frozen=True)
class WholeInputs:
    """One worker's part of a whole mini-batch: the input of `PolicyLoss.whole_pass`, which runs without gradient before
    the mini-batch's update."""

    segments: Segments
    """How the N tokens are divided into rows."""
    logprobs_N: Tensor
    """Log-probabilities by the weights before this update."""
    old_logprobs_N: Tensor
    """As in `LossInputs`."""
    advantages_N: Tensor
    columns: Mapping[str, Tensor]
    """[N] each: the columns that the loss declares in `needs`."""


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch on one worker. Rows are complete: no row is split between micro-batches. But a response with
    several rows may be."""

    segments: Segments
    """How the N tokens are divided into rows."""
    logprobs_N: Tensor
    """float32: log-probabilities by the current weights, with gradient."""
    old_logprobs_N: Tensor
    """Log-probabilities by the weights before the step's first update; equal to `logprobs_N` if the step has only one
    update. With `oldLogprobs: Rollout` by the rollout engine."""
    advantages_N: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] each: the columns that the loss declares in `needs`."""
    entropy_N: Tensor | None = None
    """None unless the loss needs it (`PolicyLoss.wanted`)."""
    squares_N: Tensor | None = None
    """None unless the loss needs it (`PolicyLoss.wanted`)."""
    whole: Mapping[str, Tensor] = field(default_factory=dict)
    """The result of `whole_pass`: this micro-batch's part of each [N] tensor, and the 0-d tensors as they are."""


@dataclass(frozen=True)
class TokenLosses:
    """The result of a policy loss for one micro-batch."""

    losses_N: Tensor
    """One loss per token, with gradient; `aggregation` reduces them to a scalar."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums over response tokens, 0-d and without gradient. The loss chooses their names. The metric `actor/<name>` is
    the sum over all micro-batches and workers divided by the number of response tokens."""


@dataclass(frozen=True)
class PolicyLoss:
    """A loss per token and the inputs that it declares."""

    name: str
    compute: Callable[[LossInputs], TokenLosses]
    needs: frozenset[str] = frozenset()
    """The columns that the loss reads from `LossInputs.columns`: names of `LOSS_COLUMNS`."""
    wanted: HeadOutputs = HeadOutputs()
    """The optional outputs of the output head that the loss reads."""
    whole_pass: Callable[[WholeInputs, Reduce], Mapping[str, Tensor]] | None = None
    """Runs before each update on the whole mini-batch. Returns [N] tensors (a value per token) and 0-d tensors by name;
    the names are free. `compute` finds them in `LossInputs.whole`. Costs one more forward pass over the mini-batch."""


OLD_LOGPROBS = "old_logprobs"
"""Log-probabilities by the weights before the step's first update; with `oldLogprobs: Rollout` by the rollout
engine."""
ROLLOUT_LOGPROBS = "rollout_logprobs"
"""Log-probabilities that the rollout engine computed when it sampled the tokens."""
REF_LOGPROBS = "ref_logprobs"
"""Log-probabilities by the reference."""
LOSS_COLUMNS = (ROLLOUT_LOGPROBS, REF_LOGPROBS)
"""What a loss may declare in `needs`. The old log-probabilities are always available."""
KL_PENALTIES = "kl_penalties"
"""The KL penalty of each token (coefficient x KL estimate), to be subtracted from its reward. Zeros unless the job puts
KL into the reward. In such a job an estimator with `for_tokens` must need this column, because only it can subtract
the penalties token by token."""
VALUES = "values"
"""The critic's values before the update: the expected return from each token to the end of the response."""
SQUARES = "squared_probabilities"
"""Sum of the squared probabilities of the whole vocabulary at each token, by the weights of OLD_LOGPROBS."""
GREEDY_REWARDS = "greedy_rewards"
"""See `ResponseInputs.greedy_rewards_B`."""
NAMED_REWARDS = "named_rewards"
"""See `ResponseInputs.named_rewards`."""
ADVANTAGE_COLUMNS = (OLD_LOGPROBS, ROLLOUT_LOGPROBS, REF_LOGPROBS, KL_PENALTIES, VALUES)
"""What a user's own estimator with `for_tokens` may declare in `needs`."""
