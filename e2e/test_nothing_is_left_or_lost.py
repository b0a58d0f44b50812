"""Status and logs of a running job, its deletion while it trains, and an operator that is killed in every phase."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rljob_api.conditions import ConditionType
from rljob_testing.cluster.kubectl import Kubectl, StatusRecording, recorded_statuses, wait_for


def job_text(jobs: Path, name: str, steps: int, *, has_pool_for_reference: bool = False) -> str:
    """The main job with another name and number of steps. `has_pool_for_reference`: one node for the job, and a second
    pool for a reference model."""
    job = YAML(typ="safe", pure=True).load((jobs / "sort-digits.yaml").read_text())
    job["metadata"]["name"] = name
    training = job["spec"]["training"]
    training["steps"] = steps
    if has_pool_for_reference:
        [pool] = job["spec"]["pools"]
        job["spec"]["pools"] = [{**pool, "nodes": 1}, {**pool, "nodes": 1, "name": "reference"}]
        job["spec"]["roles"] = {"ref": {"pool": "reference"}}
        training["algorithm"]["kl"] = {"coefficient": 0.001}
        training["timelineSteps"] = [1]
    return json.dumps(job)


def command_output(rljob: list[str], *arguments: str) -> str:
    """The output of an `rljob` command, which must succeed."""
    result = subprocess.run([*rljob, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def running(kubectl: Kubectl, jobs: Path) -> StatusRecording:
    """The statuses of a job called `deleted` until its first step; it would train for long."""
    text = job_text(jobs, "deleted", steps=2000, has_pool_for_reference=True)
    kubectl("apply", "-f", "-", stdin=text)
    with recorded_statuses(kubectl, "deleted") as recording:
        wait_for(recording.first_step, "the first training step", timeout_seconds=420)
    return recording


@pytest.mark.usefixtures("running")
def test_kubectl_get_shows_the_columns(kubectl: Kubectl) -> None:
    header, row = kubectl("get", "rlj", "deleted").splitlines()
    assert header.split() == ["NAME", "PHASE", "REASON", "STEP", "REWARD", "CKPT", "ATTEMPT", "GPUS", "AGE"]
    assert row.split()[:3] == ["deleted", "Running", "Training"]


@pytest.mark.usefixtures("running")
def test_status_logs_and_explain_show_the_running_job(rljob: list[str]) -> None:
    status = command_output(rljob, "status", "deleted")
    assert "Training" in status
    assert "/2000" in status
    assert "workers: building 2 on cpu" in command_output(rljob, "logs", "deleted")
    assert "Running: step " in command_output(rljob, "explain", "deleted")


@pytest.mark.usefixtures("running")
def test_every_role_is_in_the_pods_of_its_pool(kubectl: Kubectl, storage: Path) -> None:
    address = "jsonpath={.items[*].status.podIP}"
    pods = {
        pool: kubectl("get", "pods", "-l", f"rljob.dev/job=deleted,rljob.dev/pool={pool}", "-o", address)
        for pool in ("main", "reference")
    }
    events = json.loads((storage / "deleted" / "run" / "timelines" / "step-000001.json").read_text())["traceEvents"]
    rows = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(rows.values()) == [
        "controller",
        f"main, rank 0, {pods['main']}",
        f"reference, rank 0, {pods['reference']}",
    ]
    calls = {pid: {event["cat"] for event in events if event["pid"] == pid and "." in event["name"]} for pid in (1, 2)}
    assert calls == {1: {"actor", "hybrid", "reward"}, 2: {"ref"}}


def test_a_deleted_job_saves_a_checkpoint_and_leaves_nothing(
    running: StatusRecording, kubectl: Kubectl, storage: Path
) -> None:
    step_seen = running.sightings[-1].status.progress
    assert step_seen is not None
    deleted_at = time.monotonic()
    kubectl("delete", "rljob", "deleted", "--wait=false")

    def left() -> list[str]:
        selector = "rljob.dev/job=deleted"
        kinds = ("rayclusters", "pods", "secrets", "services", "networkpolicies")
        of_ray = kubectl.names("services", "ray.io/cluster=deleted-1") + kubectl.names(
            "pods", "ray.io/cluster=deleted-1"
        )
        return [*(name for kind in kinds for name in kubectl.names(kind, selector)), *of_ray]

    wait_for(lambda: not left(), "no cluster, pod, secret, service or policy is left", timeout_seconds=60)
    assert time.monotonic() - deleted_at <= 60
    checkpoints = sorted((storage / "deleted" / "checkpoints").glob("step-*/manifest.json"))
    assert checkpoints, "the deleted job saved no checkpoint"
    newest_step = int(checkpoints[-1].parent.name.split(".")[0].removeprefix("step-"))
    assert newest_step >= step_seen.step


def test_an_operator_killed_in_every_phase_changes_nothing(
    kubectl: Kubectl, jobs: Path, kill_operator: Callable[[], None]
) -> None:
    kubectl("apply", "-f", "-", stdin=job_text(jobs, "unwatched", steps=20))
    with recorded_statuses(kubectl, "unwatched") as recording:
        for what, reached in (
            ("the RayCluster is created", lambda: bool(kubectl.names("rayclusters", "rljob.dev/job=unwatched"))),
            ("the cluster is ready", lambda: recording.when(ConditionType.CLUSTER_READY) is not None),
            ("the trainer was submitted", lambda: recording.when(ConditionType.JOB_SUBMITTED) is not None),
            ("the first step is completed", lambda: recording.first_step() is not None),
            ("a checkpoint is saved", lambda: recording.when(ConditionType.CHECKPOINTED) is not None),
        ):
            wait_for(reached, what, timeout_seconds=420, every_seconds=0.5)
            kill_operator()
        kubectl("wait", "--for=condition=Complete", "rljob/unwatched", "--timeout=420s", timeout_seconds=430)
        wait_for(lambda: recording.when(ConditionType.COMPLETE), "the end to be recorded", timeout_seconds=30)
    status = kubectl.status("unwatched")
    assert len(status.attempts) == 1
    assert status.attempts[0].submissions == 1
    assert status.attempts[0].outcome == "Succeeded"
    assert recording.when(ConditionType.FAILED) is None
    created = {
        sighting.status.attempts[0].cluster_uid
        for sighting in recording.sightings
        if sighting.status.attempts and sighting.status.attempts[0].cluster_uid
    }
    assert len(created) == 1
    wait_for(lambda: not kubectl.names("pods", "rljob.dev/job=unwatched"), "no pods are left", timeout_seconds=90)
    kubectl("delete", "rljob", "unwatched")
