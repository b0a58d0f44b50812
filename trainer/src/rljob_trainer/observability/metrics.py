"""Metrics are a flat mapping from a name to a float; the names are those the field uses, so that dashboards carry over.

The last part of a name says how values of several workers become one: see `reduction_of`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

Metrics = Mapping[str, float]

REWARD_PREFIX: Final = "critic/rewards"
REWARD_MEAN: Final = "critic/rewards/mean"
REWARD_MAX: Final = "critic/rewards/max"
NAMED_REWARD_PREFIX: Final = "reward"
ERROR_RATE: Final = "error_rate"
TIMEOUT_RATE: Final = "timeout_rate"
REWARD_ERROR_RATE: Final = "reward/error_rate"
REWARD_TIMEOUT_RATE: Final = "reward/timeout_rate"
LEARNED_FRACTION: Final = "actor/learned_fraction"
"""Share of responses that are learned from."""
DISTINCT_FRACTION: Final = "actor/distinct_fraction"
"""Share of different ones among the responses that were drawn by policy filtration."""
SAMPLING_ROUNDS: Final = "dynamic_sampling/rounds"
"""Calls of the rollout engine in a step; this and the next ones with dynamic sampling only."""
SAMPLING_PROMPTS: Final = "dynamic_sampling/prompts"
"""Prompts of these rounds."""
SAMPLING_KEPT: Final = "dynamic_sampling/kept_fraction"
"""Share of their groups whose scores are not all equal."""
SAMPLING_SURPLUS: Final = "dynamic_sampling/surplus_groups"
"""Of these what the batch had no place for."""
SAMPLING_RETURNED: Final = "dynamic_sampling/returned_prompts"
"""Prompts that are drawn again in the next step."""
SAMPLING_REWARD_PREFIX: Final = "dynamic_sampling/batch_rewards"
"""Of the responses in the batch, where `REWARD_PREFIX` is of all that were generated."""
ROWS_LEFT_OUT: Final = "data/rows_left_out"
"""Rows that the step has passed over because their answer cannot be scored; where answers are checked when drawn."""
ADVANTAGE_MEAN: Final = "critic/advantages/mean"

POLICY_LOSS: Final = "actor/pg_loss"
ENTROPY: Final = "actor/entropy"
KL_LOSS: Final = "actor/kl_loss"
"""KL(policy || reference) by the job's estimator."""
KL_COEFFICIENT: Final = "actor/kl_coefficient"
"""Of that KL in this step."""
PPO_KL: Final = "actor/ppo_kl"
"""Mean of old minus new log-probability within one batch."""
CLIP_FRACTION: Final = "actor/pg_clipfrac"
GRADIENT_NORM: Final = "actor/grad_norm"
LEARNING_RATE: Final = "actor/lr"
NUM_SKIPPED_UPDATES: Final = "actor/num_skipped_updates"
"""Updates whose gradients were not finite."""

VALUE_LOSS: Final = "critic/vf_loss"
VALUE_CLIP_FRACTION: Final = "critic/vf_clipfrac"
VALUE_MEAN: Final = "critic/vpred_mean"
EXPLAINED_VARIANCE: Final = "critic/vf_explained_var"
"""1 - Var(return - value) / Var(return), with the values before the update: 1 where the critic knew all, 0 where it
knew no more than the mean."""
CRITIC_GRADIENT_NORM: Final = "critic/grad_norm"
CRITIC_LEARNING_RATE: Final = "critic/lr"
CRITIC_NUM_SKIPPED_UPDATES: Final = "critic/num_skipped_updates"

ROUTER_LOSS: Final = "actor/router_aux_loss"
"""Auxiliary loss of a mixture of experts, before its coefficient; 1 x experts per token where all are used alike."""
EXPERT_LOAD_MEAN: Final = "experts/load_imbalance_mean"
EXPERT_LOAD_MAX: Final = "experts/load_imbalance_max"
"""Tokens of a layer's fullest expert over those of its mean one: mean over the layers, and that of the worst."""
EXPERTS_UNUSED: Final = "experts/unused_fraction"
"""Share of experts that no token was given to."""

RESPONSE_LENGTH_PREFIX: Final = "response_length"
RESPONSE_LENGTH_MEAN: Final = "response_length/mean"
RESPONSE_LENGTH_MAX: Final = "response_length/max"
RESPONSE_CLIP_RATIO: Final = "response_length/clip_ratio"
"""Share of responses cut off by the token limit."""
PROMPT_LENGTH_MEAN: Final = "prompt_length/mean"
PROMPT_LENGTH_MAX: Final = "prompt_length/max"

LOGPROB_DIFF_MAX: Final = "rollout/logprob_diff_max"
LOGPROB_DIFF_MEAN: Final = "rollout/logprob_diff_mean"
LOGPROB_DIFF_SHARE: Final = "rollout/logprob_diff_share"
"""Share of tokens on which the two are more than a tenth of a nat apart."""
STALENESS_MEAN: Final = "rollout/staleness_mean"
STALENESS_MAX: Final = "rollout/staleness_max"
"""Steps by which the weights that sampled a token are older than those that learn from it."""
ROLLOUT_KL: Final = "rollout_corr/kl"
"""Mean log-probability of the rollout engine less that of the trainer: K1 estimate of KL(generator || trainer)."""
ROLLOUT_K3_KL: Final = "rollout_corr/k3_kl"
"""The same by K3: never negative, less noise."""
CORRECTION_MEAN: Final = "rollout_corr/rollout_is_mean"
"""Of the weights of rollout correction."""
CORRECTION_SAMPLE_SIZE: Final = "rollout_corr/rollout_is_eff_sample_size"
"""Square of their mean over the mean of their squares: 1 where all are equal."""
CORRECTION_BOUNDED: Final = "rollout_corr/rollout_is_bounded_fraction"
"""Share of tokens whose weight met a bound."""
REJECTED_FRACTION: Final = "rollout_corr/rollout_rs_masked_fraction"
"""Share of tokens that rejection leaves out."""

THROUGHPUT: Final = "perf/throughput"
"""Prompt and response tokens per second and device."""
TOTAL_TOKENS: Final = "perf/total_num_tokens"
TIME_PER_STEP: Final = "perf/time_per_step"
TOKEN_IMBALANCE: Final = "perf/token_imbalance"
"""Tokens of the worker that has the most to update with, over those of the mean worker."""
TOKEN_IMBALANCE_BEFORE: Final = "perf/token_imbalance_before"
"""The same, had every worker kept the responses that it made."""
CONTROLLER_SENT_BYTES: Final = "perf/controller_sent_bytes"
"""Payload of the batches that the controller sent in a step; what workers pass on to each other is not in it."""
CONTROLLER_RECEIVED_BYTES: Final = "perf/controller_received_bytes"
"""Payload of the batches that came to the controller in a step."""

EVAL_GREEDY: Final = "eval/greedy_score"
EVAL_SAMPLED: Final = "eval/sampled_score"

TIMING_PREFIX: Final = "timing_s/"
STEP_SECONDS: Final = TIMING_PREFIX + "step"
EVAL_SECONDS: Final = TIMING_PREFIX + "eval"
WHOLE_PASS_SECONDS: Final = TIMING_PREFIX + "whole_pass"
"""Of the step's passes without gradient over whole mini-batches, with losses that ask for them."""

MEMORY_PREFIX: Final = "memory/"


class Reduction(StrEnum):
    """How the values of several workers become one."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


_BY_LAST_WORD: Final = {"max": Reduction.MAX, "min": Reduction.MIN, "sum": Reduction.SUM, "mean": Reduction.MEAN}


def reduction_of(name: str) -> Reduction:
    """The rule for one metric.

    Timings take the maximum, because a step waits for its slowest worker; a name that ends in max, min, sum or mean
    (after `/` or `_`) does what it says; other totals (`perf/total_...`) are added up, all others averaged.
    """
    if name.startswith(TIMING_PREFIX):
        return Reduction.MAX
    last = name.rsplit("/", maxsplit=1)[-1]
    by_default = Reduction.SUM if last.startswith("total_") else Reduction.MEAN
    return _BY_LAST_WORD.get(last.rsplit("_", maxsplit=1)[-1], by_default)


def reduce_metrics(per_worker: Sequence[Metrics]) -> dict[str, float]:
    """One mapping from those of several workers; each metric over the workers that report it, in order of first sight.

    A NaN of any worker makes the result NaN, and so do opposite infinities: a broken worker must show.
    """
    collected: dict[str, list[float]] = {}
    for metrics in per_worker:
        for name, value in metrics.items():
            collected.setdefault(name, []).append(value)
    return {name: _reduce(values, reduction_of(name)) for name, values in collected.items()}


def spread(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """`prefix/mean`, `prefix/max` and `prefix/min` of `values`; nothing for no values."""
    if not values:
        return {}
    return {f"{prefix}/{rule}": _reduce(values, rule) for rule in (Reduction.MEAN, Reduction.MAX, Reduction.MIN)}


def _reduce(values: Sequence[float], rule: Reduction) -> float:
    if any(math.isnan(value) for value in values):
        return math.nan
    match rule:
        case Reduction.MAX:
            return float(max(values))
        case Reduction.MIN:
            return float(min(values))
        case Reduction.SUM:
            return _sum(values)
        case Reduction.MEAN:
            return _sum(values) / len(values)


def _sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        # fsum raises where floats are added up to infinity, or to NaN.
        return float(sum(values))
