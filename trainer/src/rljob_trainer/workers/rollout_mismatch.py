"""Metrics and corrections of the mismatch between rollout engine and trainer.

Legend: N response tokens, L tokens of all rows (prompts and responses). The log-ratio of a sampled token is its
log-probability by the trainer before the step's updates minus its log-probability by the rollout engine.
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
    num_marked,
    trained_mask,
)
from rljob_trainer.workers.update_sums import UpdateSums

LARGE_DIFFERENCE = 0.1
"""In nats: probabilities that differ by about ten percent."""
AGREEMENT_METRICS = (LOGPROB_DIFF_MEAN, LOGPROB_DIFF_SHARE, ROLLOUT_KL, ROLLOUT_K3_KL)
"""The metrics that are means over tokens; LOGPROB_DIFF_MAX is a maximum."""


def add_agreement(sums: UpdateSums, log_ratios_N: Tensor) -> None:
    """Adds the log-ratios of some tokens to the sums of the agreement metrics. The caller must add each token exactly
    once per step."""
    if not len(log_ratios_N):
        return
    distances_N = log_ratios_N.abs()
    # Clamped as for the correction weights, so that one token cannot make the mean infinite.
    clamped_N = log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    values = (distances_N, distances_N > LARGE_DIFFERENCE, -log_ratios_N, clamped_N.expm1() - clamped_N)
    found = {name: values_N.sum(dtype=torch.float64) for name, values_N in zip(AGREEMENT_METRICS, values, strict=True)}
    sums.add(found, len(log_ratios_N))
    sums.add_largest(LOGPROB_DIFF_MAX, distances_N.max())


def agreement_metrics(sums: UpdateSums, engine: TrainEngine) -> dict[str, float]:
    """Collective. The agreement metrics of the whole batch, equal on all ranks; empty if no token was compared."""
    found = sums.reduced(engine)
    return found | {LOGPROB_DIFF_MAX: sums.reduced_largest(engine, LOGPROB_DIFF_MAX)} if found else {}


def log_ratios(batch: DataProto) -> Tensor:
    """[N]: the log-ratios of the tokens that are trained on. Needs OLD_LOGPROBS."""
    mask_L = trained_mask(batch).values
    old_N, rollout_N = (batch.ragged_column(name).values[mask_L] for name in (OLD_LOGPROBS, ROLLOUT_LOGPROBS))
    return old_N - rollout_N


def with_correction_weights(batch: DataProto, correction: RolloutCorrection) -> DataProto:
    """Returns the batch with column CORRECTION_WEIGHTS added. Needs OLD_LOGPROBS. Call it before tokens are rejected,
    because a response's ratio includes all of its tokens."""
    mask = trained_mask(batch)
    segments = Segments.of(num_marked(mask), torch.device("cpu"))
    weights_N = correction_weights(log_ratios(batch), segments, correction)
    return batch.union(DataProto(ragged={CORRECTION_WEIGHTS: in_rows(weights_N, mask)}))


def staleness(batch: DataProto, policy_version: int, engine: TrainEngine) -> dict[str, float]:
    """Collective. Mean and maximum of the staleness of the tokens that are trained on: `policy_version` minus the
    version of the weights that sampled the token, in steps. Empty if no token is trained on."""
    ages_N = policy_version - batch.ragged_column(POLICY_VERSIONS).values[trained_mask(batch).values]
    total, count = engine.sum_over_ranks(torch.tensor([ages_N.sum(), len(ages_N)], dtype=torch.float64)).tolist()
    if not count:
        return {}
    largest = engine.max_over_ranks(torch.tensor(float(ages_N.max()) if len(ages_N) else 0.0)).item()
    return {STALENESS_MEAN: total / count, STALENESS_MAX: float(largest)}


def without_rejected(
    batch: DataProto, rejection: RolloutRejection, engine: TrainEngine
) -> tuple[DataProto, dict[str, float]]:
    """Collective. Returns the batch with rejected tokens removed from RESPONSE_MASK, and the metric REJECTED_FRACTION
    of the whole batch, without the metric if no token is trained on. Needs OLD_LOGPROBS."""
    mask = trained_mask(batch)
    kept_N = is_kept(log_ratios(batch), Segments.of(num_marked(mask), torch.device("cpu")), rejection)
    values_L = mask.values.clone()
    values_L[mask.values] = kept_N
    counts = torch.tensor([kept_N.sum(), len(kept_N)], dtype=torch.float64)
    num_kept, num_tokens = engine.sum_over_ranks(counts).tolist()
    kept = DataProto(ragged={RESPONSE_MASK: RaggedColumn(values_L, mask.lengths)})
    rejected = {REJECTED_FRACTION: (num_tokens - num_kept) / num_tokens} if num_tokens else {}
    return batch.without([RESPONSE_MASK]).union(kept), rejected
