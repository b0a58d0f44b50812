"""`rljob suspend` and `rljob resume` on a real API server; the tests play the operator between two looks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rljob_api.constants import ANNOTATION_RETRY
from rljob_cli.errors import CliError
from rljob_testing.job_cluster import JobCluster
from rljob_testing.steered_jobs import (
    ATTEMPT,
    COMPLETE,
    COUNTERS,
    ENDED,
    FAILED,
    RUNNING,
    SINCE,
    annotation,
    says,
    steer,
    suspend,
)

pytestmark = pytest.mark.apiserver


def test_suspend_says_what_will_happen_and_how_to_watch_it(small: JobCluster) -> None:
    small.write_status("small", RUNNING)
    code, lines = steer(small, "suspend")
    assert (code, suspend(small)) == (0, True)
    assert lines == [
        f"RLJob {small.namespace}/small will be suspended: its trainer saves a checkpoint within 2m"
        " (runPolicy.gracePeriodSeconds), then its cluster is removed",
        "`rljob resume small --context here` lets it go on from its newest checkpoint",
        "to watch it: rljob status small --context here --watch",
    ]


def test_suspend_waits_until_nothing_runs(small: JobCluster) -> None:
    small.write_status("small", RUNNING)
    stop = {"reason": "Suspending", "requestedAt": SINCE}
    steps = [
        says(small, phase="Suspending", attempts=[ATTEMPT | {"state": "Stopping", "stop": stop}]),
        lambda: None,
        says(small, phase="Suspended", attempts=[ENDED | {"outcome": "Stopped"}], suspendedAt=SINCE),
    ]
    code, lines = steer(small, "suspend", steps)
    assert code == 0
    assert lines[2:] == [
        "waiting: Running, attempt 1 Running",
        "waiting: Suspending, attempt 1 Stopping",
        f"RLJob {small.namespace}/small is suspended and holds no nodes; it goes on from step 10",
    ]


def test_suspend_of_what_is_suspended_changes_nothing(small: JobCluster) -> None:
    steer(small, "suspend")
    generation = small.job("small")["metadata"]["generation"]  # type: ignore[index]
    assert steer(small, "suspend") == (
        0,
        [
            f"RLJob {small.namespace}/small is being suspended already",
            "to watch it: rljob status small --context here --watch",
        ],
    )
    small.write_status("small", {"suspendedAt": SINCE})
    assert steer(small, "suspend", []) == (
        0,
        [
            f"RLJob {small.namespace}/small is suspended already, for 10m; `rljob resume small --context here` lets it"
            " go on"
        ],
    )
    assert small.job("small")["metadata"]["generation"] == generation  # type: ignore[index]


def test_a_job_that_ends_before_it_is_suspended_has_not_been(small: JobCluster) -> None:
    small.write_status("small", RUNNING)
    code, lines = steer(small, "suspend", [says(small, result=COMPLETE | {"message": "80 steps"})])
    assert code == 1
    assert lines[-1] == f"RLJob {small.namespace}/small has ended: Complete, Succeeded: 80 steps"


def test_a_job_that_somebody_resumes_is_not_waited_for(small: JobCluster) -> None:
    small.write_status("small", RUNNING)

    def resumed() -> None:
        assert steer(small, "resume")[0] == 0

    code, lines = steer(small, "suspend", [resumed])
    assert (code, lines[-1]) == (1, f"RLJob {small.namespace}/small was resumed meanwhile")


@pytest.mark.parametrize(
    ("status", "takes"),
    [
        ({}, "nothing of it runs"),
        (
            {"attempts": [ATTEMPT | {"state": "Provisioning"}]},
            "its trainer does not run yet, and its cluster is removed",
        ),
    ],
)
def test_what_a_suspension_takes_depends_on_what_runs(
    small: JobCluster, status: Mapping[str, object], takes: str
) -> None:
    small.write_status("small", status)
    assert steer(small, "suspend")[1][0] == f"RLJob {small.namespace}/small will be suspended: {takes}"


def test_resume_waits_for_a_trainer_that_runs_after_it_was_seen(small: JobCluster) -> None:
    small.write_status("small", {"phase": "Suspended", "attempts": [ENDED], "suspendedAt": SINCE})
    steer(small, "suspend")
    second = ATTEMPT | {"number": 2, "cluster": "small-2"}
    steps = [
        says(small, suspendedAt=None, phase="Provisioning", attempts=[ENDED, second | {"state": "Provisioning"}]),
        says(small, phase="Running", observedGeneration=2, attempts=[ENDED, second]),
        says(small, observedGeneration=3),
    ]
    code, lines = steer(small, "resume", steps)
    assert (code, suspend(small)) == (0, False)
    assert lines == [
        f"RLJob {small.namespace}/small will go on, with a new attempt from the beginning: there is no checkpoint",
        "waiting: Suspended",
        "waiting: Provisioning, attempt 2 Provisioning",
        "waiting: Running, attempt 2 Running",
        f"RLJob {small.namespace}/small: attempt 2 runs",
    ]


def test_resume_of_what_is_not_suspended_says_so(small: JobCluster) -> None:
    small.write_status("small", RUNNING)
    text = f"RLJob {small.namespace}/small is not suspended (Running, attempt 1 Running)"
    assert steer(small, "resume", []) == (0, [text])


def test_a_job_that_failed_while_it_was_to_be_suspended_can_be_got_going(small: JobCluster) -> None:
    steer(small, "suspend")
    small.write_status("small", {"result": FAILED, "counters": COUNTERS})
    where = f"RLJob {small.namespace}/small"
    with pytest.raises(CliError, match=f"{where}: is suspended; let it go on with `rljob resume small --context here`"):
        steer(small, "retry")
    assert annotation(small, ANNOTATION_RETRY) is None
    code, lines = steer(small, "resume", [])
    assert (code, suspend(small)) == (0, False)
    assert lines == [
        f"{where} is no longer suspended, but it has ended (Failed, OutOfMemory); `rljob retry small --context here`"
        " lets it go on from its newest checkpoint"
    ]
    assert steer(small, "retry")[0] == 0


def test_a_job_that_has_ended_cannot_be_suspended(small: JobCluster) -> None:
    small.write_status("small", {"result": FAILED})
    with pytest.raises(CliError, match=r"small: has ended \(Failed, OutOfMemory\); there is nothing to suspend"):
        steer(small, "suspend")
    assert suspend(small) is False
