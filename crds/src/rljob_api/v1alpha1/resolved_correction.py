"""The chosen rollout correction without open questions."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.v1alpha1.rollout_correction import (
    RejectionEstimator,
    RejectionLevel,
    RolloutCorrection,
    RolloutCorrectionType,
    RolloutRejection,
)

MASKED_CORRECTIONS = (RolloutCorrectionType.TOKEN_MASKED, RolloutCorrectionType.SEQUENCE_MASKED)
"""Those with a bound below."""
MAX_RATIO = 2.0
"""Of rollout correction: what verl has, and Yao et al. 2025 use."""


@dataclass(frozen=True, slots=True)
class ResolvedWeights:
    """What policy losses are multiplied by."""

    type: RolloutCorrectionType
    max_ratio: float
    min_ratio: float | None
    """None: no bound below."""

    @property
    def is_of_sequence(self) -> bool:
        """Whether all tokens of a response have the same."""
        return self.type in (RolloutCorrectionType.SEQUENCE_TRUNCATED, RolloutCorrectionType.SEQUENCE_MASKED)


@dataclass(frozen=True, slots=True)
class ResolvedRejection:
    """`RolloutRejection` with its values."""

    level: RejectionLevel
    estimator: RejectionEstimator
    max: float
    min: float | None
    """None: no bound below."""


@dataclass(frozen=True, slots=True)
class ResolvedRolloutCorrection:
    """`RolloutCorrection` with its values; None for what is not done."""

    weights: ResolvedWeights | None = None
    rejection: ResolvedRejection | None = None

    def as_written(self) -> RolloutCorrection:
        """The job's form."""
        rejection = self.rejection and RolloutRejection(
            level=self.rejection.level,
            estimator=self.rejection.estimator,
            max=self.rejection.max,
            min=self.rejection.min,
        )
        if self.weights is None:
            return RolloutCorrection(rejection=rejection)
        return RolloutCorrection(
            type=self.weights.type,
            max_ratio=self.weights.max_ratio,
            min_ratio=self.weights.min_ratio,
            rejection=rejection,
        )


def resolve_correction(correction: RolloutCorrection) -> ResolvedRolloutCorrection:
    """The correction with a value for every bound."""
    weights: ResolvedWeights | None = None
    if correction.type is not RolloutCorrectionType.NONE:
        highest, lowest = correction.max_ratio or MAX_RATIO, correction.min_ratio
        if correction.type in MASKED_CORRECTIONS:
            lowest = lowest or 1.0 / highest
        weights = ResolvedWeights(correction.type, highest, lowest)
    rejection: ResolvedRejection | None = None
    if correction.rejection is not None:
        asked = correction.rejection
        lowest = asked.min
        if asked.estimator is RejectionEstimator.K1:
            lowest = lowest or 1.0 / asked.max
        rejection = ResolvedRejection(asked.level, asked.estimator, asked.max, lowest)
    return ResolvedRolloutCorrection(weights, rejection)
