"""Measures the phases of a step and estimates the remaining time. Clocks are arguments, so that tests need not wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rljob_trainer.observability.metrics import TIMING_PREFIX
from rljob_trainer.observability.spans import SPANS

Clock = Callable[[], float]
"""Seconds since any fixed moment, never going back, such as `time.perf_counter`."""


class PhaseTimer:
    """Sums the seconds of the named phases of one step."""

    def __init__(self, clock: Clock, on_enter: Callable[[str], None] | None = None) -> None:
        """`on_enter` is called with the name of a phase each time the phase begins."""
        self._clock = clock
        self._on_enter = on_enter
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block as phase `name`. Times of the same phase are summed; a block that raises counts, too."""
        started = self._clock()
        if self._on_enter is not None:
            self._on_enter(name)
        try:
            with SPANS.span(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - started

    def seconds(self, name: str) -> float:
        """Returns the seconds in phase `name` since the last `take`; 0 if the phase was not entered."""
        return self._seconds.get(name, 0.0)

    def take(self) -> dict[str, float]:
        """Returns the seconds of each phase since the last call as `timing_s/<phase>`, and resets them."""
        taken = {TIMING_PREFIX + name: seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken


class RecordingBudget:
    """Decides which steps, or which evaluations, a run records in detail, so that this takes at most a small share of
    its time. If steps are long, that is every step."""

    def __init__(self, clock: Clock, max_share: float) -> None:
        self._clock = clock
        self._max_share = max_share
        self._began = clock()
        self._spent = 0.0
        """Seconds."""

    def is_due(self) -> bool:
        """Returns whether a step that begins now, or an evaluation that ends now, may be recorded."""
        return self._spent <= self._max_share * (self._clock() - self._began)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time of the block as time for recording, also if it raises."""
        started = self._clock()
        try:
            yield
        finally:
            self._spent += self._clock() - started


class RemainingTime:
    """Estimates the remaining time of a run from the mean time of the newest `window` steps, with their evaluations and
    saves."""

    def __init__(self, total_steps: int, window: int = 20) -> None:
        self._total_steps = total_steps
        self._moments: deque[tuple[int, float]] = deque(maxlen=window + 1)

    def observe(self, step: int, now_seconds: float) -> None:
        """Records that `step` steps are done at `now_seconds`."""
        self._moments.append((step, now_seconds))

    def seconds(self) -> float | None:
        """Returns the seconds until the last step is done; None before two observations of different
        steps."""
        if len(self._moments) < 2:
            return None
        (first_step, first_seconds), (last_step, last_seconds) = self._moments[0], self._moments[-1]
        if last_step <= first_step:
            return None
        per_step = (last_seconds - first_seconds) / (last_step - first_step)
        return max(0.0, per_step * (self._total_steps - last_step))
