"""The time comes from the API server once, and continues whatever the machines' clocks do afterwards."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

import pytest

from rljob_testing.operator import manual_clock

HALF = timedelta(seconds=0.5)
"""The part of a time that the header leaves out, on average."""


def test_before_the_first_response_it_is_the_nodes_time() -> None:
    clock = manual_clock.ManualClock()
    assert clock.clock.now() == manual_clock.WRONG
    assert not clock.clock.is_steady
    clock.hear()
    assert clock.clock.now() == manual_clock.NOON + HALF


def test_the_server_clock_advances_with_the_monotonic_clock() -> None:
    clock = manual_clock.synchronized_clock()
    clock.advance(3600.25)
    assert clock.clock.now() == manual_clock.NOON + HALF + timedelta(seconds=3600.25)


def test_half_of_the_response_time_is_added() -> None:
    clock = manual_clock.ManualClock()
    clock.hear(answer_seconds=1.0)
    # Written at 12:00:01 by the header, and half a second old when it arrived.
    assert clock.clock.now() == manual_clock.NOON + timedelta(seconds=1.0) + HALF + timedelta(seconds=0.5)


def test_a_slow_response_does_not_set_the_clock() -> None:
    clock = manual_clock.ManualClock()
    clock.hear(answer_seconds=3.0)
    assert clock.clock.now() == manual_clock.WRONG


@pytest.mark.parametrize("date", ["", "soon", "Sat, 99 Jan 2026 12:00:00 GMT"])
def test_an_invalid_date_header_is_ignored(date: str) -> None:
    clock = manual_clock.synchronized_clock()
    clock.clock.update(date, clock.seconds)
    assert clock.clock.now() == manual_clock.NOON + HALF


@pytest.mark.parametrize("hours", [1, -1])
def test_a_jump_of_the_server_clock_is_ignored_and_logged_once(hours: int, caplog: pytest.LogCaptureFixture) -> None:
    clock = manual_clock.synchronized_clock()
    clock.server_time += timedelta(hours=hours)
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            clock.advance(60)
            clock.hear()
    assert clock.clock.now() == manual_clock.NOON + HALF + timedelta(minutes=10)
    assert not clock.clock.is_steady
    assert len(caplog.records) == 1
    assert f"jumped by {hours * 3600} s" in caplog.text
    clock.server_time -= timedelta(hours=hours)
    clock.hear()
    assert clock.clock.is_steady


def test_a_small_difference_is_followed_slowly() -> None:
    clock = manual_clock.synchronized_clock()
    clock.server_time += timedelta(seconds=3)
    clock.advance(100)
    clock.hear()
    # One hundredth of the hundred seconds.
    assert clock.clock.now() == manual_clock.NOON + HALF + timedelta(seconds=101)
    clock.advance(1000)
    clock.hear()
    assert clock.clock.now() == manual_clock.NOON + HALF + timedelta(seconds=1103)


def test_the_server_clock_never_goes_back() -> None:
    clock = manual_clock.synchronized_clock()
    clock.advance(100)
    before = clock.clock.now()
    clock.server_time -= timedelta(seconds=3)
    clock.hear()
    assert clock.clock.now() == before
    clock.advance(0.5)
    assert clock.clock.now() == before
    clock.advance(1.5)
    assert clock.clock.now() == before + timedelta(seconds=1)


def test_an_age_counts_from_its_time_stamp() -> None:
    clock = manual_clock.synchronized_clock(datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC))
    since = manual_clock.NOON - timedelta(seconds=30)
    assert clock.ages.seconds("u", "silent", since) == 30.5
    clock.advance(10)
    assert clock.ages.seconds("u", "silent", since) == 40.5


@pytest.mark.parametrize("hours", [1, -1])
def test_an_age_survives_a_jump(hours: int) -> None:
    clock = manual_clock.synchronized_clock()
    since = manual_clock.NOON - timedelta(seconds=30)
    clock.ages.seconds("u", "silent", since)
    clock.server_time += timedelta(hours=hours)
    clock.hear()
    clock.advance(10)
    assert clock.ages.seconds("u", "silent", since) == 40.5
    # Time stamps written from now on are not comparable: their age counts from when they are seen.
    assert clock.ages.seconds("v", "silent", clock.server_time) == 0.0
    assert clock.ages.seconds("v", "gone", clock.server_time, otherwise=-20) == -20
    clock.advance(25)
    assert clock.ages.seconds("v", "silent", clock.server_time) == 25.0
    assert clock.ages.seconds("v", "gone", clock.server_time, otherwise=-20) == 5


def test_deleted_objects_are_forgotten() -> None:
    clock = manual_clock.synchronized_clock()
    clock.ages.seconds("u", "silent", manual_clock.NOON)
    clock.ages.seconds("v", "silent", manual_clock.NOON)
    clock.advance(10)
    clock.ages.keep_only(["v"])
    assert clock.ages.seconds("u", "silent", None) == 0.0
    assert clock.ages.seconds("v", "silent", None) == 10.5
