"""The loss of a micro-batch, put together from the parts that the job's algorithm names: policy loss, entropy, KL.

Legend: B rows, R response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.kl import KlPlacement
from rljob_api.v1alpha1.recipes import filled
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
)
from rljob_trainer.workers.columns import ADVANTAGES, CORRECTION_WEIGHTS, OLD_LOGPROBS, REF_LOGPROBS, ROLLOUT_LOGPROBS
from rljob_trainer.workers.rollout_agreement import add_agreement
from rljob_trainer.workers.update_sums import UpdateSums


@dataclass(frozen=True)
class UpdateLoss:
    """Of one update: call it with each micro-batch. What it is reported by is added to `sums`, on the device."""

    algorithm: Algorithm
    """Resolved."""
    policy_loss: PolicyLoss
    denominators: Denominators
    kl_coefficient: float
    """In use; that of `algorithm` says only whether there is a KL term."""
    gradient_divisor: int
    """What gradients are averaged over."""
    max_new_tokens: int
    whole: Mapping[str, Tensor]
    """What the loss's pass over the whole mini-batch gave: single numbers; values per token are among the columns."""
    whole_columns: frozenset[str]
    sums: UpdateSums
    agreement: UpdateSums | None
    """For what is not compared with the generator before: None where the batch has old log-probabilities."""
    failures: list[str] = field(default_factory=list)
    """What the user's own loss was blamed for here. The other ranks are in the collectives of this pass, so it goes on;
    whoever updates asks all ranks afterwards."""

    def __call__(self, micro_batch: MicroBatch, distribution: TokenDistribution) -> Tensor:
        """The micro-batch's part of the mini-batch's loss, 0-d, times what gradients are averaged over."""
        columns = micro_batch.columns
        logprobs_R = distribution.logprobs_N
        if not len(logprobs_R):
            # A rank that has fewer rows than others still takes part in the gradient's collectives.
            return logprobs_R.sum()
        segments = Segments.of(micro_batch.response_lengths, logprobs_R.device)
        # The bonus has its own gradient through the entropy; a policy loss gets the number.
        entropy_R = None if distribution.entropy_N is None else distribution.entropy_N.detach()
        old_R = columns[OLD_LOGPROBS] if OLD_LOGPROBS in columns else logprobs_R.detach()
        inputs = LossInputs(
            segments=segments,
            logprobs_N=logprobs_R,
            old_logprobs_N=old_R,
            advantages_N=columns[ADVANTAGES],
            columns={name: columns[name] for name in self.policy_loss.needs},
            entropy_N=entropy_R if self.policy_loss.wanted.entropy else None,
            squares_N=distribution.squares_N if self.policy_loss.wanted.squares else None,
            whole={**self.whole, **{name: columns[name] for name in self.whole_columns}},
        )
        try:
            found = self.policy_loss.compute(inputs)
        except AlgorithmFunctionError as error:
            self.failures.append(str(error))
            return logprobs_R.sum() * 0.0
        log_ratios_R = (old_R - columns[ROLLOUT_LOGPROBS]).detach()
        if self.agreement is not None:
            add_agreement(self.agreement, log_ratios_R)
        losses_R = found.losses_N
        correction = self.algorithm.rollout_correction
        if correction.type is not RolloutCorrectionType.NONE:
            weights_R = columns.get(CORRECTION_WEIGHTS)
            if weights_R is None:
                weights_R = correction_weights(log_ratios_R, segments, correction)
            losses_R = losses_R * weights_R
            self.sums.add(weight_sums(weights_R, filled(correction.max_ratio)))
        policy_loss = self._aggregated(losses_R, segments)
        loss = policy_loss
        if self.algorithm.entropy_coefficient:
            assert distribution.entropy_N is not None
            loss = loss - self.algorithm.entropy_coefficient * self._aggregated(distribution.entropy_N, segments)
        kl = self.algorithm.kl
        if kl.coefficient and kl.placement is KlPlacement.LOSS:
            kl_R = kl_estimate(logprobs_R, columns[REF_LOGPROBS], kl.estimator, straight_through=kl.straight_through)
            loss = loss + self.kl_coefficient * self._aggregated(kl_R, segments)
            self.sums.add({KL_LOSS: kl_R.detach().sum()})
        own = {METRIC_PREFIX + name: value for name, value in found.sums.items()}
        if entropy_R is not None:
            own[ENTROPY] = entropy_R.sum()
        self.sums.add({POLICY_LOSS: policy_loss.detach() / self.gradient_divisor, **own}, len(logprobs_R))
        return loss

    def _aggregated(self, values_R: Tensor, segments: Segments) -> Tensor:
        return aggregate_loss(
            values_R,
            segments,
            filled(self.algorithm.aggregation),
            self.denominators,
            dp_size=self.gradient_divisor,
            max_new_tokens=self.max_new_tokens,
        )


def update_metrics(sums: UpdateSums, engine: TrainEngine, num_updates: int) -> dict[str, float]:
    """Collective. What the updates of a step are reported by, of the whole batch, equal on all ranks."""
    metrics = sums.reduced(engine, [POLICY_LOSS], {POLICY_LOSS: float(num_updates)})
    if CORRECTION_SAMPLE_SIZE in metrics:
        mean_of_squares = metrics[CORRECTION_SAMPLE_SIZE]
        metrics[CORRECTION_SAMPLE_SIZE] = metrics[CORRECTION_MEAN] ** 2 / (mean_of_squares or 1.0)
    return metrics


def weight_sums(weights_R: Tensor, max_ratio: float) -> dict[str, Tensor]:
    """Of what the policy losses of one micro-batch were multiplied by."""
    return {
        CORRECTION_MEAN: weights_R.sum(),
        CORRECTION_SAMPLE_SIZE: weights_R.double().square().sum(),
        # A ratio itself is never 0.
        CORRECTION_BOUNDED: ((weights_R == 0) | (weights_R == max_ratio)).sum(),
    }
