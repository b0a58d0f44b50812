"""The content of the page as one JSON document. The page's scripts read it, and so can a notebook:

    data = json.load(open("run.json"))                       # rljob view runs/x --json run.json
    pandas.Series(**data["curves"]["critic/rewards/mean"])   # index: steps, data: values

Curves have at most `MAX_POINTS` points. Texts of a model or a user are in it as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from rljob_api.job_file import shareable_job_text
from rljob_api.run_state import RunPhase
from rljob_api.v1alpha1.job import RLJob
from rljob_page.conversations import conversation_sets, sample_entries
from rljob_page.curves import (
    CHARTS,
    EVAL_GREEDY,
    REWARD_MEAN,
    Curves,
    Points,
    averaging_window,
    moving_average,
    phase_seconds,
    read_curves,
    thinned,
)
from rljob_page.run_files import Json, RunFiles
from rljob_page.timelines import Timeline, read_timeline
from rljob_page.verdict import Level, Notice, Verdict, duration, time_of, usual_step_seconds, verdict_of

MAX_POINTS = 800
"""Points of a curve: about two for each pixel column of a chart."""
_MAX_PHASE_STEPS = 200
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
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class PageContent:
    """What the page shows."""

    verdict: Verdict
    data: Json
    """The document. `page.py` may remove parts of it, so that the page stays small."""


def page_content(
    files: RunFiles, other: OtherRun | None = None, advice: Sequence[str] = (), now: datetime | None = None
) -> PageContent:
    """Makes the document of a run. `advice`: lines with suggestions that make steps shorter; left out if the run has
    something to fix first. `now`: for tests."""
    now = now or datetime.now(UTC)
    curves = read_curves(files.metrics)
    verdict = verdict_of(files, curves, now)
    conversations, notes = conversation_sets(files.tokens)
    data: Json = {
        "version": VERSION,
        "writtenAt": _time_text(now),
        "run": {"name": files.name, "folder": str(files.folder.absolute()), "isActive": verdict.is_active},
        "verdict": _verdict(verdict, has_alarms=files.state is not None and files.state.alarms is not None),
        "advice": list(advice) if verdict.is_healthy else [],
        "facts": [list(fact) for fact in facts_of(files, curves, now)],
        **_curves(curves),
        "charts": [asdict(chart) for chart in CHARTS],
        "samples": sample_entries(files.samples),
        "conversations": conversations,
        "timelines": dict(_timelines(files.timelines)),
        "spec": _spec_text(files.job),
        "against": None if other is None else _against(other, now),
        "omitted": [*files.notes, *notes],
    }
    return PageContent(verdict, data)


def _verdict(verdict: Verdict, *, has_alarms: bool) -> Json:
    notices = [
        {"level": each.level.value, "title": each.title, "text": each.text, "docs": each.docs, "advice": each.advice}
        for each in verdict.notices
    ]
    return {"level": verdict.level.value, "title": verdict.title, "notices": notices, "hasAlarms": has_alarms}


def facts_of(files: RunFiles, curves: Curves, now: datetime) -> Iterator[tuple[str, str]]:
    """The newest numbers of a run, as (name, value)."""
    state = files.state
    if state is not None:
        yield "Step", f"{state.progress.step} of {state.progress.total_steps}"
    for name, metric in (("Training reward", REWARD_MEAN), ("Held-out score (greedy)", EVAL_GREEDY)):
        values = curves.get(metric, ([], []))[1]
        if values:
            yield name, f"{values[-1]:.3g}"
    usual = usual_step_seconds(curves)
    if usual is not None:
        yield "Seconds per step", f"{usual:.3g}"
    if state is not None and state.progress.tokens_per_second is not None:
        yield "Tokens per second", f"{state.progress.tokens_per_second:,.0f}"
    elapsed = _seconds(files, now)
    if elapsed is not None:
        yield "Time", duration(elapsed)
    has_ended = any(attempt.ended for attempt in files.attempts[-1:])
    if state is not None and state.phase is RunPhase.RUNNING and state.progress.eta_seconds and not has_ended:
        yield "Time left", duration(state.progress.eta_seconds)
    if len(files.attempts) > 1 or (state is not None and state.attempt > 1):
        yield "Attempt", str(max([state.attempt if state else 1, *(each.number for each in files.attempts)]))
    if state is not None and state.checkpoint is not None:
        yield "Newest checkpoint", f"step {state.checkpoint.step}"


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
    times = [line["wall_time"] for line in (*files.metrics[:1], *files.metrics[-1:]) if "wall_time" in line]
    return times[-1] - times[0] if len(times) == 2 else None


def _curves(curves: Curves) -> Json:
    phases = phase_seconds(curves, _MAX_PHASE_STEPS)
    window = averaging_window(len(curves.get(REWARD_MEAN, ([], []))[0]))
    averaged = [line.metric for chart in CHARTS for line in chart.lines if line.is_averaged and line.metric in curves]
    return {
        "curves": {name: _points(thinned(points, MAX_POINTS)) for name, points in sorted(curves.items())},
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
    return {"index": points[0], "data": list(map(_rounded, points[1]))}


def _rounded(value: float) -> float:
    """Six significant digits. A whole number stays without `.0`, to make the document shorter."""
    if value == int(value) and abs(value) < 1e6:
        return int(value)
    return float(f"{value:.6g}")


def _timelines(documents: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    for name, document in documents.items():
        timeline = read_timeline(document)
        if timeline is not None:
            step = document.get("step")
            yield name, _timeline(timeline) | ({"step": step} if isinstance(step, int) else {})


def _timeline(timeline: Timeline) -> Json:
    def times(*values: float) -> list[float]:
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


def _against(other: OtherRun, now: datetime) -> Json:
    files = other.files
    curves = read_curves(files.metrics)
    return {
        "name": files.name,
        "folder": str(files.folder.absolute()),
        "verdict": verdict_of(files, curves, now).title,
        "facts": [list(fact) for fact in facts_of(files, curves, now)],
        "differences": [asdict(each) for each in other.differences],
        **_curves(curves),
    }


def _spec_text(job: RLJob | None) -> str:
    """The job as YAML."""
    return "" if job is None else shareable_job_text(job.metadata, job.spec)


def _time_text(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


__all__ = ["Difference", "Level", "Notice", "OtherRun", "PageContent", "page_content"]
