"""What the operator asks of the API server: only what its role allows, no more than needed, again where it failed."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from rljob_testing.api_proxy import ApiProxy, Fault, SeenRequest, api_proxy
from rljob_testing.job_place import JobPlace
from rljob_testing.kuberay_stand_in import ClusterScript, PodScript
from rljob_testing.operator_process import LEASE_RULES, LONG_LEASE, NODE_LEASE_RULES, RULES, OperatorProcess
from rljob_testing.ray_dashboard_stand_in import running_for_ever, succeeding

pytestmark = pytest.mark.apiserver

MAX_STATUS_WRITES = 7
"""Of a job of a second: intent, cluster seen, ready and submitting, submitted, ended, removed; and one to spare."""
MAX_WRITES = 20
RARELY_USED = {
    ("patch", "networking.k8s.io", "networkpolicies"),
    ("get", "ray.io", "rayclusters"),
}
"""Only of jobs whose operator has moved, and of clusters that are there before they are made: see test_controller."""


@pytest.fixture
def proxy(place: JobPlace) -> Iterator[ApiProxy]:
    with api_proxy(place.server) as proxy:
        yield proxy


@contextmanager
def at_work(place: JobPlace, proxy: ApiProxy) -> Iterator[OperatorProcess]:
    leading = place.through(proxy.url).with_environment({"RLJOB_OPERATOR_LEADER_ELECTION": "true"})
    operator = leading.with_pauses({**place.setup.shorter, **LONG_LEASE}).operator("operator-watched")
    operator.start()
    try:
        operator.wait_until_healthy()
        yield operator
    finally:
        operator.terminate()


@pytest.fixture
def watched(place: JobPlace, proxy: ApiProxy) -> Iterator[OperatorProcess]:
    """An operator whose requests are written down."""
    with at_work(place, proxy) as operator:
        yield operator


@pytest.fixture
def unhurried(place: JobPlace, proxy: ApiProxy) -> Iterator[OperatorProcess]:
    """The same with its real pauses."""
    with at_work(place.with_pauses({}), proxy) as operator:
        yield operator


def allowed() -> set[tuple[str, str, str]]:
    """Verb, group and resource of everything in the role."""
    return {
        (verb, group, resource)
        for rule in (*RULES, *LEASE_RULES, *NODE_LEASE_RULES)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_every_right_is_used_and_no_other(place: JobPlace, proxy: ApiProxy, watched: OperatorProcess) -> None:
    script = PodScript(phase="Pending", ready=False, event=("FailedMount", "no volume"), scheduled_seconds_ago=60)
    place.script("stuck-1", ClusterScript({"head": script}))
    place.submit("stuck")
    place.submit("good", {"spec.runPolicy.ttlSecondsAfterFinished": 4})
    place.wait_for("good", "Complete", "Succeeded")
    place.wait_for("good", "ClusterReady", "Removed", "False")
    place.wait(lambda: place.http.get(f"{place.jobs}/good").status_code == 404, "the job to be deleted")
    place.wait_for("stuck", "ClusterReady", "VolumeMountFailed", "False")
    place.wait(lambda: ("update", "coordination.k8s.io", "leases") in used(proxy), "the lease to be renewed")
    assert used(proxy) | RARELY_USED == allowed()
    # By itself: times and numbers may contain it.
    assert not re.search(r"\b403\b", watched.log())


def used(proxy: ApiProxy) -> set[tuple[str, str, str]]:
    return {(seen.verb, seen.group, seen.resource) for seen in list(proxy.requests)}


def test_a_job_costs_few_writes(place: JobPlace, proxy: ApiProxy, unhurried: OperatorProcess) -> None:
    place.submit("cheap")
    place.wait_for("cheap", "ClusterReady", "Removed", "False")
    time.sleep(2)
    writes = Counter(str(seen) for seen in list(proxy.requests) if seen.is_write and seen.resource != "leases")
    print(f"writes of one job: {dict(writes)}")
    assert writes["patch rljobs/status"] <= MAX_STATUS_WRITES
    once = ("create secrets", "create networkpolicies", "create rayclusters", "delete rayclusters")
    assert [writes[each] for each in once] == [1, 1, 1, 1]
    assert writes.total() <= MAX_WRITES
    assert unhurried.metric("rljob_operator_status_writes_total") == writes["patch rljobs/status"]


def test_nothing_is_written_while_nothing_changes(place: JobPlace, proxy: ApiProxy, unhurried: OperatorProcess) -> None:
    place.dashboard("still-1").life = running_for_ever()
    place.submit("still")
    place.wait_for("still", "Progressing", "Training")
    time.sleep(3)
    before = list(proxy.requests)
    asked = place.dashboard("still-1").num_asked
    time.sleep(10)
    since = Counter(str(seen) for seen in list(proxy.requests)[len(before) :] if seen.resource != "leases")
    # A listing of everything, once a minute, may fall into this time.
    assert set(since) <= {"list rljobs", "list rayclusters", "list pods"}, since
    assert all(number == 1 for number in since.values()), since
    # Two or three looks of one request, though nothing happened that would call for one; and now and then the nodes.
    assert 0 < place.dashboard("still-1").num_asked - asked <= 4
    assert unhurried.probe("/healthz") == 200


def test_an_avalanche_of_events_is_one_look(place: JobPlace, unhurried: OperatorProcess) -> None:
    place.dashboard("busy-1").life = running_for_ever()
    place.submit("busy")
    place.wait_for("busy", "Progressing", "Training")
    time.sleep(2)
    started = time.monotonic()
    passes, asked = unhurried.metric("rljob_operator_passes_total"), place.dashboard("busy-1").num_asked
    for number in range(100):
        touch(place, "/api/v1", "pods", "busy-1-head-0", str(number))
    place.change("busy", {"metadata": {"labels": {"touched": "yes"}}})
    time.sleep(2)
    num_asked = place.dashboard("busy-1").num_asked - asked
    num_passes = unhurried.metric("rljob_operator_passes_total") - passes
    looks = (time.monotonic() - started) / 1.5 + 2
    assert num_asked <= looks + 1
    assert num_passes <= looks


def touch(place: JobPlace, group: str, plural: str, name: str, value: str) -> None:
    path = f"{group}/namespaces/{place.namespace}/{plural}/{name}"
    patch = {"metadata": {"annotations": {"touched": value}}}
    headers = {"Content-Type": "application/merge-patch+json"}
    place.http.patch(path, json=patch, headers=headers).raise_for_status()


@pytest.mark.usefixtures("watched")
def test_requests_that_fail_are_made_again(place: JobPlace, proxy: ApiProxy) -> None:
    """Each kind of request fails once: writes of the status with a conflict, others with an overload or an error."""
    failed: set[str] = set()

    def fault(request: SeenRequest) -> Fault | None:
        what = str(request)
        if request.resource in ("leases", "events") or request.verb == "watch" or what in failed:
            return None
        failed.add(what)
        if what == "patch rljobs/status":
            return Fault(409, "Conflict")
        if request.is_write:
            return Fault(429, "TooManyRequests", {"Retry-After": "1"})
        return Fault(500, "InternalError")

    proxy.fault = fault
    place.dashboard("patient-1").life = succeeding(2.0)
    place.submit("patient")
    place.wait_for("patient", "Complete", "Succeeded")
    place.wait_for("patient", "ClusterReady", "Removed", "False")
    assert failed >= {"get rljobs", "patch rljobs/status", "create secrets", "create rayclusters", "delete rayclusters"}
    assert list(place.dashboard("patient-1").started) == ["patient-1-1"]


@pytest.mark.long
def test_watches_that_break_begin_anew(place: JobPlace, proxy: ApiProxy, watched: OperatorProcess) -> None:
    error = {"type": "ERROR", "object": {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd"}}
    broken: list[str] = []

    def fault(request: SeenRequest) -> Fault | None:
        if request.verb != "watch" or request.resource != "pods" or broken:
            return None
        broken.append("an error in the stream")
        return Fault(200, "", body=json.dumps(error) + "\n")

    def num_restarts() -> float:
        return watched.metric("rljob_operator_watch_restarts_total")

    place.wait(lambda: ("watch", "", "pods") in used(proxy), "the pods to be watched")
    proxy.fault = fault
    # What the other watches are doing when one fails is different each time.
    for number in (1, 2):
        broken.clear()
        proxy.cut()
        place.wait(lambda: bool(broken), "the watch to fail")
        place.wait(lambda number=number: num_restarts() == number, "the watches to end: {}", watched.log)
        place.submit(f"after-{number}")
        place.wait_for(f"after-{number}", "Complete", "Succeeded")
    proxy.cut()
    place.submit("second")
    place.wait_for("second", "Complete", "Succeeded")
    assert num_restarts() == 2, f"a connection that is cut is no reason: {watched.log()}"
    assert watched.probe("/healthz") == 200


@pytest.mark.usefixtures("operator")
def test_an_admission_policy_speaks_through_the_job(place: JobPlace) -> None:
    policy = f"no-clusters-{place.namespace}"
    base = "/apis/admissionregistration.k8s.io/v1"
    rules = [{"apiGroups": ["ray.io"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["rayclusters"]}]
    spec: Mapping[str, Any] = {
        "matchConstraints": {"resourceRules": rules},
        "validations": [{"expression": "false", "message": "clusters are closed on Sundays"}],
    }
    selector = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": place.namespace}}}
    binding = {"policyName": policy, "validationActions": ["Deny"], "matchResources": selector}
    for plural, name, content in (
        ("validatingadmissionpolicies", policy, spec),
        ("validatingadmissionpolicybindings", policy, binding),
    ):
        answer = place.http.post(f"{base}/{plural}", json={"metadata": {"name": name}, "spec": content})
        assert answer.status_code == 201, answer.text
    probe = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "probe"}}
    there = f"/apis/ray.io/v1/namespaces/{place.namespace}/rayclusters"
    place.wait(lambda: place.http.post(there, json=probe, params={"dryRun": "All"}).status_code == 422, "the policy")
    place.submit("sunday")
    refused = place.wait_for("sunday", "ClusterReady", "CreationRefused", "False")
    assert "clusters are closed on Sundays" in refused["message"]
    place.http.delete(f"{base}/validatingadmissionpolicybindings/{policy}").raise_for_status()
    place.wait_for("sunday", "Complete", "Succeeded")


@pytest.mark.usefixtures("watched")
def test_an_admission_webhook_that_is_dead_is_named(place: JobPlace, proxy: ApiProxy) -> None:
    words = 'failed calling webhook "gate.example.org": connection refused'
    proxy.fault = lambda request: Fault(500, words) if str(request) == "create rayclusters" else None
    place.submit("gated")
    refused = place.wait_for("gated", "ClusterReady", "CreationRefused", "False")
    assert words in refused["message"]
    proxy.fault = lambda _: None
    place.wait_for("gated", "Complete", "Succeeded")


@pytest.mark.usefixtures("operator")
def test_what_fails_is_tried_less_and_less_often(place: JobPlace) -> None:
    place.dashboard("refused-1").submit_error = "No available agent to submit job"
    place.submit("refused")
    place.wait_for("refused", "JobSubmitted", "SubmissionFailed", "False")
    started, num_before = time.monotonic(), len(place.dashboard("refused-1").posts)
    time.sleep(1.5)
    num_posts, seconds = len(place.dashboard("refused-1").posts) - num_before, time.monotonic() - started
    # After 1/8, 1/4, 1/2, 1 and 2 s, a fifth more or less; while Ray is looked at every second all the time.
    assert 0.8 / 8 * (2**num_posts - 1) <= seconds
    place.dashboard("refused-1").submit_error = None
    place.wait_for("refused", "Complete", "Succeeded")
    assert set(place.dashboard("refused-1").posts) == {"refused-1-1"}
