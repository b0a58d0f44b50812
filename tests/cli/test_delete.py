"""`rljob delete` on a real API server."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console
from ruamel.yaml import YAML

from rljob_cli.cluster.client import ClusterOptions, connect
from rljob_cli.cluster.delete import delete
from rljob_cli.cluster.watching import Clock
from rljob_testing.command_line import JOB
from rljob_testing.job_cluster import JobCluster

pytestmark = pytest.mark.apiserver

Rljob = Callable[..., tuple[int, str, str]]
STORAGE = "  checkpoint: {storage: {persistentVolumeClaim: results, subPath: runs/a}}\n"


def test_the_job_is_deleted_and_what_stays_is_named(job_cluster: JobCluster, rljob: Rljob) -> None:
    job_cluster.create_job(YAML(typ="safe", pure=True).load(JOB + STORAGE))
    code, output, errors = rljob("delete", "small")
    assert (code, errors) == (0, "")
    assert output == (
        f"RLJob {job_cluster.namespace}/small deleted; its pods stop within their grace period\n"
        "checkpoints and results stay in pvc://results/runs/a\n"
    )
    assert job_cluster.server.http.get(f"{job_cluster.jobs}/small").status_code == 404


def test_wait_returns_when_the_last_pod_is_gone(job_cluster: JobCluster) -> None:
    stored = job_cluster.create_job(YAML(typ="safe", pure=True).load(JOB))
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
        "nothing of it is left",
    ]
    assert steps == []


def test_ctrl_c_while_waiting_says_that_the_job_is_deleted(job_cluster: JobCluster) -> None:
    stored = job_cluster.create_job(YAML(typ="safe", pure=True).load(JOB))
    metadata = stored["metadata"]
    assert isinstance(metadata, dict)
    job_cluster.create_pod("head", {"rljob.dev/job-uid": metadata["uid"]}, ["ray"], {})

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    output = io.StringIO()
    console = Console(file=output, highlight=False)
    cluster = connect(ClusterOptions(kubeconfig=job_cluster.kubeconfig))
    assert delete(cluster, "small", console, wait=True, clock=Clock(sleep=interrupt)) == 130
    assert output.getvalue().endswith("waiting for head\nstopped waiting; the job is deleted all the same\n")
