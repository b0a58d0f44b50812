"""Statuses of the operator before records, as it wrote them, and the records that they become."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest

from rljob_api.v1alpha1.status import RLJobStatus
from rljob_operator.kube.observed_objects import JobReader
from rljob_operator.kube.status_upgrade import is_without_records, with_records
from rljob_testing.job_place import cluster_job

CREATED = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
CREATED_SECONDS = 1769860800
STARTED, READY, SUBMITTED, STOPPING, ENDED, REMOVED = (f"2026-01-31T12:0{minute}:00Z" for minute in range(1, 7))


def condition(kind: str, status: str, reason: str, since: str, message: str = "") -> dict[str, object]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since}


VALID = condition("SpecValid", "True", "Valid", STARTED)
CLUSTER = condition("ClusterReady", "True", "Ready", READY)
RAN = condition("JobSubmitted", "True", "Submitted", SUBMITTED)
TRAINS = condition("Progressing", "True", "Training", SUBMITTED)


def upgraded(conditions: list[dict[str, object]], **attempt: object) -> RLJobStatus:
    made = {"number": 1, "cluster": "job-1", "started": STARTED, "outcome": "Running", "submissions": 0} | attempt
    attempts = [made] if attempt else []
    return with_records(RLJobStatus.from_wire({"conditions": conditions, "attempts": attempts}), CREATED)


def test_a_job_that_was_never_looked_at_needs_no_records() -> None:
    assert not is_without_records(RLJobStatus())
    assert not is_without_records(RLJobStatus.from_wire({"conditions": [VALID], "counters": {"attempts": 1}}))
    assert is_without_records(RLJobStatus.from_wire({"conditions": [VALID]}))


def test_a_job_whose_cluster_is_awaited() -> None:
    waiting = condition("ClusterReady", "False", "PodsPending", STARTED)
    status = upgraded([VALID, waiting], clusterUid="c1")
    (attempt,) = status.attempts
    assert (attempt.state, attempt.admitted_at, attempt.ready_at) == ("Provisioning", STARTED, None)
    assert (attempt.running_since, attempt.start_number, attempt.stop) == (None, None, None)
    assert status.counters is not None
    assert (status.counters.attempts, status.counters.start_number) == (1, 0)
    assert status.result is None


def test_a_job_whose_cluster_was_not_seen_yet_was_not_admitted() -> None:
    (attempt,) = upgraded([VALID], submissions=0).attempts
    assert (attempt.state, attempt.admitted_at) == ("Provisioning", None)


def test_a_job_that_runs() -> None:
    status = upgraded([VALID, CLUSTER, RAN, TRAINS], clusterUid="c1", submissions=1)
    (attempt,) = status.attempts
    assert attempt.state == "Running"
    assert (attempt.admitted_at, attempt.ready_at, attempt.running_since) == (READY, READY, SUBMITTED)
    assert attempt.start_number == CREATED_SECONDS + 1
    assert attempt.progressed_at is None, "it counts from when this operator first sees it"
    assert status.counters is not None
    assert (status.counters.attempts, status.counters.start_number) == (1, CREATED_SECONDS + 1)
    assert status.result is None


def test_a_job_that_runs_on_a_cluster_that_is_not_ready_any_more() -> None:
    lost = condition("ClusterReady", "False", "PodsPending", STOPPING)
    (attempt,) = upgraded([VALID, lost, RAN, TRAINS], clusterUid="c1", submissions=1).attempts
    assert (attempt.admitted_at, attempt.ready_at, attempt.running_since) == (STARTED, STARTED, SUBMITTED)


def test_a_job_that_was_being_stopped() -> None:
    stopping = condition("Progressing", "False", "Stopping", STOPPING, "the trainer was asked to stop")
    status = upgraded([VALID, CLUSTER, RAN, stopping], submissions=1, reason="ActiveDeadlineExceeded")
    (attempt,) = status.attempts
    assert (attempt.state, attempt.reason, attempt.ended) == ("Stopping", None, None)
    assert attempt.stop is not None
    assert (attempt.stop.reason, attempt.stop.requested_at, attempt.stop.told_at) == (
        "ActiveDeadlineExceeded",
        STOPPING,
        None,
    )


def test_a_job_that_has_ended() -> None:
    complete = condition("Complete", "True", "Succeeded", ENDED, "4 of 4 steps")
    removed = condition("ClusterReady", "False", "Removed", REMOVED)
    status = upgraded([VALID, removed, RAN, complete], submissions=1, outcome="Succeeded", ended=ENDED)
    assert status.result is not None
    assert (status.result.outcome, status.result.reason, status.result.message) == (
        "Succeeded",
        "Succeeded",
        "4 of 4 steps",
    )
    assert (status.result.at, status.result.cleaned_up_at) == (ENDED, REMOVED)
    (attempt,) = status.attempts
    assert (attempt.state, attempt.outcome, attempt.ended) == ("Ended", "Succeeded", ENDED)
    assert status.counters is not None
    # From 12:01 to 12:05: of a cluster that is gone nobody knows since when it was ready.
    assert (status.counters.active_seconds, status.counters.failed_attempts) == (240, 0)


@pytest.mark.parametrize(
    ("cluster", "cleaned_up_at"),
    [
        (condition("ClusterReady", "False", "Removed", REMOVED), REMOVED),
        (condition("ClusterReady", "True", "Kept", READY), ENDED),
        (condition("ClusterReady", "False", "Ended", REMOVED), None),
        (condition("ClusterReady", "False", "ClusterLost", REMOVED), None),
        (condition("ClusterReady", "True", "Ready", READY), None),
    ],
)
def test_a_job_that_has_failed_is_cleaned_up_only_where_that_was_seen(
    cluster: dict[str, object], cleaned_up_at: str | None
) -> None:
    failed = condition("Failed", "True", "OutOfMemory", ENDED, "x" * 1024)
    status = upgraded([VALID, cluster, failed], outcome="Failed", ended=ENDED, reason="OutOfMemory")
    assert status.result is not None
    assert (status.result.outcome, status.result.reason) == ("Failed", "OutOfMemory")
    assert status.result.cleaned_up_at == cleaned_up_at
    assert (status.attempts[0].state, status.attempts[0].message) == ("Ended", "x" * 512)
    assert status.counters is not None
    assert status.counters.failed_attempts == 1


def test_a_job_that_could_not_begin_has_left_nothing() -> None:
    invalid = condition("SpecValid", "False", "InvalidSpec", ENDED, "spec.pools: is missing")
    failed = condition("Failed", "True", "InvalidSpec", ENDED, "spec.pools: is missing")
    status = upgraded([invalid, failed])
    assert status.result is not None
    assert (status.result.reason, status.result.cleaned_up_at, status.attempts) == ("InvalidSpec", ENDED, ())
    assert status.counters is not None
    assert status.counters.attempts == 0


@pytest.mark.parametrize(
    "conditions", [[VALID], [VALID, CLUSTER, RAN, TRAINS]], ids=["at its beginning", "while it runs"]
)
def test_it_is_done_once(conditions: list[dict[str, object]]) -> None:
    once = upgraded(conditions, submissions=1)
    assert not is_without_records(once)


def test_a_job_is_read_with_records_and_what_is_stored_is_known() -> None:
    status: Mapping[str, object] = {"conditions": [VALID, CLUSTER, RAN, TRAINS], "attempts": []}
    metadata = {"name": "job", "namespace": "team", "uid": "u", "creationTimestamp": "2026-01-31T12:00:00Z"}
    read = JobReader().read({**cluster_job("job"), "metadata": metadata, "status": copy.deepcopy(status)})
    assert read.is_upgraded
    assert read.observed.status.counters is not None
    assert read.status == status, "the records are what is to be written"
