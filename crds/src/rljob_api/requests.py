"""What people ask for by annotations (`constants.ANNOTATION_STOP`, `ANNOTATION_RETRY`): any text that was not there
before is a new request. `rljob` writes the time, and so does who wants the later of two requests to count."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

MAX_REQUEST_LENGTH = 253
"""Characters of a request in `status.handledRequests`, as its schema says."""


def as_noted(request: str) -> str:
    """A request as it fits a status: an annotation may be empty, or as long as anybody likes."""
    return request if 0 < len(request) <= MAX_REQUEST_LENGTH else hashlib.sha256(request.encode()).hexdigest()


def is_later(request: str | None, than: str | None) -> bool:
    """Whether both are times, and the first is the later one."""
    first, second = _time(request), _time(than)
    return first is not None and second is not None and first > second


def _time(request: str | None) -> datetime | None:
    """In UTC where the text names no zone."""
    try:
        found = datetime.fromisoformat(request or "")
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
