"""The parts of steps as contenders measure them, by turn."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence


class PartsOfSteps:
    """Seconds by part. The first turn does not count unless it is the only one (see `rounds.interleaved`)."""

    def __init__(self) -> None:
        self._turns: list[Sequence[Mapping[str, float]]] = []

    def add_turn(self, parts: Sequence[Mapping[str, float]]) -> None:
        """Adds the parts of each step of a turn. A step need not have every part."""
        self._turns.append(parts)

    def median(self, names: Sequence[str]) -> float | None:
        """Median seconds of these parts together; None if no step has one of them."""
        counted = self._turns[1:] or self._turns
        values = [
            sum(step[name] for name in names if name in step)
            for turn in counted
            for step in turn
            if not step.keys().isdisjoint(names)
        ]
        return statistics.median(values) if values else None
