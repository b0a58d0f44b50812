"""A stop and a retry that are both new to an operator which was away: the later one counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType
from rljob_operator.reconcile.observed import Observed, RayJobStatus
from rljob_testing.operator_observed import (
    after,
    at,
    at_work,
    decide,
    found,
    observed,
    ray_job,
    waiting,
    without_retries,
)

EARLIER, LATER = "2026-03-01T11:59:00.5Z", "2026-03-01T12:59:30+01:00"


def asked(seen: Observed, *, stop: str, retry: str) -> Observed:
    return replace(seen, job=replace(seen.job, stop_request=stop, retry_request=retry))


def failed() -> Observed:
    """Of which nothing is left."""
    seen = without_retries(at_work(ray_job(RayJobStatus.FAILED, 1)))
    return replace(after(seen, decide(seen)), clusters=(), pods=())


def test_a_stop_that_was_asked_for_after_the_retry_stops_the_job() -> None:
    seen = asked(failed(), stop=LATER, retry=EARLIER)
    plan = decide(seen, at(10))
    assert (plan.status.phase, plan.effects, len(plan.status.attempts)) == ("Failed", (), 1)
    told = found(plan.status, ConditionType.FAILED)
    assert told is not None
    assert told[1] == "StoppedByUser"
    handled = plan.status.handled_requests
    assert handled is not None
    assert (handled.stop, handled.retry) == (LATER, EARLIER)
    # Both are seen to once.
    assert decide(after(seen, plan), at(20)).status == plan.status


@pytest.mark.parametrize(
    ("stop", "retry"),
    [(EARLIER, LATER), (EARLIER, EARLIER), ("b", "a"), (LATER, "a"), ("b", EARLIER)],
    ids=["before it", "at its time", "no times", "a retry without time", "a stop without time"],
)
def test_any_other_stop_is_taken_back_by_the_retry(stop: str, retry: str) -> None:
    seen = asked(failed(), stop=stop, retry=retry)
    plan = decide(seen, at(10))
    assert plan.status.attempts[-1].number == 2
    assert decide(after(seen, plan), at(11)).status.attempts[-1].stop is None


def test_between_two_attempts_a_stop_counts_whatever_its_time() -> None:
    for stop, retry in ((EARLIER, LATER), (LATER, EARLIER)):
        assert decide(asked(observed(waiting(300)), stop=stop, retry=retry)).status.phase == "Failed"
