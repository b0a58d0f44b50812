"""Jobs in a queue of Kueue that has two GPUs: a job waits without failing until another one ends. When a job with a
higher priority takes its GPUs, it waits again, and resumes from its checkpoint.

Only one job trains, and it is stopped when it has resumed. The jobs that take the GPUs are deleted before they train.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rljob_api.conditions import ConditionType
from rljob_api.v1alpha1.status import Condition, RLJobStatus
from rljob_testing.cluster.kubectl import Kubectl, wait_for

JOB, FIRST, URGENT = "queued", "first", "urgent"
STEPS = 2000


@dataclass(frozen=True)
class Waiting:
    """The job while another one has the GPUs."""

    status: RLJobStatus
    pods: list[str]
    explained: str
    """The output of `rljob explain`."""


def job_text(jobs: Path, name: str, queue: str, *, num_gpus: int, priority: str) -> str:
    """A job in the queue, on one node. It keeps its cluster at the end, except in a queue."""
    job = YAML(typ="safe", pure=True).load((jobs / "sort-digits.yaml").read_text())
    labels = {"kueue.x-k8s.io/queue-name": queue, "kueue.x-k8s.io/priority-class": priority}
    job["metadata"] = {"name": name, "labels": labels}
    [pool] = job["spec"]["pools"]
    pool |= {"nodes": 1, "gpusPerNode": num_gpus}
    job["spec"]["training"] |= {"steps": STEPS, "evaluations": []}
    job["spec"]["runPolicy"] |= {"cleanup": "KeepCluster"}
    return json.dumps(job)


def quota(kubectl: Kubectl, job: str, status: str) -> Condition | None:
    """The condition QuotaReserved with a message of Kueue, if it has this status."""
    for found in kubectl.status(job).conditions:
        if (found.type, found.status) == (ConditionType.QUOTA_RESERVED, status):
            return found
    return None


@pytest.fixture(scope="module")
def waiting(queue: str, kubectl: Kubectl, jobs: Path, rljob: list[str]) -> Waiting:
    """The job while it waited for another one with the same priority. That one is deleted now."""
    kubectl("apply", "-f", "-", stdin=job_text(jobs, FIRST, queue, num_gpus=2, priority="low"))
    wait_for(lambda: quota(kubectl, FIRST, "True"), f"{FIRST} is admitted", timeout_seconds=60, every_seconds=0.5)
    kubectl("apply", "-f", "-", stdin=job_text(jobs, JOB, queue, num_gpus=1, priority="low"))

    def has_message_of_kueue() -> bool:
        found = quota(kubectl, JOB, "False")
        return found is not None and "insufficient unused quota for nvidia.com/gpu" in found.message

    wait_for(has_message_of_kueue, f"{JOB} waits, with Kueue's message", timeout_seconds=60, every_seconds=0.5)
    explained = subprocess.run([*rljob, "explain", JOB], capture_output=True, text=True, check=False)
    pods = kubectl.names("pods", f"rljob.dev/job={JOB}")
    seen = Waiting(kubectl.status(JOB), pods, explained.stdout + explained.stderr)
    kubectl("delete", "rljob", FIRST, "--wait=false")
    return seen


def test_a_job_waits_in_its_queue_until_another_job_ends(waiting: Waiting, kubectl: Kubectl) -> None:
    assert (waiting.status.phase, waiting.status.reason) == ("Queued", "Queued")
    assert waiting.pods == []
    assert "insufficient unused quota for nvidia.com/gpu" in waiting.explained
    wait_for(lambda: quota(kubectl, JOB, "True"), f"{JOB} is admitted", timeout_seconds=60)
    assert [(attempt.number, attempt.reason) for attempt in kubectl.status(JOB).attempts] == [(1, None)]


@pytest.mark.usefixtures("waiting")
def test_a_preempted_job_resumes_from_its_checkpoint_and_uses_no_retry(
    kubectl: Kubectl, jobs: Path, rljob: list[str], queue: str
) -> None:
    wait_for(lambda: kubectl.status(JOB).checkpoint, "a checkpoint", timeout_seconds=420)
    saved = kubectl.status(JOB).checkpoint
    assert saved is not None
    kubectl("apply", "-f", "-", stdin=job_text(jobs, URGENT, queue, num_gpus=2, priority="high"))
    wait_for(lambda: quota(kubectl, URGENT, "True"), f"{URGENT} is admitted", timeout_seconds=120)
    wait_for(lambda: kubectl.status(JOB).phase == "Queued", f"{JOB} waits again", timeout_seconds=30)
    kubectl("delete", "rljob", URGENT, "--wait=false")

    def has_trained_again() -> bool:
        status = kubectl.status(JOB)
        newest, progress = status.attempts[-1], status.progress
        return newest.number == 2 and progress is not None and progress.step > (newest.resumed_from_step or STEPS)

    wait_for(has_trained_again, f"{JOB} trains again", timeout_seconds=420)
    subprocess.run([*rljob, "stop", JOB, "--wait"], check=True, timeout=120)
    # `cleanup: KeepCluster` would keep its GPUs in the queue.
    wait_for(lambda: not kubectl.names("rayclusters", f"rljob.dev/job={JOB}"), "the cluster is deleted", 60)

    status = kubectl.status(JOB)
    first, second = status.attempts
    assert (first.reason, first.outcome, first.failure_class) == ("Evicted", "Stopped", "Resumable"), first
    assert "Preempted to accommodate a workload" in (first.message or "")
    assert (second.resumed_from_step or 0) >= saved.step
    assert (first.cluster, first.cluster_uid) == (second.cluster, second.cluster_uid)
    counters = status.counters
    assert counters is not None
    assert (counters.attempts, counters.failed_attempts, counters.infrastructure_retries) == (2, 0, 0)
    kubectl("delete", "rljob", JOB)
