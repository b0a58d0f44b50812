"""Prints and records stages with their durations: a cold start of the cluster takes tens of minutes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Progress:
    """Prints a line when a stage begins and when it ends, and keeps the seconds of each stage in a JSON file."""

    def __init__(self, record: Path) -> None:
        self._record = record
        self.seconds: dict[str, float] = {}
        """Seconds by stage, in the order in which they ended. A stage inside another counts in both."""

    def say(self, text: str) -> None:
        """Prints one line."""
        print(f"[e2e] {text}", file=sys.stderr, flush=True)

    @contextmanager
    def stage(self, name: str, expected: str = "") -> Iterator[None]:
        """Measures the block. `expected` is printed as the usual duration, such as "8 min the first time"."""
        self.say(f"{name} ..." + (f" ({expected})" if expected else ""))
        started = time.monotonic()
        outcome = "failed after"
        try:
            yield
            outcome = "took"
        finally:
            seconds = time.monotonic() - started
            self.say(f"{name} {outcome} {seconds:.1f} s")
            self.add(name, seconds)

    def add(self, name: str, seconds: float) -> None:
        """Records the seconds of a stage that was measured elsewhere."""
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 1)
        self._record.parent.mkdir(parents=True, exist_ok=True)
        self._record.write_text(json.dumps(self.seconds, indent=2) + "\n")
