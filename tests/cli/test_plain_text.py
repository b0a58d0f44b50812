"""Ages, durations and foreign text, as the cluster commands show them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from rljob.plain_text import age, duration_text, one_line, shortened


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (119.9, "119s"),
        (120, "2m"),
        (200, "3m20s"),
        (600, "10m"),
        (3 * 3600 - 1, "179m"),
        (3 * 3600, "3h"),
        (3 * 3600 + 300, "3h5m"),
        (8 * 3600 + 300, "8h"),
        (47 * 3600, "47h"),
        (48 * 3600, "2d"),
    ],
)
def test_a_duration_is_as_exact_as_matters(seconds: float, shown: str) -> None:
    assert duration_text(seconds) == shown


def test_a_clock_that_is_ahead_gives_no_negative_age() -> None:
    now = datetime(2026, 1, 31, tzinfo=UTC)
    assert age(now + timedelta(seconds=5), now) == "0s"


def test_foreign_text_becomes_one_printable_line() -> None:
    assert one_line("a\tb\x1b[31m\n  c\r\n") == "a b c"


def test_a_long_line_keeps_both_ends() -> None:
    assert shortened("x" * 240) == "x" * 240
    cut = shortened("a" * 200 + "b" * 200)
    assert len(cut) == 240
    assert cut.startswith("aaa")
    assert cut.endswith("bbb")
    assert "a ... b" in cut
