"""A clock that follows the API server, so that all replicas agree whatever their nodes' clocks show.

It starts with the time in the API server's first response and advances with this machine's monotonic clock. If the
server's clock or this node's clock jumps while the operator is running, no deadline moves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

JUMP_SECONDS = 5.0
"""Smaller differences are drift and are corrected slowly; larger ones are jumps and are ignored."""
LARGEST_CORRECTION = 0.01
"""Drift is corrected by at most this fraction of the time since the last correction."""
LONGEST_RESPONSE_SECONDS = 2.0
"""Slower responses are ignored, because it is unknown when their time was written."""
AVERAGE_TRUNCATED_SECONDS = 0.5
"""What is cut off on average, because the Date header has whole seconds."""

logger = logging.getLogger(__name__)


class ServerClock:
    """The clock of one process, for all its threads.

    Args:
        monotonic: Returns seconds that never jump.
        time_before_first_response: Returns the time in UTC to use until the API server's first response.
    """

    def __init__(self, monotonic: Callable[[], float], time_before_first_response: Callable[[], datetime]) -> None:
        self._monotonic = monotonic
        self._time_before_first_response = time_before_first_response
        self._lock = threading.Lock()
        self._zero: datetime | None = None
        """The server's time when the monotonic clock was 0."""
        self._updated_at = 0.0
        self._last_returned: datetime | None = None
        """The newest time that `now` has returned."""
        self._has_jumped = False

    def monotonic(self) -> float:
        """Seconds, for differences only."""
        return self._monotonic()

    def now(self) -> datetime:
        """The time in UTC. After the API server's first response it never goes back."""
        with self._lock:
            found = (
                self._time_before_first_response() if self._zero is None else self._zero + _seconds(self._monotonic())
            )
            if self._zero is not None:
                self._last_returned = found = max(found, self._last_returned or found)
            return found

    @property
    def is_steady(self) -> bool:
        """Whether times that the cluster writes now can be compared with `now`. Before the first response, and after a
        jump, they cannot."""
        with self._lock:
            return self._zero is not None and not self._has_jumped

    def update(self, date: str, requested_at: float) -> None:
        """Updates the clock with the `Date` header of a response. `requested_at`: when the request was sent (monotonic
        seconds)."""
        arrived = self._monotonic()
        if arrived - requested_at > LONGEST_RESPONSE_SECONDS:
            return
        try:
            written = parsedate_to_datetime(date)
        except ValueError:
            return
        zero = written.replace(tzinfo=written.tzinfo or UTC).astimezone(UTC) + _seconds(
            AVERAGE_TRUNCATED_SECONDS - (requested_at + arrived) / 2
        )
        with self._lock:
            self._correct(zero, arrived)

    def _correct(self, zero: datetime, arrived: float) -> None:
        if self._zero is None:
            self._zero, self._updated_at = zero, arrived
            return
        ahead = (zero - self._zero).total_seconds()
        if abs(ahead) >= JUMP_SECONDS:
            if not self._has_jumped:
                logger.warning("the API server's clock jumped by %.0f s; the operator ignores the jump", ahead)
            self._has_jumped = True
            return
        self._has_jumped = False
        most = LARGEST_CORRECTION * max(0.0, arrived - self._updated_at)
        self._zero += _seconds(min(most, max(-most, ahead)))
        self._updated_at = arrived


class Ages:
    """Measures how long something has been in its state, from when this process first saw it. For the time
    before, it uses the object's timestamp, if the clock is steady."""

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._since: dict[tuple[str, Hashable], float] = {}

    def seconds(self, uid: str, what: Hashable, since: datetime | None, otherwise: float = 0.0) -> float:
        """For how many seconds `what` has been true for the object with this UID; negative if it begins in the future.

        Args:
            what: Any value that identifies the state of the object.
            since: The object's timestamp.
            otherwise: The age when this process first sees it, if `since` is missing or the clock is not steady.
        """
        key = (uid, what)
        if key not in self._since:
            age = otherwise
            if since is not None and self._clock.is_steady:
                age = (self._clock.now() - since).total_seconds()
            self._since[key] = self._clock.monotonic() - age
        return self._clock.monotonic() - self._since[key]

    def keep_only(self, uids: Iterable[str]) -> None:
        """Forgets all objects except these."""
        kept = set(uids)
        self._since = {key: since for key, since in self._since.items() if key[0] in kept}


def _seconds(number: float) -> timedelta:
    return timedelta(seconds=number)
