"""`rljob suspend` and `rljob resume` on a real API server; the tests play the operator between two polls."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rljob.errors import RejectedError
from rljob_api.constants import ANNOTATION_RETRY
from rljob_testing.cli import job_statuses, job_steering
from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.messages import Mentions

pytestmark = pytest.mark.apiserver


def test_suspend_says_what_will_happen_and_how_to_watch_it(small: JobCluster) -> None:
    small.write_status("small", job_statuses.RUNNING)
    code, lines = job_steering.steer(small, "suspend")
    assert (code, job_steering.suspend(small)) == (0, True)
    where = f"RLJob {small.namespace}/small"
    assert lines == [
        Mentions(where, "suspended", "checkpoint within 2m", "runPolicy.gracePeriodSeconds", "deleted"),
        Mentions("`rljob resume small --context here`", "checkpoint"),
        Mentions("rljob status small --context here --watch"),
    ]


def test_suspend_promises_no_checkpoint_of_a_trainer_that_is_starting(small: JobCluster) -> None:
    starting = job_statuses.RUNNING | {"attempts": [job_statuses.ATTEMPT | {"state": "Starting"}]}
    small.write_status("small", starting)
    _, lines = job_steering.steer(small, "suspend")
    assert "its trainer is starting and exits without a new checkpoint, then its RayCluster is deleted" in lines[0]


def test_suspend_waits_until_nothing_runs(small: JobCluster) -> None:
    small.write_status("small", job_statuses.RUNNING)
    stop = {"reason": "Suspending", "requestedAt": job_statuses.SINCE}
    steps = [
        job_steering.operator_writes(
            small, phase="Suspending", attempts=[job_statuses.ATTEMPT | {"state": "Stopping", "stop": stop}]
        ),
        lambda: None,
        job_steering.operator_writes(
            small,
            phase="Suspended",
            attempts=[job_statuses.ENDED | {"outcome": "Stopped"}],
            suspendedAt=job_statuses.SINCE,
        ),
    ]
    code, lines = job_steering.steer(small, "suspend", steps)
    assert code == 0
    assert lines[2:] == [
        "waiting: Running, attempt 1 Running",
        "waiting: Suspending, attempt 1 Stopping",
        Mentions(f"RLJob {small.namespace}/small", "suspended", "pods are deleted", "step 10"),
    ]


def test_suspend_of_a_suspended_job_changes_nothing(small: JobCluster) -> None:
    job_steering.steer(small, "suspend")
    generation = small.job("small")["metadata"]["generation"]  # type: ignore[index]
    where = f"RLJob {small.namespace}/small"
    assert job_steering.steer(small, "suspend") == (
        0,
        [Mentions(where, "already being suspended"), Mentions("rljob status small --context here --watch")],
    )
    small.write_status("small", {"suspendedAt": job_statuses.SINCE})
    assert job_steering.steer(small, "suspend", []) == (
        0,
        [Mentions(where, "already suspended", "10m", "`rljob resume small --context here`")],
    )
    assert small.job("small")["metadata"]["generation"] == generation  # type: ignore[index]


def test_a_job_that_finishes_before_its_suspension_is_reported(small: JobCluster) -> None:
    small.write_status("small", job_statuses.RUNNING)
    code, lines = job_steering.steer(
        small, "suspend", [job_steering.operator_writes(small, result=job_statuses.COMPLETE | {"message": "80 steps"})]
    )
    assert code == 1
    assert lines[-1] == Mentions(f"RLJob {small.namespace}/small", "finished", "Complete, Succeeded", "80 steps")


def test_a_job_that_another_user_resumes_is_not_waited_for(small: JobCluster) -> None:
    small.write_status("small", job_statuses.RUNNING)

    def resumed() -> None:
        assert job_steering.steer(small, "resume")[0] == 0

    code, lines = job_steering.steer(small, "suspend", [resumed])
    assert (code, lines[-1]) == (1, Mentions(f"RLJob {small.namespace}/small", "was resumed"))


@pytest.mark.parametrize(
    ("status", "parts"),
    [
        ({}, ("no attempt",)),
        ({"attempts": [job_statuses.ATTEMPT | {"state": "Provisioning"}]}, ("trainer", "not started", "deleted")),
    ],
)
def test_the_announced_suspension_depends_on_the_attempt(
    small: JobCluster, status: Mapping[str, object], parts: tuple[str, ...]
) -> None:
    small.write_status("small", status)
    first = job_steering.steer(small, "suspend")[1][0]
    assert first == Mentions(f"RLJob {small.namespace}/small", "suspended", *parts, without=["gracePeriodSeconds"])


def test_resume_waits_for_a_running_trainer(small: JobCluster) -> None:
    small.write_status(
        "small", {"phase": "Suspended", "attempts": [job_statuses.ENDED], "suspendedAt": job_statuses.SINCE}
    )
    job_steering.steer(small, "suspend")
    second = job_statuses.ATTEMPT | {"number": 2, "cluster": "small-2"}
    steps = [
        job_steering.operator_writes(
            small,
            suspendedAt=None,
            phase="Provisioning",
            attempts=[job_statuses.ENDED, second | {"state": "Provisioning"}],
        ),
        job_steering.operator_writes(
            small, phase="Running", observedGeneration=2, attempts=[job_statuses.ENDED, second]
        ),
        job_steering.operator_writes(small, observedGeneration=3),
    ]
    code, lines = job_steering.steer(small, "resume", steps)
    assert (code, job_steering.suspend(small)) == (0, False)
    where = f"RLJob {small.namespace}/small"
    assert lines == [
        Mentions(where, "resume", "attempt", "step 0", "no checkpoint"),
        "waiting: Suspended",
        "waiting: Provisioning, attempt 2 Provisioning",
        "waiting: Running, attempt 2 Running",
        Mentions(where, "attempt 2", "running"),
    ]


def test_resume_of_a_job_that_is_not_suspended_says_so(small: JobCluster) -> None:
    small.write_status("small", job_statuses.RUNNING)
    text = Mentions(f"RLJob {small.namespace}/small", "not suspended", "Running, attempt 1 Running")
    assert job_steering.steer(small, "resume", []) == (0, [text])


def test_a_job_that_failed_during_its_suspension_can_be_resumed(small: JobCluster) -> None:
    job_steering.steer(small, "suspend")
    small.write_status("small", {"result": job_statuses.FAILED, "counters": job_statuses.COUNTERS})
    where = f"RLJob {small.namespace}/small"
    with pytest.raises(RejectedError, match=f"{where}: .*suspended.*`rljob resume small --context here`"):
        job_steering.steer(small, "retry")
    assert job_steering.annotation(small, ANNOTATION_RETRY) is None
    code, lines = job_steering.steer(small, "resume", [])
    assert (code, job_steering.suspend(small)) == (0, False)
    retry = "`rljob retry small --context here`"
    assert lines == [Mentions(where, "no longer suspended", "finished", "Failed, OutOfMemory", retry, "checkpoint")]
    assert job_steering.steer(small, "retry")[0] == 0


def test_a_finished_job_cannot_be_suspended(small: JobCluster) -> None:
    small.write_status("small", {"result": job_statuses.FAILED})
    with pytest.raises(RejectedError, match=r"small: .*finished.*Failed, OutOfMemory.*suspend"):
        job_steering.steer(small, "suspend")
    assert job_steering.suspend(small) is False
