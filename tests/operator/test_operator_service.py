"""The operator as a service: leading and following, outages around it, slow neighbours, probes and signals."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rljob_testing.apiserver import DEFINITIONS
from rljob_testing.job_place import JobPlace
from rljob_testing.kuberay_stand_in import install_ray_cluster_resource
from rljob_testing.operator_process import LEASE, LONG_LEASE, OPERATOR_NAMESPACE, QUICK, OperatorProcess
from rljob_testing.ray_dashboard_stand_in import running_for_ever, succeeding
from rljob_testing.settings import inherited_environment

pytestmark = [pytest.mark.apiserver, pytest.mark.long]

LEASE_PATH = f"/apis/coordination.k8s.io/v1/namespaces/{OPERATOR_NAMESPACE}/leases/{LEASE}"
STOP_SECONDS = 45.0
"""Well below the 60 s that a slow dashboard takes for an answer."""


@contextmanager
def at_work(*operators: OperatorProcess) -> Iterator[None]:
    """They are killed at the end."""
    try:
        for operator in operators:
            operator.start()
            operator.wait_until_healthy()
        yield
    finally:
        for operator in operators:
            operator.kill()


def test_one_of_two_replicas_leads(place: JobPlace) -> None:
    place = place.with_environment({"RLJOB_OPERATOR_LEADER_ELECTION": "true"})
    place = place.with_pauses({**QUICK, **LONG_LEASE})
    place.http.delete(LEASE_PATH)
    first, second = place.operator("operator-a"), place.operator("operator-b")

    def holder() -> str:
        return str(place.http.get(LEASE_PATH).json()["spec"]["holderIdentity"])

    with at_work(first):
        place.wait(lambda: first.metric("rljob_operator_leader") == 1, "the first to lead")
        with at_work(second):
            assert (holder(), second.metric("rljob_operator_leader")) == ("operator-a", 0)
            assert second.probe("/readyz") == 200
            assert second.terminate(STOP_SECONDS) == 0
            second.start()
            second.wait_until_healthy()
            place.submit("one")
            place.wait_for("one", "Complete", "Succeeded")
            assert second.metric("rljob_operator_passes_total") == 0

            first.kill()
            said_before = len(first.log())
            first.start()
            place.wait(
                lambda: first.probe("/healthz") == 200 and first.metric("rljob_operator_leader") == 1, "it again"
            )
            assert "waiting: " not in first.log()[said_before:], "a container that is restarted has its lease"

            assert first.terminate(STOP_SECONDS) == 0
            place.wait(lambda: second.metric("rljob_operator_leader") == 1, "the second to lead")
            place.submit("two")
            place.wait_for("two", "Complete", "Succeeded")

            def take() -> bool:
                lease = place.http.get(LEASE_PATH).json()
                lease["spec"]["holderIdentity"] = "somebody-else"
                return place.http.put(LEASE_PATH, json=lease).status_code == 200

            place.wait(take, "a moment between two renewals")
            place.wait(lambda: second.exit_code() == 1, "the end of the second")
            assert "somebody-else holds it" in second.log()
    place.http.delete(LEASE_PATH)


def test_the_api_server_goes_away_and_comes_back(place: JobPlace, operator: OperatorProcess) -> None:
    place.dashboard("long-1").life = running_for_ever()
    place.submit("long")
    place.wait_for("long", "Progressing", "Training")
    place.server.program.kill()
    time.sleep(3)
    assert operator.probe("/healthz") == 200
    place.start_server_again()
    place.dashboard("long-1").life = succeeding(0.1)
    place.wait_for("long", "Complete", "Succeeded")
    place.submit("after")
    place.wait_for("after", "Complete", "Succeeded")
    assert operator.probe("/healthz") == 200
    assert list(place.dashboard("long-1").started) == ["long-1-1"]


def test_kuberay_is_installed_later(place: JobPlace) -> None:
    place.http.delete(f"{DEFINITIONS}/rayclusters.ray.io").raise_for_status()
    place.wait(lambda: place.http.get("/apis/ray.io/v1/rayclusters").status_code == 404, "the resource to go")
    operator = place.operator()
    try:
        with at_work(operator):
            place.submit("early")
            place.wait_for("early", "ClusterReady", "KubeRayUnavailable", "False")
            install_ray_cluster_resource(place.http)
            place.wait_for("early", "Complete", "Succeeded")
            place.wait(lambda: "there is a resource rayclusters now" in operator.log(), "the watches to begin anew")
            # Nothing but the watch tells within the time of this test that a cluster is gone.
            place.dashboard("gone-1").life = running_for_ever()
            place.submit("gone")
            place.wait_for("gone", "Progressing", "Training")
    finally:
        install_ray_cluster_resource(place.http)


def test_slow_dashboards_delay_nobody_else(place: JobPlace) -> None:
    operator = place.with_environment({"RLJOB_OPERATOR_NUM_WORKERS": "1"}).operator()
    slow = [f"slow-{number}" for number in range(6)]
    with at_work(operator):
        for name in slow:
            place.dashboard(f"{name}-1").delay_seconds = 60.0
            place.submit(name)
        for name in slow:
            place.wait_for(name, "ClusterReady", "DashboardUnreachable", "False")
        started = time.monotonic()
        for name in ("quick", "quicker"):
            place.submit(name)
            place.wait_for(name, "Complete", "Succeeded")
        # Each slow one is given 5 s. Were they waited for, so would be in each of a dozen passes.
        assert time.monotonic() - started < 60


def test_all_namespaces(place: JobPlace) -> None:
    everywhere = replace(place, setup=replace(place.setup, namespaces=[]))
    with at_work(everywhere.operator()):
        place.submit("anywhere")
        place.wait_for("anywhere", "Complete", "Succeeded")


def test_a_running_operator_stops_when_told(place: JobPlace, operator: OperatorProcess) -> None:
    place.dashboard("slow-1").delay_seconds = 60.0
    place.submit("slow")
    place.wait(lambda: place.dashboard("slow-1").num_asked > 0, "the operator to wait for Ray")
    assert operator.terminate(STOP_SECONDS) == 0


def test_bad_settings_are_named(place: JobPlace) -> None:
    environment = inherited_environment() | {"RLJOB_OPERATOR_POD_NAME": "x", "RLJOB_OPERATOR_POD_NAMESPACE": "y"}
    environment |= {"RLJOB_OPERATOR_RAY_VERSION": "2.60.0", "RLJOB_OPERATOR_NUM_WORKERS": "many"}
    environment |= {"RLJOB_OPERATOR_TOKEN_KEYS_FOLDER": str(place.setup.folder)}
    command = [sys.executable, "-m", "rljob_operator"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "RLJOB_OPERATOR_NUM_WORKERS: not a number from 1 to 1024 (seen: 'many')" in result.stderr
    assert len(result.stderr.splitlines()) == 1
