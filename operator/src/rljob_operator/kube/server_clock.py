"""A clock that follows the API server, so that all replicas of the operator agree, whatever the clocks of their nodes
show.

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
"""Slower responses are ignored, because it is unknown when the server wrote the time into them."""
AVERAGE_TRUNCATED_SECONDS = 0.5
"""How much earlier the Date header is than the server's time, on average: the header has only whole seconds."""

logger = logging.getLogger(__name__)


class ServerClock:
    """The clock of one process, for all its threads.

    Args:
        monotonic: Returns the seconds of a clock that never jumps.
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
        """Seconds of a clock that never jumps; only differences have a meaning."""
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
        """Whether times that the cluster writes now can be compared with `now`. They cannot before the first response,
        and after a jump of the API server's clock as long as that clock and this one differ by `JUMP_SECONDS` or more.
        """
        with self._lock:
            return self._zero is not None and not self._has_jumped

    def update(self, date: str, requested_at: float) -> None:
        """Updates the clock with the `Date` header of a response; a header that cannot be parsed is ignored.
        `requested_at`: when the request was sent (monotonic seconds)."""
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
    """Measures for how long an object has been in a state. The time since this process first saw the state is measured;
    the time before that is computed from the object's timestamp, if the clock was steady then."""

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._since: dict[tuple[str, Hashable], float] = {}

    def seconds(self, uid: str, state: Hashable, since: datetime | None, otherwise: float = 0.0) -> float:
        """For how many seconds the object with this UID has been in a state; negative if `since` is in the future.

        Args:
            state: Any value that identifies the state of the object.
            since: When the state began, by the object's timestamp.
            otherwise: The result at the first call for this state, if `since` is None or the clock is not steady.
        """
        key = (uid, state)
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
