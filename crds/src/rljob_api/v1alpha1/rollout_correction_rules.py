"""Rules on rollout correction, and on the weights' age, which it is there for."""

from __future__ import annotations

from rljob_api.rule import rule
from rljob_api.v1alpha1.resolved_correction import MASKED_CORRECTIONS, MAX_RATIO
from rljob_api.v1alpha1.rollout_correction import (
    RejectionEstimator,
    RejectionLevel,
    RolloutCorrection,
    RolloutCorrectionType,
    RolloutRejection,
)
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.training import Training


def _samples_all_or_corrects_nothing(training: Training) -> bool:
    correction, rollout = training.algorithm.rollout_correction, training.rollout
    is_none = correction.type is RolloutCorrectionType.NONE and correction.rejection is None
    return is_none or (rollout.top_p == 1 and rollout.top_k == 0)


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
    rule(
        Training,
        "Training.syncEverySteps",
        field=".evaluation.everySteps",
        cel="!has(self.evaluation) || self.evaluation.everySteps % self.rollout.syncEverySteps == 0",
        wrong="must be a multiple of rollout.syncEverySteps: an evaluation takes the newest weights, and would change "
        "what the steps after it learn from",
        advice="change one of the two",
        holds=lambda t: t.evaluation is None or t.evaluation.every_steps % t.rollout.sync_every_steps == 0,
    ),
    rule(
        RLJobSpec,
        "RLJobSpec.syncEverySteps",
        field=".checkpoint.everySteps",
        cel="self.checkpoint.everySteps % self.training.rollout.syncEverySteps == 0",
        wrong="must be a multiple of training.rollout.syncEverySteps: a run that goes on from a checkpoint takes the "
        "newest weights, and would differ from one that was not interrupted",
        advice="change one of the two",
        holds=lambda spec: spec.checkpoint.every_steps % spec.training.rollout.sync_every_steps == 0,
    ),
    rule(
        Training,
        "Training.rolloutCorrection",
        field=".algorithm.rolloutCorrection",
        cel="(self.rollout.topP == 1.0 && self.rollout.topK == 0) || ((!has(self.algorithm.rolloutCorrection.type)"
        " || self.algorithm.rolloutCorrection.type == 'None') && !has(self.algorithm.rolloutCorrection.rejection))",
        wrong="with rollout.topP below 1 or topK the generator's log-probabilities are of what the cut left, and "
        "cannot be compared with the trainer's",
        advice="write topP: 1 and topK: 0, or remove the correction",
        holds=_samples_all_or_corrects_nothing,
    ),
)
