"""`rljob delete`, and what `suspend`, `resume`, `stop` and `retry` have in common: waiting without result, and
errors."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from ruamel.yaml import YAML

from rljob import steering
from rljob.cluster import ClusterOptions, connect
from rljob.errors import ClusterUnreachableError, NotAllowedError, RejectedError
from rljob.polling import Clock
from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP
from rljob_cli.cluster.steering import delete, steer
from rljob_testing.cli import job_statuses, job_steering
from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.cli.rljob_command import SMALL_JOB
from rljob_testing.messages import Mentions

pytestmark = pytest.mark.apiserver


@pytest.mark.parametrize("command", ["suspend", "resume", "stop", "retry"])
def test_a_job_that_is_being_deleted_is_not_changed(small: JobCluster, command: str) -> None:
    http, path = small.server.http, f"{small.jobs}/small"
    http.patch(path, json={"metadata": {"finalizers": ["example.com/slow"]}}).raise_for_status()
    small.delete("small")
    with pytest.raises(
        RejectedError,
        match=f"RLJob {small.namespace}/small: .*deleted.*`rljob submit --context here FILE`",
    ):
        job_steering.steer(small, command)
    http.patch(path, json={"metadata": {"finalizers": None}}).raise_for_status()


def test_waiting_ends_with_the_job(small: JobCluster) -> None:
    small.write_status("small", job_statuses.RUNNING)
    code, lines = job_steering.steer(small, "suspend", [lambda: small.delete("small")])
    assert (code, lines[-1]) == (3, Mentions(f"RLJob {small.namespace}/small", "deleted"))


def test_another_job_of_the_same_name_is_not_waited_for(small: JobCluster) -> None:
    small.write_status("small", job_statuses.RUNNING)

    def recreate() -> None:
        small.delete("small")
        small.create_small_job()

    code, lines = job_steering.steer(small, "stop", [recreate])
    assert (code, lines[-1]) == (3, Mentions(f"RLJob {small.namespace}/small", "deleted"))


def test_ctrl_c_ends_only_the_waiting(small: JobCluster) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    small.write_status("small", job_statuses.RUNNING)
    code, lines = job_steering.steer(small, "suspend", [interrupt])
    assert (code, lines[-1]) == (130, Mentions("stopped waiting", "request"))
    assert job_steering.suspend(small) is True


@pytest.mark.parametrize("command", ["suspend", "stop", "retry"])
def test_commands_without_permission_to_patch_change_nothing(small: JobCluster, tmp_path: Path, command: str) -> None:
    small.write_status(
        "small",
        {"attempts": [job_statuses.ENDED], "counters": job_statuses.COUNTERS, "nextAttempt": job_statuses.BETWEEN},
    )
    rules = [{"apiGroups": ["rljob.dev"], "resources": ["rljobs"], "verbs": ["get", "list"]}]
    token = small.account_token({"metadata": {"name": "looks"}, "rules": rules})
    file = tmp_path / "looks"
    file.write_text(small.server.kubeconfig(token=token, namespace=small.namespace))
    with pytest.raises(NotAllowedError, match=r"permission denied \(.*cannot patch resource"):
        job_steering.steer(small, command, kubeconfig=file)
    assert (
        job_steering.suspend(small),
        job_steering.annotation(small, ANNOTATION_STOP),
        job_steering.annotation(small, ANNOTATION_RETRY),
    ) == (
        False,
        None,
        None,
    )


@pytest.mark.parametrize("command", ["suspend", "resume", "stop", "retry"])
def test_an_unreachable_server_is_reported(small: JobCluster, tmp_path: Path, command: str) -> None:
    file = tmp_path / "nobody"
    file.write_text(small.server.kubeconfig(url="https://127.0.0.1:1", namespace=small.namespace))
    with pytest.raises(ClusterUnreachableError):
        job_steering.steer(small, command, kubeconfig=file)


Rljob = Callable[..., tuple[int, str, str]]
STORAGE = "  checkpoint: {storage: {persistentVolumeClaim: results, subPath: runs/a}}\n"


def test_delete_reports_the_files_that_remain(job_cluster: JobCluster, rljob: Rljob) -> None:
    job_cluster.create_small_job(STORAGE)
    code, output, errors = rljob("delete", "small")
    assert (code, errors) == (0, "")
    assert output.splitlines() == [
        Mentions(f"RLJob {job_cluster.namespace}/small", "deleted", "grace period"),
        Mentions("checkpoints", "kept", "pvc://results/runs/a"),
    ]
    assert job_cluster.server.http.get(f"{job_cluster.jobs}/small").status_code == 404


def test_wait_returns_when_the_last_pod_was_deleted(job_cluster: JobCluster) -> None:
    stored = job_cluster.create_small_job()
    metadata = stored["metadata"]
    assert isinstance(metadata, dict)
    for name in ("head", "worker"):
        job_cluster.create_pod(name, {"rljob.dev/job-uid": metadata["uid"]}, ["ray"], {})
    job_cluster.create_pod("other", {"rljob.dev/job-uid": "another-job"}, ["ray"], {})
    # No garbage collector runs here: the pods disappear when this list says so.
    steps: list[Callable[[], None]] = [
        lambda: None,
        lambda: job_cluster.delete_pod("head"),
        lambda: job_cluster.delete_pod("worker"),
    ]
    output = io.StringIO()
    console = Console(file=output, highlight=False)
    cluster = connect(ClusterOptions(kubeconfig=job_cluster.kubeconfig))
    assert delete(cluster, ["small"], console, wait=True, clock=Clock(sleep=lambda _: steps.pop(0)())) == 0
    assert output.getvalue().splitlines()[1:] == [
        "waiting for head, worker",
        "waiting for worker",
        Mentions("pods", "deleted"),
    ]
    assert steps == []


def test_ctrl_c_while_waiting_reports_that_the_job_was_deleted(job_cluster: JobCluster) -> None:
    stored = job_cluster.create_small_job()
    metadata = stored["metadata"]
    assert isinstance(metadata, dict)
    job_cluster.create_pod("head", {"rljob.dev/job-uid": metadata["uid"]}, ["ray"], {})

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    output = io.StringIO()
    console = Console(file=output, highlight=False)
    cluster = connect(ClusterOptions(kubeconfig=job_cluster.kubeconfig))
    assert delete(cluster, ["small"], console, wait=True, clock=Clock(sleep=interrupt)) == 130
    assert output.getvalue().splitlines()[-2:] == ["waiting for head", Mentions("stopped waiting", "deletion")]


@pytest.fixture
def two(job_cluster: JobCluster) -> JobCluster:
    """A namespace with the jobs `a` and `b`."""
    for name in ("a", "b"):
        text = SMALL_JOB.replace("{name: small}", f"{{name: {name}}}")
        job_cluster.create_job(YAML(typ="safe", pure=True).load(text))
    return job_cluster


@pytest.mark.parametrize("command", ["suspend", "resume", "stop", "retry", "delete"])
def test_several_names_are_all_handled_and_the_exit_code_is_the_largest(
    two: JobCluster, rljob: Rljob, command: str
) -> None:
    if command == "retry":
        for name in ("a", "b"):
            two.write_status(name, {"phase": "Failed", "result": job_statuses.FAILED})
    code, output, errors = rljob(command, "a", "none", "b", "a")
    assert (code, errors) == (3, Mentions("error: RLJob none: not found"))
    assert errors.count("\n") == 1
    assert [output.count(f"RLJob {two.namespace}/{name}") for name in ("a", "b")] == [1, 1]


def test_a_job_that_cannot_be_suspended_does_not_keep_others_from_it(two: JobCluster, rljob: Rljob) -> None:
    two.write_status("a", {"result": job_statuses.COMPLETE})
    code, output, errors = rljob("suspend", "a", "b")
    assert (code, output, errors) == (
        2,
        Mentions(f"RLJob {two.namespace}/b will be suspended"),
        Mentions(f"error: RLJob {two.namespace}/a: has finished"),
    )


def test_all_jobs_are_asked_before_the_command_waits(two: JobCluster) -> None:
    output = io.StringIO()
    api = connect(ClusterOptions(kubeconfig=two.kubeconfig))

    def both_end() -> None:
        assert "will be stopped" in output.getvalue().partition(f"{two.namespace}/b")[2]
        two.write_status("a", {"result": job_statuses.FAILED})
        two.write_status("b", {"result": job_statuses.FAILED})

    console = Console(file=output, highlight=False, width=80)
    clock = job_steering.Script([both_end]).clock()
    code = steer(steering.stop, api, ["a", "b"], console, wait=True, clock=clock)
    assert (code, output.getvalue().count("has finished: Failed")) == (0, 2)
