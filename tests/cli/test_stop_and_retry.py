"""`rljob stop` and `rljob retry` on a real API server; the tests play the operator between two polls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import pytest

from rljob.errors import RejectedError
from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP
from rljob_testing.cli import job_statuses, job_steering
from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.messages import Mentions

Rljob = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.apiserver


def test_stop_requests_with_the_time_and_says_how_to_withdraw_it(small: JobCluster) -> None:
    small.write_status("small", job_statuses.RUNNING)
    code, lines = job_steering.steer(small, "stop")
    assert (code, job_steering.annotation(small, ANNOTATION_STOP)) == (0, job_steering.ASKED)
    where = f"RLJob {small.namespace}/small"
    assert lines == [
        Mentions(where, "checkpoint within 2m", "runPolicy.gracePeriodSeconds", "deleted", "Failed (StoppedByUser)"),
        Mentions("`rljob retry small --context here`", "checkpoint"),
        Mentions("rljob status small --context here --watch"),
    ]


def test_stop_waits_for_any_result_of_the_job(small: JobCluster) -> None:
    small.write_status("small", job_statuses.RUNNING)
    result = job_statuses.FAILED | {"reason": "StoppedByUser", "message": "somebody asked for it"}
    code, lines = job_steering.steer(small, "stop", [lambda: None, job_steering.operator_writes(small, result=result)])
    assert code == 0
    where = f"RLJob {small.namespace}/small"
    assert lines[-1] == Mentions(where, "finished", "Failed, StoppedByUser", "somebody asked for it")
    assert job_steering.steer(small, "stop") == (0, [Mentions(where, "already finished", "Failed, StoppedByUser")])


def test_stop_is_requested_once_and_again_after_a_retry(small: JobCluster) -> None:
    small.write_status("small", job_statuses.RUNNING)
    job_steering.steer(small, "stop")
    where = f"RLJob {small.namespace}/small"
    version = small.job("small")["metadata"]["resourceVersion"]  # type: ignore[index]
    assert job_steering.steer(small, "stop")[1][0] == Mentions(where, "already asked to stop", job_steering.ASKED)
    assert small.job("small")["metadata"]["resourceVersion"] == version  # type: ignore[index]
    stop = {"reason": "StoppedByUser", "requestedAt": job_statuses.SINCE}
    handled = {"stop": job_steering.ASKED}
    small.write_status("small", {"attempts": [job_statuses.ATTEMPT | {"stop": stop}], "handledRequests": handled})
    assert job_steering.steer(small, "stop")[1][0] == Mentions(where, "already being stopped", job_statuses.SINCE)
    # The job was retried, and the earlier request is still in its annotation.
    small.write_status("small", {"attempts": [job_statuses.ENDED, job_statuses.ATTEMPT | {"number": 2}]})
    small.server.http.patch(
        f"{small.jobs}/small",
        json={"metadata": {"annotations": {ANNOTATION_STOP: "before"}}},
    ).raise_for_status()
    small.write_status("small", {"handledRequests": {"stop": "before"}})
    assert job_steering.steer(small, "stop")[1][0] == Mentions(where, "will be stopped")
    assert job_steering.annotation(small, ANNOTATION_STOP) == job_steering.ASKED


@pytest.mark.parametrize("request_text", ["", "long " * 60])
def test_the_operators_acknowledgement_of_any_request_is_recognized(small: JobCluster, request_text: str) -> None:
    small.write_status("small", job_statuses.RUNNING)
    patch = {"metadata": {"annotations": {ANNOTATION_STOP: request_text}}}
    small.change("small", patch)
    assert job_steering.steer(small, "stop")[1][0] == Mentions("already asked to stop")
    digest = hashlib.sha256(request_text.encode()).hexdigest()
    small.write_status("small", {"handledRequests": {"stop": digest}})
    assert job_steering.steer(small, "stop")[1][0] == Mentions("will be stopped")


def test_stop_keeps_a_cluster_with_cleanup_keepcluster(small: JobCluster, rljob: Rljob) -> None:
    patch = {"spec": {"runPolicy": {"cleanup": "KeepCluster"}}}
    small.change("small", patch)
    small.write_status("small", job_statuses.RUNNING)
    code, output, errors = rljob("stop", "small")
    assert (code, errors) == (0, "")
    assert output == Mentions("RayCluster is kept", "runPolicy.cleanup", "Failed (StoppedByUser)")


def test_retry_of_a_failed_job_waits_for_the_next_attempt(small: JobCluster) -> None:
    status = job_statuses.full_status() | {
        "attempts": [job_statuses.ENDED],
        "counters": job_statuses.COUNTERS,
        "result": job_statuses.FAILED,
        "phase": "Failed",
    }
    small.write_status("small", status)
    second = job_statuses.ATTEMPT | {"number": 2, "cluster": "small-2", "state": "Provisioning"}
    steps = [
        lambda: None,
        job_steering.operator_writes(
            small,
            phase="Provisioning",
            result=None,
            attempts=[job_statuses.ENDED, second],
            handledRequests={"retry": job_steering.ASKED},
        ),
        job_steering.operator_writes(
            small, phase="Running", attempts=[job_statuses.ENDED, second | {"state": "Running"}]
        ),
    ]
    code, lines = job_steering.steer(small, "retry", steps)
    assert (code, job_steering.annotation(small, ANNOTATION_RETRY)) == (0, job_steering.ASKED)
    where = f"RLJob {small.namespace}/small:"
    assert lines == [
        Mentions(where, "attempt 2", "starts now", "step 10", "retry budgets"),
        "waiting: Failed, OutOfMemory",
        "waiting: Provisioning, attempt 2 Provisioning",
        Mentions(where, "attempt 2", "running"),
    ]


def test_a_long_retry_request_is_recognized_by_its_digest(small: JobCluster) -> None:
    request = "x" * 300
    small.write_status(
        "small", {"attempts": [job_statuses.ENDED], "counters": job_statuses.COUNTERS, "result": job_statuses.FAILED}
    )
    small.annotate("small", {ANNOTATION_RETRY: request})
    second = job_statuses.ATTEMPT | {"number": 2, "cluster": "small-2", "state": "Running"}
    handled = {"retry": hashlib.sha256(request.encode()).hexdigest()}
    steps = [
        lambda: None,
        job_steering.operator_writes(
            small, result=None, attempts=[job_statuses.ENDED, second], handledRequests=handled
        ),
    ]
    code, lines = job_steering.steer(small, "retry", steps)
    assert (code, lines[-1]) == (0, Mentions(f"RLJob {small.namespace}/small:", "attempt 2", "running"))


def test_a_failure_after_a_retry_is_distinguished_from_the_one_before(small: JobCluster) -> None:
    small.write_status(
        "small", {"attempts": [job_statuses.ENDED], "counters": job_statuses.COUNTERS, "result": job_statuses.FAILED}
    )
    again = job_statuses.FAILED | {"reason": "ImagePullFailed", "message": "no such image"}
    steps = [
        lambda: None,
        job_steering.operator_writes(small, result=again, handledRequests={"retry": job_steering.ASKED}),
    ]
    code, lines = job_steering.steer(small, "retry", steps)
    assert code == 1
    where = f"RLJob {small.namespace}/small"
    assert lines[-1] == Mentions(where, "finished", "Failed, ImagePullFailed", "no such image")


def test_retry_between_two_attempts_skips_the_backoff(small: JobCluster) -> None:
    small.write_status(
        "small",
        {"attempts": [job_statuses.ENDED], "counters": job_statuses.COUNTERS, "nextAttempt": job_statuses.BETWEEN},
    )
    code, lines = job_steering.steer(small, "retry")
    assert code == 0
    where = f"RLJob {small.namespace}/small:"
    assert lines[0] == Mentions(
        where, "attempt 2", "starts now", "2026-01-31T12:31:00Z", "step 0", "no checkpoint", "retry budgets"
    )
    assert job_steering.steer(small, "retry")[1][0] == Mentions(where, "already requested", job_steering.ASKED)


STOPPING = job_statuses.ATTEMPT | {
    "state": "Stopping",
    "stop": {"reason": "StoppedByUser", "requestedAt": job_statuses.SINCE},
}


@pytest.mark.parametrize(
    ("status", "parts"),
    [
        ({"result": job_statuses.COMPLETE}, ("Complete", "nothing to retry", "new job")),
        (
            {"conditions": [job_statuses.condition("Complete", "True", "Succeeded", job_statuses.SINCE)]},
            ("Complete", "nothing to retry"),
        ),
        ({"attempts": [job_statuses.ATTEMPT]}, ("attempt 1", "Running", "nothing to retry", "`rljob stop small")),
        ({"attempts": [STOPPING]}, ("still stopping", "`rljob status small --context here`")),
        ({}, ("no attempt", "nothing to retry", "(New)", "wait")),
    ],
)
def test_retry_of_a_job_that_has_not_failed_is_rejected(
    small: JobCluster, status: Mapping[str, object], parts: tuple[str, ...]
) -> None:
    small.write_status("small", status)
    with pytest.raises(RejectedError) as caught:
        job_steering.steer(small, "retry")
    assert str(caught.value) == Mentions(f"RLJob {small.namespace}/small:", *parts)
    assert job_steering.annotation(small, ANNOTATION_RETRY) is None


def test_a_retry_waits_until_the_operator_has_handled_an_earlier_stop(small: JobCluster) -> None:
    small.write_status(
        "small",
        {"attempts": [job_statuses.ENDED], "counters": job_statuses.COUNTERS, "nextAttempt": job_statuses.BETWEEN},
    )
    job_steering.steer(small, "stop")
    with pytest.raises(RejectedError, match="still stopping"):
        job_steering.steer(small, "retry")


BEFORE, BEFORE_THAT = "2026-01-31T12:29:00Z", "2026-01-31T12:28:00Z"


def test_a_failed_job_with_a_pending_retry_can_be_stopped(small: JobCluster) -> None:
    small.write_status(
        "small", {"attempts": [job_statuses.ENDED], "counters": job_statuses.COUNTERS, "result": job_statuses.FAILED}
    )
    small.annotate("small", {ANNOTATION_RETRY: BEFORE})
    stopped = job_statuses.FAILED | {"reason": "StoppedByUser", "message": "somebody asked for it"}
    handled = {"retry": BEFORE, "stop": job_steering.ASKED}
    code, lines = job_steering.steer(
        small, "stop", [lambda: None, job_steering.operator_writes(small, result=stopped, handledRequests=handled)]
    )
    assert (code, job_steering.annotation(small, ANNOTATION_STOP)) == (0, job_steering.ASKED)
    where = f"RLJob {small.namespace}/small"
    assert lines[0] == Mentions(where, "will be stopped", "no attempt", "Failed (StoppedByUser)")
    assert lines[-1] == Mentions(where, "finished", "Failed, StoppedByUser", "somebody asked for it")


def test_the_later_of_an_unhandled_stop_and_an_unhandled_retry_counts(small: JobCluster) -> None:
    small.write_status(
        "small", {"attempts": [job_statuses.ENDED], "counters": job_statuses.COUNTERS, "result": job_statuses.FAILED}
    )
    # The retry withdraws this stop.
    small.annotate("small", {ANNOTATION_STOP: BEFORE_THAT, ANNOTATION_RETRY: BEFORE})
    assert job_steering.steer(small, "retry")[1][0] == Mentions("already requested")
    assert job_steering.steer(small, "stop")[1][0] == Mentions("will be stopped")
    assert job_steering.annotation(small, ANNOTATION_STOP) == job_steering.ASKED
    assert job_steering.steer(small, "stop")[1][0] == Mentions("already asked to stop")
    # And this stop withdraws the retry.
    small.annotate("small", {ANNOTATION_STOP: BEFORE, ANNOTATION_RETRY: BEFORE_THAT})
    assert job_steering.steer(small, "retry")[1][0] == Mentions("attempt 2", "starts now")
    assert job_steering.annotation(small, ANNOTATION_RETRY) == job_steering.ASKED


def test_a_complete_job_cannot_be_stopped_after_any_request(small: JobCluster) -> None:
    small.write_status(
        "small", {"attempts": [job_statuses.ENDED], "counters": job_statuses.COUNTERS, "result": job_statuses.COMPLETE}
    )
    small.annotate("small", {ANNOTATION_RETRY: BEFORE})
    assert job_steering.steer(small, "stop")[1] == [
        Mentions(f"RLJob {small.namespace}/small", "already finished", "Complete, Succeeded")
    ]
    assert job_steering.annotation(small, ANNOTATION_STOP) is None
