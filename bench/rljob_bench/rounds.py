"""Measures several contenders side by side. Each takes a turn in every round, so that other load on the machine affects
all of them equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Turn = Callable[[], Sequence[float]]
"""One turn of a contender; returns the seconds of each of its calls."""


@dataclass(frozen=True)
class Timings:
    """The seconds of every call that counts."""

    seconds: tuple[float, ...]

    @property
    def fastest(self) -> float:
        """Seconds of the fastest call."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """Seconds of the median call."""
        return statistics.median(self.seconds)


def interleaved(contenders: Mapping[str, Turn], num_rounds: int, *, counts_first: bool = False) -> dict[str, Timings]:
    """Runs rounds of turns, in the order of the contenders. The first round is a warm-up and does not count, unless it
    is the only one, or `counts_first` is true because everything is warm."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(num_rounds):
        for name, turn in contenders.items():
            measured = turn()
            if number or num_rounds == 1 or counts_first:
                seconds[name].extend(measured)
    return {name: Timings(tuple(measured)) for name, measured in seconds.items()}


def timed_calls(call: Callable[[], object], num_calls: int) -> list[float]:
    """The seconds of consecutive calls. The result of a call is released after its time was taken, before the next
    call."""
    seconds = []
    for _ in range(num_calls):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
        del result
    return seconds
