"""Jobs that cannot work are rejected, or have the cause in their status."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rljob_api.v1alpha1.status import Condition
from rljob_testing.cluster.kubectl import CommandFailed, Kubectl, wait_for


def condition(kubectl: Kubectl, job: str, kind: str) -> Condition | None:
    """A condition of the job; None if the job does not have it yet."""
    return next((c for c in kubectl.status(job).conditions if c.type == kind), None)


def failed(kubectl: Kubectl, job: str) -> Condition | None:
    """The condition Failed; None until it is True."""
    found = condition(kubectl, job, "Failed")
    return found if found is not None and found.status == "True" else None


def test_the_api_server_rejects_a_job_with_our_message(kubectl: Kubectl, jobs: Path) -> None:
    text = (jobs / "sort-digits.yaml").read_text().replace("batchSize: 32", "batchSize: 33")
    text = text.replace("groupSize: 16", "groupSize: 15").replace("name: sort-digits", "name: odd-batch")
    message = "batchSize x rollout.groupSize x roles.actor.sequenceParallel (1 when unset) must be divisible by"
    with pytest.raises(CommandFailed, match=re.escape(message)):
        kubectl("apply", "-f", "-", stdin=text)
    assert "rljob.rljob.dev/odd-batch" not in kubectl.names("rljobs")


def test_an_unknown_field_is_rejected(kubectl: Kubectl, jobs: Path) -> None:
    text = (jobs / "sort-digits.yaml").read_text().replace("    seed: 0", "    sead: 0")
    with pytest.raises(CommandFailed, match=r'unknown field "spec\.training\.sead"'):
        kubectl("apply", "-f", "-", stdin=text.replace("name: sort-digits", "name: misspelt"))


def test_a_job_without_storage_fails_before_a_pod_is_created(kubectl: Kubectl, jobs: Path) -> None:
    job = YAML(typ="safe", pure=True).load((jobs / "sort-digits.yaml").read_text())
    job["metadata"]["name"] = "no-storage"
    del job["spec"]["checkpoint"]["storage"]
    kubectl("apply", "-f", "-", stdin=json.dumps(job))
    found = wait_for(lambda: failed(kubectl, "no-storage"), "Failed", timeout_seconds=30)
    assert found.reason == "StorageMissing"
    assert "spec.checkpoint.storage" in found.message
    assert kubectl.names("rayclusters", "rljob.dev/job=no-storage") == []
    kubectl("delete", "rljob", "no-storage")


def test_an_unschedulable_pool_is_explained_within_thirty_seconds_and_gives_back_what_it_holds(
    kubectl: Kubectl, jobs: Path, rljob: list[str]
) -> None:
    applied = time.monotonic()
    kubectl("apply", "-f", str(jobs / "impossible.yaml"))

    def unschedulable() -> Condition | None:
        found = condition(kubectl, "impossible", "ClusterReady")
        return found if found is not None and found.reason == "Unschedulable" else None

    found = wait_for(unschedulable, "ClusterReady has the reason Unschedulable", timeout_seconds=30)
    assert time.monotonic() - applied < 30
    assert "nvidia.com/gpu" in found.message
    assert "pool main" in found.message
    explained = subprocess.run([*rljob, "explain", "impossible"], capture_output=True, text=True, check=False)
    assert "nvidia.com/gpu" in explained.stdout, explained.stdout + explained.stderr

    wait_for(lambda: kubectl.status("impossible").attempts[0].ended, "the end at the deadline", timeout_seconds=60)
    wait_for(lambda: not kubectl.names("pods", "rljob.dev/job=impossible"), "no pods are left", timeout_seconds=60)
    status = kubectl.status("impossible")
    first = status.attempts[0]
    assert (first.reason, first.outcome, first.failure_class) == ("Unschedulable", "Stopped", "Resumable"), first
    assert "nvidia.com/gpu" in (first.message or "")
    assert failed(kubectl, "impossible") is None
    counters = status.counters
    assert counters is not None
    assert (counters.failed_attempts, counters.infrastructure_retries) == (0, 0)
    kubectl("delete", "rljob", "impossible")


def test_a_job_whose_reward_raises_is_retried_on_the_same_cluster_and_fails_with_the_error(
    kubectl: Kubectl, jobs: Path
) -> None:
    kubectl("apply", "-f", str(jobs / "broken-reward.yaml"))
    found = wait_for(lambda: failed(kubectl, "broken-reward"), "Failed", timeout_seconds=420)
    assert found.reason == "ApplicationError"
    assert found.message.startswith("after 1 of 1 retries (runPolicy.maxAppRetries): "), found.message
    assert "ZeroDivisionError" in found.message
    first, second = kubectl.status("broken-reward").attempts
    assert (first.reason, first.failure_class) == ("ApplicationError", "Application")
    assert (first.cluster, first.cluster_uid) == (second.cluster, second.cluster_uid)
    assert "the reward of this test never works" in found.message
    wait_for(lambda: not kubectl.names("pods", "rljob.dev/job=broken-reward"), "no pods are left", timeout_seconds=90)
    kubectl("delete", "-f", str(jobs / "broken-reward.yaml"))
