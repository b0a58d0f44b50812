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
FOLLOWED_SHARE = 0.01
"""Drift is corrected by at most this fraction of the time that passes."""
LONGEST_ANSWER_SECONDS = 2.0
"""Slower responses are ignored, because it is unknown when their time was written."""
DATE_SECONDS = 0.5
"""The Date header is truncated to whole seconds; this is the average that is cut off."""

logger = logging.getLogger(__name__)


class ServerClock:
    """The clock of one process, for all its threads.

    Args:
        monotonic: Returns seconds that never jump.
        stop_gap: Returns the time in UTC to use until the API server's first response.
    """

    def __init__(self, monotonic: Callable[[], float], stop_gap: Callable[[], datetime]) -> None:
        self._monotonic = monotonic
        self._stop_gap = stop_gap
        self._lock = threading.Lock()
        self._zero: datetime | None = None
        """The server's time when the monotonic clock was 0."""
        self._heard_at = 0.0
        self._last_returned: datetime | None = None
        """The newest time that `now` has returned."""
        self._has_jumped = False

    def monotonic(self) -> float:
        """Seconds, for differences only."""
        return self._monotonic()

    def now(self) -> datetime:
        """The time in UTC. It never goes back."""
        with self._lock:
            found = self._stop_gap() if self._zero is None else self._zero + _seconds(self._monotonic())
            if self._zero is not None:
                self._last_returned = found = max(found, self._last_returned or found)
            return found

    @property
    def is_steady(self) -> bool:
        """Whether times that the cluster writes now can be compared with `now`: they cannot since a jump."""
        with self._lock:
            return self._zero is not None and not self._has_jumped

    def hear(self, date: str, asked_at: float) -> None:
        """Updates the clock with the `Date` header of a response; `asked_at`: monotonic time of its request."""
        arrived = self._monotonic()
        if arrived - asked_at > LONGEST_ANSWER_SECONDS:
            return
        try:
            written = parsedate_to_datetime(date)
        except ValueError:
            return
        zero = written.replace(tzinfo=written.tzinfo or UTC).astimezone(UTC) + _seconds(
            DATE_SECONDS - (asked_at + arrived) / 2
        )
        with self._lock:
            self._follow(zero, arrived)

    def _follow(self, zero: datetime, arrived: float) -> None:
        if self._zero is None:
            self._zero, self._heard_at = zero, arrived
            return
        ahead = (zero - self._zero).total_seconds()
        if abs(ahead) >= JUMP_SECONDS:
            if not self._has_jumped:
                logger.warning("the API server's clock jumped by %.0f s; the operator ignores the jump", ahead)
            self._has_jumped = True
            return
        self._has_jumped = False
        most = FOLLOWED_SHARE * max(0.0, arrived - self._heard_at)
        self._zero += _seconds(min(most, max(-most, ahead)))
        self._heard_at = arrived


class Ages:
    """Measures how long something has been in its state, from when this process first saw it. Time before that counts
    by the object's timestamp if the clock is steady."""

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._since: dict[tuple[str, Hashable], float] = {}

    def seconds(self, uid: str, what: Hashable, since: datetime | None, otherwise: float = 0.0) -> float:
        """How long `what` has been true for the object with this UID; negative if it is in the future.

        Args:
            since: The object's timestamp.
            otherwise: The age at first sight if `since` is missing or the clock is not steady.
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
