"""Warns if the rollout engine and the trainer compute different log-probabilities from the same weights
(training/inference mismatch), if rollout correction rejects most tokens because of this mismatch, and if merged
adapters are lost by rounding."""

from __future__ import annotations

import logging

from rljob_api.v1alpha1.model import Dtype
from rljob_api.v1alpha1.rollout_correction import OldLogprobs, RolloutCorrectionType
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.observability.metrics import (
    LOGPROB_DIFF_MAX,
    LOGPROB_DIFF_MEAN,
    LOGPROB_DIFF_SHARE,
    MERGE_ERROR,
    REJECTED_FRACTION,
    STALENESS_MAX,
    Metrics,
)

log = logging.getLogger(__name__)

USUAL_DIFFERENCE = {Dtype.FLOAT32: 1e-3, Dtype.BFLOAT16: 0.05}
"""Mean difference of log-probabilities over a step's tokens, in nats. Rounding and different kernels explain
differences up to this value."""
MOST_REJECTED = 0.5
"""A warning is logged if more than this fraction of the tokens is rejected."""
LARGEST_MERGE_ERROR = 0.1
"""A warning is logged if rounding loses a larger fraction of merged adapters."""


class MismatchWatch:
    """The warnings of one run."""

    def __init__(self, spec: RLJobSpec) -> None:
        """`spec.training.model.dtype` must not be `Auto`."""
        self.dtype = spec.training.model.dtype
        correction = spec.training.algorithm.rollout_correction
        has_weights = correction.type is not RolloutCorrectionType.NONE
        self.corrects = has_weights or correction.old_logprobs is OldLogprobs.ROLLOUT
        self.can_sync_more_often = spec.training.rollout.sync_every_steps > 1
        self.max_difference = USUAL_DIFFERENCE[self.dtype]
        self.max_rejected = MOST_REJECTED
        self.has_reported_merge_error = False

    def step_done(self, step: int, metrics: Metrics) -> None:
        """Warns if a step's mean difference is larger than usual, and again each time the difference has doubled. For
        this, steps with stale responses are skipped, because older weights are expected to differ. Also warns if more
        than half of the tokens are rejected, and again each time the accepted fraction has halved. Warns once if
        rounding loses a large part of merged adapters."""
        self._check_merge_error(step, metrics.get(MERGE_ERROR, 0.0))
        mean = metrics.get(LOGPROB_DIFF_MEAN, 0.0)
        if mean > self.max_difference and metrics[STALENESS_MAX] == 0:
            self.max_difference = 2 * mean
            self._warn_of_difference(step, metrics)
        rejected = metrics.get(REJECTED_FRACTION, 0.0)
        if rejected > self.max_rejected:
            self.max_rejected = (1 + rejected) / 2
            more_often = ", or sync the weights more often (rollout.syncEverySteps)" if self.can_sync_more_often else ""
            log.warning(
                "step %d: training.algorithm.rolloutCorrection.rejection rejects %.0f %% of the tokens; widen its "
                "bounds%s",
                step,
                100 * rejected,
                more_often,
            )

    def _check_merge_error(self, step: int, error: float) -> None:
        if self.has_reported_merge_error or not error > LARGEST_MERGE_ERROR:
            return
        self.has_reported_merge_error = True
        log.warning(
            "step %d: spec.training.model.lora.sync: the rollout engine gets the adapters merged into weights in %s, "
            "and rounding loses %.0f %% of what the adapters add; set sync: Adapter (requires rollout.engine: VLLM), "
            "or model.dtype: Float32",
            step,
            self.dtype,
            100 * error,
        )

    def _warn_of_difference(self, step: int, metrics: Metrics) -> None:
        advice = "training.algorithm.rolloutCorrection corrects for this"
        if not self.corrects:
            advice = "training.algorithm.rolloutCorrection: {type: TokenTruncated} would correct for this"
        log.warning(
            "step %d: training/inference mismatch: the log-probabilities of the rollout engine and of the trainer "
            "differ by %.2g nats on average (max %.2g, %.0f %% of the tokens by more than 0.1; up to %g is usual in "
            "%s), so training is off-policy. %s; to find the cause try rollout.compile: Never, model.dtype: Float32, "
            "rollout.engine: HuggingFace",
            step,
            metrics[LOGPROB_DIFF_MEAN],
            metrics[LOGPROB_DIFF_MAX],
            100 * metrics[LOGPROB_DIFF_SHARE],
            USUAL_DIFFERENCE[self.dtype],
            self.dtype,
            advice,
        )
