"""A job in a queue of Kueue, from the queue to its end. The test acts as Kueue: it changes `suspend` of the RayCluster
and writes the workload."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.v1alpha1.pools import PRIORITY_CLASS_LABEL, QUEUE_LABEL
from rljob_testing.cluster.api_server import install_definition
from rljob_testing.operator import scripts
from rljob_testing.operator.testbed import Testbed

pytestmark = pytest.mark.apiserver

WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2"
PENDING = "couldn't assign flavors to pod set head: insufficient unused quota for nvidia.com/gpu"
PREEMPTED = "Preempted to accommodate a workload (UID: 1234) due to prioritization in the ClusterQueue"


def test_a_job_waits_in_its_queue_is_evicted_and_resumes_without_using_a_retry(testbed: Testbed) -> None:
    install_workloads(testbed)
    testbed.dashboard("queued-1").life = trains
    with testbed.with_environment({"RLJOB_OPERATOR_KUEUE": "true"}).operator().running():
        testbed.submit(
            "queued",
            {
                "metadata.labels": {QUEUE_LABEL: "team", PRIORITY_CLASS_LABEL: "low"},
                "spec.runPolicy.cleanup": "KeepCluster",
            },
        )
        testbed.wait_for("queued", "QuotaReserved", "Queued", "False")
        cluster = testbed.item_of("queued", "rayclusters")
        assert cluster["spec"]["suspend"] is True
        assert {QUEUE_LABEL: "team", PRIORITY_CLASS_LABEL: "low"}.items() <= cluster["metadata"]["labels"].items()
        write_workload(testbed, cluster, {"QuotaReserved": ("False", PENDING)})
        testbed.wait(lambda: PENDING in testbed.condition("queued", "QuotaReserved")["message"], "Kueue's message")
        status = testbed.job("queued")["status"]
        assert (status["phase"], status["reason"], testbed.items("pods")) == ("Queued", "Queued", [])
        assert "waitingSince" in status

        suspend(testbed, cluster, False)
        testbed.wait_for("queued", "Progressing", "Training")
        testbed.wait_for("queued", "QuotaReserved", "Admitted")
        assert "waitingSince" not in testbed.job("queued")["status"]

        write_workload(testbed, cluster, {"Evicted": ("True", PREEMPTED)})
        suspend(testbed, cluster, True)
        testbed.wait(lambda: newest_attempt(testbed)["number"] == 2, "the next attempt", lambda: testbed.job("queued"))
        testbed.wait_for("queued", "QuotaReserved", "Queued", "False")
        former, newest = testbed.job("queued")["status"]["attempts"]
        assert (former["reason"], former["outcome"], former["failureClass"]) == ("Evicted", "Stopped", "Resumable")
        testbed.wait(lambda: PREEMPTED in testbed.condition("queued", "QuotaReserved")["message"], "Kueue's reason")
        assert (
            newest["clusterUid"]
            == cluster["metadata"]["uid"]
            == testbed.item_of("queued", "rayclusters")["metadata"]["uid"]
        )
        assert (newest["state"], testbed.items("pods")) == ("Queued", [])

        testbed.dashboard("queued-1").life = scripts.succeeding(0.1)
        suspend(testbed, cluster, False)
        testbed.wait_for("queued", "Complete", "Succeeded")
        counters = testbed.job("queued")["status"]["counters"]
        assert (counters["infrastructureRetries"], counters["failedAttempts"], counters["attempts"]) == (0, 0, 2)
        # The cluster would hold its quota.
        testbed.wait(lambda: testbed.items("rayclusters") == [], "the cluster to be deleted despite KeepCluster")


def trains(_: float, environment: dict[str, object]) -> scripts.RunMoment:
    """A trainer that has saved a checkpoint and continues."""
    return scripts.RunMoment(run_state=scripts.run_state(environment, "Running", 2))


def newest_attempt(testbed: Testbed) -> dict[str, Any]:
    """The newest attempt of the job."""
    found: dict[str, Any] = testbed.job("queued")["status"]["attempts"][-1]
    return found


def suspend(testbed: Testbed, cluster: dict[str, Any], value: bool) -> None:
    """Changes `spec.suspend` of a RayCluster."""
    path = f"/apis/ray.io/v1/namespaces/{testbed.namespace}/rayclusters/{cluster['metadata']['name']}"
    testbed.http.patch(path, json={"spec": {"suspend": value}}).raise_for_status()


def write_workload(testbed: Testbed, cluster: dict[str, Any], conditions: dict[str, tuple[str, str]]) -> None:
    """Creates or replaces the workload of a RayCluster."""
    path, name = f"{WORKLOADS}/namespaces/{testbed.namespace}/workloads", "raycluster-queued-1"
    metadata = cluster["metadata"]
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": metadata["name"], "uid": metadata["uid"]}
    workload = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {
            "name": name,
            "labels": {"kueue.x-k8s.io/job-uid": metadata["uid"]},
            "ownerReferences": [owner | {"controller": True}],
        },
        "status": {
            "conditions": [
                {"type": kind, "status": status, "message": message} for kind, (status, message) in conditions.items()
            ]
        },
    }
    answer = testbed.http.patch(f"{path}/{name}", json={"status": workload["status"]})
    if answer.status_code == 404:
        testbed.http.post(path, json=workload).raise_for_status()
    else:
        answer.raise_for_status()


def install_workloads(testbed: Testbed) -> None:
    """Installs the resource Workload, without its schema."""
    names = {"plural": "workloads", "singular": "workload", "kind": "Workload", "listKind": "WorkloadList"}
    version = {
        "name": "v1beta2",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
    }
    manifest = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": "workloads.kueue.x-k8s.io",
            # Groups under k8s.io need it.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {"group": "kueue.x-k8s.io", "names": names, "scope": "Namespaced", "versions": [version]},
    }
    install_definition(testbed.http, manifest)
