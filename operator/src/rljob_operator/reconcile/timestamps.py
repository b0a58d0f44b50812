"""Times in a status: RFC 3339, UTC, whole seconds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def timestamp(moment: datetime) -> str:
    """A time as text; `moment` has a time zone."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(text: str) -> datetime:
    """The time that `timestamp`, or a trainer's clock, wrote."""
    return datetime.fromisoformat(text)


def seconds_since(text: str, now: datetime) -> float:
    """Negative for a time to come."""
    return (now - moment(text)) / timedelta(seconds=1)
