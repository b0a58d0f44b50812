"""Requests to stop or retry a job, by annotation (`constants.ANNOTATION_STOP`, `ANNOTATION_RETRY`).

Each new value of an annotation is a new request. `rljob` writes the current time. If both annotations have a time, the
later request applies.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

MAX_REQUEST_LENGTH = 253
"""Largest number of characters of a request in `status.handledRequests`, by the schema of the status."""


def as_recorded(request: str) -> str:
    """The request as the status records it: unchanged, or its SHA-256 if it is empty or too long, because the value of
    an annotation may have any length."""
    return request if 0 < len(request) <= MAX_REQUEST_LENGTH else hashlib.sha256(request.encode()).hexdigest()


def is_later(request: str | None, than: str | None) -> bool:
    """Whether both requests are times, and `request` is later than `than`."""
    first, second = _time(request), _time(than)
    return first is not None and second is not None and first > second


def _time(request: str | None) -> datetime | None:
    """The request as a time, in UTC if it has no time zone; None if it is not a time."""
    try:
        found = datetime.fromisoformat(request or "")
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
