"""A clock that a test sets, and the API server's clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from rljob_operator.kube.server_clock import Ages, ServerClock

NOON = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
"""What the API server's clock shows at first."""
WRONG = datetime(2001, 1, 1, tzinfo=UTC)
"""What the clock of the operator's node shows."""


class ManualClock:
    """A monotonic clock and the server's clock, which advance together until a test sets one of them."""

    def __init__(self, server_time: datetime = NOON) -> None:
        self.seconds = 1000.0
        """The monotonic clock."""
        self.server_time = server_time
        self.clock = ServerClock(lambda: self.seconds, lambda: WRONG)
        self.ages = Ages(self.clock)

    def advance(self, seconds: float) -> None:
        """Advances both clocks."""
        self.seconds += seconds
        self.server_time += timedelta(seconds=seconds)

    def hear(self, answer_seconds: float = 0.0) -> None:
        """Passes a response of the API server to the clock, after the duration of the request. The Date header has no
        fractions of a second."""
        asked_at = self.seconds
        self.advance(answer_seconds)
        self.clock.update(format_datetime(self.server_time.replace(microsecond=0), usegmt=True), asked_at)


def synchronized_clock(server_time: datetime = NOON) -> ManualClock:
    """A clock that has received the API server's time. It assumes that half a second was cut off."""
    made = ManualClock(server_time)
    made.hear()
    return made
