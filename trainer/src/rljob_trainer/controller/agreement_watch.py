"""Says when the rollout engine and the trainer, with the same weights, speak of different distributions."""

from __future__ import annotations

import logging

from rljob_api.v1alpha1.model import Dtype
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.observability.metrics import (
    LOGPROB_DIFF_MAX,
    LOGPROB_DIFF_MEAN,
    LOGPROB_DIFF_SHARE,
    STALENESS_MAX,
    Metrics,
)

log = logging.getLogger(__name__)

USUAL_DIFFERENCE = {Dtype.FLOAT32: 1e-3, Dtype.BFLOAT16: 0.05}
"""Of log-probabilities, in nats, in the mean over a step's tokens; no more than that by rounding and other kernels."""


class AgreementWatch:
    """Of one run."""

    def __init__(self, spec: RLJobSpec) -> None:
        """`spec` names the precision."""
        self.dtype = spec.training.model.dtype
        self.worst_said = USUAL_DIFFERENCE[self.dtype]

    def step_done(self, step: int, metrics: Metrics) -> None:
        """Warns when a step's mean difference is beyond the usual one, and again each time that it has doubled.
        Responses by older weights are another matter, and expected to differ."""
        mean = metrics.get(LOGPROB_DIFF_MEAN, 0.0)
        if mean <= self.worst_said or metrics[STALENESS_MAX] > 0:
            return
        self.worst_said = 2 * mean
        log.warning(
            "step %d: the rollout engine's log-probabilities are %.2g nats from the trainer's in the mean (largest "
            "%.2g, %.0f %% of the tokens beyond 0.1; up to %g is usual in %s): the policy learns from responses that "
            "it would not have given like this. training.algorithm.rolloutCorrection: {type: TokenTruncated} corrects "
            "for it; to find the cause try rollout.compile: Never, model.dtype: Float32, rollout.engine: HuggingFace",
            step,
            mean,
            metrics[LOGPROB_DIFF_MAX],
            100 * metrics[LOGPROB_DIFF_SHARE],
            USUAL_DIFFERENCE[self.dtype],
            self.dtype,
        )
