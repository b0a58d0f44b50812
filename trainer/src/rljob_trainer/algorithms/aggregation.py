"""From per-token losses to one number whose gradient depends neither on the micro-batches nor on the workers.

Legend: B rows of one micro-batch on one worker, N response tokens of them.

The denominators are those of the whole mini-batch on all workers. Each micro-batch contributes its part of one sum;
gradients of micro-batches add up by themselves, and because data-parallel gradients are *averaged* over `dp_size`
workers the part is multiplied by `dp_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rljob_api.v1alpha1.algorithm import LossAggregation
from rljob_trainer.algorithms.segments import Segments


@dataclass(frozen=True)
class Denominators:
    """Counts of the mini-batch over all workers."""

    num_tokens: float
    """Response tokens."""
    num_sequences: float
    """Rows with at least one response token; empty rows do not count."""


def count_denominators(segments: Segments) -> Denominators:
    """The counts of one part of the mini-batch; those of all parts are added up before use."""
    return Denominators(float(segments.num_values), float(segments.num_used))


def aggregate_loss(
    losses_N: Tensor,
    segments: Segments,
    aggregation: LossAggregation,
    denominators: Denominators,
    dp_size: int,
    max_new_tokens: int,
) -> Tensor:
    """This micro-batch's part of the mini-batch loss, 0-d, times `dp_size`.

    With N tokens and S rows in the mini-batch, n_i tokens in row i, l the losses and M the limit of new tokens:
    TokenMean: sum l / N (DAPO, arXiv 2503.14476, section 3.3).
    TokenSum: sum l.
    SequenceMeanTokenMean: sum_i (sum_t l / n_i) / S (GRPO, arXiv 2402.03300, equation 3).
    SequenceMeanTokenSum: sum_i (sum_t l) / S.
    SequenceMeanTokenSumNorm: sum_i (sum_t l) / (S M) (Dr.GRPO, arXiv 2503.20783, section 3.2).
    An empty mini-batch gives 0, not NaN.
    """
    num_sequences = max(denominators.num_sequences, 1.0)
    match aggregation:
        case LossAggregation.TOKEN_MEAN:
            return losses_N.sum() * (dp_size / max(denominators.num_tokens, 1.0))
        case LossAggregation.TOKEN_SUM:
            return losses_N.sum() * dp_size
        case LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN:
            # One product of numbers: sums over rows with a graph take three times as long.
            shares_B = (dp_size / num_sequences) / segments.lengths_B.clamp(min=1)
            return (losses_N * segments.spread(shares_B.to(losses_N.dtype))).sum()
        case LossAggregation.SEQUENCE_MEAN_TOKEN_SUM:
            return losses_N.sum() * (dp_size / num_sequences)
        case LossAggregation.SEQUENCE_MEAN_TOKEN_SUM_NORM:
            return losses_N.sum() * (dp_size / num_sequences / max_new_tokens)
