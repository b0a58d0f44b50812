"""What belongs to a job and what does not: deletion, names that are taken, keys that change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from rljob_testing.job_place import JobPlace
from rljob_testing.operator_process import KEY, OperatorProcess
from rljob_testing.ray_dashboard_stand_in import running_for_ever, succeeding

pytestmark = [pytest.mark.apiserver, pytest.mark.long]

MADE = ("rayclusters", "pods", "secrets", "networkpolicies")


def names(place: JobPlace) -> Mapping[str, list[str]]:
    return {kind: sorted(item["metadata"]["name"] for item in place.items(kind)) for kind in MADE}


def test_a_running_job_that_is_deleted_leaves_nothing(place: JobPlace, operator: OperatorProcess) -> None:
    place.dashboard("short-1").life = running_for_ever()
    place.submit("short")
    place.wait_for("short", "Progressing", "Training")
    assert [len(found) for found in names(place).values()] == [1, 2, 1, 1]
    place.delete("short")
    place.wait(lambda: not any(names(place).values()), "everything to go; there is {}", lambda: names(place))
    assert "level=error" not in operator.log()


def test_a_job_made_again_starts_behind_the_one_before(place: JobPlace, operator: OperatorProcess) -> None:
    place.dashboard("twin-1").life = running_for_ever()
    place.submit("twin")
    place.wait_for("twin", "Progressing", "Training")
    first = place.dashboard("twin-1").started["twin-1-1"][1]
    place.delete("twin")
    place.wait(lambda: place.http.get(f"{place.jobs}/twin").status_code == 404, "the job to go")
    place.dashboard("twin-1").life = succeeding(0.5)
    place.dashboard("twin-1").started.clear()
    place.submit("twin")
    place.wait_for("twin", "Complete", "Succeeded")
    second = place.dashboard("twin-1").started["twin-1-1"][1]
    assert int(str(second["RLJOB_START_NUMBER"])) > int(str(first["RLJOB_START_NUMBER"]))
    assert "level=error" not in operator.log()


def test_a_cluster_of_somebody_else_is_left_alone(place: JobPlace, operator: OperatorProcess) -> None:
    body = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "taken-1"},
        "spec": {"headGroupSpec": {"template": {"spec": {"containers": [{"name": "ray", "image": "x"}]}}}}
        | {"workerGroupSpecs": []},
    }
    path = f"/apis/ray.io/v1/namespaces/{place.namespace}/rayclusters"
    uid = place.http.post(path, json=body).raise_for_status().json()["metadata"]["uid"]
    place.submit("taken")
    assert "does not belong to this job" in place.wait_for("taken", "ClusterReady", "NameConflict", "False")["message"]
    place.delete("taken")
    place.wait(lambda: place.http.get(f"{place.jobs}/taken").status_code == 404, "the job to go")
    assert [item["metadata"]["uid"] for item in place.items("rayclusters")] == [uid]
    assert operator.metric('rljob_operator_effects_total{kind="CreateCluster",outcome="done"}') == 0


def test_a_key_is_exchanged_while_jobs_run(place: JobPlace) -> None:
    keys = place.setup.folder / "token-keys"
    operator = place.operator()
    operator.start()
    try:
        operator.wait_until_healthy()
        place.dashboard("steady-1").life = running_for_ever()
        place.submit("steady")
        place.wait_for("steady", "Progressing", "Training")

        (keys / "previous-key").write_bytes(KEY)
        (keys / "key").write_bytes(b"another key of more than 16 bytes")
        place.submit("new")
        place.wait_for("new", "Complete", "Succeeded")
        asked = place.dashboard("steady-1").num_asked
        place.wait(lambda: place.dashboard("steady-1").num_asked > asked + 2, "further looks at the running job")
        assert place.condition("steady", "Progressing")["reason"] == "Training"

        (keys / "previous-key").unlink()
        rejected = place.wait_for("steady", "Progressing", "TokenRejected", "Unknown")
        assert "does not accept the token" in rejected["message"]
        (keys / "previous-key").write_bytes(KEY)
        place.wait_for("steady", "Progressing", "Training")
    finally:
        operator.kill()


def test_jobs_of_other_namespaces_are_not_touched(place: JobPlace, operator: OperatorProcess) -> None:
    other = place.http.post("/api/v1/namespaces", json={"metadata": {"generateName": "other-"}}).json()
    elsewhere = dataclasses.replace(place, namespace=other["metadata"]["name"])
    elsewhere.submit("foreign")
    place.submit("own")
    place.wait_for("own", "Complete", "Succeeded")
    assert "status" not in elsewhere.job("foreign")
    assert operator.probe("/readyz") == 200
