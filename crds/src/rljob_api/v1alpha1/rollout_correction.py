"""What is done about a generator that is not quite the policy: one part of a learning rule (`algorithm`)."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.rule import rule
from rljob_api.scalars import PositiveNumber


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


MASKED_CORRECTIONS = (RolloutCorrectionType.TOKEN_MASKED, RolloutCorrectionType.SEQUENCE_MASKED)
"""Those with a bound below."""
MAX_RATIO = 2.0
"""What verl has, and Yao et al. 2025 use."""


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


class RejectionEstimator(StrEnum):
    """Of how far trainer and generator are apart: as `KlEstimator`."""

    K1 = "K1"
    K2 = "K2"
    K3 = "K3"


class RolloutRejection(WireModel):
    """Tokens, or whole responses, on which trainer and generator disagree too much are not learned from and not
    counted. Takes one more forward pass where a step has a single update."""

    level: RejectionLevel
    estimator: RejectionEstimator = RejectionEstimator.K1
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


CORRECTION_RULES = (
    rule(
        RolloutCorrection,
        "RolloutCorrection.maxRatio",
        field=".maxRatio",
        cel="!has(self.maxRatio) || !has(self.type) || self.type != 'None'",
        wrong="is ignored with type None",
        advice="remove it, or write `type: TokenTruncated` beside it",
        holds=lambda c: c.max_ratio is None or c.type is not RolloutCorrectionType.NONE,
    ),
    rule(
        RolloutCorrection,
        "RolloutCorrection.minRatio",
        field=".minRatio",
        cel="!has(self.minRatio) || !has(self.type) || self.type in ['TokenMasked', 'SequenceMasked']",
        wrong="only TokenMasked and SequenceMasked have a bound below",
        advice="remove it, or choose one of them",
        holds=lambda c: c.min_ratio is None or c.type in MASKED_CORRECTIONS,
    ),
    rule(
        RolloutCorrection,
        "RolloutCorrection.ratios",
        field=".minRatio",
        cel=f"!has(self.minRatio) || self.minRatio < (has(self.maxRatio) ? self.maxRatio : {MAX_RATIO})",
        wrong=f"must be below maxRatio ({MAX_RATIO} when unset)",
        advice="0.5 and 2.0 are usual",
        holds=lambda c: c.min_ratio is None or c.min_ratio < (c.max_ratio or MAX_RATIO),
    ),
    rule(
        RolloutCorrection,
        "RolloutCorrection.maskedRatio",
        field=".maxRatio",
        cel="!has(self.maxRatio) || has(self.minRatio) || self.maxRatio > 1.0"
        " || !has(self.type) || !(self.type in ['TokenMasked', 'SequenceMasked'])",
        wrong="must be above 1 where minRatio, which is then 1 / maxRatio, is not given",
        advice="raise it, or give minRatio",
        holds=lambda c: (
            c.max_ratio is None or c.min_ratio is not None or c.max_ratio > 1 or c.type not in MASKED_CORRECTIONS
        ),
    ),
    rule(
        RolloutRejection,
        "RolloutRejection.estimator",
        field=".estimator",
        cel="self.level != 'SequenceMax' || self.estimator != 'K1'",
        wrong="K1 has a sign, and its largest value says nothing of the smallest",
        advice="write K2 or K3, or another level",
        holds=lambda r: r.level is not RejectionLevel.SEQUENCE_MAX or r.estimator is not RejectionEstimator.K1,
    ),
    rule(
        RolloutRejection,
        "RolloutRejection.min",
        field=".min",
        cel="!has(self.min) || self.estimator == 'K1'",
        wrong="K2 is never below 0, nor is K3, and they have no bound below",
        advice="remove it, or write `estimator: K1`",
        holds=lambda r: r.min is None or r.estimator is RejectionEstimator.K1,
    ),
    rule(
        RolloutRejection,
        "RolloutRejection.bounds",
        field=".max",
        cel="self.estimator != 'K1' || (has(self.min) ? self.min < self.max : self.max > 1.0)",
        wrong="must be above min, which is 1 / max when unset",
        advice="bounds of the ratio on both sides of 1 are usual: 0.5 and 2.0",
        holds=lambda r: r.estimator is not RejectionEstimator.K1 or (r.min < r.max if r.min is not None else r.max > 1),
    ),
)
