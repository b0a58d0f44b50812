"""The curves of a run from the lines of its metrics.jsonl, thinned to what a screen can show; and the charts of the
page with their lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rljob_page.run_files import MetricsLine

Points = tuple[list[int], list[float]]
"""Steps in ascending order, and the value of each step."""
Curves = Mapping[str, Points]

REWARD_MEAN = "critic/rewards/mean"
STEP_SECONDS = "timing_s/step"
EVAL_GREEDY, EVAL_SAMPLED = "eval/greedy_score", "eval/sampled_score"
MAX_METRICS = 400
"""The largest number of metrics of which curves are made; a loss of the user's own may report any number."""
PHASES = {
    "weight_sync": "weights to the rollout engine",
    "generate": "generation",
    "reward": "scores",
    "old_logprob": "old log-probabilities",
    "ref": "reference",
    "values": "values",
    "update_critic": "critic's update",
    "update_actor": "policy's update",
}
"""The phases of a step in order: the part of `timing_s/...` that names them, and their names on the page."""
OTHER_PHASE = "other"


@dataclass(frozen=True)
class ChartLine:
    """A curve of a chart."""

    metric: str
    label: str
    is_averaged: bool = False
    """Whether a moving average is drawn, too, and the curve itself in a lighter color."""


@dataclass(frozen=True)
class Chart:
    """A chart of the page. It is left out if the run has none of its metrics."""

    title: str
    unit: str
    lines: tuple[ChartLine, ...]
    is_share: bool = False
    """Whether the values are between 0 and 1."""
    scale: float = 1.0
    """Values are multiplied by it."""


CHARTS = (
    Chart("Training reward", "mean score", (ChartLine(REWARD_MEAN, "reward", is_averaged=True),)),
    Chart(
        "Held-out score",
        "mean score",
        (ChartLine(EVAL_GREEDY, "greedy"), ChartLine(EVAL_SAMPLED, "sampled")),
    ),
    Chart(
        "KL divergence",
        "nats per token",
        (
            ChartLine("actor/kl_loss", "policy to reference"),
            ChartLine("actor/ppo_kl", "policy before and after the update"),
            ChartLine("rollout_corr/k3_kl", "rollout engine to trainer"),
        ),
    ),
    Chart("Entropy of the policy", "nats per token", (ChartLine("actor/entropy", "entropy"),)),
    Chart(
        "Response length",
        "tokens",
        (ChartLine("response_length/mean", "mean"), ChartLine("response_length/max", "longest")),
    ),
    Chart(
        "Responses with problems",
        "share of responses",
        (
            ChartLine("response_length/clip_ratio", "truncated"),
            ChartLine("outcome/excluded_fraction", "without a score"),
            ChartLine("reward/error_rate", "reward error"),
            ChartLine("outcome/infrastructure_fraction", "not completed by the engine"),
        ),
        is_share=True,
    ),
    Chart(
        "Used in the update",
        "share of responses",
        (ChartLine("actor/trained_fraction", "used"),),
        is_share=True,
    ),
    Chart("Gradient norm", "before clipping", (ChartLine("actor/grad_norm", "policy"),)),
    Chart(
        "Rollout engine and trainer",
        "nats, difference of log-probabilities",
        (ChartLine("rollout/logprob_diff_mean", "mean"),),
    ),
    Chart("Throughput", "tokens per second and device", (ChartLine("perf/throughput", "all tokens"),)),
    Chart(
        "Memory of the fullest worker",
        "GiB",
        (
            ChartLine("memory/process_bytes_max", "process, on the host"),
            ChartLine("memory/during_generate_bytes_max", "device, generation"),
            ChartLine("memory/during_forward_backward_bytes_max", "device, update"),
        ),
        scale=1 / 2**30,
    ),
)


def read_curves(lines: Iterable[MetricsLine]) -> dict[str, Points]:
    """The values of every metric, by name. If a step has several values, the last one counts."""
    by_name: dict[str, dict[int, float]] = {}
    for line in lines:
        step = line.get("step")
        if type(step) is not int:
            continue
        for name, value in line.items():
            if name in by_name:
                by_name[name][step] = value
            elif len(by_name) < MAX_METRICS and name not in ("step", "wall_time"):
                by_name[name] = {step: value}
    # A resumed run repeats no step, so the points are usually in order already.
    return {name: _sorted(points) for name, points in by_name.items()}


def _sorted(points: Mapping[int, float]) -> Points:
    steps = sorted(points)
    return steps, [points[step] for step in steps]


def thinned(points: Points, max_points: int) -> Points:
    """At most `max_points` points: the smallest and the largest value of each of `max_points / 2` equal parts, so that
    no peak is lost. The first and the last point are kept."""
    steps, values = points
    if len(steps) <= max_points:
        return points
    num_buckets = max(1, (max_points - 2) // 2)
    kept = {0, len(steps) - 1}
    for number in range(num_buckets):
        begin, end = number * len(steps) // num_buckets, (number + 1) * len(steps) // num_buckets
        bucket = values[begin:end]
        kept |= {begin + bucket.index(min(bucket)), begin + bucket.index(max(bucket))}
    order = sorted(kept)
    return [steps[index] for index in order], [values[index] for index in order]


def averaging_window(num_steps: int) -> int:
    """Steps in a moving average: 10, and more for a long run."""
    return max(10, num_steps // 50)


def moving_average(points: Points, window: int) -> Points:
    """The mean of the last `window` values at each point; of fewer values at the beginning."""
    steps, values = points
    averages, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        averages.append(total / min(index + 1, window))
    return steps, averages


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of each phase. Of a long run, each entry is the mean over equally many steps."""

    steps: list[int]
    seconds: dict[str, list[float]]
    """By the name of the phase, in the order of a step. The last one is what no phase accounts for."""


def phase_seconds(curves: Curves, max_steps: int) -> PhaseSeconds | None:
    """The seconds of the phases of each step; None if no step has finished."""
    if STEP_SECONDS not in curves:
        return None
    steps, totals = curves[STEP_SECONDS]
    by_phase = {}
    for key, name in PHASES.items():
        if f"timing_s/{key}" in curves:
            seconds = dict(zip(*curves[f"timing_s/{key}"], strict=True))
            by_phase[name] = [max(0.0, seconds.get(step, 0.0)) for step in steps]
    # `rollout` includes generation and weight sync; what else it does counts as other.
    named = [math.fsum(row) for row in zip(*by_phase.values(), strict=True)] if by_phase else [0.0] * len(steps)
    by_phase[OTHER_PHASE] = [max(0.0, total - part) for total, part in zip(totals, named, strict=True)]
    size = math.ceil(len(steps) / max_steps)
    last_of_bucket = [min(begin + size, len(steps)) - 1 for begin in range(0, len(steps), size)]
    return PhaseSeconds(
        [steps[index] for index in last_of_bucket],
        {name: _bucket_means(values, size) for name, values in by_phase.items() if any(values)},
    )


def _bucket_means(values: Sequence[float], size: int) -> list[float]:
    buckets = (values[begin : begin + size] for begin in range(0, len(values), size))
    return [math.fsum(bucket) / len(bucket) for bucket in buckets]
