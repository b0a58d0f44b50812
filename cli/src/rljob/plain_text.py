"""Formats ages, durations, numbers and the output of other programs as text."""

from __future__ import annotations

from datetime import UTC, datetime

from rljob_api.standard_streams import printable


def one_line(text: object) -> str:
    """The text on one line, without control characters."""
    return " ".join(printable(str(text)).split())


def shortened(line: str, limit: int = 240) -> str:
    """Shortens a long line in the middle, because the start usually names the subject and the end names the cause."""
    if len(line) <= limit:
        return line
    tail = (limit - 5) // 2
    return f"{line[: limit - 5 - tail]} ... {line[-tail:]}"


def age(then: datetime, now: datetime) -> str:
    """An age as `kubectl get` shows it: `45s`, `3m20s`, `12m`, `3h5m`, `2d`. A time in the future has the age `0s`,
    because clocks may differ."""
    return duration_text(max((now - then).total_seconds(), 0))


def duration_text(time_seconds: float) -> str:
    """A duration in one or two units: `45s`, `3m20s`, `12m`, `3h5m`, `2d`."""
    seconds = int(time_seconds)
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if minutes < 2:
        return f"{seconds}s"
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    return f"{hours}h" if days < 2 else f"{days}d"


def number_text(value: float | None) -> str:
    """A number with at most four significant digits; empty for None."""
    return "" if value is None else f"{value:.4g}"


def time_text(then: datetime) -> str:
    """A time in UTC, such as `2026-01-31T12:29:30Z`."""
    return f"{then.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def in_time(then: datetime, now: datetime) -> str:
    """How far a time is in the future: `in 10m`, or `now` if it has passed."""
    left = (then - now).total_seconds()
    return f"in {duration_text(left)}" if left > 0 else "now"


def bytes_text(num_bytes: float) -> str:
    """A number of bytes in one unit: `512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
