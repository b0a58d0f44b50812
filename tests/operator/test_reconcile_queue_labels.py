"""The labels for Kueue of a job change while its RayCluster exists."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import Reason
from rljob_api.v1alpha1.pools import PRIORITY_CLASS_LABEL, QUEUE_LABEL
from rljob_operator.reconcile.decision import CreateCluster, DeleteCluster
from rljob_testing.operator import inputs
from rljob_testing.operator.reasons_of_waiting import in_queue

R = Reason


@pytest.mark.parametrize(
    ("labels", "is_moved"),
    [
        ({QUEUE_LABEL: "other"}, True),
        ({QUEUE_LABEL: "team", PRIORITY_CLASS_LABEL: "high"}, True),
        ({QUEUE_LABEL: "team"}, False),
        ({}, False),
    ],
)
def test_a_job_that_waits_moves_to_the_queue_of_its_new_label(labels: dict[str, str], *, is_moved: bool) -> None:
    seen = in_queue()
    seen = replace(seen, job=replace(seen.job, labels=labels))
    decision = inputs.decide(seen)
    if not is_moved:
        assert (decision.effects, decision.status.attempts[-1].ended) == ((), None)
        return
    assert [type(effect) for effect in decision.effects] == [DeleteCluster]
    assert decision.status.attempts[-1].reason == R.QUEUE_CHANGED
    assert (decision.status.phase, decision.status.waiting_since) == ("Queued", "2026-03-01T12:00:00Z")
    deleted = replace(inputs.with_status_written(seen, decision), clusters=())
    started = inputs.decide(deleted, inputs.at(20))
    created = inputs.decide(inputs.with_status_written(deleted, started), inputs.at(21))
    assert created.effects == (CreateCluster(1, "example-1"),)
    assert started.status.counters is not None
    used = started.status.counters
    assert (used.attempts, used.failed_attempts, used.uncounted_restarts) == (2, 0, 1)


def test_a_priority_that_only_a_webhook_has_set_is_no_change() -> None:
    seen = in_queue()
    there = replace(seen.clusters[0], priority_class="default")
    seen = replace(seen, clusters=(there,), job=replace(seen.job, labels={QUEUE_LABEL: "team"}))
    assert inputs.decide(seen).status.attempts[-1].ended is None


def test_a_job_that_was_admitted_stays_although_its_label_changes() -> None:
    seen = in_queue(suspended=False, active=True)
    decision = inputs.decide(replace(seen, job=replace(seen.job, labels={QUEUE_LABEL: "other"})))
    assert (decision.effects, decision.status.attempts[-1].ended) == ((), None)
