"""The operator's process under faults around it: late events, clocks that jump, other versions, missing permissions."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from rljob_testing.operator import api_proxy
from rljob_testing.operator.forked_operator import OperatorProcess
from rljob_testing.operator.testbed import Testbed

pytestmark = [pytest.mark.apiserver, pytest.mark.long]

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
JOBS_DEFINITION = f"{DEFINITIONS}/rljobs.rljob.dev"
PROBE = "/apis/rljob.dev/v1alpha1/namespaces/default/rljobs/probe"
CLUSTERS_DEFINITION = f"{DEFINITIONS}/rayclusters.ray.io"


@pytest.fixture
def watched(testbed: Testbed, proxy: api_proxy.ApiProxy) -> Iterator[OperatorProcess]:
    """An operator behind the proxy; the test starts it."""
    operator = testbed.with_server_url(proxy.url).operator("operator-watched")
    try:
        yield operator
    finally:
        operator.kill()


class Shuffled:
    """Of the events of each watch, every second one comes twice, and every third one after its successor."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}
        self._num_events: dict[str, int] = {}
        self.num_late = 0

    def __call__(self, request: api_proxy.SeenRequest, event: bytes) -> list[bytes]:
        kind = request.resource
        number = self._num_events[kind] = self._num_events.get(kind, 0) + 1
        late = [self._held.pop(kind)] if kind in self._held else []
        if number % 3 == 0:
            self._held[kind] = event
            self.num_late += 1
            return late
        return [event, *([event] if number % 2 == 0 else []), *late]


def test_duplicated_and_reordered_events_change_nothing(
    testbed: Testbed, proxy: api_proxy.ApiProxy, watched: OperatorProcess
) -> None:
    shuffled = proxy.events = Shuffled()
    watched.start()
    names = [f"shuffled-{number}" for number in range(3)]
    for name in names:
        testbed.dashboard(f"{name}-1").complete_after(1.0)
        testbed.submit(name)
    for name in names:
        testbed.wait_for(name, "Complete", "Succeeded")
        assert [attempt["number"] for attempt in testbed.job(name)["status"]["attempts"]] == [1]
        assert list(testbed.dashboard(f"{name}-1").started) == [f"{name}-1-1"]
    assert shuffled.num_late > 10
    created = [request for request in proxy.requests if str(request) == "create rayclusters"]
    assert len(created) == 3
    assert "level=error" not in watched.log()


@pytest.mark.parametrize("hours", [1, -1])
def test_a_clock_jump_of_an_hour_moves_no_deadline(
    testbed: Testbed, proxy: api_proxy.ApiProxy, watched: OperatorProcess, hours: int
) -> None:
    watched.start()
    pending, running = f"pending{hours}".replace("-", "m"), f"running{hours}".replace("-", "m")
    testbed.keep_pods_starting(f"{pending}-1")
    testbed.dashboard(f"{running}-1").train_forever()
    testbed.submit(pending)
    testbed.submit(running, {"spec.runPolicy.activeDeadlineSeconds": 1800})
    testbed.wait_for(running, "Progressing", "Training")
    testbed.wait_for(pending, "ClusterReady", "PodsPending", "False")
    proxy.seconds_ahead = 3600.0 * hours
    # Each write of a status returns the new time, and another pass follows it.
    for generation, seconds in ((2, 121), (3, 122)):
        for name in (pending, running):
            testbed.change(name, {"spec": {"runPolicy": {"gracePeriodSeconds": seconds}}})
            wait_until_seen(testbed, name, generation)
    for name in (pending, running):
        status = testbed.job(name)["status"]
        assert "result" not in status, status
        assert [attempt["state"] for attempt in status["attempts"]][-1] in ("Provisioning", "Running"), status
    assert watched.log().count("clock jumped") == 1
    testbed.delete_all_jobs()


def wait_until_seen(testbed: Testbed, name: str, generation: int) -> None:
    """Waits until a pass has seen this generation of a job."""
    testbed.wait(lambda: testbed.job(name)["status"]["observedGeneration"] == generation, "a pass")


@contextmanager
def changed(testbed: Testbed, definition: str, change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """A definition whose schema of the whole object is replaced for a while."""
    before = testbed.http.get(definition).raise_for_status().json()
    after = copy.deepcopy(before)
    change(after["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    testbed.http.put(definition, json=after).raise_for_status()
    try:
        yield
    finally:
        now = testbed.http.get(definition).raise_for_status().json()
        testbed.http.put(definition, json=now | {"spec": before["spec"]}).raise_for_status()


def without_counters(schema: dict[str, Any]) -> None:
    del schema["properties"]["status"]["properties"]["counters"]


def test_under_an_older_crd_jobs_wait_and_continue_later(testbed: Testbed, watched: OperatorProcess) -> None:
    with changed(testbed, JOBS_DEFINITION, without_counters):
        testbed.wait(lambda: counters_are(testbed, is_kept=False), "the older definition to be served")
        watched.start()
        testbed.submit("waits")
        testbed.wait(lambda: "is older than this operator (it drops status.counters)" in watched.log(), "its log line")
        assert watched.metric("rljob_operator_definition_outdated") == 1
        assert testbed.items("rayclusters") == []
    testbed.wait(lambda: counters_are(testbed, is_kept=True), "the right definition to be served")
    testbed.http.delete(PROBE).raise_for_status()
    testbed.wait_for("waits", "Complete", "Succeeded")
    assert watched.metric("rljob_operator_definition_outdated") == 0


def counters_are(testbed: Testbed, *, is_kept: bool) -> bool:
    """Whether the API server keeps the counters or drops them, shown by a job that no operator reconciles. For a moment
    after a change of the definition the server responds with 503."""
    if testbed.http.get(PROBE).status_code == 404:
        testbed.http.post(PROBE.rpartition("/")[0], json=testbed.wire("probe"))
    status = {"counters": {"attempts": int(time.monotonic() * 10)}}
    answer = testbed.http.patch(f"{PROBE}/status", json={"status": status})
    return answer.status_code == 200 and bool(answer.json().get("status", {}).get("counters")) == is_kept


def patched_status(testbed: Testbed, path: str, status: Mapping[str, Any]) -> dict[str, Any]:
    answer = testbed.http.patch(f"{path}/status", json={"status": status})
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def of_the_next_version(schema: dict[str, Any]) -> None:
    """Adds fields that this version does not know: two of the spec with defaults, two of the status."""
    spec, status = (schema["properties"][part]["properties"] for part in ("spec", "status"))
    spec["queue"] = {"type": "string", "default": "research"}
    spec["pools"]["items"]["properties"]["spot"] = {"type": "boolean", "default": False}
    status["queuePosition"] = {"type": "integer"}
    status["counters"]["properties"]["preemptions"] = {"type": "integer"}


def test_under_a_newer_crd_jobs_run_and_unknown_fields_are_logged_and_kept(
    testbed: Testbed, watched: OperatorProcess
) -> None:
    with changed(testbed, JOBS_DEFINITION, of_the_next_version):
        testbed.wait(lambda: testbed.served_spec().get("queue") == "research", "the newer definition to be served")
        testbed.dashboard("newer-1").train_forever()
        testbed.submit("newer")
        assert testbed.job("newer")["spec"]["pools"][0]["spot"] is False
        patched_status(testbed, f"{testbed.jobs}/newer", {"queuePosition": 3})
        watched.start()
        testbed.wait_for("newer", "Progressing", "Training")
        patched_status(testbed, f"{testbed.jobs}/newer", {"counters": {"preemptions": 2}})
        testbed.dashboard("newer-1").complete_after(0.1)
        testbed.wait_for("newer", "Complete", "Succeeded")
        testbed.wait_for("newer", "ClusterReady", "Removed", "False")
        job = testbed.job("newer")
        status = job["status"]
        assert job["spec"]["queue"] == "research"
        assert (status["queuePosition"], status["counters"]["preemptions"], status["counters"]["attempts"]) == (3, 2, 1)
        assert [attempt["reason"] for attempt in status["attempts"]] == ["Succeeded"]
        assert testbed.dashboard("newer-1").posts == ["newer-1-1"]
        (named,) = [line for line in watched.log().splitlines() if "spec.queue" in line]
        assert "spec.pools[0].spot" in named
        assert "level=error" not in watched.log()
    testbed.wait(lambda: is_of_this_version(testbed.served_spec()), "the right definition to be served")


def is_of_this_version(served_spec: Mapping[str, Any]) -> bool:
    return "pools" in served_spec and "queue" not in served_spec


def without_tokens(schema: dict[str, Any]) -> None:
    """The definition of a KubeRay before 1.5."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    known: Mapping[str, Any] = {
        "rayVersion": {"type": "string"},
        "headGroupSpec": anything,
        "workerGroupSpecs": {"type": "array", "items": anything},
    }
    schema.clear()
    schema.update(
        {"type": "object", "properties": {"spec": {"type": "object", "properties": known}, "status": anything}}
    )


def test_a_kuberay_that_is_too_old_is_named(testbed: Testbed, watched: OperatorProcess) -> None:
    probe = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "probe"}}
    probe["spec"] = {"authOptions": {"mode": "token"}}  # type: ignore[assignment]
    there = f"/apis/ray.io/v1/namespaces/{testbed.namespace}/rayclusters"

    def is_refused() -> bool:
        answer = testbed.http.post(there, json=probe, params={"dryRun": "All", "fieldValidation": "Strict"})
        return answer.status_code == 400

    with changed(testbed, CLUSTERS_DEFINITION, without_tokens):
        testbed.wait(is_refused, "the older definition to be served")
        watched.start()
        testbed.submit("modern")
        condition = testbed.wait_for("modern", "Failed", "KubeRayTooOld")
        assert "spec.authOptions" in condition["message"]
        assert testbed.items("rayclusters") == []
    testbed.wait(lambda: not is_refused(), "the right definition to be served")


def test_a_missing_permission_is_reported_and_waited_for(
    testbed: Testbed, proxy: api_proxy.ApiProxy, watched: OperatorProcess
) -> None:
    def fault(request: api_proxy.SeenRequest) -> api_proxy.Fault | None:
        return api_proxy.Fault(403, "Forbidden") if request.resource == "pods" else None

    proxy.fault = fault
    watched.start()
    testbed.submit("blind")
    condition = testbed.wait_for("blind", "ClusterReady", "ReadForbidden", "Unknown")
    assert "injected Forbidden" in condition["message"]
    assert testbed.items("rayclusters") == []
    started, passes = time.monotonic(), watched.metric("rljob_operator_passes_total")
    time.sleep(1)
    passes = watched.metric("rljob_operator_passes_total") - passes
    assert passes <= 3 * (time.monotonic() - started), "no request is repeated again and again"
    proxy.fault = lambda _: None
    testbed.wait_for("blind", "Complete", "Succeeded")


def test_an_operator_in_a_new_namespace_updates_the_network_policy(
    testbed: Testbed, proxy: api_proxy.ApiProxy, watched: OperatorProcess
) -> None:
    watched.start()
    testbed.dashboard("moved-1").train_forever()
    testbed.submit("moved")
    testbed.wait_for("moved", "Progressing", "Training")
    (policy,) = testbed.items("networkpolicies")
    path = f"/apis/networking.k8s.io/v1/namespaces/{testbed.namespace}/networkpolicies/{policy['metadata']['name']}"
    original = copy.deepcopy(policy["spec"])
    policy["spec"]["ingress"][1]["from"][0]["namespaceSelector"]["matchLabels"] = {"kubernetes.io/metadata.name": "old"}
    testbed.http.put(path, json=policy).raise_for_status()
    testbed.dashboard("moved-1").down = True
    testbed.wait(lambda: testbed.http.get(path).json()["spec"] == original, "the policy to name this operator again")
    testbed.dashboard("moved-1").down = False
    testbed.wait_for("moved", "Progressing", "Training")
    applied = [request for request in proxy.requests if str(request) == "patch networkpolicies"]
    assert len(applied) == 1
