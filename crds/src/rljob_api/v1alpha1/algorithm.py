"""The learning rule: a recipe by name, and what a job changes in it: advantages, policy loss, aggregation, KL term.

What is left out here is the recipe's (`recipes.py`), which gives every field its value.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import Flag, FunctionPath, NonNegativeNumber, Number, PositiveNumber


class AlgorithmType(StrEnum):
    """Recipes: an advantage, a loss, an aggregation and their settings under one name. GRPO has the
    advantages of Shao et al. 2024 (arXiv 2402.03300), with the token mean, the dual clip and no KL term, as is usual
    since; the paper's own form is `aggregation: SequenceMeanTokenMean`, `dualClipRatio: 0` and a KL coefficient. DrGRPO
    is of Liu et al. 2025 (arXiv 2503.20783)."""

    GRPO = "GRPO"
    DR_GRPO = "DrGRPO"


class AdvantageType(StrEnum):
    """How rewards become advantages."""

    GROUP_RELATIVE = "GroupRelative"
    FUNCTION = "Function"


class LossType(StrEnum):
    """The policy loss of one token."""

    CLIPPED = "Clipped"
    FUNCTION = "Function"


class Function(WireModel):
    """The user's own function, importable on PYTHONPATH as that of a reward is."""

    path: FunctionPath
    """`package.module:function`."""


class GroupRelative(WireModel):
    """A reward less the mean reward of all responses to the same prompt (arXiv 2402.03300)."""

    normalize_by_std: Flag | None = None
    """Divide by the group's standard deviation. The recipe's when unset."""


class Advantage(WireModel):
    """How rewards become advantages."""

    type: AdvantageType | None = None
    """The recipe's when unset."""
    group_relative: GroupRelative | None = None
    function: Function | None = None
    """For `type: Function`: takes `rljob_trainer.algorithms.ResponseInputs`, returns an advantage for each response.
    Decorated with `token_advantage` it takes `TokenInputs` and `Reduce`, and returns one for each token."""


class Clipped(WireModel):
    """The clipped ratio of PPO (Schulman et al. 2017, arXiv 1707.06347). What is unset is the recipe's."""

    clip_ratio_low: PositiveNumber | None = None
    """The probability ratio is clipped below at 1 - clipRatioLow."""
    clip_ratio_high: PositiveNumber | None = None
    """... and above at 1 + clipRatioHigh."""
    dual_clip_ratio: NonNegativeNumber | None = None
    """Bound on the loss of negative advantages (arXiv 1912.09729); above 1, or 0 for none."""


class Loss(WireModel):
    """The policy loss of one token; `aggregation` makes one number of all."""

    type: LossType | None = None
    """The recipe's when unset."""
    clipped: Clipped | None = None
    function: Function | None = None
    """For `type: Function`: takes `rljob_trainer.algorithms.LossInputs`, returns a loss for each token. Decorated with
    `policy_loss_function` it may ask for more: other log-probabilities, the entropy, a look at the mini-batch."""


class LossAggregation(StrEnum):
    """How per-token losses become one number. All denominators are those of the whole mini-batch on all workers;
    SequenceMeanTokenSumNorm divides each response's sum by rollout.maxNewTokens, whatever the response's length."""

    TOKEN_MEAN = "TokenMean"
    SEQUENCE_MEAN_TOKEN_MEAN = "SequenceMeanTokenMean"
    SEQUENCE_MEAN_TOKEN_SUM = "SequenceMeanTokenSum"
    SEQUENCE_MEAN_TOKEN_SUM_NORM = "SequenceMeanTokenSumNorm"


class KlEstimator(StrEnum):
    """Per-token estimators of KL(policy || reference) (Schulman 2020, http://joschu.net/blog/kl-approx.html).
    K3 is held below 10 nats for each token, with no gradient beyond."""

    K1 = "K1"
    K2 = "K2"
    K3 = "K3"


class KlPlacement(StrEnum):
    """Where the KL term enters."""

    LOSS = "Loss"
    REWARD = "Reward"


class Kl(WireModel):
    """Penalty for moving away from the reference policy. With coefficient 0 no reference is computed, unless a function
    of one's own needs its log-probabilities."""

    coefficient: NonNegativeNumber = 0.0
    estimator: KlEstimator = KlEstimator.K3
    placement: KlPlacement = KlPlacement.LOSS


class RolloutCorrectionType(StrEnum):
    """How much of the ratio between trainer and generator a token's policy loss is multiplied by: exp(log-probability
    by the trainer less that by the rollout engine), of the token or the product over its response."""

    NONE = "None"
    TOKEN_TRUNCATED = "TokenTruncated"
    """The token's ratio, at most maxRatio (truncated importance sampling)."""
    SEQUENCE_TRUNCATED = "SequenceTruncated"
    """The response's ratio, at most maxRatio, for each of its tokens."""
    TOKEN_MASKED = "TokenMasked"
    """The token's ratio between minRatio and maxRatio, 0 outside (IcePop)."""
    SEQUENCE_MASKED = "SequenceMasked"
    """The same with the response's ratio."""


class RejectionLevel(StrEnum):
    """Of what a bound is on."""

    TOKEN = "Token"
    """Each token by itself."""
    SEQUENCE_SUM = "SequenceSum"
    """The sum over a response, for all of its tokens; with K1 the product of their ratios."""
    SEQUENCE_MEAN = "SequenceMean"
    """The mean over a response; with K1 the geometric mean of the ratios."""
    SEQUENCE_MAX = "SequenceMax"
    """A response's largest; not with K1, whose values have a sign."""


class RolloutRejection(WireModel):
    """Tokens, or whole responses, on which trainer and generator disagree too much are not learned from and not
    counted. Takes one more forward pass where a step has a single update."""

    level: RejectionLevel
    estimator: KlEstimator = KlEstimator.K1
    """Of how far the two are apart. K1 is bounded as the ratio of trainer to generator, on both sides; K2 and
    K3 in nats, above."""
    max: PositiveNumber
    min: PositiveNumber | None = None
    """For K1; 1 / max when unset."""


class RolloutCorrection(WireModel):
    """What is done about a generator that samples from another distribution than the policy in training: because of
    other kernels, of rounding, or of weights that are some steps old (rollout.syncEverySteps). The metrics
    rollout/logprob_diff_* and rollout_corr/* say how far apart the two are. Nothing is corrected by default."""

    type: RolloutCorrectionType = RolloutCorrectionType.NONE
    max_ratio: PositiveNumber | None = None
    """2.0 when unset."""
    min_ratio: PositiveNumber | None = None
    """For the masked types; 1 / maxRatio when unset."""
    rejection: RolloutRejection | None = None


class Algorithm(WireModel):
    """The learning rule: `type` names a recipe, the rest overrides it; `rljob validate --resolved FILE` prints what
    becomes of it."""

    type: AlgorithmType = AlgorithmType.GRPO
    advantage: Advantage = Field(default_factory=Advantage)
    loss: Loss = Field(default_factory=Loss)
    aggregation: LossAggregation | None = None
    """How per-token losses become one number. The recipe's when unset."""
    drop_zero_variance_groups: Flag | None = None
    """Leave out groups whose scores are all equal: group-relative advantages are 0 there, and with this they do not
    enter the denominators either. A KL term does not pull on them, in the reward or in the loss. The recipe's when
    unset."""
    entropy_coefficient: Number = 0.0
    """Weight of the entropy bonus (subtracted from the loss)."""
    kl: Kl = Field(default_factory=Kl)
    rollout_correction: RolloutCorrection = Field(default_factory=RolloutCorrection)
