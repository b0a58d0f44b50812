"""The operator as a service: leader and follower, outages around it, slow dashboards, probes and signals."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from rljob_testing.operator.forked_operator import OperatorProcess
from rljob_testing.operator.testbed import Testbed
from rljob_testing.settings import inherited_environment

pytestmark = [pytest.mark.apiserver, pytest.mark.long]

STOP_SECONDS = 45.0
"""Well below the 60 s that a slow dashboard takes for a response."""


def test_one_of_two_replicas_leads(testbed: Testbed) -> None:
    testbed = testbed.with_leader_election()
    testbed.http.delete(testbed.lease)
    first, second = testbed.operator("operator-a"), testbed.operator("operator-b")

    def holder() -> str:
        return str(testbed.http.get(testbed.lease).json()["spec"]["holderIdentity"])

    with first.running():
        testbed.wait(lambda: first.metric("rljob_operator_leader") == 1, "the first to lead")
        with second.running():
            assert (holder(), second.metric("rljob_operator_leader")) == ("operator-a", 0)
            assert second.probe("/readyz") == 200
            assert second.terminate(STOP_SECONDS) == 0
            second.start()
            second.wait_until_healthy()
            testbed.submit("one")
            testbed.wait_for("one", "Complete", "Succeeded")
            assert second.metric("rljob_operator_passes_total") == 0

            first.kill()
            log_length = len(first.log())
            first.start()
            testbed.wait(
                lambda: first.probe("/healthz") == 200 and first.metric("rljob_operator_leader") == 1,
                "it to lead again",
            )
            assert "waiting for leadership" not in first.log()[log_length:], (
                "a restarted container still holds its Lease"
            )

            assert first.terminate(STOP_SECONDS) == 0
            testbed.wait(lambda: second.metric("rljob_operator_leader") == 1, "the second to lead")
            testbed.submit("two")
            testbed.wait_for("two", "Complete", "Succeeded")

            def take() -> bool:
                lease = testbed.http.get(testbed.lease).json()
                lease["spec"]["holderIdentity"] = "somebody-else"
                return testbed.http.put(testbed.lease, json=lease).status_code == 200

            testbed.wait(take, "a moment between two renewals")
            testbed.wait(lambda: second.exit_code() == 1, "the end of the second")
            assert "held by somebody-else" in second.log()
    testbed.http.delete(testbed.lease)


def test_jobs_continue_after_an_outage_of_the_api_server(testbed: Testbed, operator: OperatorProcess) -> None:
    testbed.dashboard("long-1").train_forever()
    testbed.submit("long")
    testbed.wait_for("long", "Progressing", "Training")
    testbed.server.program.kill()
    time.sleep(3)
    assert operator.probe("/healthz") == 200
    testbed.restart_server()
    testbed.dashboard("long-1").complete_after(0.1)
    testbed.wait_for("long", "Complete", "Succeeded")
    testbed.submit("after")
    testbed.wait_for("after", "Complete", "Succeeded")
    assert operator.probe("/healthz") == 200
    assert list(testbed.dashboard("long-1").started) == ["long-1-1"]


def test_kuberay_may_be_installed_later(testbed: Testbed) -> None:
    testbed.uninstall_kuberay()
    try:
        with testbed.operator().running() as operator:
            testbed.submit("early")
            testbed.wait_for("early", "ClusterReady", "KubeRayUnavailable", "False")
            testbed.install_kuberay()
            testbed.wait_for("early", "Complete", "Succeeded")
            testbed.wait(lambda: "resource rayclusters is now installed" in operator.log(), "the watches to restart")
            # Only the watch reports within the time of this test that a cluster was deleted.
            testbed.dashboard("gone-1").train_forever()
            testbed.submit("gone")
            testbed.wait_for("gone", "Progressing", "Training")
    finally:
        testbed.install_kuberay()


def test_slow_dashboards_do_not_delay_other_jobs(testbed: Testbed) -> None:
    slow = [f"slow-{number}" for number in range(6)]
    with testbed.with_environment({"RLJOB_OPERATOR_MAX_CONCURRENT_RECONCILES": "1"}).operator().running():
        for name in slow:
            testbed.dashboard(f"{name}-1").delay_seconds = 60.0
            testbed.submit(name)
        for name in slow:
            testbed.wait_for(name, "ClusterReady", "DashboardUnreachable", "False")
        started = time.monotonic()
        for name in ("quick", "quicker"):
            testbed.submit(name)
            testbed.wait_for(name, "Complete", "Succeeded")
        # Each slow one is given 5 s. If passes waited for them, so would each of a dozen passes.
        assert time.monotonic() - started < 60


def test_jobs_of_all_namespaces_are_reconciled(testbed: Testbed) -> None:
    everywhere = replace(testbed, setup=replace(testbed.setup, namespaces=[]))
    with everywhere.operator().running():
        testbed.submit("anywhere")
        testbed.wait_for("anywhere", "Complete", "Succeeded")


def test_a_running_operator_stops_on_sigterm(testbed: Testbed, operator: OperatorProcess) -> None:
    testbed.dashboard("slow-1").delay_seconds = 60.0
    testbed.submit("slow")
    testbed.wait(lambda: testbed.dashboard("slow-1").num_requests > 0, "the operator to wait for Ray")
    assert operator.terminate(STOP_SECONDS) == 0


def test_invalid_settings_are_named(testbed: Testbed) -> None:
    environment = inherited_environment() | {"RLJOB_OPERATOR_POD_NAME": "x", "RLJOB_OPERATOR_POD_NAMESPACE": "y"}
    environment |= {"RLJOB_OPERATOR_RAY_VERSION": "2.60.0", "RLJOB_OPERATOR_MAX_CONCURRENT_RECONCILES": "many"}
    environment |= {"RLJOB_OPERATOR_TOKEN_KEYS_FOLDER": str(testbed.setup.folder)}
    command = [sys.executable, "-m", "rljob_operator"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "RLJOB_OPERATOR_MAX_CONCURRENT_RECONCILES: must be an integer from 1 to 1024 (seen: 'many')" in result.stderr
    assert len(result.stderr.splitlines()) == 1
