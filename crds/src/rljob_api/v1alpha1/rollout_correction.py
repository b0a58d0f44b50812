"""Off-policy correction for the mismatch between trainer and rollout engine, a part of the algorithm."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.rule import rule
from rljob_api.scalars import PositiveNumber


class RolloutCorrectionType(StrEnum):
    """Importance weight by which a token's policy loss is multiplied. It is derived from the ratio exp(trainer logprob
    - rollout logprob) of the token, or from the product of these ratios over the response."""

    NONE = "None"
    """No weight."""
    TOKEN_TRUNCATED = "TokenTruncated"
    """The ratio of the token, at most maxRatio (truncated importance sampling)."""
    SEQUENCE_TRUNCATED = "SequenceTruncated"
    """The ratio of the response, at most maxRatio, for each of its tokens."""
    TOKEN_MASKED = "TokenMasked"
    """The ratio of the token if it is between minRatio and maxRatio, else 0 (IcePop)."""
    SEQUENCE_MASKED = "SequenceMasked"
    """The ratio of the response if it is between minRatio and maxRatio, else 0."""


MASKED_CORRECTIONS = (RolloutCorrectionType.TOKEN_MASKED, RolloutCorrectionType.SEQUENCE_MASKED)
"""Types with an upper and a lower bound. Outside of the bounds, the weight is 0."""
MAX_RATIO = 2.0
"""Default of maxRatio, as in verl and Yao et al. 2025."""


class OldLogprobs(StrEnum):
    """Source of the old log-probabilities, with which the policy loss compares the policy."""

    TRAINER = "Trainer"
    """The trainer, before the step's updates. With several updates per step this is one more forward pass."""
    ROLLOUT = "Rollout"
    """The rollout engine. Needs no pass; the loss's ratio then includes the mismatch between the two."""


class RejectionLevel(StrEnum):
    """The number that is compared with the bounds: the estimated divergence at a token, or its combination over the
    response."""

    TOKEN = "Token"
    """The estimate of each token; single tokens are rejected."""
    SEQUENCE_SUM = "SequenceSum"
    """The sum over the response; whole responses are rejected. With K1: the product of the ratios."""
    SEQUENCE_MEAN = "SequenceMean"
    """The mean over the response; whole responses are rejected. With K1: the geometric mean of the ratios."""
    SEQUENCE_MAX = "SequenceMax"
    """The maximum over the response; whole responses are rejected. Not with K1, which can be negative."""


class RejectionEstimator(StrEnum):
    """Estimator of the divergence between trainer and rollout engine; formulas as in KlEstimator."""

    K1 = "K1"
    K2 = "K2"
    K3 = "K3"


class RolloutRejection(WireModel):
    """Exclude tokens or responses from the update if the log-probabilities of trainer and rollout engine differ too
    much.

    Needs one additional forward pass if a step has a single update; with several updates the step computes the needed
    log-probabilities in any case."""

    level: RejectionLevel
    estimator: RejectionEstimator = RejectionEstimator.K1
    """Estimator of the divergence. With K1, min and max bound the ratio of the probabilities; with K2 and K3, max
    bounds the divergence in nats."""
    max: PositiveNumber
    """Upper bound, for example 2.0 with K1."""
    min: PositiveNumber | None = None
    """Lower bound of the ratio, only for K1; 1 / max when unset."""


class RolloutCorrection(WireModel):
    """Off-policy correction if the rollout engine samples from another distribution than the policy in training
    (training/inference mismatch). Nothing is corrected by default.

    Causes are other kernels, rounding, or weights that are some steps old (rollout.syncEverySteps). The metrics
    rollout/logprob_diff_* and rollout_corr/* show the size of the mismatch."""

    type: RolloutCorrectionType = RolloutCorrectionType.NONE
    max_ratio: PositiveNumber | None = None
    """Upper bound of the ratio; 2.0 when unset."""
    min_ratio: PositiveNumber | None = None
    """Lower bound of the ratio, only for the masked types; 1 / maxRatio when unset."""
    rejection: RolloutRejection | None = None
    old_logprobs: OldLogprobs = OldLogprobs.TRAINER

    @property
    def uses_rollout_logprobs(self) -> bool:
        """Whether the update depends on the rollout engine's log-probabilities."""
        weighs = self.type is not RolloutCorrectionType.NONE
        return weighs or self.rejection is not None or self.old_logprobs is OldLogprobs.ROLLOUT


CORRECTION_RULES = (
    rule(
        RolloutCorrection,
        "RolloutCorrection.maxRatio",
        field=".maxRatio",
        cel="!has(self.maxRatio) || !has(self.type) || self.type != 'None'",
        wrong="would be ignored with type None",
        advice="remove it, or set for example type: TokenTruncated",
        holds=lambda c: c.max_ratio is None or c.type is not RolloutCorrectionType.NONE,
    ),
    rule(
        RolloutCorrection,
        "RolloutCorrection.minRatio",
        field=".minRatio",
        cel="!has(self.minRatio) || !has(self.type) || self.type in ['TokenMasked', 'SequenceMasked']",
        wrong="is only allowed with type TokenMasked or SequenceMasked, because other types would ignore it",
        advice="remove it, or set one of these types",
        holds=lambda c: c.min_ratio is None or c.type in MASKED_CORRECTIONS,
    ),
    rule(
        RolloutCorrection,
        "RolloutCorrection.ratios",
        field=".minRatio",
        cel=f"!has(self.minRatio) || self.minRatio < (has(self.maxRatio) ? self.maxRatio : {MAX_RATIO})",
        wrong=f"must be below maxRatio ({MAX_RATIO} when unset)",
        advice="use for example minRatio: 0.5 and maxRatio: 2.0",
        holds=lambda c: c.min_ratio is None or c.min_ratio < (c.max_ratio or MAX_RATIO),
    ),
    rule(
        RolloutCorrection,
        "RolloutCorrection.maskedRatio",
        field=".maxRatio",
        cel="!has(self.maxRatio) || has(self.minRatio) || self.maxRatio > 1.0"
        " || !has(self.type) || !(self.type in ['TokenMasked', 'SequenceMasked'])",
        wrong="must be above 1, because minRatio is unset and therefore 1 / maxRatio",
        advice="increase it, or set minRatio",
        holds=lambda c: (
            c.max_ratio is None or c.min_ratio is not None or c.max_ratio > 1 or c.type not in MASKED_CORRECTIONS
        ),
    ),
    rule(
        RolloutCorrection,
        "RolloutCorrection.oldLogprobs",
        field=".oldLogprobs",
        cel="!has(self.oldLogprobs) || self.oldLogprobs != 'Rollout'"
        " || ((!has(self.type) || self.type == 'None') && !has(self.rejection))",
        wrong="must not be Rollout with type or rejection, which need the trainer's log-probabilities",
        advice="remove type and rejection, or set oldLogprobs: Trainer",
        holds=lambda c: (
            c.old_logprobs is not OldLogprobs.ROLLOUT or (c.type is RolloutCorrectionType.NONE and c.rejection is None)
        ),
    ),
    rule(
        RolloutRejection,
        "RolloutRejection.estimator",
        field=".estimator",
        cel="self.level != 'SequenceMax' || self.estimator != 'K1'",
        wrong="must not be K1 with level SequenceMax, because K1 can be negative",
        advice="use K2 or K3, or another level",
        holds=lambda r: r.level is not RejectionLevel.SEQUENCE_MAX or r.estimator is not RejectionEstimator.K1,
    ),
    rule(
        RolloutRejection,
        "RolloutRejection.min",
        field=".min",
        cel="!has(self.min) || self.estimator == 'K1'",
        wrong="is only allowed with estimator K1, because K2 and K3 are never negative and have only an upper bound",
        advice="remove it, or set estimator: K1",
        holds=lambda r: r.min is None or r.estimator is RejectionEstimator.K1,
    ),
    rule(
        RolloutRejection,
        "RolloutRejection.bounds",
        field=".max",
        cel="self.estimator != 'K1' || (has(self.min) ? self.min < self.max : self.max > 1.0)",
        wrong="must be above min (1 / max when unset)",
        advice="use for example min: 0.5 and max: 2.0",
        holds=lambda r: r.estimator is not RejectionEstimator.K1 or (r.min < r.max if r.min is not None else r.max > 1),
    ),
)
