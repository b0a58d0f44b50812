"""Adds a span for each time in which a worker process is idle during a step. Its name says what the worker waits for.

A worker is idle while it runs no call, or one that only waits (WAITING_CALLS), and no thread generates. What it waits
for follows from the controller's phase and from the calls of all workers. Waiting for other workers within a call, in a
collective operation, cannot be seen.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from rljob_trainer.observability.spans import Counts, Record, Span
from rljob_trainer.observability.timeline import IDLE_PREFIX, IDLE_THREAD, ProcessSpans

WAITS_FOR_SCORES = frozenset({"reward.completed_ids", "reward.finish_scoring"})
WAITING_CALLS = frozenset({"hybrid.take", *WAITS_FOR_SCORES})
"""Calls that wait for responses or scores."""
PARTS_OF_CALLS = frozenset({"read arguments", "store result"})
GENERATE, REWARD_PHASE = "generate", "reward"
MIN_IDLE_SECONDS = 0.001
"""Shorter times are left out."""
OTHERS_GENERATE = f"{IDLE_PREFIX}other workers generate"
OTHER_WORKERS = f"{IDLE_PREFIX}other workers"
SCORES = f"{IDLE_PREFIX}scores"
CONTROLLER = f"{IDLE_PREFIX}controller"

Interval = tuple[float, float]
"""Begin and end in Unix seconds."""


def with_idle_time(processes: Sequence[ProcessSpans]) -> list[ProcessSpans]:
    """Returns the processes of a step's timeline, the controller first, with a span for each idle time of a worker.
    Needs all spans of the step: without the short ones, busy time would look idle."""
    controller, workers = processes[0], processes[1:]
    phases = joined_phases(_spans(controller.spans))
    if not phases:
        return list(processes)
    step = (phases[0].started, max(each.ended for each in phases))
    busy = [union(_interval(each) for each in _spans(worker.spans) if _is_work(each)) for worker in workers]
    activity = _Activity(
        work=union(interval for of_worker in busy for interval in of_worker),
        generation=union(_intervals_named({GENERATE}, workers), MIN_IDLE_SECONDS),
        scoring=union(_intervals_named(WAITS_FOR_SCORES, workers)),
    )
    bounds = list(chain.from_iterable(activity.generation))
    found = [ProcessSpans(controller.name, [*phases, *(each for each in controller.spans if isinstance(each, Counts))])]
    for worker, of_worker in zip(workers, busy, strict=True):
        idle: list[Span] = []
        for gap in gaps(of_worker, step):
            for part, phase in _parts(gap, phases, bounds):
                name = _waits_for(part, phase, activity)
                if idle and idle[-1].name == name and idle[-1].ended == part[0]:
                    idle[-1] = replace(idle[-1], ended=part[1])
                else:
                    idle.append(Span(name, *part, IDLE_THREAD))
        long = [each for each in idle if each.ended - each.started >= MIN_IDLE_SECONDS]
        found.append(ProcessSpans(worker.name, [*worker.spans, *long]))
    return found


def joined_phases(spans: Iterable[Span]) -> list[Span]:
    """Returns the controller's phases in ascending order. Phases of the same name with less than MIN_IDLE_SECONDS
    between them are one: a controller that takes finished responses again and again begins a phase each time."""
    found: list[Span] = []
    for each in sorted(spans, key=lambda each: each.started):
        if found and found[-1].name == each.name and each.started - found[-1].ended < MIN_IDLE_SECONDS:
            found[-1] = replace(found[-1], ended=max(found[-1].ended, each.ended))
        else:
            found.append(each)
    return found


def union(intervals: Iterable[Interval], max_between: float = 0.0) -> list[Interval]:
    """Returns the union of intervals as disjoint intervals in ascending order. Those with at most `max_between` seconds
    between them are one."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + max_between:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def gaps(intervals: Sequence[Interval], whole: Interval) -> list[Interval]:
    """Returns the parts of `whole` that the intervals, which are disjoint and ascending, do not cover."""
    found, begin = [], whole[0]
    for start, end in intervals:
        if min(start, whole[1]) > begin:
            found.append((begin, min(start, whole[1])))
        begin = max(begin, end)
    return [*found, (begin, whole[1])] if begin < whole[1] else found


@dataclass(frozen=True, slots=True)
class _Activity:
    """When at least one worker does something. The intervals are disjoint and ascending."""

    work: Sequence[Interval]
    """Generates, or runs a call that does not only wait."""
    generation: Sequence[Interval]
    scoring: Sequence[Interval]
    """Waits for scores."""


def _waits_for(part: Interval, phase: str | None, activity: _Activity) -> str:
    if phase == REWARD_PHASE:
        return SCORES
    if _overlaps(part, activity.generation):
        return OTHERS_GENERATE
    if _overlaps(part, activity.scoring):
        return SCORES
    return OTHER_WORKERS if phase is not None and _overlaps(part, activity.work) else CONTROLLER


def _parts(gap: Interval, phases: Sequence[Span], bounds: Sequence[float]) -> Iterator[tuple[Interval, str | None]]:
    """Splits a gap at the phases, see `_by_phase`, and at the bounds, which are ascending."""
    for (begin, end), phase in _by_phase(gap, phases):
        within = bounds[bisect_right(bounds, begin) : bisect_left(bounds, end)]
        for part in pairwise((begin, *within, end)):
            yield part, phase


def _by_phase(gap: Interval, phases: Sequence[Span]) -> list[tuple[Interval, str | None]]:
    """Splits a gap at the phases of the controller, which are in ascending order and do not overlap. The phase is None
    between two phases."""
    found: list[tuple[Interval, str | None]] = []
    begin, stop = gap
    for phase in phases[bisect_right(phases, begin, key=lambda each: each.ended) :]:
        if phase.started >= stop:
            break
        if phase.started > begin:
            found.append(((begin, phase.started), None))
        found.append(((max(begin, phase.started), min(stop, phase.ended)), phase.name))
        begin = found[-1][0][1]
    return [*found, ((begin, stop), None)] if begin < stop else found


def _overlaps(part: Interval, intervals: Sequence[Interval]) -> bool:
    """Whether the intervals, which are disjoint and ascending, cover at least half of the part."""
    first = max(0, bisect_right(intervals, part) - 1)
    covered = 0.0
    for begin, end in intervals[first:]:
        if begin >= part[1]:
            break
        covered += max(0.0, min(end, part[1]) - max(begin, part[0]))
    return covered >= (part[1] - part[0]) / 2


def _intervals_named(names: Set[str], workers: Sequence[ProcessSpans]) -> Iterator[Interval]:
    return (_interval(each) for worker in workers for each in _spans(worker.spans) if each.name in names)


def _is_work(span: Span) -> bool:
    return span.name not in WAITING_CALLS and span.name not in PARTS_OF_CALLS


def _interval(span: Span) -> Interval:
    return span.started, span.ended


def _spans(records: Sequence[Record]) -> list[Span]:
    return [each for each in records if isinstance(each, Span)]
