"""What this process did when: spans of wall-clock time, and counts, which the timeline of a step is made of."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

MAX_KEPT = 16_384
"""The newest spans that a process keeps until somebody takes them."""


@dataclass(frozen=True)
class Span:
    """Something that was done from `started` to `ended` (Unix seconds) by one thread (its native id)."""

    name: str
    started: float
    ended: float
    thread: int


@dataclass(frozen=True)
class Counts:
    """Numbers of one `track` at one moment (Unix seconds), and what had just been done then."""

    track: str
    at: float
    after: str
    values: Mapping[str, float]


Record = Span | Counts


class SpanRecorder:
    """Keeps the newest spans and counts. Used from any thread."""

    def __init__(self) -> None:
        self._spans: deque[Record] = deque(maxlen=MAX_KEPT)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Notes the block, also one that raises."""
        started = time.time()
        try:
            yield
        finally:
            # The clock may be set back meanwhile.
            ended = max(started, time.time())
            self._spans.append(Span(name, started, ended, threading.get_native_id()))

    def count(self, track: str, after: str, values: Mapping[str, float]) -> None:
        """Notes numbers as they are now."""
        self._spans.append(Counts(track, time.time(), after, dict(values)))

    def take(self) -> list[Record]:
        """Spans that have ended since the last `take`, and counts since then."""
        # Somebody else may take the last one between a look and `popleft`.
        taken: list[Record] = []
        with suppress(IndexError):
            while True:
                taken.append(self._spans.popleft())
        return taken


SPANS = SpanRecorder()
"""Of this process."""
