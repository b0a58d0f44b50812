"""Reads from a step's timeline how long calls of several pools run at the same time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROLES = ("actor", "critic", "hybrid", "ref")
"""Roles whose calls are counted. Calls of rewards wait for their own processes."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Busy:
    """Seconds of a step."""

    by_pools: float
    """Time in calls, added over all pools: the time that the calls would take one after the other."""
    at_all: float
    """Time in which any pool is in a call."""

    @property
    def at_the_same_time(self) -> float:
        """Time that is saved because calls run at the same time, if this slows none of them down."""
        return self.by_pools - self.at_all


def busy(timeline: Path) -> Busy:
    """Reads the timeline of one step. A worker's row is named after its pool: `main, rank 0, ...`."""
    events = json.loads(timeline.read_text())["traceEvents"]
    pools = {
        event["pid"]: event["args"]["name"].partition(", rank ")[0]
        for event in events
        if event["name"] == "process_name"
    }
    calls: dict[str, list[Interval]] = {}
    for event in events:
        # The controller's row has phases, some of which have the names of roles.
        if event["ph"] == "X" and event["cat"] in ROLES and "." in event["name"]:
            calls.setdefault(pools[event["pid"]], []).append((event["ts"], event["ts"] + event["dur"]))
    everything = [interval for intervals in calls.values() for interval in intervals]
    return Busy(1e-6 * sum(map(covered, calls.values())), 1e-6 * covered(everything))


def covered(intervals: Sequence[Interval]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(intervals):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total
