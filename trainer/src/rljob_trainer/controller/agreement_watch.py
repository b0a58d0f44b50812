"""Says when the rollout engine and the trainer, with the same weights, speak of different distributions, and when most
of what was generated is rejected for it."""

from __future__ import annotations

import logging

from rljob_api.v1alpha1.model import Dtype
from rljob_api.v1alpha1.rollout_correction import RolloutCorrectionType
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.observability.metrics import (
    LOGPROB_DIFF_MAX,
    LOGPROB_DIFF_MEAN,
    LOGPROB_DIFF_SHARE,
    REJECTED_FRACTION,
    STALENESS_MAX,
    Metrics,
)

log = logging.getLogger(__name__)

USUAL_DIFFERENCE = {Dtype.FLOAT32: 1e-3, Dtype.BFLOAT16: 0.05}
"""Of log-probabilities, in nats, in the mean over a step's tokens; no more than that by rounding and other kernels."""
MOST_REJECTED = 0.5


class AgreementWatch:
    """Of one run."""

    def __init__(self, spec: RLJobSpec) -> None:
        """`spec` names the precision, not `Auto`."""
        self.dtype = spec.training.model.dtype
        self.corrects = spec.training.algorithm.rollout_correction.type is not RolloutCorrectionType.NONE
        self.worst_difference = USUAL_DIFFERENCE[self.dtype]
        self.worst_rejected = MOST_REJECTED

    def step_done(self, step: int, metrics: Metrics) -> None:
        """Warns when a step's mean difference is beyond the usual one, and again each time that it has doubled, unless
        the responses are by older weights, which are expected to differ; and when more than half of the tokens are
        rejected."""
        mean = metrics.get(LOGPROB_DIFF_MEAN, 0.0)
        if mean > self.worst_difference and metrics[STALENESS_MAX] == 0:
            self.worst_difference = 2 * mean
            self._warn_of_difference(step, metrics)
        rejected = metrics.get(REJECTED_FRACTION, 0.0)
        if rejected > self.worst_rejected:
            self.worst_rejected = (1 + rejected) / 2
            log.warning(
                "step %d: algorithm.rolloutCorrection.rejection leaves out %.0f %% of the tokens; widen its bounds, or "
                "hand weights over more often (rollout.syncEverySteps)",
                step,
                100 * rejected,
            )

    def _warn_of_difference(self, step: int, metrics: Metrics) -> None:
        advice = "training.algorithm.rolloutCorrection corrects for it"
        if not self.corrects:
            advice = "training.algorithm.rolloutCorrection: {type: TokenTruncated} would correct for it"
        log.warning(
            "step %d: the rollout engine's log-probabilities are %.2g nats from the trainer's in the mean (largest "
            "%.2g, %.0f %% of the tokens beyond 0.1; up to %g is usual in %s): the policy learns from responses to "
            "which it gives other probabilities. %s; to find the cause try rollout.compile: Never, model.dtype: "
            "Float32, rollout.engine: HuggingFace",
            step,
            metrics[LOGPROB_DIFF_MEAN],
            metrics[LOGPROB_DIFF_MAX],
            100 * metrics[LOGPROB_DIFF_SHARE],
            USUAL_DIFFERENCE[self.dtype],
            self.dtype,
            advice,
        )
