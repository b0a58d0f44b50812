"""What contenders say about the parts of their steps, turn by turn."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence


class PartsOfSteps:
    """Seconds by part. The first turn does not count, unless it is the only one (see `rounds.interleaved`)."""

    def __init__(self) -> None:
        self._turns: list[Sequence[Mapping[str, float]]] = []

    def add_turn(self, parts: Sequence[Mapping[str, float]]) -> None:
        """Of each step of a turn; a step need not have every part."""
        self._turns.append(parts)

    def median(self, names: Sequence[str]) -> float | None:
        """Of all of these parts of a step together; None where no step has one of them."""
        counted = self._turns[1:] or self._turns
        values = [
            sum(step[name] for name in names if name in step)
            for turn in counted
            for step in turn
            if not step.keys().isdisjoint(names)
        ]
        return statistics.median(values) if values else None
