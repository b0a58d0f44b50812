"""What this process did when: spans of wall-clock time, which the timeline of a step is made of."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
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


class SpanRecorder:
    """Keeps the newest spans. Used from any thread."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=MAX_KEPT)

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

    def take(self) -> list[Span]:
        """Those that have ended since the last `take`."""
        # Somebody else may take the last one between a look and `popleft`.
        taken: list[Span] = []
        with suppress(IndexError):
            while True:
                taken.append(self._spans.popleft())
        return taken


SPANS = SpanRecorder()
"""Of this process."""
