"""A clock whose hands a test moves, and the API server's beside it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from rljob_operator.kube.server_clock import Ages, ServerClock

NOON = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
"""What the API server's clock says at first."""
WRONG = datetime(2001, 1, 1, tzinfo=UTC)
"""What this node's says."""


class ManualClock:
    """Two clocks that go alike until one is set."""

    def __init__(self, server_time: datetime = NOON) -> None:
        self.seconds = 1000.0
        """Of the monotonic clock."""
        self.server_time = server_time
        self.clock = ServerClock(lambda: self.seconds, lambda: WRONG)
        self.ages = Ages(self.clock)

    def pass_by(self, seconds: float) -> None:
        """Time goes by, on both."""
        self.seconds += seconds
        self.server_time += timedelta(seconds=seconds)

    def hear(self, answer_seconds: float = 0.0) -> None:
        """The API server answers a request, after some time. Its header leaves out fractions of a second."""
        asked_at = self.seconds
        self.pass_by(answer_seconds)
        self.clock.hear(format_datetime(self.server_time.replace(microsecond=0), usegmt=True), asked_at)


def synchronized_clock(server_time: datetime = NOON) -> ManualClock:
    """One that has heard the API server's time. It believes half a second to be left out of it."""
    made = ManualClock(server_time)
    made.hear()
    return made
