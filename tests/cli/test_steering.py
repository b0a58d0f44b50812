"""`rljob delete`, and what `suspend`, `resume`, `stop` and `retry` have in common: when they wait in vain, and what
keeps them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from ruamel.yaml import YAML

from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP
from rljob_cli.cluster.client import ClusterOptions, connect
from rljob_cli.cluster.steering import delete
from rljob_cli.cluster.watching import Clock
from rljob_cli.errors import CliError, ClusterUnreachableError, NotAllowedError
from rljob_testing.cli import job_statuses, steering
from rljob_testing.cli.job_cluster import JobCluster, kubeconfig_text
from rljob_testing.cli.rljob_command import SMALL_JOB

pytestmark = pytest.mark.apiserver


@pytest.mark.parametrize("command", ["suspend", "resume", "stop", "retry"])
def test_a_job_that_is_being_deleted_is_left_alone(small: JobCluster, command: str) -> None:
    headers = {"Content-Type": "application/merge-patch+json"}
    http, path = small.server.http, f"{small.jobs}/small"
    http.patch(path, headers=headers, json={"metadata": {"finalizers": ["example.com/slow"]}}).raise_for_status()
    small.delete_job("small")
    with pytest.raises(
        CliError,
        match=f"RLJob {small.namespace}/small: is being deleted; create it again with `rljob submit --context here`",
    ):
        steering.steer(small, command)
    http.patch(path, headers=headers, json={"metadata": {"finalizers": None}}).raise_for_status()


def test_waiting_ends_with_the_job(small: JobCluster) -> None:
    small.write_status("small", job_statuses.RUNNING)
    code, lines = steering.steer(small, "suspend", [lambda: small.delete_job("small")])
    assert (code, lines[-1]) == (3, f"RLJob {small.namespace}/small was deleted")


def test_another_job_of_the_same_name_is_not_waited_for(small: JobCluster) -> None:
    small.write_status("small", job_statuses.RUNNING)

    def made_again() -> None:
        small.delete_job("small")
        small.create_job(YAML(typ="safe", pure=True).load(SMALL_JOB))

    code, lines = steering.steer(small, "stop", [made_again])
    assert (code, lines[-1]) == (3, f"RLJob {small.namespace}/small was deleted")


def test_ctrl_c_ends_the_waiting_only(small: JobCluster) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    small.write_status("small", job_statuses.RUNNING)
    code, lines = steering.steer(small, "suspend", [interrupt])
    assert (code, lines[-1]) == (130, "stopped waiting; the request stays in effect")
    assert steering.suspend(small) is True


@pytest.mark.parametrize("command", ["suspend", "stop", "retry"])
def test_who_may_only_look_changes_nothing(small: JobCluster, tmp_path: Path, command: str) -> None:
    small.write_status(
        "small",
        {"attempts": [job_statuses.ENDED], "counters": job_statuses.COUNTERS, "nextAttempt": job_statuses.BETWEEN},
    )
    http, namespace = small.server.http, small.namespace
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    rules = [{"apiGroups": ["rljob.dev"], "resources": ["rljobs"], "verbs": ["get", "list"]}]
    http.post(f"{rbac}/roles", json={"metadata": {"name": "looks"}, "rules": rules}).raise_for_status()
    account = {"kind": "ServiceAccount", "name": "default", "namespace": namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "looks"}
    binding = {"metadata": {"name": "looks"}, "roleRef": role, "subjects": [account]}
    http.post(f"{rbac}/rolebindings", json=binding).raise_for_status()
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    http.post(accounts, json={"metadata": {"name": "default"}})  # unless the controller was faster
    answer = http.post(f"{accounts}/default/token", json={"spec": {"expirationSeconds": 3600}}).raise_for_status()
    file = tmp_path / "looks"
    token = str(answer.json()["status"]["token"])
    file.write_text(kubeconfig_text(small.server.url, small.server.certificate, token, namespace))
    with pytest.raises(NotAllowedError, match=r"permission denied \(.*cannot patch resource"):
        steering.steer(small, command, kubeconfig=file)
    assert (
        steering.suspend(small),
        steering.annotation(small, ANNOTATION_STOP),
        steering.annotation(small, ANNOTATION_RETRY),
    ) == (
        False,
        None,
        None,
    )


@pytest.mark.parametrize("command", ["suspend", "resume", "stop", "retry"])
def test_a_server_that_does_not_answer_is_said(small: JobCluster, tmp_path: Path, command: str) -> None:
    file = tmp_path / "nobody"
    file.write_text(kubeconfig_text("https://127.0.0.1:1", small.server.certificate, "t", small.namespace))
    with pytest.raises(ClusterUnreachableError):
        steering.steer(small, command, kubeconfig=file)


Rljob = Callable[..., tuple[int, str, str]]
STORAGE = "  checkpoint: {storage: {persistentVolumeClaim: results, subPath: runs/a}}\n"


def test_the_job_is_deleted_and_what_stays_is_named(job_cluster: JobCluster, rljob: Rljob) -> None:
    job_cluster.create_job(YAML(typ="safe", pure=True).load(SMALL_JOB + STORAGE))
    code, output, errors = rljob("delete", "small")
    assert (code, errors) == (0, "")
    assert output == (
        f"RLJob {job_cluster.namespace}/small deleted; its pods stop within their grace period\n"
        "checkpoints and results are kept in pvc://results/runs/a\n"
    )
    assert job_cluster.server.http.get(f"{job_cluster.jobs}/small").status_code == 404


def test_wait_returns_when_the_last_pod_is_gone(job_cluster: JobCluster) -> None:
    stored = job_cluster.create_job(YAML(typ="safe", pure=True).load(SMALL_JOB))
    metadata = stored["metadata"]
    assert isinstance(metadata, dict)
    for name in ("head", "worker"):
        job_cluster.create_pod(name, {"rljob.dev/job-uid": metadata["uid"]}, ["ray"], {})
    job_cluster.create_pod("other", {"rljob.dev/job-uid": "another-job"}, ["ray"], {})
    # No garbage collector runs here: the pods go when this list says so.
    steps: list[Callable[[], None]] = [
        lambda: None,
        lambda: job_cluster.delete_pod("head"),
        lambda: job_cluster.delete_pod("worker"),
    ]
    output = io.StringIO()
    console = Console(file=output, highlight=False)
    cluster = connect(ClusterOptions(kubeconfig=job_cluster.kubeconfig))
    assert delete(cluster, "small", console, wait=True, clock=Clock(sleep=lambda _: steps.pop(0)())) == 0
    assert output.getvalue().splitlines()[1:] == [
        "waiting for head, worker",
        "waiting for worker",
        "all its pods are deleted",
    ]
    assert steps == []


def test_ctrl_c_while_waiting_says_that_the_job_is_deleted(job_cluster: JobCluster) -> None:
    stored = job_cluster.create_job(YAML(typ="safe", pure=True).load(SMALL_JOB))
    metadata = stored["metadata"]
    assert isinstance(metadata, dict)
    job_cluster.create_pod("head", {"rljob.dev/job-uid": metadata["uid"]}, ["ray"], {})

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    output = io.StringIO()
    console = Console(file=output, highlight=False)
    cluster = connect(ClusterOptions(kubeconfig=job_cluster.kubeconfig))
    assert delete(cluster, "small", console, wait=True, clock=Clock(sleep=interrupt)) == 130
    assert output.getvalue().endswith("waiting for head\nstopped waiting; the deletion continues\n")
