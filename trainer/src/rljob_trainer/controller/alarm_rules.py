"""The alarms of a training: what the metrics of a step say about each, and which values are usual.

A rule reads nothing but the metrics of the steps, in order. So a resumed run that reads `metrics.jsonl` again computes
the same as an uninterrupted one. `alarms` decides from several steps whether an alarm is raised.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rljob_api.conditions import Reason
from rljob_api.v1alpha1.model import Dtype
from rljob_api.v1alpha1.rollout_correction import OldLogprobs, RolloutCorrectionType
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.observability.metrics import (
    EQUAL_SCORES_FRACTION,
    EXCLUDED_FRACTION,
    GRADIENT_NORM,
    KL_LOSS,
    LOGPROB_DIFF_MAX,
    LOGPROB_DIFF_MEAN,
    LOGPROB_DIFF_SHARE,
    MERGE_ERROR,
    NAMED_REWARD_PREFIX,
    NUM_SKIPPED_UPDATES,
    REJECTED_FRACTION,
    REPLACED_FRACTION,
    RESPONSE_CLIP_RATIO,
    REWARD_MAX,
    REWARD_MEAN,
    REWARD_MIN,
    STALENESS_MAX,
    STATUS_RATES,
    Metrics,
)

WINDOW = 10
"""Number of steps that an alarm looks at: those over which `training.maxFailureRate` counts."""
MOST_FAILURES = 0.05
"""Largest usual fraction of responses without a result of a reward, of the engine or of the environment. A quarter of
the default of `training.maxFailureRate`, which ends the run."""
MOST_CUT_OFF = 0.5
"""Largest usual fraction of truncated responses: "most" of them. A model that learns to stop begins above it."""
MOST_EQUAL = 0.9
"""Largest usual fraction of groups with equal scores: at 0.9 a step trains on a tenth of its responses. Runs that learn
a hard task begin at 0.8."""
SOLVED = 0.8
"""Groups with equal scores are no problem if the mean reward has reached this fraction of the range of all scores of
the run: then most of them are equal because the policy solves the prompts."""
USUAL_DIFFERENCE = {Dtype.FLOAT32: 1e-3, Dtype.BFLOAT16: 0.05}
"""Mean difference of log-probabilities over a step's tokens, in nats. Rounding and different kernels explain
differences up to this value (docs/rollout-correction.md)."""
MOST_REJECTED = 0.5
"""Largest usual fraction of tokens that the rejection of rollout correction excludes."""
LARGEST_MERGE_ERROR = 0.1
"""Largest usual fraction of merged adapters that rounding loses (docs/lora.md). It is larger in the first steps of a
run, while the adapters are small."""
GROWTH = 10
"""A gradient norm or KL is unusual above this multiple of its median in the steps before."""
WARM_UP = 10
"""Number of values that such a median needs."""
HISTORY = 100
"""Number of the newest values that such a median is computed from. It is limited so that the usual range follows a
training that changes slowly."""
SMALL_KL = 1.0
"""A KL per token up to this value, in nats, is usual however small it was before: it begins at 0 and grows while the
policy learns. The small models of examples/ reach 0.3."""


@dataclass(frozen=True)
class Observation:
    """What a step says about an alarm."""

    value: float | None
    """The number that the rule observes; None if it is not finite."""
    problem: str = ""
    """The number, what is usual, and what to do; empty if the number is usual."""


@dataclass(frozen=True)
class Rule:
    """An alarm of a run."""

    reason: Reason
    num_steps: int
    """The alarm is raised if the number is unusual in this many of the last `WINDOW` steps that have it. More steps for
    numbers that a healthy run may have for a while."""
    observe: Callable[[Metrics], Observation | None]
    """Called with the metrics of each step, in order; None if the step does not have the number."""


def rules_of(spec: RLJobSpec) -> tuple[Rule, ...]:
    """The alarms of a job, most serious first. `spec.training.model.dtype` must not be `Auto`."""
    names = [reward.name for reward in spec.training.rewards]
    max_norm = spec.training.optimizer.max_gradient_norm
    return (
        Rule(Reason.REWARD_ERRORS, 2, lambda metrics: reward_errors(metrics, names)),
        Rule(Reason.RESPONSES_EXCLUDED, 2, responses_excluded),
        Rule(Reason.HIGH_GRADIENT_NORM, 3, GradientNorm(max_norm).observe),
        Rule(Reason.HIGH_KL, 3, Kl().observe),
        Rule(Reason.ROLLOUT_MISMATCH, 3, lambda metrics: rollout_mismatch(metrics, spec)),
        Rule(Reason.TOKENS_REJECTED, 3, lambda metrics: tokens_rejected(metrics, spec)),
        Rule(Reason.ADAPTERS_ROUNDED, 8, lambda metrics: adapters_rounded(metrics, spec)),
        Rule(Reason.RESPONSES_CUT_OFF, 5, lambda metrics: responses_cut_off(metrics, spec)),
        Rule(Reason.EQUAL_SCORES, 5, EqualScores().observe),
    )


def reward_errors(metrics: Metrics, names: Sequence[str]) -> Observation | None:
    """The fraction of responses for which a reward failed. `names`: of all rewards."""
    rates = [rate for rate in STATUS_RATES.values() if f"{NAMED_REWARD_PREFIX}/{rate}" in metrics]
    if not rates:
        return None
    fraction = _failed_fraction(metrics)
    if not fraction > MOST_FAILURES:
        return Observation(fraction)
    found = {
        f"{name} {rate.removesuffix('_rate')}": metrics.get(f"{NAMED_REWARD_PREFIX}/{name}/{rate}", 0.0)
        for name in names
        for rate in rates
    }
    worst = sorted(found.items(), key=lambda each: -each[1])[:3]
    details = ", ".join(f"{name} {_percent(value)}" for name, value in worst if value > 0)
    return Observation(
        fraction,
        f"a reward failed for {_percent(fraction)} of the responses (usual: 0 %; {details}); logs/ of the run folder "
        "has the first failure of each kind",
    )


def responses_excluded(metrics: Metrics) -> Observation | None:
    """The fraction of responses that were excluded or replaced by others, without those for which a reward failed."""
    excluded = _number(metrics, EXCLUDED_FRACTION)
    if excluded is None:
        return None
    fraction = max(0.0, min(1.0, excluded + metrics.get(REPLACED_FRACTION, 0.0)) - _failed_fraction(metrics))
    if not fraction > MOST_FAILURES:
        return Observation(fraction)
    return Observation(
        fraction,
        f"{_percent(fraction)} of the responses were excluded or replaced by others (usual: 0 %), without those for "
        "which a reward failed: the rollout engine or the environment did not complete them, or the reward of a "
        "replaced response failed; see logs/ of the run folder and the metrics outcome/...",
    )


def rollout_mismatch(metrics: Metrics, spec: RLJobSpec) -> Observation | None:
    """The mean difference between the log-probabilities of rollout engine and trainer. Steps with responses of older
    weights are left out, because these are expected to differ."""
    mean = _number(metrics, LOGPROB_DIFF_MEAN)
    if mean is None or metrics.get(STALENESS_MAX, 0.0) > 0:
        return None
    dtype, correction = spec.training.model.dtype, spec.training.algorithm.rollout_correction
    usual = USUAL_DIFFERENCE[dtype]
    if mean <= usual:
        return Observation(mean)
    share = _percent(metrics.get(LOGPROB_DIFF_SHARE, math.nan))
    has_weights = correction.type is not RolloutCorrectionType.NONE
    advice = "training.algorithm.rolloutCorrection corrects for this"
    if not has_weights and correction.old_logprobs is not OldLogprobs.ROLLOUT:
        advice = "training.algorithm.rolloutCorrection: {type: TokenTruncated} would correct for this"
    return Observation(
        mean,
        "training/inference mismatch: the log-probabilities of the rollout engine and of the trainer differ by "
        f"{mean:.2g} nats on average (max {metrics.get(LOGPROB_DIFF_MAX, math.nan):.2g}, {share} of the tokens by more "
        f"than 0.1; up to {usual:g} is usual in {dtype}), so training is off-policy. {advice}; to find the cause try "
        "rollout.compile: Never, model.dtype: Float32, rollout.engine: HuggingFace",
    )


def tokens_rejected(metrics: Metrics, spec: RLJobSpec) -> Observation | None:
    """The fraction of tokens that rollout correction rejects."""
    fraction = _number(metrics, REJECTED_FRACTION)
    if fraction is None:
        return None
    if not fraction > MOST_REJECTED:
        return Observation(fraction)
    more_often = ""
    if spec.training.rollout.sync_every_steps > 1:
        more_often = ", or sync the weights more often (rollout.syncEverySteps)"
    return Observation(
        fraction,
        f"training.algorithm.rolloutCorrection.rejection rejects {_percent(fraction)} of the tokens (usual: below "
        f"{_percent(MOST_REJECTED)}); widen its bounds{more_often}",
    )


def adapters_rounded(metrics: Metrics, spec: RLJobSpec) -> Observation | None:
    """The fraction of merged adapters that rounding loses."""
    fraction = _number(metrics, MERGE_ERROR)
    if fraction is None:
        return None
    if not fraction > LARGEST_MERGE_ERROR:
        return Observation(fraction)
    return Observation(
        fraction,
        "spec.training.model.lora.sync: the rollout engine gets the adapters merged into weights in "
        f"{spec.training.model.dtype}, and rounding loses {_percent(fraction)} of what the adapters add (usual: below "
        f"{_percent(LARGEST_MERGE_ERROR)}); set sync: Adapter (requires rollout.engine: VLLM), or model.dtype: Float32",
    )


def responses_cut_off(metrics: Metrics, spec: RLJobSpec) -> Observation | None:
    """The fraction of responses that were truncated at a token limit."""
    fraction = _number(metrics, RESPONSE_CLIP_RATIO)
    if fraction is None:
        return None
    if not fraction > MOST_CUT_OFF:
        return Observation(fraction)
    limits = f"rollout.maxNewTokens ({spec.training.rollout.max_new_tokens})"
    if spec.training.environment is not None:
        limits += ", environment.maxTurnTokens or maxContextTokens"
    return Observation(
        fraction,
        f"{_percent(fraction)} of the responses were truncated at the token limit (usual: below "
        f"{_percent(MOST_CUT_OFF)}); increase {limits}, or ask for shorter responses",
    )


class EqualScores:
    """The fraction of groups whose scores are all equal, while the policy does not solve its prompts."""

    def __init__(self) -> None:
        self.lowest, self.highest = math.inf, -math.inf
        """The lowest and the highest score of the run."""

    def observe(self, metrics: Metrics) -> Observation | None:
        """See Rule."""
        fraction = _number(metrics, EQUAL_SCORES_FRACTION)
        mean, lowest, highest = (_number(metrics, name) for name in (REWARD_MEAN, REWARD_MIN, REWARD_MAX))
        if mean is None or lowest is None or highest is None:
            return None
        self.lowest, self.highest = min(self.lowest, lowest), max(self.highest, highest)
        if fraction is None:
            return None
        solved = self.lowest + SOLVED * (self.highest - self.lowest)
        is_solved = self.lowest < self.highest and mean >= solved
        if is_solved or not fraction > MOST_EQUAL:
            return Observation(fraction)
        return Observation(
            fraction,
            f"in {_percent(fraction)} of the groups all scores are equal (usual: below {_percent(MOST_EQUAL)}; mean "
            f"score of the step: {mean:.3g}), so nearly nothing is learned; use prompts that the model sometimes "
            "solves, a reward with partial credit, or a larger rollout.groupSize",
        )


class UsualRange:
    """What is usual for a number by its own history: up to `GROWTH` times its median, without unusual values."""

    def __init__(self, floor: float, warm_up_limit: float) -> None:
        """`floor`: every value up to it is usual. `warm_up_limit`: the limit before the median is known."""
        self.floor = floor
        self.warm_up_limit = warm_up_limit
        self.values: deque[float] = deque(maxlen=HISTORY)

    def limit_for(self, value: float) -> float:
        """The largest usual value, by the values before this one. A zero does not count as a value: without a learning
        signal the gradient is 0."""
        limit = self.warm_up_limit
        if len(self.values) >= WARM_UP:
            limit = max(self.floor, GROWTH * statistics.median(self.values))
        if 0 < value <= limit:
            self.values.append(value)
        return limit


class GradientNorm:
    """The norm of the policy's gradient before it is clipped."""

    def __init__(self, max_norm: float) -> None:
        """`max_norm`: the norm to which gradients are clipped. Up to it a gradient is used as it is."""
        # A first gradient may be large, because it depends on the model and on the scores.
        self.range = UsualRange(max_norm, math.inf)

    def observe(self, metrics: Metrics) -> Observation | None:
        """See Rule."""
        norm = metrics.get(GRADIENT_NORM)
        if norm is None:
            return None
        advice = "reduce optimizer.learningRate"
        if not math.isfinite(norm) or metrics.get(NUM_SKIPPED_UPDATES, 0.0) > 0:
            return Observation(
                None,
                f"gradients of the policy were not finite, so updates were skipped; {advice}, or find the scores or "
                "losses that are not finite",
            )
        limit = self.range.limit_for(norm)
        if norm <= limit:
            return Observation(norm)
        return Observation(
            norm,
            f"the norm of the policy's gradient is {norm:.3g} (usual in this run: below {limit:.3g}, {GROWTH} times "
            f"its median); {advice}",
        )


class Kl:
    """The KL divergence of policy and reference per token."""

    def __init__(self) -> None:
        self.range = UsualRange(SMALL_KL, SMALL_KL)

    def observe(self, metrics: Metrics) -> Observation | None:
        """See Rule."""
        kl = _number(metrics, KL_LOSS)
        if kl is None:
            return None
        limit = self.range.limit_for(kl)
        if kl <= limit:
            return Observation(kl)
        return Observation(
            kl,
            f"the KL divergence of policy and reference is {kl:.3g} nats per token (usual in this run: below "
            f"{limit:.3g}); reduce optimizer.learningRate or increase algorithm.kl.coefficient, and read responses in "
            "samples.jsonl",
        )


def _failed_fraction(metrics: Metrics) -> float:
    """The fraction of responses for which a reward failed; a response for which several failed may count as often."""
    return min(1.0, sum(metrics.get(f"{NAMED_REWARD_PREFIX}/{rate}", 0.0) for rate in STATUS_RATES.values()))


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _number(metrics: Metrics, name: str) -> float | None:
    """A metric of the step; None if the step does not have it, or if it is not finite."""
    value = metrics.get(name)
    return value if value is not None and math.isfinite(value) else None
