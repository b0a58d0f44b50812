"""How far the rollout engine and the trainer are apart, and what is not learned from because of it.

Legend: R response tokens of the rows at hand. Log ratios are the trainer's log-probability of a sampled token, before
the step's updates, less that which the rollout engine gave to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.rollout_correction import RolloutCorrection, RolloutRejection
from rljob_trainer.algorithms.kl import MAX_LOG_RATIO
from rljob_trainer.algorithms.rollout_correction import correction_weights, is_kept
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.token_batch import in_rows
from rljob_trainer.observability.metrics import (
    LOGPROB_DIFF_MAX,
    LOGPROB_DIFF_MEAN,
    LOGPROB_DIFF_SHARE,
    REJECTED_FRACTION,
    ROLLOUT_K3_KL,
    ROLLOUT_KL,
    STALENESS_MAX,
    STALENESS_MEAN,
)
from rljob_trainer.workers.columns import (
    CORRECTION_WEIGHTS,
    OLD_LOGPROBS,
    POLICY_VERSIONS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    learned_mask,
)
from rljob_trainer.workers.update_sums import UpdateSums

LARGE_DIFFERENCE = 0.1
"""In nats: a probability that is a tenth off."""


AGREEMENT_METRICS = (LOGPROB_DIFF_MEAN, LOGPROB_DIFF_SHARE, ROLLOUT_KL, ROLLOUT_K3_KL)


def add_agreement(sums: UpdateSums, log_ratios_R: Tensor) -> None:
    """Adds what trainer and generator say of some tokens; each token counts once in a step."""
    if not len(log_ratios_R):
        return
    distances_R = log_ratios_R.abs()
    # Held as in the weights: one token must not make the mean infinite.
    held_R = log_ratios_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    values = (distances_R, distances_R > LARGE_DIFFERENCE, -log_ratios_R, held_R.expm1() - held_R)
    found = {name: values_R.sum(dtype=torch.float64) for name, values_R in zip(AGREEMENT_METRICS, values, strict=True)}
    sums.add(found, len(log_ratios_R))
    sums.add_largest(LOGPROB_DIFF_MAX, distances_R.max())


def agreement_metrics(sums: UpdateSums, engine: TrainEngine) -> dict[str, float]:
    """Collective. Of the whole batch, equal on all ranks."""
    return sums.reduced(engine, AGREEMENT_METRICS) | {LOGPROB_DIFF_MAX: sums.reduced_largest(engine, LOGPROB_DIFF_MAX)}


def log_ratios(batch: DataProto) -> Tensor:
    """[R], of the response tokens that are learned from; a batch with OLD_LOGPROBS."""
    mask_L = learned_mask(batch).values
    old_R, rollout_R = (batch.ragged_column(name).values[mask_L] for name in (OLD_LOGPROBS, ROLLOUT_LOGPROBS))
    return old_R - rollout_R


def with_weights(batch: DataProto, correction: RolloutCorrection) -> DataProto:
    """The batch, which has OLD_LOGPROBS, with CORRECTION_WEIGHTS. Before any token is rejected: a response's ratio is
    that of all of its tokens."""
    mask = learned_mask(batch)
    segments = Segments.of(num_marked(mask), torch.device("cpu"))
    weights_R = correction_weights(log_ratios(batch), segments, correction)
    return batch.union(DataProto(ragged={CORRECTION_WEIGHTS: in_rows(weights_R, mask)}))


def staleness(batch: DataProto, policy_version: int, engine: TrainEngine) -> dict[str, float]:
    """Collective. By how many steps the weights that sampled a token are older than `policy_version`: metrics over the
    tokens that are learned from, on all ranks."""
    ages_R = policy_version - batch.ragged_column(POLICY_VERSIONS).values[learned_mask(batch).values]
    total, count = engine.sum_over_ranks(torch.tensor([ages_R.sum(), len(ages_R)], dtype=torch.float64)).tolist()
    largest = engine.max_over_ranks(torch.tensor(float(ages_R.max()) if len(ages_R) else 0.0)).item()
    return {STALENESS_MEAN: total / max(1.0, count), STALENESS_MAX: float(largest)}


def without_rejected(
    batch: DataProto, rejection: RolloutRejection, engine: TrainEngine
) -> tuple[DataProto, dict[str, float]]:
    """Collective. The batch, which has OLD_LOGPROBS, with a RESPONSE_MASK that leaves out what trainer and generator
    disagree on, and which share of the tokens that is."""
    mask = learned_mask(batch)
    kept_R = is_kept(log_ratios(batch), Segments.of(num_marked(mask), torch.device("cpu")), rejection)
    values_L = mask.values.clone()
    values_L[mask.values] = kept_R
    counts = torch.tensor([kept_R.sum(), len(kept_R)], dtype=torch.float64)
    num_kept, num_tokens = engine.sum_over_ranks(counts).tolist()
    kept = DataProto(ragged={RESPONSE_MASK: RaggedColumn(values_L, mask.lengths)})
    rejected = {REJECTED_FRACTION: (num_tokens - num_kept) / max(1.0, num_tokens)}
    return batch.without([RESPONSE_MASK]).union(kept), rejected


def num_marked(mask: RaggedColumn) -> tuple[int, ...]:
    """[B]: marked tokens of each row."""
    return tuple(int(row.sum()) for row in mask.row_tensors())
