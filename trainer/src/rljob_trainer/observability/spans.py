"""Records what this process does and when: spans of wall-clock time, and counter values. Timelines are made of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

MAX_KEPT = 16_384
"""Maximum number of records of a process; older records are dropped."""


@dataclass(frozen=True)
class Span:
    """An activity from `started` to `ended` (Unix seconds) in one thread (its native id)."""

    name: str
    started: float
    ended: float
    thread: int


@dataclass(frozen=True)
class Counts:
    """Counter values of one `track` at one moment (`at`, Unix seconds), and what had just been done (`after`)."""

    track: str
    at: float
    after: str
    values: Mapping[str, float]


Record = Span | Counts
Annotate = Callable[[str], AbstractContextManager[object]]
"""Called with the name of a span; the span's block runs within the result (see `profiles`)."""


class SpanRecorder:
    """Keeps the newest MAX_KEPT spans and counter values until `take`. Thread-safe."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=MAX_KEPT)
        self.annotate: Annotate = nullcontext
        """Called for each span."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Records the block as a span, also if it raises."""
        started = time.time()
        try:
            with self.annotate(name):
                yield
        finally:
            # The clock may have been set back in the meantime.
            ended = max(started, time.time())
            self._records.append(Span(name, started, ended, threading.get_native_id()))

    def count(self, track: str, after: str, values: Mapping[str, float]) -> None:
        """Records the current counter values."""
        self._records.append(Counts(track, time.time(), after, dict(values)))

    def take(self) -> list[Record]:
        """Returns the spans that have ended, and the counter values, since the last `take`."""
        # No emptiness check: another thread could take the last record between the check and `popleft`.
        taken: list[Record] = []
        with suppress(IndexError):
            while True:
                taken.append(self._records.popleft())
        return taken


def longest(records: Sequence[Record], max_spans: int) -> list[Record]:
    """Returns the counter values, and the `max_spans` longest spans, in the same order."""
    spans = [each for each in records if isinstance(each, Span)]
    if len(spans) <= max_spans:
        return list(records)
    kept = set(map(id, sorted(spans, key=lambda each: each.started - each.ended)[:max_spans]))
    return [each for each in records if isinstance(each, Counts) or id(each) in kept]


SPANS = SpanRecorder()
"""The one instance for this process."""
