"""What belongs to a job and what does not: deletion, name conflicts, changed keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest

from rljob_testing.operator.forked_operator import OperatorProcess
from rljob_testing.operator.testbed import Testbed

pytestmark = [pytest.mark.apiserver, pytest.mark.long]

CREATED_KINDS = ("rayclusters", "pods", "secrets", "networkpolicies")


def names(testbed: Testbed) -> Mapping[str, list[str]]:
    return {kind: sorted(item["metadata"]["name"] for item in testbed.items(kind)) for kind in CREATED_KINDS}


def test_a_deleted_running_job_leaves_nothing(testbed: Testbed, operator: OperatorProcess) -> None:
    testbed.dashboard("short-1").train_forever()
    testbed.submit("short")
    testbed.wait_for("short", "Progressing", "Training")
    assert [len(found) for found in names(testbed).values()] == [1, 2, 1, 1]
    testbed.delete("short")
    testbed.wait(
        lambda: not any(names(testbed).values()), "everything to be deleted; there is {}", lambda: names(testbed)
    )
    assert "level=error" not in operator.log()


def test_a_recreated_job_starts_after_the_former_is_gone(testbed: Testbed, operator: OperatorProcess) -> None:
    testbed.dashboard("twin-1").train_forever()
    testbed.submit("twin")
    testbed.wait_for("twin", "Progressing", "Training")
    first = testbed.dashboard("twin-1").started["twin-1-1"][1]
    created = datetime.fromisoformat(testbed.job("twin")["metadata"]["creationTimestamp"])
    testbed.delete("twin")
    testbed.wait(lambda: testbed.http.get(f"{testbed.jobs}/twin").status_code == 404, "the job to be deleted")
    # Start numbers begin with the second of the creation. No real trainer starts within this second.
    testbed.wait(lambda: datetime.now(UTC) >= created + timedelta(seconds=1), "the next second")
    testbed.dashboard("twin-1").complete_after(0.5)
    testbed.dashboard("twin-1").started.clear()
    testbed.submit("twin")
    testbed.wait_for("twin", "Complete", "Succeeded")
    second = testbed.dashboard("twin-1").started["twin-1-1"][1]
    assert int(str(second["RLJOB_START_NUMBER"])) > int(str(first["RLJOB_START_NUMBER"]))
    assert "level=error" not in operator.log()


def test_a_foreign_cluster_is_not_changed(testbed: Testbed, operator: OperatorProcess) -> None:
    body = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "taken-1"},
        "spec": {"headGroupSpec": {"template": {"spec": {"containers": [{"name": "ray", "image": "x"}]}}}}
        | {"workerGroupSpecs": []},
    }
    path = f"/apis/ray.io/v1/namespaces/{testbed.namespace}/rayclusters"
    uid = testbed.http.post(path, json=body).raise_for_status().json()["metadata"]["uid"]
    testbed.submit("taken")
    assert (
        "does not belong to this job" in testbed.wait_for("taken", "ClusterReady", "NameConflict", "False")["message"]
    )
    testbed.delete("taken")
    testbed.wait(lambda: testbed.http.get(f"{testbed.jobs}/taken").status_code == 404, "the job to be deleted")
    assert [item["metadata"]["uid"] for item in testbed.items("rayclusters")] == [uid]
    assert operator.metric('rljob_operator_effects_total{kind="CreateCluster",outcome="done"}') == 0


def test_a_key_can_be_replaced_while_jobs_run(testbed: Testbed) -> None:
    keys = testbed.setup.folder / "token-keys"
    with testbed.operator().running():
        testbed.dashboard("steady-1").train_forever()
        testbed.submit("steady")
        testbed.wait_for("steady", "Progressing", "Training")

        first_key = (keys / "key").read_bytes()
        (keys / "previous-key").write_bytes(first_key)
        (keys / "key").write_bytes(b"another key of more than 16 bytes")
        testbed.submit("new")
        testbed.wait_for("new", "Complete", "Succeeded")
        asked = testbed.dashboard("steady-1").num_requests
        testbed.wait(lambda: testbed.dashboard("steady-1").num_requests > asked + 2, "further polls of the running job")
        assert testbed.condition("steady", "Progressing")["reason"] == "Training"

        (keys / "previous-key").unlink()
        rejected = testbed.wait_for("steady", "Progressing", "TokenRejected", "Unknown")
        assert "rejects the token" in rejected["message"]
        (keys / "previous-key").write_bytes(first_key)
        testbed.wait_for("steady", "Progressing", "Training")


def test_jobs_of_other_namespaces_are_not_changed(testbed: Testbed, operator: OperatorProcess) -> None:
    other = testbed.http.post("/api/v1/namespaces", json={"metadata": {"generateName": "other-"}}).json()
    elsewhere = dataclasses.replace(testbed, namespace=other["metadata"]["name"])
    elsewhere.submit("foreign")
    testbed.submit("own")
    testbed.wait_for("own", "Complete", "Succeeded")
    assert "status" not in elsewhere.job("foreign")
    assert operator.probe("/readyz") == 200


def test_two_installations_in_one_namespace_notice_each_other(testbed: Testbed) -> None:
    quick = testbed.with_shorter_times({"START_SECONDS": 1000.0})
    first = quick.with_environment({"RLJOB_OPERATOR_LEASE_NAME": "first"}).operator("first-0")
    second = quick.with_environment({"RLJOB_OPERATOR_LEASE_NAME": "second"}).operator("second-0")
    metric = "rljob_operator_foreign_status_events_total"
    with first.running(), second.running():
        testbed.dashboard("both-1").complete_after(3.0)
        testbed.submit("both")
        testbed.wait_for("both", "Complete", "Succeeded")
        testbed.wait(lambda: first.metric(metric) + second.metric(metric) > 0, "one of them to notice the other")
    lines = [line for line in (first.log() + second.log()).splitlines() if "another installation" in line]
    assert 1 <= len(lines) <= 2
    for line in lines:
        assert "level=error" in line
        assert f"job={testbed.namespace}/both" in line
        assert "change watchNamespaces of one installation, or uninstall one" in line
    assert ("rljob-system/second" in first.log()) or ("rljob-system/first" in second.log())

    # What a former installation wrote stays in the jobs, and is no reason to complain.
    managers = {entry["manager"] for entry in testbed.job("both")["metadata"]["managedFields"]}
    assert managers & {"rljob-operator/rljob-system/first", "rljob-operator/rljob-system/second"}
    third = quick.with_environment({"RLJOB_OPERATOR_LEASE_NAME": "third"}).operator("third-0")
    with third.running():
        testbed.submit("alone")
        testbed.wait_for("alone", "Complete", "Succeeded")
        assert third.metric(metric) == 0
    assert "another installation" not in third.log()
