"""What a pass through a `TokenModel` is asked for: functions for its `forward`, and their results in a batch's order.

Legend: B rows, R response tokens of all rows, L layers with experts, E experts of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rljob_trainer.engines.train.token_batch import MicroBatch
from rljob_trainer.engines.train.token_model import Outputs, Question, TokenModel


def columns(micro_batch: MicroBatch, question: Question, model: TokenModel) -> Outputs:
    """Of the response tokens: what the question says."""
    return model.columns(micro_batch, question)


def routed_columns(micro_batch: MicroBatch, question: Question, model: TokenModel) -> Outputs:
    """The counts of experts, the two parts of a RouterUse where an auxiliary loss is wanted, else None, and the same
    columns."""
    found, counts_LE, use = model.routed_columns(micro_batch, question)
    return (counts_LE, *((None, None) if use is None else (use.counts_LE, use.probabilities_E)), *found)


def router_use(micro_batch: MicroBatch, model: TokenModel) -> Outputs:
    """The parts of a RouterUse; nothing for a model that gives no logits of its routers."""
    use = model.router_use(micro_batch)
    return () if use is None else (use.counts_LE, use.probabilities_E)


def own_values(rows: Sequence[Tensor], model: TokenModel) -> Outputs:
    """See TokenModel.own_values."""
    return model.own_values(rows)


def own_logprobs(rows: Sequence[Tensor], model: TokenModel) -> Outputs:
    """See TokenModel.own_logprobs."""
    return model.own_logprobs(rows)


def in_batch_order(values: Sequence[Tensor], micro_batches: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
    """[R]: what the micro-batches gave, in the order of the batch's rows."""
    parts: dict[int, Tensor] = {}
    for rows, values_R in zip(micro_batches, values, strict=True):
        sizes = [lengths[row] for row in rows]
        parts.update(zip(rows, torch.split_with_sizes(values_R, sizes), strict=True) if rows else ())
    found = [parts[row] for row in sorted(parts)]
    return torch.cat(found) if found else torch.zeros(0)
