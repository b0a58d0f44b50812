"""How busy the workers of a step were, from its timeline (trainer, observability/timeline.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONTROLLER = "controller"


@dataclass(frozen=True)
class TimelineSpan:
    """Something that a process did, in seconds from the timeline's beginning."""

    process: str
    name: str
    started: float
    ended: float


@dataclass(frozen=True)
class TimelineFacts:
    """Of one step."""

    seconds: float
    """From the controller's first phase to the end of its last."""
    busy: Mapping[str, float]
    """By worker process: share of those seconds in which a method of a role ran there."""

    @property
    def idle_share(self) -> float:
        """Of all workers' seconds together."""
        return 1 - sum(self.busy.values()) / len(self.busy) if self.busy else 0.0

    @property
    def idlest(self) -> tuple[str, float] | None:
        """The worker that waited most, and the share of the step that it did."""
        if not self.busy:
            return None
        name = min(self.busy, key=lambda each: self.busy[each])
        return name, 1 - self.busy[name]


def timeline_facts(spans: Sequence[TimelineSpan]) -> TimelineFacts | None:
    """None where the controller or the workers have no spans."""
    phases = [span for span in spans if span.process == CONTROLLER]
    if not phases:
        return None
    begin, end = min(span.started for span in phases), max(span.ended for span in phases)
    # A method's span is named after its role (`actor.update_policy`); what it is made of is within it.
    methods = [span for span in spans if span.process != CONTROLLER and "." in span.name]
    workers = dict.fromkeys(span.process for span in methods)
    if end <= begin or not workers:
        return None
    busy = {
        worker: _covered([span for span in methods if span.process == worker], begin, end) / (end - begin)
        for worker in workers
    }
    return TimelineFacts(end - begin, busy)


def _covered(spans: Sequence[TimelineSpan], begin: float, end: float) -> float:
    """Seconds between the two in which at least one of the spans lasts."""
    total, reached = 0.0, begin
    for span in sorted(spans, key=lambda each: each.started):
        started, ended = max(span.started, reached), min(span.ended, end)
        if ended > started:
            total += ended - started
            reached = ended
    return total
