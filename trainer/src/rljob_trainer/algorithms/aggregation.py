"""From per-token losses to one number whose gradient depends neither on the micro-batches nor on the workers.

Shapes: B sequences of one micro-batch on one worker, T response tokens.

The denominators are those of the whole mini-batch on all workers. Each micro-batch contributes its part of one sum;
gradients of micro-batches add up by themselves, and because data-parallel gradients are *averaged* over `dp_size`
workers the part is multiplied by `dp_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rljob_api.v1alpha1.algorithm import LossAggregation


@dataclass(frozen=True)
class Denominators:
    """Counts of the mini-batch over all workers."""

    num_tokens: float
    """Response tokens, which is the sum of all masks."""
    num_sequences: float
    """Sequences with at least one response token; padding rows do not count."""

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences)


def count_denominators(mask_BT: Tensor) -> Denominators:
    """The counts of one part of the mini-batch; the parts of all workers are added up before use."""
    return Denominators(float(mask_BT.sum()), float(mask_BT.bool().any(dim=1).sum()))


def aggregate_loss(
    loss_BT: Tensor,
    mask_BT: Tensor,
    aggregation: LossAggregation,
    denominators: Denominators,
    dp_size: int,
) -> Tensor:
    """This micro-batch's part of the mini-batch loss, 0-d, times `dp_size`.

    With N tokens and S sequences in the mini-batch, n_i tokens in sequence i and l the masked loss:
    TokenMean: sum l / N (DAPO, arXiv 2503.14476, section 3.3).
    SequenceMeanTokenMean: sum_i (sum_t l / n_i) / S (GRPO, arXiv 2402.03300, equation 3).
    SequenceMeanTokenSum: sum_i (sum_t l) / S (Dr.GRPO, arXiv 2503.20783, up to its constant).
    An empty mini-batch gives 0, not NaN.
    """
    # `where`, not a product: a masked position may hold inf or NaN, and 0 * NaN would poison the sum.
    masked_BT = loss_BT.where(mask_BT.bool(), 0.0)
    num_sequences = max(denominators.num_sequences, 1.0)
    match aggregation:
        case LossAggregation.TOKEN_MEAN:
            part = masked_BT.sum() / max(denominators.num_tokens, 1.0)
        case LossAggregation.SEQUENCE_MEAN_TOKEN_MEAN:
            lengths_B = mask_BT.sum(dim=1).clamp(min=1)
            part = (masked_BT.sum(dim=1) / lengths_B).sum() / num_sequences
        case LossAggregation.SEQUENCE_MEAN_TOKEN_SUM:
            part = masked_BT.sum() / num_sequences
    return part * dp_size
