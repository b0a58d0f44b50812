"""The loss of a micro-batch: policy loss - entropy bonus + KL term, as the job's algorithm specifies them.

Legend: N response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.kl import KlPlacement
from rljob_api.v1alpha1.recipes import is_distillation, resolved_value
from rljob_api.v1alpha1.rollout_correction import RolloutCorrectionType
from rljob_trainer.algorithms.aggregation import Denominators, aggregate_loss
from rljob_trainer.algorithms.function_results import METRIC_PREFIX
from rljob_trainer.algorithms.interfaces import LossInputs, PolicyLoss
from rljob_trainer.algorithms.kl import kl_estimate
from rljob_trainer.algorithms.rollout_correction import correction_weights
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.token_batch import MicroBatch
from rljob_trainer.engines.train.token_logprobs import TokenDistribution
from rljob_trainer.errors import AlgorithmFunctionError
from rljob_trainer.observability.metrics import (
    CORRECTION_BOUNDED,
    CORRECTION_MEAN,
    CORRECTION_SAMPLE_SIZE,
    ENTROPY,
    KL_LOSS,
    POLICY_LOSS,
    TEACHER_KL,
)
from rljob_trainer.workers.columns import (
    ADVANTAGES,
    CORRECTION_WEIGHTS,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    ROLLOUT_LOGPROBS,
    TRAINED_LENGTHS,
)
from rljob_trainer.workers.rollout_mismatch import add_agreement
from rljob_trainer.workers.update_sums import UpdateSums

Agreement = tuple[UpdateSums, Callable[[MicroBatch, Tensor], None]]
"""Sums for the agreement metrics of the rollout engine, and a function that gets each micro-batch with the trainer's
log-probabilities of its tokens, [N] without gradient."""


@dataclass(frozen=True)
class UpdateLoss:
    """The loss of one update. It is called with each micro-batch, and adds the micro-batch's metrics to `sums` on the
    device."""

    algorithm: Algorithm
    """The job's algorithm, resolved: all fields that count have values."""
    policy_loss: PolicyLoss
    denominators: Denominators
    kl_coefficient: float
    """The KL coefficient of this step. The coefficient in `algorithm` only decides whether there is a KL term."""
    gradient_divisor: int
    """The number of ranks over which gradients are averaged."""
    max_new_tokens: int
    whole: Mapping[str, Tensor]
    """The 0-d results of the loss's `whole_pass`, by name; the [N] results are columns of the micro-batch."""
    whole_columns: frozenset[str]
    """The names of the [N] results of `whole_pass`."""
    sums: UpdateSums
    agreement: Agreement | None
    """None if nothing is compared in this update: OLD_LOGPROBS were already compared with the rollout engine's
    log-probabilities, or it is not the step's first update."""
    failures: list[str] = field(default_factory=list)
    """Errors of the user's loss on this rank. After an error the forward and backward pass continues, because other
    ranks wait in the collectives of this pass; the caller checks the failures of all ranks afterwards."""

    def __call__(self, micro_batch: MicroBatch, distribution: TokenDistribution) -> Tensor:
        """The micro-batch's part of the mini-batch's loss, 0-d, times `gradient_divisor`."""
        columns = micro_batch.columns
        logprobs_N = distribution.logprobs_N
        if not len(logprobs_N):
            # A rank with fewer rows than others must still take part in the backward pass's collectives.
            return logprobs_N.sum()
        segments = Segments.of(micro_batch.response_lengths, logprobs_N.device)
        # Only the entropy bonus has a gradient through the entropy; the policy loss gets the entropy as a constant.
        entropy_N = None if distribution.entropy_N is None else distribution.entropy_N.detach()
        old_N = columns[OLD_LOGPROBS] if OLD_LOGPROBS in columns else logprobs_N.detach()
        inputs = LossInputs(
            segments=segments,
            logprobs_N=logprobs_N,
            old_logprobs_N=old_N,
            advantages_N=columns[ADVANTAGES],
            columns={name: columns[name] for name in self.policy_loss.needs},
            entropy_N=entropy_N if self.policy_loss.wanted.entropy else None,
            squares_N=distribution.squares_N if self.policy_loss.wanted.squares else None,
            whole={**self.whole, **{name: columns[name] for name in self.whole_columns}},
        )
        try:
            found = self.policy_loss.compute(inputs)
        except AlgorithmFunctionError as error:
            self.failures.append(str(error))
            return logprobs_N.sum() * 0.0
        log_ratios_N = logprobs_N.detach() - columns[ROLLOUT_LOGPROBS]
        if self.agreement is not None:
            agreement_sums, record = self.agreement
            add_agreement(agreement_sums, log_ratios_N)
            record(micro_batch, logprobs_N.detach())
        losses_N = found.losses_N
        correction = self.algorithm.rollout_correction
        if correction.type is not RolloutCorrectionType.NONE:
            weights_N = columns.get(CORRECTION_WEIGHTS)
            if weights_N is None:
                weights_N = correction_weights(log_ratios_N, segments, correction)
            losses_N = losses_N * weights_N
            self.sums.add(weight_sums(weights_N, resolved_value(correction.max_ratio)))
        lengths_N = columns.get(TRAINED_LENGTHS)
        policy_loss = self._aggregated(losses_N, segments, lengths_N)
        loss = policy_loss
        if self.algorithm.entropy_coefficient:
            assert distribution.entropy_N is not None
            entropy = self._aggregated(distribution.entropy_N, segments, lengths_N)
            loss = loss - self.algorithm.entropy_coefficient * entropy
        kl = self.algorithm.kl
        if kl.coefficient and kl.placement is KlPlacement.LOSS:
            kl_N = kl_estimate(logprobs_N, columns[REF_LOGPROBS], kl.estimator, straight_through=kl.straight_through)
            loss = loss + self.kl_coefficient * self._aggregated(kl_N, segments, lengths_N)
            self.sums.add({KL_LOSS: kl_N.detach().sum()})
        if is_distillation(self.algorithm):
            self.sums.add({TEACHER_KL: (old_N - columns[REF_LOGPROBS]).sum()})
        other_sums = {METRIC_PREFIX + name: value for name, value in found.sums.items()}
        if entropy_N is not None:
            other_sums[ENTROPY] = entropy_N.sum()
        self.sums.add({POLICY_LOSS: policy_loss.detach() / self.gradient_divisor, **other_sums}, len(logprobs_N))
        return loss

    def _aggregated(self, values_N: Tensor, segments: Segments, lengths_N: Tensor | None) -> Tensor:
        return aggregate_loss(
            values_N,
            segments,
            resolved_value(self.algorithm.aggregation),
            self.denominators,
            dp_size=self.gradient_divisor,
            max_new_tokens=self.max_new_tokens,
            lengths_N=lengths_N,
        )


def update_metrics(sums: UpdateSums, engine: TrainEngine, num_updates: int) -> dict[str, float]:
    """Collective. The metrics of `num_updates` updates, of the whole batch and equal on all ranks."""
    metrics = sums.reduced(engine, [POLICY_LOSS], {POLICY_LOSS: float(num_updates)})
    if CORRECTION_SAMPLE_SIZE in metrics:
        mean_of_squares = metrics[CORRECTION_SAMPLE_SIZE]
        metrics[CORRECTION_SAMPLE_SIZE] = metrics[CORRECTION_MEAN] ** 2 / (mean_of_squares or 1.0)
    return metrics


def weight_sums(weights_N: Tensor, max_ratio: float) -> dict[str, Tensor]:
    """Sums for the metrics of one micro-batch's importance weights."""
    return {
        CORRECTION_MEAN: weights_N.sum(),
        # `update_metrics` computes the sample size from this mean of squares.
        CORRECTION_SAMPLE_SIZE: weights_N.double().square().sum(),
        # A weight of 0 means that the token was masked, because a ratio is never 0.
        CORRECTION_BOUNDED: ((weights_N == 0) | (weights_N == max_ratio)).sum(),
    }
