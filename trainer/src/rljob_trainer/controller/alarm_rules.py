"""The rules of the alarms: which metrics each one reads, its limit, and its message.

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
from rljob_api.v1alpha1.reward import ErrorPolicy, Reward
from rljob_api.v1alpha1.rollout_correction import OldLogprobs, RolloutCorrectionType
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.controller.outcomes import NUM_STEPS
from rljob_trainer.observability.metrics import (
    EQUAL_SCORES_FRACTION,
    GRADIENT_NORM,
    KL_LOSS,
    LOGPROB_DIFF_MAX,
    LOGPROB_DIFF_MEAN,
    LOGPROB_DIFF_SHARE,
    MERGE_ERROR,
    NAMED_REWARD_PREFIX,
    NUM_SKIPPED_UPDATES,
    REJECTED_FRACTION,
    RESPONSE_CLIP_RATIO,
    REWARD_FAILED_FRACTION,
    REWARD_MAX,
    REWARD_MEAN,
    REWARD_MIN,
    ROLLOUT_FAILED_FRACTION,
    SAMPLING_KEPT,
    STALENESS_MAX,
    STATUS_RATES,
    Metrics,
)
from rljob_trainer.rewards.base import RewardStatus
from rljob_trainer.rewards.error_policies import policy_for

WINDOW = NUM_STEPS
"""Number of steps that an alarm looks at: those over which `training.maxFailureRate` counts."""
USUAL_FAILURES = 0.25
"""Limit of failed responses, relative to `training.maxFailureRate`, above which the run ends."""
MIN_FAILING_STEPS = 2
"""Failures are unusual only if this many of the last `WINDOW` steps have some."""
USUAL_TRUNCATED = 0.5
"""Largest usual fraction of truncated responses: "most" of them. A model that learns to stop begins above it."""
USUAL_EQUAL = 0.9
"""Largest usual fraction of groups with equal scores: at 0.9 a step trains on a tenth of its responses. Runs that learn
a hard task begin at 0.8."""
SOLVED_FRACTION = 0.8
"""Groups with equal scores are no problem if the mean score has reached this fraction of the range of scores in the
steps before: then most of them are equal because the policy solves the prompts."""
USUAL_DIFFERENCE = {Dtype.FLOAT32: 1e-3, Dtype.BFLOAT16: 0.05}
"""Mean difference of log-probabilities over a step's tokens, in nats. Rounding and different kernels explain
differences up to this value (docs/rollout-correction.md)."""
USUAL_REJECTED = 0.5
"""Largest usual fraction of tokens that the rejection of rollout correction excludes."""
USUAL_MERGE_ERROR = 0.1
"""Largest usual fraction of merged adapters that rounding loses (docs/lora.md). It is larger in the first steps of a
run, while the adapters are small."""
MEDIAN_FACTOR = 10
"""A gradient norm or KL is unusual above this multiple of its median in the steps before."""
MIN_MEDIAN_VALUES = 10
"""Number of values that such a median needs, and of steps from which the range of scores is known."""
MAX_MEDIAN_VALUES = 100
"""Number of the newest values that such a median is computed from. It is limited so that the usual range follows a
training that changes slowly."""
USUAL_KL = 1.0
"""A KL per token up to this value, in nats, is usual however small it was before: it begins at 0 and grows while the
policy learns."""


@dataclass(frozen=True)
class Observation:
    """What a step says about an alarm."""

    value: float | None
    """The value of the metric; None if it is not finite."""
    problem: str = ""
    """The message: the value, its limit, and what to do; empty if the value is usual."""


@dataclass(frozen=True)
class Rule:
    """An alarm of a run."""

    reason: Reason
    min_unusual_steps: int
    """The alarm is raised if the metric is unusual in this many of the last `WINDOW` steps that have a value. Larger
    for metrics that a healthy run may exceed for some steps."""
    observe: Callable[[Metrics], Observation | None]
    """Called with the metrics of each step, in order. None if the step has no value."""


def rules_of(spec: RLJobSpec) -> tuple[Rule, ...]:
    """The alarms of a job, most serious first. `spec.training.model.dtype` must not be `Auto`.

    A KL to another model than the policy at step 0 does not show how far the policy has moved, so it has no alarm."""
    has_own_reference = spec.roles.ref.model is not None
    max_norm, max_failures = spec.training.optimizer.max_gradient_norm, spec.training.max_failure_rate
    return (
        Rule(Reason.REWARD_ERRORS, 1, RewardErrors(max_failures, spec.training.rewards).observe),
        Rule(Reason.RESPONSES_EXCLUDED, 1, ResponsesExcluded(max_failures).observe),
        Rule(Reason.HIGH_GRADIENT_NORM, 3, GradientNorm(max_norm).observe),
        *([] if has_own_reference else [Rule(Reason.HIGH_KL, 3, Kl().observe)]),
        Rule(Reason.ROLLOUT_MISMATCH, 3, lambda metrics: rollout_mismatch(metrics, spec)),
        Rule(Reason.TOKENS_REJECTED, 3, lambda metrics: tokens_rejected(metrics, spec)),
        Rule(Reason.ADAPTERS_ROUNDED, 8, lambda metrics: adapters_rounded(metrics, spec)),
        Rule(Reason.RESPONSES_CUT_OFF, 5, lambda metrics: responses_cut_off(metrics, spec)),
        Rule(Reason.EQUAL_SCORES, 5, EqualScores().observe),
    )


class Failures:
    """A fraction of failed responses, as a mean over the last `WINDOW` steps. As for `training.maxFailureRate`, which
    counts responses instead of steps, missing steps count as steps without failures until that many are done."""

    def __init__(self, max_rate: float) -> None:
        """`max_rate`: `training.maxFailureRate`."""
        self.limit = USUAL_FAILURES * max_rate
        self.fractions: deque[float] = deque(maxlen=WINDOW)

    def observe(self, fraction: float, problem: Callable[[str], str]) -> Observation:
        """Counts a step in which `fraction` of the responses failed. `problem`: makes the message from a text such as
        `3 % of the responses of the last 10 steps (...)`. Steps without failures are usual, so one unusual step raises
        no alarm."""
        self.fractions.append(fraction)
        mean = sum(self.fractions) / len(self.fractions)
        num_failing = sum(each > 0 for each in self.fractions)
        is_usual = sum(self.fractions) / WINDOW <= self.limit or num_failing < MIN_FAILING_STEPS or fraction == 0
        text = (
            f"{_percent(mean)} of the responses of the last {len(self.fractions)} steps (usual: 0 %; at most "
            f"{_percent(self.limit)}, a quarter of maxFailureRate)"
        )
        return Observation(mean, "" if is_usual else problem(text))


class RewardErrors:
    """The fraction of responses that were excluded because a reward failed. A failure that `onError` or `onTimeout`
    turns into a score is no failure here."""

    def __init__(self, max_rate: float, rewards: Sequence[Reward]) -> None:
        """`rewards`: of the job. For `max_rate` see Failures."""
        self.failures = Failures(max_rate)
        self.rates = {
            f"{reward.name} {rate.removesuffix('_rate')}": f"{NAMED_REWARD_PREFIX}/{reward.name}/{rate}"
            for reward in rewards
            for status, rate in STATUS_RATES.items()
            if reward.weight != 0 and policy_for(reward, RewardStatus[status]) is not ErrorPolicy.SCORE
        }
        """By what the message says: the metrics of the failures that exclude a response."""

    def observe(self, metrics: Metrics) -> Observation | None:
        """See Rule."""
        fraction = _number(metrics, REWARD_FAILED_FRACTION)
        return None if fraction is None else self.failures.observe(fraction, lambda of: self._problem(of, metrics))

    def _problem(self, of_the_responses: str, metrics: Metrics) -> str:
        found = {text: metrics.get(name, 0.0) for text, name in self.rates.items()}
        worst = sorted(found.items(), key=lambda each: -each[1])[:3]
        details = ", ".join(f"{name} {_percent(value)}" for name, value in worst if value > 0)
        return (
            f"a reward failed for {of_the_responses}{f'; in this step: {details}' if details else ''}; logs/ of the "
            "run folder has the first failure of each kind"
        )


class ResponsesExcluded:
    """The fraction of responses that the rollout engine or the environment did not complete."""

    def __init__(self, max_rate: float) -> None:
        self.failures = Failures(max_rate)

    def observe(self, metrics: Metrics) -> Observation | None:
        """See Rule."""
        fraction = _number(metrics, ROLLOUT_FAILED_FRACTION)
        return None if fraction is None else self.failures.observe(fraction, self._problem)

    @staticmethod
    def _problem(of_the_responses: str) -> str:
        return (
            f"the rollout engine or the environment did not complete {of_the_responses}; they were excluded; see "
            "logs/ of the run folder and the metrics outcome/..."
        )


def rollout_mismatch(metrics: Metrics, spec: RLJobSpec) -> Observation | None:
    """The mean difference between the log-probabilities of rollout engine and trainer. Steps with responses of older
    weights are left out, because these are expected to differ."""
    mean = metrics.get(LOGPROB_DIFF_MEAN)
    if mean is None or metrics.get(STALENESS_MAX, 0.0) > 0:
        return None
    if not math.isfinite(mean):
        return _not_finite("the difference of the log-probabilities of rollout engine and trainer")
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
        f"than 0.1; up to {usual:g} is usual in {dtype}), so training is off-policy. {advice}; to find the cause "
        "try, one at a time, rollout.compile: Never, model.dtype: Float32, rollout.engine: HuggingFace",
    )


def tokens_rejected(metrics: Metrics, spec: RLJobSpec) -> Observation | None:
    """The fraction of tokens that rollout correction rejects."""
    fraction = _number(metrics, REJECTED_FRACTION)
    if fraction is None:
        return None
    if not fraction > USUAL_REJECTED:
        return Observation(fraction)
    more_often = ""
    if spec.training.rollout.sync_every_steps > 1:
        more_often = ", or synchronize the weights more often (rollout.syncEverySteps)"
    return Observation(
        fraction,
        f"training.algorithm.rolloutCorrection.rejection rejects {_percent(fraction)} of the tokens (usual: below "
        f"{_percent(USUAL_REJECTED)}); widen its bounds{more_often}",
    )


def adapters_rounded(metrics: Metrics, spec: RLJobSpec) -> Observation | None:
    """The fraction of merged adapters that rounding loses."""
    fraction = _number(metrics, MERGE_ERROR)
    if fraction is None:
        return None
    if not fraction > USUAL_MERGE_ERROR:
        return Observation(fraction)
    return Observation(
        fraction,
        "spec.training.model.lora.sync: the rollout engine gets the adapters merged into weights in "
        f"{spec.training.model.dtype}, and rounding loses {_percent(fraction)} of what the adapters add (usual: below "
        f"{_percent(USUAL_MERGE_ERROR)}); set sync: Adapter (requires rollout.engine: VLLM), or model.dtype: Float32",
    )


def responses_cut_off(metrics: Metrics, spec: RLJobSpec) -> Observation | None:
    """The fraction of responses that were truncated at a token limit."""
    fraction = _number(metrics, RESPONSE_CLIP_RATIO)
    if fraction is None:
        return None
    if not fraction > USUAL_TRUNCATED:
        return Observation(fraction)
    limits = f"rollout.maxNewTokens ({spec.training.rollout.max_new_tokens})"
    if spec.training.environment is not None:
        limits += ", environment.maxTurnTokens or maxContextTokens"
    return Observation(
        fraction,
        f"{_percent(fraction)} of the responses were truncated at the token limit (usual: below "
        f"{_percent(USUAL_TRUNCATED)}); increase {limits}, or ask for shorter responses",
    )


class EqualScores:
    """The fraction of groups whose scores are all equal, while the policy does not solve its prompts."""

    def __init__(self) -> None:
        self.ranges: deque[tuple[float, float]] = deque(maxlen=MAX_MEDIAN_VALUES)
        """The lowest and the highest score of the newest steps in which scores differ, without unusual steps."""

    def observe(self, metrics: Metrics) -> Observation | None:
        """See Rule."""
        fraction = _number(metrics, EQUAL_SCORES_FRACTION)
        mean, lowest, highest = (_number(metrics, name) for name in (REWARD_MEAN, REWARD_MIN, REWARD_MAX))
        if fraction is None or mean is None or lowest is None or highest is None:
            return None
        is_usual = fraction <= USUAL_EQUAL
        if lowest < highest and (is_usual or len(self.ranges) < MIN_MEDIAN_VALUES):
            self.ranges.append((lowest, highest))
        if is_usual or self._is_solved(mean):
            return Observation(fraction)
        effect = "so the policy hardly learns"
        if SAMPLING_KEPT in metrics:
            effect = "so dynamic sampling drops nearly all that is generated"
        return Observation(
            fraction,
            f"in {_percent(fraction)} of the groups all scores are equal (usual: below {_percent(USUAL_EQUAL)}; mean "
            f"score of the step: {mean:.3g}), {effect}; use prompts that the model sometimes solves, a reward with "
            "partial credit, or a larger rollout.groupSize",
        )

    def _is_solved(self, mean: float) -> bool:
        """Whether a step with this mean score has solved its prompts. A median, because single scores may be far below
        or above all others."""
        if not self.ranges:
            return False
        lowest = statistics.median_high(each for each, _ in self.ranges)
        highest = statistics.median_low(each for _, each in self.ranges)
        return mean >= lowest + SOLVED_FRACTION * (highest - lowest)


class UsualRange:
    """What is usual for a metric by its own history: up to `MEDIAN_FACTOR` times its median, without unusual values."""

    def __init__(self, always_usual_up_to: float, warm_up_limit: float) -> None:
        """`warm_up_limit`: the limit before the median is known."""
        self.always_usual_up_to = always_usual_up_to
        self.warm_up_limit = warm_up_limit
        self.values: deque[float] = deque(maxlen=MAX_MEDIAN_VALUES)

    def limit_for(self, value: float) -> float:
        """The largest usual value, by the values before this one. A zero does not count as a value: without a learning
        signal the gradient is 0."""
        limit = self.warm_up_limit
        if len(self.values) >= MIN_MEDIAN_VALUES:
            limit = max(self.always_usual_up_to, MEDIAN_FACTOR * statistics.median(self.values))
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
            f"the norm of the policy's gradient is {norm:.3g} (limit: {limit:.3g}, the larger of {MEDIAN_FACTOR} times "
            f"its median in this run and optimizer.maxGradientNorm); {advice}",
        )


class Kl:
    """The KL divergence of policy and reference per token."""

    def __init__(self) -> None:
        self.range: UsualRange | None = None

    def observe(self, metrics: Metrics) -> Observation | None:
        """See Rule."""
        kl = metrics.get(KL_LOSS)
        if kl is None:
            return None
        if not math.isfinite(kl):
            return _not_finite("the KL divergence of policy and reference")
        if self.range is None:
            # A resumed run may have another policy as its reference, with a large KL from its first step on.
            self.range = UsualRange(USUAL_KL, MEDIAN_FACTOR * kl if kl > USUAL_KL else USUAL_KL)
        limit = self.range.limit_for(kl)
        if kl <= limit:
            return Observation(kl)
        return Observation(
            kl,
            f"the KL divergence of policy and reference is {kl:.3g} nats per token (limit: {limit:.3g}, the larger of "
            f"{USUAL_KL:g} and {MEDIAN_FACTOR} times its usual value in this run); reduce optimizer.learningRate or "
            "increase algorithm.kl.coefficient, and read responses in samples.jsonl",
        )


def _not_finite(number: str) -> Observation:
    """A number that is NaN or infinite, because the training has diverged."""
    return Observation(
        None, f"{number} is not finite; reduce optimizer.learningRate, and resume from an earlier checkpoint"
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"


def _number(metrics: Metrics, name: str) -> float | None:
    """A metric of the step; None if the step does not have it, or if it is not finite."""
    value = metrics.get(name)
    return value if value is not None and math.isfinite(value) else None
