"""What is done about a generator that is not quite the policy: one part of a learning rule (`algorithm`)."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
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
