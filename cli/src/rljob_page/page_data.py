"""The content of the page as one JSON document. The page's scripts read it, and so can a notebook:

    data = json.load(open("run.json"))                       # rljob view runs/x --json run.json
    pandas.Series(**data["curves"]["critic/rewards/mean"])   # index: steps, data: values

Curves have at most `MAX_POINTS` points. Texts of a model or a user are in it as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from rljob_api.job_file import shareable_job_text
from rljob_api.run_state import RunPhase
from rljob_api.v1alpha1.job import RLJob
from rljob_page.conversations import conversation_sets, sample_entries
from rljob_page.curves import (
    MAX_METRICS,
    REWARD_MEAN,
    Chart,
    Curves,
    Points,
    averaging_window,
    charts_of,
    finite,
    held_out_scores,
    is_step,
    moving_average,
    not_finite_since,
    phase_seconds,
    shown_metrics,
    thinned,
)
from rljob_page.run_files import Json, RunFiles
from rljob_page.timelines import Timeline, read_timeline
from rljob_page.verdict import Level, Notice, Verdict, duration, newest_step, time_of, usual_step_seconds, verdict_of

MAX_POINTS = 800
"""Points of a curve: about two for each pixel column of a chart."""
_MAX_PHASE_STEPS = 200
_MAX_SCORES = 4
"""The largest number of held-out scores among the newest numbers."""
VERSION = 1
"""Version of the document; larger if a field gets another meaning."""


@dataclass(frozen=True)
class Difference:
    """A field of the spec that differs between two runs, with its value in each."""

    field: str
    this: str
    other: str


@dataclass(frozen=True)
class OtherRun:
    """A run that the page compares with its run."""

    files: RunFiles
    differences: tuple[Difference, ...] | None
    """None if the folder of one of the runs has no job."""


@dataclass(frozen=True)
class PageContent:
    """What the page shows."""

    verdict: Verdict
    data: Json
    """The document. `page.py` may remove parts of it, so that the page stays small."""


def page_content(
    files: RunFiles,
    other: OtherRun | None = None,
    advice: Sequence[str] = (),
    now: datetime | None = None,
    *,
    has_paths: bool = True,
) -> PageContent:
    """Makes the document of a run. `advice`: lines with suggestions that make steps shorter; left out if the run has
    something to fix first. `now`: for tests. `has_paths`: whether the paths of folders on this machine are shown."""
    now = now or datetime.now(UTC)
    verdict = verdict_of(files, now)
    conversations, notes = conversation_sets(files.tokens)
    charts = charts_of(dict.fromkeys([*files.curves, *(other.files.curves if other is not None else ())]))
    shown = shown_metrics(files.curves, charts)
    num_left_out = len(files.curves.keys() - {"wall_time"}) - len(shown)
    if num_left_out:
        notes.append(f"{num_left_out} of the metrics: at most {MAX_METRICS} are shown; all are in metrics.jsonl")
    data: Json = {
        "version": VERSION,
        "writtenAt": _time_text(now),
        "run": {"name": files.name, "folder": _folder(files, has_paths), "isActive": verdict.is_active},
        "verdict": _verdict(verdict, has_alarms=files.state is not None and files.state.alarms is not None),
        "advice": list(advice) if verdict.is_healthy else [],
        "facts": [list(fact) for fact in facts_of(files, verdict, now)],
        **_curves(files.curves, shown, charts),
        "charts": [asdict(chart) for chart in charts],
        "samples": sample_entries(files.samples),
        "conversations": conversations,
        "timelines": dict(_timelines(files.timelines)),
        "spec": _spec_text(files.job),
        "against": None if other is None else _against(other, charts, now, has_paths),
        "omitted": [*files.notes, *notes],
    }
    return PageContent(verdict, data)


def _verdict(verdict: Verdict, *, has_alarms: bool) -> Json:
    notices = [
        {
            "level": each.level.value,
            "title": each.title,
            "text": each.text,
            "docs": each.docs,
            "advice": each.advice,
            "explanation": each.explanation,
        }
        for each in verdict.notices
    ]
    return {"level": verdict.level.value, "title": verdict.title, "notices": notices, "hasAlarms": has_alarms}


def _folder(files: RunFiles, has_paths: bool) -> str:
    return str(files.folder.absolute()) if has_paths else files.folder.absolute().name


def facts_of(files: RunFiles, verdict: Verdict, now: datetime) -> Iterator[tuple[str, str]]:
    """The newest numbers of a run, as (name, value)."""
    state, curves = files.state, files.curves
    if state is not None:
        yield "Step", f"{newest_step(state, curves)} of {state.progress.total_steps}"
    scores = {
        f"Held-out score ({name})": metric for name, metric in list(held_out_scores(curves).items())[:_MAX_SCORES]
    }
    for name, metric in {"Training reward": REWARD_MEAN, **scores}.items():
        if metric in curves:
            since, values = not_finite_since(curves[metric]), finite(curves[metric])[1]
            yield name, f"{values[-1]:.3g}" if since is None else f"not finite since step {since}"
    usual = usual_step_seconds(curves)
    if usual is not None:
        yield "Seconds per step", f"{usual:.3g}"
    if state is not None and state.progress.tokens_per_second is not None:
        yield "Tokens per second", f"{state.progress.tokens_per_second:,.0f}"
    elapsed = _seconds(files, now)
    if elapsed is not None:
        yield "Time", duration(elapsed)
    is_training = verdict.is_active and state is not None and state.phase is RunPhase.RUNNING
    if is_training and state is not None and state.progress.eta_seconds:
        yield "Time left", duration(state.progress.eta_seconds)
    if len(files.attempts) > 1 or (state is not None and state.attempt > 1):
        yield "Attempt", str(max([state.attempt if state else 1, *(each.number for each in files.attempts)]))
    if state is not None and state.checkpoint is not None:
        yield "Newest checkpoint", f"step {state.checkpoint.step}"
    if state is not None and state.best is not None:
        yield "Best checkpoint", f"step {state.best.step} ({state.best.value:.3g})"


def _seconds(files: RunFiles, now: datetime) -> float | None:
    """Seconds that all attempts ran, by attempts.jsonl; without it, from the first to the last line of the metrics."""
    total, is_known = 0.0, False
    for attempt in files.attempts:
        started, ended = time_of(attempt.started), time_of(attempt.ended)
        if ended is None and attempt is files.attempts[-1] and files.has_process:
            ended = now
        if ended is None and files.state is not None:
            ended = time_of(files.state.written_at)
        if started is not None and ended is not None:
            total, is_known = total + max(0.0, (ended - started).total_seconds()), True
    if is_known:
        return total
    times = finite(files.curves.get("wall_time", ([], [])))[1]
    return times[-1] - times[0] if times else None


def _curves(curves: Curves, shown: Sequence[str], charts: Sequence[Chart]) -> Json:
    phases = phase_seconds(curves, _MAX_PHASE_STEPS)
    window = averaging_window(len(curves.get(REWARD_MEAN, ([], []))[0]))
    averaged = [line.metric for chart in charts for line in chart.lines if line.is_averaged and line.metric in curves]
    return {
        "curves": {name: _points(thinned(curves[name], MAX_POINTS)) for name in sorted(shown)},
        "averages": {
            "window": window,
            "curves": {
                name: _points(thinned(moving_average(curves[name], window), MAX_POINTS))
                for name in averaged
                if len(curves[name][0]) > window
            },
        },
        "phases": None
        if phases is None
        else {
            "steps": phases.steps,
            "seconds": {name: list(map(_rounded, values)) for name, values in phases.seconds.items()},
        },
    }


def _points(points: Points) -> Json:
    return {"index": list(points[0]), "data": list(map(_rounded, points[1]))}


def _rounded(value: float) -> float | None:
    """Six significant digits; None for NaN. A whole number stays without `.0`, to make the document shorter."""
    if math.isnan(value):
        return None
    if value == int(value) and abs(value) < 1e6:
        return int(value)
    return float(f"{value:.6g}")


def _timelines(documents: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    for name, document in documents.items():
        step, timeline = document.get("step"), read_timeline(document)
        if timeline is not None:
            yield name, _timeline(timeline) | ({"step": step} if is_step(step) else {})


def _timeline(timeline: Timeline) -> Json:
    def times(*values: float) -> list[float | None]:
        return [_rounded(round(value, 2)) for value in values]

    return {
        "milliseconds": _rounded(timeline.milliseconds),
        "omittedProcesses": timeline.omitted_processes,
        "processes": [
            {
                "name": process.name,
                "spans": [[name, *times(begin, length), row] for name, begin, length, row in process.spans],
                "idle": {cause: _rounded(round(length, 2)) for cause, length in process.idle.items()},
                "idleSpans": [[cause, *times(begin, length)] for cause, begin, length in process.idle_spans],
                "memory": process.memory,
                "omittedSpans": process.omitted_spans,
            }
            for process in timeline.processes
        ],
    }


def _against(other: OtherRun, charts: Sequence[Chart], now: datetime, has_paths: bool) -> Json:
    files = other.files
    verdict = verdict_of(files, now)
    return {
        "name": files.name,
        "folder": _folder(files, has_paths),
        "verdict": verdict.title,
        "facts": [list(fact) for fact in facts_of(files, verdict, now)],
        "differences": None if other.differences is None else [asdict(each) for each in other.differences],
        **_curves(files.curves, shown_metrics(files.curves, charts), charts),
    }


def _spec_text(job: RLJob | None) -> str:
    """The job as YAML."""
    return "" if job is None else shareable_job_text(job.metadata, job.spec)


def _time_text(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


__all__ = ["Difference", "Level", "Notice", "OtherRun", "PageContent", "page_content"]
