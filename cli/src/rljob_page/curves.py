"""The curves of a run from the rows of its metrics.jsonl, thinned to what a screen can show; and the charts of the
page with their lines.
"""

from __future__ import annotations

import math
import operator
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TypeGuard

Points = tuple[Sequence[int], Sequence[float]]
"""Steps in ascending order, and the value of each step; NaN for a value that was not finite, or above 1e300."""
Curves = Mapping[str, Points]

REWARD_MEAN = "critic/rewards/mean"
STEP_SECONDS = "timing_s/step"
MAX_METRICS = 400
"""The largest number of metrics on the page; a loss of the user's own may report many."""
_MAX_STEP = 2**53
"""JavaScript represents smaller whole numbers exactly."""
MAX_NUMBER = 2**63
"""Larger whole numbers are ignored, because float cannot represent all of them."""
MAX_VALUE = 1e300
"""Larger values count as not finite, so that sums of values are finite."""
MAX_LINES = 8
"""The largest number of lines of a chart, and of charts of evaluations."""
EVAL_PREFIX = "eval/"
_MAIN_SCORE = re.compile(r"eval/(?P<name>[^/]+)/(?P<kind>greedy|mean_at_\d+)")
_MAX_NAME = 200
"""Metrics with longer names are not shown."""
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
        "KL divergence",
        "nats per token",
        (
            ChartLine("actor/kl_loss", "policy to reference"),
            ChartLine("actor/teacher_kl", "policy to teacher"),
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


def charts_of(names: Iterable[str]) -> tuple[Chart, ...]:
    """The charts for the metrics with these names: those of every run, and those of evaluations."""
    reward, *others = CHARTS
    return (reward, *_evaluation_charts(names), *others)


def _evaluation_charts(names: Iterable[str]) -> list[Chart]:
    """A chart for the scores of each evaluation, and of each of its rewards; one for all shares, and one for all
    lengths."""
    scores: dict[str, list[ChartLine]] = {}
    shares: list[ChartLine] = []
    lengths: list[ChartLine] = []
    for metric in names:
        if metric.startswith(EVAL_PREFIX) and len(metric) <= _MAX_NAME:
            group, _, name = metric.removeprefix(EVAL_PREFIX).rpartition("/")
            if name == "response_length_mean":
                lengths.append(ChartLine(metric, group))
            elif name.endswith("_fraction"):
                shares.append(ChartLine(metric, f"{group}, {name.removesuffix('_fraction').replace('_', ' ')}"))
            else:
                scores.setdefault(group, []).append(ChartLine(metric, name.replace("_at_", "@")))
    charts = [
        Chart(f"Held-out score, {group.replace('/', ' ')}", "mean score", tuple(lines[:MAX_LINES]))
        for group, lines in list(scores.items())[:MAX_LINES]
    ]
    if shares:
        charts.append(Chart("Held-out responses", "share of responses", tuple(shares[:MAX_LINES]), is_share=True))
    if lengths:
        charts.append(Chart("Length of held-out responses", "tokens", tuple(lengths[:MAX_LINES])))
    return charts


def held_out_scores(curves: Curves) -> dict[str, str]:
    """The metric with the main score of each evaluation by the evaluation's name, that of the first evaluation first:
    the greedy score, or without it the mean score of sampled responses."""
    found: dict[str, str] = {}
    for metric in curves:
        match = _MAIN_SCORE.fullmatch(metric)
        if match and len(metric) <= _MAX_NAME and (match["name"] not in found or match["kind"] == "greedy"):
            found[match["name"]] = metric
    return found


def shown_metrics(curves: Curves, charts: Iterable[Chart]) -> list[str]:
    """The names of the metrics on the page: those of the charts, then others, at most `MAX_METRICS`."""
    first = [line.metric for chart in charts for line in chart.lines if line.metric in curves]
    names = dict.fromkeys([*first, *(name for name in curves if name != "wall_time")])
    return [name for name in names if len(name) <= _MAX_NAME][:MAX_METRICS]


def curves_of(rows: Iterable[Mapping[str, object]]) -> dict[str, Points]:
    """The values of every metric, by name, from rows with their `step`. If a step has several values, the last one
    counts. A value that was not finite is NaN (the trainer writes null for it); values that are no numbers are left
    out. Values are kept in arrays, because a long run has millions."""
    columns: dict[str, tuple[array[int], array[float]]] = {}
    for row in rows:
        step = row.get("step")
        if not is_step(step):
            continue
        for name, value in row.items():
            # `type` is faster than isinstance, and excludes bool.
            kind = type(value)
            if kind is float:
                number = value if -MAX_VALUE < value < MAX_VALUE else math.nan  # type: ignore[operator]
            elif value is None:
                number = math.nan
            elif kind is int and -MAX_NUMBER < value < MAX_NUMBER and name != "step":  # type: ignore[operator]
                number = float(value)  # type: ignore[arg-type]
            else:
                continue
            column = columns.get(name)
            if column is None:
                column = columns[name] = (array("q"), array("d"))
            column[0].append(step)
            column[1].append(number)  # type: ignore[arg-type]
    return {name: _ascending(*column) for name, column in columns.items()}


def is_step(value: object) -> TypeGuard[int]:
    """Whether a value of a JSON document is the number of a step."""
    return type(value) is int and 0 <= value < _MAX_STEP


def _ascending(steps: array[int], values: array[float]) -> Points:
    # A resumed run repeats no step, so the steps are usually in order already.
    if not any(map(operator.ge, steps, islice(steps, 1, None))):
        return steps, values
    points = sorted(dict(zip(steps, values, strict=True)).items())
    return array("q", (step for step, _ in points)), array("d", (value for _, value in points))


def lines_of(curves: Curves) -> tuple[dict[str, float], ...]:
    """The finite metrics of each step by name, with `step` among them."""
    lines: dict[int, dict[str, float]] = {}
    for name, points in curves.items():
        for step, value in zip(*finite(points), strict=True):
            lines.setdefault(step, {"step": step})[name] = value
    return tuple(lines[step] for step in sorted(lines))


def finite(points: Points) -> Points:
    """The points that are not NaN."""
    steps, values = points
    if not any(map(math.isnan, values)):
        return points
    kept = [index for index, value in enumerate(values) if not math.isnan(value)]
    return [steps[index] for index in kept], [values[index] for index in kept]


def not_finite_since(points: Points) -> int | None:
    """The first step since which all values are NaN; None if the newest value is finite."""
    found = None
    for step, value in zip(reversed(points[0]), reversed(points[1]), strict=True):
        if not math.isnan(value):
            break
        found = step
    return found


def thinned(points: Points, max_points: int) -> Points:
    """At most `max_points` points: the smallest and the largest value of each of equally long parts, so that no peak is
    lost, and the first NaN of each part. The first and the last point are kept."""
    steps, values = points
    if len(steps) <= max_points:
        return points
    has_gaps = any(map(math.isnan, values))
    num_buckets = max(1, (max_points - 2) // (3 if has_gaps else 2))
    kept = {0, len(steps) - 1}
    for number in range(num_buckets):
        begin, end = number * len(steps) // num_buckets, (number + 1) * len(steps) // num_buckets
        bucket = values[begin:end]
        gap = next((index for index, value in enumerate(bucket) if math.isnan(value)), None) if has_gaps else None
        if gap is not None:
            kept.add(begin + gap)
        numbers = bucket if gap is None else [value for value in bucket if not math.isnan(value)]
        if numbers:
            kept |= {begin + bucket.index(min(numbers)), begin + bucket.index(max(numbers))}
    order = sorted(kept)
    return [steps[index] for index in order], [values[index] for index in order]


def averaging_window(num_steps: int) -> int:
    """Steps in a moving average: 10, and more for a long run."""
    return max(10, num_steps // 50)


def moving_average(points: Points, window: int) -> Points:
    """The mean of the last `window` finite values at each point; of fewer values at the beginning."""
    steps, values = finite(points)
    averages: list[float] = []
    # Each sum is that of the end of the block before plus that of the begin of this block. Nothing is subtracted, so no
    # rounding error of a very large value stays.
    ends = [0.0] * window
    for begin in range(0, len(values), window):
        block = values[begin : begin + window]
        for index, (total, end) in enumerate(zip(accumulate(block), ends, strict=False), start=begin + 1):
            averages.append((end + total) / min(index, window))
        ends = [*reversed([*accumulate(reversed(block[1:]))]), 0.0]
    return steps, averages


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of each phase. Of a long run, each entry is the mean over equally many steps."""

    steps: list[int]
    seconds: dict[str, list[float]]
    """By the name of the phase, in the order of a step. The last one is what no phase accounts for."""


def phase_seconds(curves: Curves, max_steps: int) -> PhaseSeconds | None:
    """The seconds of the phases of each step; None if no step has finished."""
    steps, totals = finite(curves.get(STEP_SECONDS, ([], [])))
    if not steps:
        return None
    by_phase = {}
    for key, name in PHASES.items():
        if f"timing_s/{key}" in curves:
            seconds = dict(zip(*finite(curves[f"timing_s/{key}"]), strict=True))
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
