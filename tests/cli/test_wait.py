"""`rljob wait` on a real API server; the tests play the operator between two polls."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from rljob.cluster import Cluster, ClusterOptions, connect
from rljob.errors import ClusterUnreachableError
from rljob.stored_job import StoredJob, stored_job
from rljob.waiting import ended, wait
from rljob_api.constants import ANNOTATION_RETRY
from rljob_cli.cluster.steering import wait_for
from rljob_testing.cli import job_statuses
from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.cli.job_steering import Script, Step, operator_writes
from rljob_testing.messages import Mentions

pytestmark = pytest.mark.apiserver

Rljob = Callable[..., tuple[int, str, str]]
SINCE = job_statuses.SINCE
SAVED = job_statuses.condition("Checkpointed", "True", "Saved", SINCE, "step 10")
SUSPENDED = job_statuses.condition("Suspended", "True", "Suspended", SINCE)


def waited(
    cluster: JobCluster, state: str, steps: Sequence[Step] = (), timeout_seconds: float | None = None
) -> tuple[int, list[str]]:
    """Waits for a state of the job `small`, with one step after each poll. Returns exit code and output."""
    output = io.StringIO()
    api = connect(ClusterOptions(kubeconfig=cluster.kubeconfig))
    console = Console(file=output, highlight=False, width=80)
    clock = Script(steps).clock()
    code = wait_for(api, "small", state, console, timeout_seconds=timeout_seconds, clock=clock)
    return code, output.getvalue().splitlines()


def test_waiting_ends_when_the_trainer_runs(small: JobCluster) -> None:
    provisioning = job_statuses.ATTEMPT | {"state": "Provisioning"}
    steps = [
        operator_writes(small, phase="Provisioning", attempts=[provisioning]),
        operator_writes(small, **job_statuses.RUNNING),
    ]
    code, lines = waited(small, "running", steps)
    assert code == 0
    assert lines == [
        "waiting: New",
        "waiting: Provisioning, attempt 1 Provisioning",
        f"RLJob {small.namespace}/small: attempt 1 is running",
    ]


@pytest.mark.parametrize(
    ("state", "status", "text"),
    [
        ("Complete", {"result": job_statuses.COMPLETE}, "has finished: Complete, Succeeded"),
        ("finished", {"result": job_statuses.COMPLETE}, "has finished: Complete, Succeeded"),
        ("Finished", {"result": job_statuses.FAILED}, "has finished: Failed, OutOfMemory: head: 8Gi"),
        ("Failed", {"result": job_statuses.FAILED}, "has finished: Failed, OutOfMemory: head: 8Gi"),
        ("Checkpointed", {"conditions": [SAVED]}, "Checkpointed is True, Saved: step 10"),
        ("Suspended", {"conditions": [SUSPENDED]}, "Suspended is True, Suspended"),
        ("Checkpointed", {"conditions": [SAVED], "result": job_statuses.FAILED}, "Checkpointed is True"),
    ],
)
def test_a_state_that_the_job_has_ends_the_command_at_once(
    small: JobCluster, rljob: Rljob, state: str, status: dict[str, object], text: str
) -> None:
    small.write_status("small", status)
    assert rljob("wait", "small", "--for", state) == (0, Mentions(f"RLJob {small.namespace}/small", text), "")


@pytest.mark.parametrize(
    ("state", "result"),
    [
        ("Complete", job_statuses.FAILED),
        ("Failed", job_statuses.COMPLETE),
        ("Running", job_statuses.COMPLETE),
        ("Suspended", job_statuses.FAILED),
    ],
)
def test_a_job_that_has_finished_otherwise_ends_the_command_with_1(
    small: JobCluster, rljob: Rljob, state: str, result: dict[str, object]
) -> None:
    small.write_status("small", {"result": result})
    assert rljob("wait", "small", "--for", state) == (1, Mentions("has finished"), "")


def test_a_failed_job_that_is_to_be_retried_is_waited_for(small: JobCluster) -> None:
    small.write_status("small", {"result": job_statuses.FAILED})
    small.annotate("small", {ANNOTATION_RETRY: "now"})
    retried = operator_writes(small, result=None, handledRequests={"retry": "now"}, attempts=[job_statuses.ATTEMPT])
    code, lines = waited(small, "Running", [retried])
    assert (code, lines[-1]) == (0, Mentions("attempt 1 is running"))


def test_the_time_limit_ends_the_command_with_124(small: JobCluster) -> None:
    code, lines = waited(small, "Complete", timeout_seconds=90)
    assert code == 124
    assert lines == ["waiting: New", f"RLJob {small.namespace}/small: waited for 90s (New); wait longer with --timeout"]
    assert waited(small, "Complete", timeout_seconds=0)[0] == 124


def test_a_deleted_job_ends_the_command_with_3_and_is_a_state_of_its_own(small: JobCluster, rljob: Rljob) -> None:
    deletes = [lambda: small.delete("small")]
    where = f"RLJob {small.namespace}/small"
    assert waited(small, "Complete", deletes) == (3, ["waiting: New", f"{where} was deleted"])
    assert rljob("wait", "small", "--for", "deleted") == (0, f"{where} does not exist\n", "")
    assert rljob("wait", "small")[0] == 3
    small.create_small_job()
    assert waited(small, "Deleted", deletes) == (0, ["waiting: New", f"{where} was deleted"])


def test_ctrl_c_ends_only_the_command(small: JobCluster) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert waited(small, "Complete", [interrupt]) == (130, ["waiting: New", "stopped waiting; the job continues"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--for", "complet"], "'complet'"),
        (["--for", "complet"], "did you mean Complete?"),
        (["--for", "x"], "use one of SpecValid"),
        (["--timeout", "soon"], "--timeout: 'soon' is not a duration; write for example 90s, 10m, 1h30m or 2d"),
        (["--timeout", ""], "--timeout: '' is not a duration"),
        (["--timeout", "10"], "--timeout: '10' is not a duration"),
    ],
)
@pytest.mark.usefixtures("small")
def test_wrong_options_are_one_clear_error(rljob: Rljob, arguments: list[str], message: str) -> None:
    code, output, errors = rljob("wait", "small", *arguments)
    assert (code, output) == (2, "")
    assert errors == Mentions("error:", message)
    assert errors.count("\n") == 1


def test_an_outage_is_reported_once() -> None:
    metadata = {"name": "small", "namespace": "team-a", "uid": "u", "creationTimestamp": SINCE}
    new = stored_job({"metadata": metadata})
    complete = stored_job({"metadata": metadata, "status": {"phase": "Complete", "result": job_statuses.COMPLETE}})
    outage = ClusterUnreachableError("here", "refused")
    answers: list[StoredJob | Exception] = [new, outage, outage, outage, new, complete]

    def job(_: str) -> StoredJob:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    lines: list[str] = []
    cluster = cast(Cluster, SimpleNamespace(job=job))
    _, outcome = wait(cluster, new, ended, Script(()).clock(), lines.append)
    assert outcome.error is None
    assert lines == ["waiting: New", "no usable response from the API server (refused); retrying", "waiting: New"]
