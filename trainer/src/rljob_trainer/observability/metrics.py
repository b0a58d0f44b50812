"""The names of all metrics, and how metrics of several workers are reduced to one.

Metrics are a flat mapping from name to float. Most names are those of verl, so that dashboards can be reused. The last
part of a name determines the reduction over workers: see `reduction_of`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Final

Metrics = Mapping[str, float]

REWARD_PREFIX: Final = "critic/rewards"
REWARD_MEAN: Final = "critic/rewards/mean"
REWARD_MAX: Final = "critic/rewards/max"
REWARD_MIN: Final = "critic/rewards/min"
NAMED_REWARD_PREFIX: Final = "reward"
"""The metrics of one reward are `reward/<name>/...`, for example `reward/<name>/mean`."""
STATUS_RATES: Final = MappingProxyType(
    {"ERROR": "error_rate", "TIMEOUT": "timeout_rate", "DIED": "died_rate", "UNREACHABLE": "unreachable_rate"}
)
"""By the status of a scoring: last part of the name of the metric with the fraction of responses that have it."""
COMPLETED_FRACTION: Final = "outcome/completed_fraction"
MAX_TOKENS_FRACTION: Final = "outcome/max_tokens_fraction"
CONTEXT_FULL_FRACTION: Final = "outcome/context_full_fraction"
MAX_TURNS_FRACTION: Final = "outcome/max_turns_fraction"
PARSE_ERROR_FRACTION: Final = "outcome/parse_error_fraction"
TIME_LIMIT_FRACTION: Final = "outcome/time_limit_fraction"
REPLACED_FRACTION: Final = "outcome/replaced_fraction"
INFRASTRUCTURE_FRACTION: Final = "outcome/infrastructure_fraction"
ERROR_FRACTION: Final = "outcome/error_fraction"
"""Fractions of responses by how they ended."""
EXCLUDED_FRACTION: Final = "outcome/excluded_fraction"
"""Fraction of responses without a score."""
REWARD_FAILED_FRACTION: Final = "outcome/reward_failed_fraction"
ROLLOUT_FAILED_FRACTION: Final = "outcome/rollout_failed_fraction"
"""Fractions of responses, those that were replaced included, that were excluded because a reward gave no score, and
because the engine or the environment did not complete them."""
ALONE_FRACTION: Final = "outcome/alone_fraction"
"""Fraction of responses that are not used because all others of their group were excluded."""
EQUAL_SCORES_FRACTION: Final = "groups/equal_scores_fraction"
"""Fraction of groups whose scores are all equal, of the groups with at least two scores. Exists only if advantages
compare the responses of a group."""
TRAINED_FRACTION: Final = "actor/trained_fraction"
"""Fraction of responses that are used in the update."""
DISTINCT_FRACTION: Final = "actor/distinct_fraction"
"""Fraction of distinct responses among those that policy filtration has drawn."""
SAMPLING_ROUNDS: Final = "dynamic_sampling/rounds"
"""Rounds of generation in a step. This and the following metrics exist only with dynamic sampling."""
SAMPLING_PROMPTS: Final = "dynamic_sampling/prompts"
"""Prompts of all rounds of a step."""
SAMPLING_KEPT: Final = "dynamic_sampling/kept_fraction"
"""Fraction of groups whose scores are not all equal."""
SAMPLING_SURPLUS: Final = "dynamic_sampling/surplus_groups"
"""Kept groups that did not fit into the batch."""
SAMPLING_RETURNED: Final = "dynamic_sampling/returned_prompts"
"""Prompts that return to the stream and are drawn again in the next step."""
SAMPLING_REWARD_PREFIX: Final = "dynamic_sampling/batch_rewards"
"""Rewards of the responses in the batch; `REWARD_PREFIX` is for all generated responses."""
SOURCE_PREFIX: Final = "data"
"""With `training.datasets`, the metrics of one dataset are `data/<name>/...`: `score/mean`, `score/max` and `score/min`
of the responses to its prompts, and the next two. With `sourceField`, those of a source are the same except epochs;
`data/<dataset>/source/<source>/...` with both."""
SOURCE_PROMPTS: Final = "prompts"
"""Prompts of the step that are from this dataset or source."""
SOURCE_EPOCHS: Final = "epochs"
"""Epochs of the dataset that were drawn, for example 1.5."""
ROWS_SKIPPED: Final = "data/rows_skipped"
"""Rows that the step skipped because their answers cannot be scored. Exists only if answers are checked when rows are
drawn."""
PASS_RATE_MEAN: Final = "prompt_sampling/pass_rate_mean"
"""Mean of the known pass rates of the rows, with `promptSampling: {type: PassRate}`."""
SOURCE_PASS_RATE: Final = "pass_rate_mean"
"""The same for one of `training.datasets`."""
PASS_RATE_SKIPPED: Final = "prompt_sampling/rows_skipped"
"""Rows that the step skipped because of their pass rates."""
ADVANTAGE_MEAN: Final = "critic/advantages/mean"

POLICY_LOSS: Final = "actor/pg_loss"
ENTROPY: Final = "actor/entropy"
KL_LOSS: Final = "actor/kl_loss"
"""KL(policy || reference) in nats per token, with the job's estimator."""
TEACHER_KL: Final = "actor/teacher_kl"
"""K1 estimate of KL(policy || teacher) in nats per token, with advantage Distillation. The policy is that before the
step's updates."""
KL_COEFFICIENT: Final = "actor/kl_coefficient"
"""Coefficient of the KL term in this step."""
PPO_KL: Final = "actor/ppo_kl"
"""Mean of old minus new log-probability over the tokens of a batch."""
CLIP_FRACTION: Final = "actor/pg_clipfrac"
GRADIENT_NORM: Final = "actor/grad_norm"
LEARNING_RATE: Final = "actor/lr"
NUM_SKIPPED_UPDATES: Final = "actor/num_skipped_updates"
"""Updates that were skipped because their gradients were not finite."""

VALUE_LOSS: Final = "critic/vf_loss"
VALUE_CLIP_FRACTION: Final = "critic/vf_clipfrac"
VALUE_MEAN: Final = "critic/vpred_mean"
EXPLAINED_VARIANCE: Final = "critic/vf_explained_var"
"""1 - Var(return - value) / Var(return), with the values before the update: 1 for a perfect critic, 0 for one that
predicts the mean."""
CRITIC_GRADIENT_NORM: Final = "critic/grad_norm"
CRITIC_LEARNING_RATE: Final = "critic/lr"
CRITIC_NUM_SKIPPED_UPDATES: Final = "critic/num_skipped_updates"

ROUTER_LOSS: Final = "actor/router_aux_loss"
"""Auxiliary loss of a mixture of experts, without its coefficient. It equals the number of experts per token if all
experts have the same load."""
EXPERT_LOAD_MEAN: Final = "experts/load_imbalance_mean"
EXPERT_LOAD_MAX: Final = "experts/load_imbalance_max"
"""Tokens of a layer's most used expert divided by the mean over its experts: mean and maximum over the layers."""
EXPERTS_UNUSED: Final = "experts/unused_fraction"
"""Fraction of experts without any token."""

RESPONSE_LENGTH_PREFIX: Final = "response_length"
RESPONSE_LENGTH_MEAN: Final = "response_length/mean"
RESPONSE_LENGTH_MAX: Final = "response_length/max"
RESPONSE_CLIP_RATIO: Final = "response_length/clip_ratio"
"""Fraction of responses that are truncated at the token limit."""
ROWS_PER_RESPONSE_MEAN: Final = "rows_per_response/mean"
ROWS_PER_RESPONSE_MAX: Final = "rows_per_response/max"
"""Rows of tokens per response. Exist only in steps in which a response has several."""
PROMPT_LENGTH_MEAN: Final = "prompt_length/mean"
PROMPT_LENGTH_MAX: Final = "prompt_length/max"

LOGPROB_DIFF_MAX: Final = "rollout/logprob_diff_max"
LOGPROB_DIFF_MEAN: Final = "rollout/logprob_diff_mean"
LOGPROB_DIFF_SHARE: Final = "rollout/logprob_diff_share"
"""Fraction of tokens whose log-probabilities in rollout engine and trainer differ by more than 0.1 nat."""
STALENESS_MEAN: Final = "rollout/staleness_mean"
STALENESS_MAX: Final = "rollout/staleness_max"
"""Age, in steps, of the weights that sampled a token, compared with the weights that are updated."""
ROLLOUT_KL: Final = "rollout_corr/kl"
"""Mean log-probability in the rollout engine minus that in the trainer: K1 estimate of KL(rollout || trainer)."""
ROLLOUT_K3_KL: Final = "rollout_corr/k3_kl"
"""The same KL with the K3 estimator, which is never negative and has less variance."""
CORRECTION_MEAN: Final = "rollout_corr/rollout_is_mean"
"""Mean importance weight of the rollout correction."""
CORRECTION_SAMPLE_SIZE: Final = "rollout_corr/rollout_is_eff_sample_size"
"""Effective sample size of the importance weights, as a fraction: mean^2 / mean of squares; 1 if all are equal."""
CORRECTION_BOUNDED: Final = "rollout_corr/rollout_is_bounded_fraction"
"""Fraction of tokens whose importance weight was clipped at a bound."""
REJECTED_FRACTION: Final = "rollout_corr/rollout_rs_masked_fraction"
"""Fraction of tokens that the rejection excludes from the update."""

MERGE_ERROR: Final = "lora/merge_error"
"""Fraction of what adapters add to the weights that rounding to 16 bits loses when they are merged for the rollout
engine. Exists only with merged adapters in 16 bits."""

TURNS_PREFIX: Final = "environment/turns"
TOOL_CALLS_MEAN: Final = "environment/tool_calls_mean"
TOOL_ERROR_RATE: Final = "environment/tool_error_rate"
"""Fraction of the tool calls that gave an error, or could not be read."""
REWRITTEN_FRACTION: Final = "environment/rewritten_fraction"
"""Fraction of the conversations for which the chat template would have written another text."""
ENVIRONMENT_SECONDS_MEAN: Final = "environment/call_seconds_mean"
GENERATION_SECONDS_MEAN: Final = "environment/generation_seconds_mean"

THROUGHPUT: Final = "perf/throughput"
"""Tokens of all rows, prompts included, per second and device."""
TOTAL_TOKENS: Final = "perf/total_num_tokens"
TIME_PER_STEP: Final = "perf/time_per_step"
MICRO_BATCH_IMBALANCE: Final = "perf/micro_batch_imbalance"
"""The most expensive micro-batches of the updates, divided by the mean cost of a worker; see
`controller/balanced_order.py`."""
TOKEN_IMBALANCE: Final = "perf/token_imbalance"
"""Tokens of the worker with the most tokens in the update, divided by the mean over workers."""
TOKEN_IMBALANCE_BEFORE: Final = "perf/token_imbalance_before"
"""What TOKEN_IMBALANCE would be if responses had not been redistributed across workers."""
CONTROLLER_SENT_BYTES: Final = "perf/controller_sent_bytes"
"""Payload of the batches that the controller sent in a step, without what workers send to each other."""
CONTROLLER_RECEIVED_BYTES: Final = "perf/controller_received_bytes"
"""Payload of the batches that the controller received in a step."""

TIMING_PREFIX: Final = "timing_s/"
STEP_SECONDS: Final = TIMING_PREFIX + "step"
EVAL_SECONDS: Final = TIMING_PREFIX + "eval"
WHOLE_PASS_SECONDS: Final = TIMING_PREFIX + "whole_pass"
"""Time of the passes without gradient over whole mini-batches, which only some losses need."""

MEMORY_PREFIX: Final = "memory/"


class Reduction(StrEnum):
    """How the values of several workers are reduced to one."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


_BY_LAST_WORD: Final = {"max": Reduction.MAX, "min": Reduction.MIN, "sum": Reduction.SUM, "mean": Reduction.MEAN}


def reduction_of(name: str) -> Reduction:
    """Returns the reduction of one metric.

    Timings use the maximum, because a step waits for its slowest worker. A name that ends in max, min, sum or mean
    (after `/` or `_`) uses that reduction. Totals (`perf/total_...`) are summed, and all others are averaged.
    """
    if name.startswith(TIMING_PREFIX):
        return Reduction.MAX
    last = name.rsplit("/", maxsplit=1)[-1]
    by_default = Reduction.SUM if last.startswith("total_") else Reduction.MEAN
    return _BY_LAST_WORD.get(last.rsplit("_", maxsplit=1)[-1], by_default)


def reduce_metrics(per_worker: Sequence[Metrics]) -> dict[str, float]:
    """Reduces the metrics of several workers to one mapping. Each metric is reduced over the workers that report it.

    If any worker reports NaN, the result is NaN, so that a broken worker is visible; also a mean or a sum of opposite
    infinities.
    """
    collected: dict[str, list[float]] = {}
    for metrics in per_worker:
        for name, value in metrics.items():
            collected.setdefault(name, []).append(value)
    return {name: _reduce(values, reduction_of(name)) for name, values in collected.items()}


def spread(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """Returns `prefix/mean`, `prefix/max` and `prefix/min` of `values`; empty without values."""
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
        # fsum raises an error instead of returning infinity or NaN.
        return float(sum(values))
