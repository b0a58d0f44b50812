"""A job that loses a worker pod and, at the same moment, its operator continues from its last checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from ruamel.yaml import YAML

from rljob_api.conditions import ConditionType
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_testing.cluster.kubectl import Kubectl, recorded_statuses, wait_for

NAME = "survivor"


def test_a_job_continues_after_the_loss_of_a_worker_and_of_the_operator(
    kubectl: Kubectl, jobs: Path, kill_operator: Callable[[], None]
) -> None:
    job = YAML(typ="safe", pure=True).load((jobs / "sort-digits.yaml").read_text())
    job["metadata"]["name"] = NAME
    kubectl("apply", "-f", "-", stdin=json.dumps(job))
    with recorded_statuses(kubectl, NAME) as recording:
        wait_for(lambda: recording.when(ConditionType.CHECKPOINTED), "a checkpoint", timeout_seconds=420)
        saved = kubectl.status(NAME).checkpoint
        assert saved is not None
        worker = kubectl.names("pods", f"rljob.dev/job={NAME},rljob.dev/pool=main")[0]
        node = kubectl("get", worker, "-o", "jsonpath={.spec.nodeName}")
        kubectl("delete", worker, "--force", "--grace-period=0")
        kill_operator()
        wait_for(lambda: recording.when(ConditionType.RETRYING), "Retrying", timeout_seconds=180)
        kubectl("wait", "--for=condition=Finished", f"rljob/{NAME}", "--timeout=420s", timeout_seconds=430)
    check(kubectl.status(NAME), saved.step, f"on pod {worker.removeprefix('pod/')}, node {node})")
    wait_for(lambda: not kubectl.names("pods", f"rljob.dev/job={NAME}"), "no pods are left", timeout_seconds=90)
    kubectl("delete", "rljob", NAME)


def check(status: RLJobStatus, saved_step: int, where: str) -> None:
    """Checks that there were two attempts on one cluster, of which KubeRay replaced the worker, that no step before the
    checkpoint was repeated, and that the message of the first attempt names the lost worker and its node."""
    assert status.result is not None
    assert (status.phase, status.result.reason) == ("Complete", "Succeeded")
    first, second = status.attempts
    assert (first.outcome, first.failure_class) == ("Failed", "Infrastructure"), first
    assert re.search(rf"worker rank \d+ \(.*{re.escape(where)}", first.message or ""), first.message
    assert second.outcome == "Succeeded"
    assert (second.cluster, second.cluster_uid) == (first.cluster, first.cluster_uid)
    assert second.resumed_from_step is not None
    assert second.resumed_from_step >= saved_step
    assert (second.start_number or 0) > (first.start_number or 0)
    assert status.counters is not None
    assert (status.counters.attempts, status.counters.failed_attempts) == (2, 1)
