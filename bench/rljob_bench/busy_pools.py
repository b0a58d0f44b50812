"""What a step's timeline says about calls that run at the same time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROLES = ("actor", "critic", "hybrid", "ref")
"""Whose calls are counted. A reward's wait for processes of their own."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Busy:
    """Seconds of a step."""

    by_pools: float
    """In which a pool is in a call, of all pools together: what the calls take one after the other."""
    at_all: float
    """In which any pool is."""

    @property
    def at_the_same_time(self) -> float:
        """What calls that run at the same time spare, if none is slower for it."""
        return self.by_pools - self.at_all


def busy(timeline: Path) -> Busy:
    """Of one step. A worker's row is called after its pool: `main, rank 0, ...`."""
    events = json.loads(timeline.read_text())["traceEvents"]
    pools = {
        event["pid"]: event["args"]["name"].partition(", rank ")[0]
        for event in events
        if event["name"] == "process_name"
    }
    calls: dict[str, list[Interval]] = {}
    for event in events:
        # The controller's row has its phases, of which some are called as roles are.
        if event["ph"] == "X" and event["cat"] in ROLES and "." in event["name"]:
            calls.setdefault(pools[event["pid"]], []).append((event["ts"], event["ts"] + event["dur"]))
    everything = [interval for intervals in calls.values() for interval in intervals]
    return Busy(1e-6 * sum(map(covered, calls.values())), 1e-6 * covered(everything))


def covered(intervals: Sequence[Interval]) -> float:
    """The length of their union."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(intervals):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total
