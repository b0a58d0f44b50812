"""The learning rule: advantages, policy loss, KL term, aggregation."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import Flag, NonNegativeNumber, Number, PositiveNumber


class AlgorithmType(StrEnum):
    """One block of the same name (camelCase) says the rest."""

    GRPO = "GRPO"


class Grpo(WireModel):
    """Group-relative advantages (Shao et al. 2024, arXiv 2402.03300)."""

    normalize_by_std: Flag = True
    """Divide by the group's standard deviation; `false` is Dr.GRPO (arXiv 2503.20783)."""
    drop_zero_variance_groups: Flag = False
    """Leave out groups whose rewards are all equal: they carry no gradient, and do not enter the denominators."""


class LossAggregation(StrEnum):
    """How per-token losses become one number. All denominators are those of the whole mini-batch on all workers."""

    TOKEN_MEAN = "TokenMean"
    SEQUENCE_MEAN_TOKEN_MEAN = "SequenceMeanTokenMean"
    SEQUENCE_MEAN_TOKEN_SUM = "SequenceMeanTokenSum"


class KlEstimator(StrEnum):
    """Per-token estimators of KL(policy || reference) (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""

    K1 = "K1"
    K2 = "K2"
    K3 = "K3"


class KlPlacement(StrEnum):
    """Where the KL term enters."""

    LOSS = "Loss"
    REWARD = "Reward"


class Kl(WireModel):
    """Penalty for moving away from the reference policy. No reference is computed when the coefficient is 0."""

    coefficient: NonNegativeNumber = 0.0
    estimator: KlEstimator = KlEstimator.K3
    placement: KlPlacement = KlPlacement.LOSS


class Algorithm(WireModel):
    """The learning rule."""

    type: AlgorithmType = AlgorithmType.GRPO
    grpo: Grpo = Field(default_factory=Grpo)
    clip_ratio_low: PositiveNumber = 0.2
    """The probability ratio is clipped below at 1 - clipRatioLow."""
    clip_ratio_high: PositiveNumber = 0.2
    """... and above at 1 + clipRatioHigh."""
    dual_clip_ratio: PositiveNumber | None = 3.0
    """Bound on the loss of negative advantages (arXiv 1912.09729); above 1, or null for none."""
    loss_aggregation: LossAggregation = LossAggregation.TOKEN_MEAN
    entropy_coefficient: Number = 0.0
    """Weight of the entropy bonus (subtracted from the loss)."""
    kl: Kl = Field(default_factory=Kl)
