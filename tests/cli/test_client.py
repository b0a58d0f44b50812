"""`rljob.Client` against a real API server; the tests play the operator between two polls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from ruamel.yaml import YAML

import rljob
from rljob import Client
from rljob.cluster import Cluster
from rljob.errors import ClusterUnreachableError
from rljob.kubernetes_models import Pod
from rljob.log_options import Container
from rljob.polling import Clock
from rljob.stored_job import StoredJob, stored_job
from rljob.waiting import wait_until_deleted
from rljob_api.v1alpha1.job import RLJob
from rljob_operator.raw_json import object_at
from rljob_testing import pages
from rljob_testing.cli import job_statuses
from rljob_testing.cli.job_cluster import JobCluster, Json, StandInKubelet
from rljob_testing.cli.job_steering import Script, operator_writes
from rljob_testing.cli.rljob_command import SMALL_JOB

pytestmark = pytest.mark.apiserver

Rljob = Callable[..., tuple[int, str, str]]
ON_CLUSTER = SMALL_JOB + "  checkpoint: {storage: {persistentVolumeClaim: results}}\n"
VALUES: Json = YAML(typ="safe", pure=True).load(ON_CLUSTER)
COMPLETE = {"phase": "Complete", "result": job_statuses.COMPLETE, "exportUri": "pvc://results/small/run/export"}


def client_of(cluster: JobCluster, *steps: Callable[[], None]) -> Client:
    """A client; one step runs after each poll."""
    return Client(kubeconfig=cluster.kubeconfig, clock=Script(steps).clock())


def head_pod(cluster: JobCluster, name: str) -> str:
    """Creates the running head pod of the first attempt of a job, and returns the key of its log."""
    labels = {"rljob.dev/job-uid": str(object_at(cluster.job(name), "metadata")["uid"])}
    labels |= {"rljob.dev/attempt": "1", "ray.io/node-type": "head"}
    state = {"running": {"startedAt": job_statuses.SINCE}}
    status = {"ready": True, "restartCount": 0, "image": "i", "imageID": "i", "state": state}
    containers = ["ray", "driver"]
    statuses = [{"name": each, **status} for each in containers]
    cluster.create_pod(f"{name}-1-head", labels, containers, {"containerStatuses": statuses})
    return f"{cluster.namespace}/{name}-1-head/driver"


@pytest.mark.parametrize("kind", ["mapping", "file", "type"])
def test_a_job_is_submitted_once_and_then_changed(job_cluster: JobCluster, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(ON_CLUSTER)
    job = {"mapping": VALUES, "file": file, "type": RLJob.from_wire(VALUES)}[kind]
    client = client_of(job_cluster)
    planned = client.submit(job, dry_run=True)
    assert (planned.action, client.list()) == ("created", [])
    submitted = client.submit(job)
    assert (submitted.action, submitted.job.name, submitted.job.phase) == ("created", "small", "New")
    assert client.submit(job).action == "unchanged"
    changed = client.submit(job, changes=["spec.runPolicy.maxAppRetries=7"])
    assert (changed.action, changed.differences) == ("changed", ("spec.runPolicy.maxAppRetries: 2 -> 7",))
    other = client.submit(job, name="other", changes=["metadata.labels.team=red"])
    assert [each.name for each in client.list()] == ["other", "small"]
    assert [each.metadata.uid for each in client.list("team=red")] == [other.job.metadata.uid]


def test_an_invalid_job_is_rejected_with_its_problems(job_cluster: JobCluster, rljob: Rljob, tmp_path: Path) -> None:
    client = client_of(job_cluster)
    file = tmp_path / "job.yaml"
    file.write_text(ON_CLUSTER.replace("steps: 3", "steps: many").replace("batchSize: 4", "batchSizes: 4"))
    with pytest.raises(rljob_error("RejectedError")) as of_file:
        client.submit(file)
    assert [(problem.path, problem.line) for problem in of_file.value.problems] == [
        ("spec.training.steps", 8),
        ("spec.training.batchSizes", 9),
    ]
    assert rljob("submit", str(file)) == (2, "", f"{of_file.value}\n")
    with pytest.raises(rljob_error("RejectedError")) as of_values:
        client.submit(YAML(typ="safe", pure=True).load(file))
    texts = [str(problem) for problem in of_file.value.problems]
    assert sorted(str(of_values.value).splitlines()) == sorted(texts)
    deep: dict[str, object] = {}
    for _ in range(10_000):
        deep = {"a": deep}
    others: list[tuple[object, str]] = [
        (VALUES | {"spec": {1, 2}}, "set"),
        (VALUES | {"spec": {None: 1}}, "the key None"),
        (VALUES | {"spec": [{True: 1}]}, "the key True"),
        (VALUES | {"spec": deep}, "recursion"),
        (None, "NoneType"),
    ]
    for value, message in others:
        with pytest.raises(rljob_error("RejectedError"), match=f"^the job must consist of .*{message}"):
            client.submit(cast(Json, value))
    for changes in (["spec.training.stps=1"], "spec.training.stps=1"):
        with pytest.raises(rljob_error("RejectedError"), match=r"^--set: spec.training.stps: .*did you mean"):
            client.submit(VALUES, changes=changes)
    client.submit(VALUES)
    with pytest.raises(rljob_error("RejectedError"), match=r"already exists with another spec") as other:
        client.submit(VALUES, changes=["spec.training.steps=9"])
    assert "spec.training.steps: 3 -> 9" in str(other.value)


def test_what_the_api_server_rejects_has_its_fields(job_cluster: JobCluster) -> None:
    with pytest.raises(rljob_error("RejectedError"), match="the API server rejected the request") as rejected:
        client_of(job_cluster).submit(VALUES, changes=["metadata.annotations[example.com/x]=" + "x" * 300_000])
    assert [problem.path for problem in rejected.value.problems] == ["metadata.annotations"]


def test_errors_have_the_messages_of_the_command_line(job_cluster: JobCluster, rljob: Rljob) -> None:
    client = client_of(job_cluster)
    client.submit(VALUES)
    for arguments, call, name in (
        (("status", "none"), lambda: client.status("none"), "JobNotFoundError"),
        (("retry", "small"), lambda: client.retry("small"), "RejectedError"),
        (("logs", "small"), lambda: list(client.logs("small")), "NoLogError"),
        (("status", "a/b"), lambda: client.status("a/b"), "ClusterError"),
        (("wait", "small", "--for", "complte"), lambda: client.wait("small", "complte"), "RejectedError"),
    ):
        with pytest.raises(rljob_error(name)) as raised:
            call()
        code, _, errors = rljob(*arguments)
        message = str(raised.value).replace(f" --kubeconfig {job_cluster.kubeconfig}", "")
        assert (code, errors) == (raised.value.exit_code, f"error: {message}\n")


def test_watch_yields_every_change_once_and_ends_with_the_job(small: JobCluster) -> None:
    running = operator_writes(small, **job_statuses.RUNNING)
    client = client_of(small, lambda: None, running, lambda: None, operator_writes(small, **COMPLETE))
    seen = list(client.watch("small"))
    assert [job.phase for job in seen] == ["New", "Running", "Complete"]
    assert seen[1].status.progress is not None
    assert seen[1].status.progress.reward_mean == 0.4125
    assert seen[-1].ending is not None
    assert seen[-1].ending.is_complete


def test_watch_of_a_job_that_is_deleted_raises(small: JobCluster) -> None:
    watched = client_of(small, lambda: small.delete("small")).watch("small")
    assert next(watched).name == "small"
    with pytest.raises(rljob.JobNotFoundError, match="was deleted"):
        next(watched)


def test_watch_does_not_go_on_with_another_job_of_the_same_name(small: JobCluster) -> None:
    def replace() -> None:
        small.delete("small")
        small.create_small_job()

    watched = client_of(small, replace).watch("small")
    assert next(watched).name == "small"
    with pytest.raises(rljob.JobNotFoundError, match="was deleted"):
        next(watched)


def test_many_jobs_are_listed_in_pages(small: JobCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob.cluster._PAGE_SIZE", 1)
    client = client_of(small)
    for name in ("a", "z"):
        client.submit(VALUES, name=name)
    assert [job.name for job in client.list()] == ["a", "small", "z"]


def test_deletion_is_waited_for_also_while_the_api_server_is_unreachable() -> None:
    metadata = {"name": "small", "namespace": "team-a", "uid": "u", "creationTimestamp": job_statuses.SINCE}
    answers: list[list[Pod] | Exception] = [ClusterUnreachableError("here", "refused"), [], []]

    def pods(_: StoredJob) -> list[Pod]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def job(_: str) -> StoredJob:
        raise rljob.JobNotFoundError("not found")

    lines: list[str] = []
    cluster = cast(Cluster, SimpleNamespace(pods=pods, job=job))
    wait_until_deleted(cluster, stored_job({"metadata": metadata}), Script(()).clock(), lines.append)
    assert lines == ["waiting for the API server (refused)"]
    answers[:] = [ClusterUnreachableError("here", "refused")] * 1000
    with pytest.raises(ClusterUnreachableError):
        wait_until_deleted(cluster, stored_job({"metadata": metadata}), Script(()).clock(), lines.append)
    assert len(answers) == 1000 - 302


def test_wait_returns_the_job_in_the_state(small: JobCluster) -> None:
    client = client_of(small, operator_writes(small, **job_statuses.RUNNING))
    assert client.wait("small", "running").phase == "Running"
    with pytest.raises(rljob.WaitTimeoutError, match="waited for 5s"):
        client.wait("small", timeout_seconds=5)
    operator_writes(small, phase="Failed", result=job_statuses.FAILED)()
    with pytest.raises(rljob.JobFinishedError, match="has finished: Failed, OutOfMemory: head: 8Gi"):
        client.wait("small", "Complete")
    assert client.wait("small").phase == "Failed"
    with pytest.raises(rljob.RejectedError, match="delete"):
        client.wait("small", "Deleted")


def test_a_job_is_suspended_resumed_stopped_and_deleted(small: JobCluster) -> None:
    small.write_status("small", job_statuses.RUNNING)
    suspended = operator_writes(small, phase="Suspended", suspendedAt=job_statuses.SINCE)
    client = client_of(small, suspended, lambda: small.write_status("small", {"observedGeneration": 3}))
    assert client.suspend("small", wait=True).phase == "Suspended"
    assert client.resume("small", wait=True).wants_suspend is False
    stopped = client.stop("small")
    assert "rljob.dev/stop-requested-at" in stopped.metadata.annotations
    with pytest.raises(rljob.WaitTimeoutError):
        client.stop("small", wait=True, timeout_seconds=3)
    client.delete("small", wait=True)
    with pytest.raises(rljob.JobNotFoundError):
        client.delete("small")


def test_logs_are_lines(small: JobCluster, kubelet: StandInKubelet) -> None:
    small.write_status("small", job_statuses.RUNNING)
    kubelet.logs[head_pod(small, "small")] = ["step 1 ü".encode()[:-1], "ü".encode()[1:] + b"\n\nstep", b" 2"]
    assert list(client_of(small).logs("small")) == ["step 1 ü", "", "step 2"]
    with pytest.raises(rljob.RejectedError, match="previous: cannot be combined with attempt"):
        client_of(small).logs("small", previous=True, attempt=1)
    for attempt in (0, -1, 2):
        with pytest.raises(rljob.RejectedError, match=f"has had no attempt {attempt}"):
            next(client_of(small).logs("small", attempt=attempt))
    with pytest.raises(rljob.RejectedError, match="there is no container nope; use one of driver, ray"):
        client_of(small).logs("small", container=cast(Container, "nope"))
    with pytest.raises(rljob.RejectedError, match="must be at least 0"):
        next(client_of(small).logs("small", index=-1))


def test_the_notebook_of_the_page_runs(
    job_cluster: JobCluster,
    kubelet: StandInKubelet,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    [notebook] = pages.blocks(pages.REPOSITORY / "docs/python-client.md", "python")
    assert len(notebook.text.splitlines()) <= 26
    # mypy checks the types of this file.
    assert notebook.text == (pages.REPOSITORY / "examples/notebook.py").read_text()
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(ON_CLUSTER)

    def runs() -> None:
        job_cluster.write_status("small-lr", job_statuses.RUNNING)
        kubelet.logs[head_pod(job_cluster, "small-lr")] = [b"step 11\nstep 12\n"]

    ends = (lambda: None, lambda: job_cluster.write_status("small-lr", COMPLETE))
    steps: Iterator[Callable[[], None]] = iter((runs, *ends))
    monkeypatch.setattr("rljob.client.Clock", lambda: Clock(sleep=lambda _: next(steps)()))
    exec(compile(notebook.text, "docs/python-client.md", "exec"), {})
    assert list(steps) == []
    assert capsys.readouterr().out.splitlines() == [
        "Running 12 80 0.4125",
        "step 11",
        "step 12",
        "pvc://results/small/run/export",
    ]
    training = object_at(job_cluster.job("small-lr"), "spec", "training")
    assert training["steps"] == 200
    assert object_at(training, "optimizer")["learningRate"] == 1e-6


def test_importing_the_client_is_cheap() -> None:
    """Not even `Client` imports the package `kubernetes` or the libraries of the command line."""
    program = (
        "import sys, rljob\n"
        "print('rljob.client' in sys.modules)\n"
        "from rljob import *\n"
        "print([name for name in ('kubernetes', 'typer', 'rich', 'rljob_cli') if name in sys.modules])\n"
        "print(sorted(set(rljob.__all__) - set(globals())))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["False", "[]", "[]"]


def rljob_error(name: str) -> type[rljob.RLJobError]:
    """The public exception with this name; the fixture `rljob` hides the module in some tests."""
    found = getattr(rljob, name)
    assert issubclass(found, rljob.RLJobError)
    return found  # type: ignore[no-any-return]


def test_unknown_names_are_no_attributes() -> None:
    assert rljob.RLJobError.__mro__[1] is Exception
    with pytest.raises(AttributeError, match="no attribute 'clients'"):
        _ = rljob.clients  # type: ignore[attr-defined]
