"""A time limit for a program that runs several cases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class TimeLimit:
    """The seconds that the program may take, from its start."""

    seconds: float
    started: float = field(default_factory=time.monotonic)
    longest: float = 0.0
    """Seconds of the longest case so far."""

    @property
    def has_time(self) -> bool:
        """Whether a case that takes as long as the longest one so far would end in time."""
        return time.monotonic() - self.started + self.longest < self.seconds

    @contextmanager
    def case(self) -> Iterator[None]:
        """The block is one case."""
        began = time.monotonic()
        yield
        self.longest = max(self.longest, time.monotonic() - began)
