"""The operator's requests to the API server: only what its role allows, no more than needed, retried after failures."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from rljob_testing.operator import api_proxy, forked_operator
from rljob_testing.operator.testbed import Testbed

pytestmark = pytest.mark.apiserver

MAX_STATUS_WRITES = 7
"""Writes for a job of one second: intent, cluster seen, ready and submitting, submitted, ended, removed; and one to
spare."""
MAX_WRITES = 20
RARELY_USED = {
    ("patch", "networking.k8s.io", "networkpolicies"),
    ("get", "ray.io", "rayclusters"),
}
"""Used only for jobs whose operator has moved, and for clusters that exist before they are created: see
test_controller."""


@contextmanager
def at_work(testbed: Testbed, proxy: api_proxy.ApiProxy) -> Iterator[forked_operator.OperatorProcess]:
    operator = testbed.with_server_url(proxy.url).with_leader_election().operator("operator-watched")
    operator.start()
    try:
        operator.wait_until_healthy()
        yield operator
    finally:
        operator.terminate()


@pytest.fixture
def watched(testbed: Testbed, proxy: api_proxy.ApiProxy) -> Iterator[forked_operator.OperatorProcess]:
    """An operator whose requests are recorded."""
    with at_work(testbed, proxy) as operator:
        yield operator


@pytest.fixture
def unhurried(testbed: Testbed, proxy: api_proxy.ApiProxy) -> Iterator[forked_operator.OperatorProcess]:
    """The same with its real pauses."""
    with at_work(testbed.with_real_times(), proxy) as operator:
        yield operator


def allowed() -> set[tuple[str, str, str]]:
    """Verb, group and resource of everything in the role."""
    return {
        (verb, group, resource)
        for rule in (*forked_operator.RULES, *forked_operator.LEASE_RULES, *forked_operator.NODE_LEASE_RULES)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_every_permission_is_used_and_no_other(
    testbed: Testbed, proxy: api_proxy.ApiProxy, watched: forked_operator.OperatorProcess
) -> None:
    testbed.fail_volume_mount("stuck-1", "no volume")
    testbed.submit("stuck")
    testbed.submit("good", {"spec.runPolicy.ttlSecondsAfterFinished": 4})
    testbed.wait_for("good", "Complete", "Succeeded")
    testbed.wait_for("good", "ClusterReady", "Removed", "False")
    testbed.wait(lambda: testbed.http.get(f"{testbed.jobs}/good").status_code == 404, "the job to be deleted")
    testbed.wait_for("stuck", "ClusterReady", "VolumeMountFailed", "False")
    testbed.wait(lambda: ("update", "coordination.k8s.io", "leases") in used(proxy), "the lease to be renewed")
    assert used(proxy) | RARELY_USED == allowed()
    # As a word of its own: times and numbers may contain it.
    assert not re.search(r"\b403\b", watched.log())


def used(proxy: api_proxy.ApiProxy) -> set[tuple[str, str, str]]:
    return {(seen.verb, seen.group, seen.resource) for seen in list(proxy.requests)}


def test_a_job_costs_few_writes(
    testbed: Testbed, proxy: api_proxy.ApiProxy, unhurried: forked_operator.OperatorProcess
) -> None:
    testbed.submit("cheap")
    testbed.wait_for("cheap", "ClusterReady", "Removed", "False")
    time.sleep(2)
    writes = Counter(str(seen) for seen in list(proxy.requests) if seen.is_write and seen.resource != "leases")
    print(f"writes of one job: {dict(writes)}")
    assert writes["patch rljobs/status"] <= MAX_STATUS_WRITES
    once = ("create secrets", "create networkpolicies", "create rayclusters", "delete rayclusters")
    assert [writes[each] for each in once] == [1, 1, 1, 1]
    assert writes.total() <= MAX_WRITES
    assert unhurried.metric("rljob_operator_status_writes_total") == writes["patch rljobs/status"]


def test_nothing_is_written_while_nothing_changes(
    testbed: Testbed, proxy: api_proxy.ApiProxy, watched: forked_operator.OperatorProcess
) -> None:
    testbed.dashboard("still-1").train_forever()
    testbed.submit("still")
    testbed.wait_for("still", "Progressing", "Training")
    time.sleep(2)
    before = list(proxy.requests)
    asked = testbed.dashboard("still-1").num_requests
    # As long as four polls, and longer than the interval at which progress is written again.
    time.sleep(4)
    since = Counter(str(seen) for seen in list(proxy.requests)[len(before) :] if seen.resource != "leases")
    # A listing of everything, once a minute, may fall into this time.
    assert set(since) <= {"list rljobs", "list rayclusters", "list pods", "list networkpolicies"}, since
    assert all(number == 1 for number in since.values()), since
    # Polls of one request, though nothing happened that would cause one; and now and then groups and nodes.
    assert 0 < testbed.dashboard("still-1").num_requests - asked <= 6
    assert watched.probe("/healthz") == 200


def test_many_events_do_not_cause_more_reconcile_passes(
    testbed: Testbed, unhurried: forked_operator.OperatorProcess
) -> None:
    testbed.dashboard("busy-1").train_forever()
    testbed.submit("busy")
    testbed.wait_for("busy", "Progressing", "Training")
    time.sleep(2)
    started = time.monotonic()
    passes, asked = unhurried.metric("rljob_operator_passes_total"), testbed.dashboard("busy-1").num_requests
    for number in range(100):
        touch(testbed, "/api/v1", "pods", "busy-1-head-0", str(number))
    testbed.change("busy", {"metadata": {"labels": {"touched": "yes"}}})
    time.sleep(2)
    num_requests = testbed.dashboard("busy-1").num_requests - asked
    num_passes = unhurried.metric("rljob_operator_passes_total") - passes
    num_polls = (time.monotonic() - started) / 1.5 + 2
    assert num_requests <= num_polls + 1
    assert num_passes <= num_polls


def touch(testbed: Testbed, group: str, plural: str, name: str, value: str) -> None:
    path = f"{group}/namespaces/{testbed.namespace}/{plural}/{name}"
    patch = {"metadata": {"annotations": {"touched": value}}}
    testbed.http.patch(path, json=patch).raise_for_status()


@pytest.mark.usefixtures("watched")
def test_failed_requests_are_retried(testbed: Testbed, proxy: api_proxy.ApiProxy) -> None:
    """Each kind of request fails once: writes of the status with a conflict, others with an overload or an error."""
    failed: set[str] = set()

    def fault(request: api_proxy.SeenRequest) -> api_proxy.Fault | None:
        what = str(request)
        if request.resource in ("leases", "events") or request.verb == "watch" or what in failed:
            return None
        failed.add(what)
        if what == "patch rljobs/status":
            return api_proxy.Fault(409, "Conflict")
        if request.is_write:
            return api_proxy.Fault(429, "TooManyRequests", {"Retry-After": "1"})
        return api_proxy.Fault(500, "InternalError")

    proxy.fault = fault
    testbed.submit("patient")
    testbed.wait_for("patient", "Complete", "Succeeded")
    testbed.wait_for("patient", "ClusterReady", "Removed", "False")
    assert failed >= {"get rljobs", "patch rljobs/status", "create secrets", "create rayclusters", "delete rayclusters"}
    assert list(testbed.dashboard("patient-1").started) == ["patient-1-1"]


@pytest.mark.usefixtures("operator")
def test_a_message_of_an_admission_policy_is_shown_in_the_job(testbed: Testbed) -> None:
    policy = f"no-clusters-{testbed.namespace}"
    base = "/apis/admissionregistration.k8s.io/v1"
    rules = [{"apiGroups": ["ray.io"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["rayclusters"]}]
    spec: Mapping[str, Any] = {
        "matchConstraints": {"resourceRules": rules},
        "validations": [{"expression": "false", "message": "clusters are closed on Sundays"}],
    }
    selector = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": testbed.namespace}}}
    binding = {"policyName": policy, "validationActions": ["Deny"], "matchResources": selector}
    for plural, name, content in (
        ("validatingadmissionpolicies", policy, spec),
        ("validatingadmissionpolicybindings", policy, binding),
    ):
        answer = testbed.http.post(f"{base}/{plural}", json={"metadata": {"name": name}, "spec": content})
        assert answer.status_code == 201, answer.text
    probe = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "probe"}}
    there = f"/apis/ray.io/v1/namespaces/{testbed.namespace}/rayclusters"
    testbed.wait(
        lambda: testbed.http.post(there, json=probe, params={"dryRun": "All"}).status_code == 422, "the policy"
    )
    testbed.submit("sunday")
    rejected = testbed.wait_for("sunday", "ClusterReady", "CreationRejected", "False")
    assert "clusters are closed on Sundays" in rejected["message"]
    testbed.http.delete(f"{base}/validatingadmissionpolicybindings/{policy}").raise_for_status()
    testbed.wait_for("sunday", "Complete", "Succeeded")


@pytest.mark.usefixtures("watched")
def test_a_dead_admission_webhook_is_named(testbed: Testbed, proxy: api_proxy.ApiProxy) -> None:
    words = 'failed calling webhook "gate.example.org": connection refused'
    proxy.fault = lambda request: api_proxy.Fault(500, words) if str(request) == "create rayclusters" else None
    testbed.submit("gated")
    rejected = testbed.wait_for("gated", "ClusterReady", "InfrastructureError", "False")
    assert words in rejected["message"]
    proxy.fault = lambda _: None
    testbed.wait_for("gated", "Complete", "Succeeded")


@pytest.mark.usefixtures("operator")
def test_failing_requests_are_retried_with_backoff(testbed: Testbed) -> None:
    dashboard = testbed.dashboard("refused-1")
    dashboard.submit_error = "No available agent to submit job"
    testbed.submit("refused")
    testbed.wait_for("refused", "JobSubmitted", "SubmissionFailed", "False")
    testbed.wait(lambda: len(dashboard.posted_at) > 5, "six tries")
    pauses = [then - one for one, then in pairwise(dashboard.posted_at)]
    # After 1/8, 1/4, 1/2, 1 and 2 s, a fifth more or less; meanwhile Ray is polled every second.
    assert all(pause >= 0.8 / 8 * 2**number for number, pause in enumerate(pauses[:5])), pauses
    assert pauses[4] > 2 * min(pauses[:2]), pauses
    dashboard.submit_error = None
    testbed.wait_for("refused", "Complete", "Succeeded")
    assert set(dashboard.posts) == {"refused-1-1"}
