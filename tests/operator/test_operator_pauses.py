"""Silence: a leader that is paused and wakes up when another one leads; watches that deliver nothing; requests to the
API server that get no response, and requests that are carried out after they have timed out. All at the same time; time
limits are shorter than on a cluster, but the test sets the replicas' clock."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rljob_api.constants import LABEL_JOB_UID
from rljob_operator.handlers import relist
from rljob_operator.kube.client import TIMEOUT_SECONDS
from rljob_testing.operator import api_proxy
from rljob_testing.operator.forked_operator import LEASE, OperatorProcess
from rljob_testing.operator.testbed import Testbed
from rljob_testing.running_clock import RunningClock

pytestmark = [pytest.mark.apiserver, pytest.mark.long]

PAUSE_SECONDS = 30.0
"""By the replicas' clock, which the test sets: longer than a holder that does not renew may lead, and than others
wait."""
LIMIT_SECONDS = TIMEOUT_SECONDS / 4
RELIST_SECONDS = relist.RELIST_SECONDS / 4
PATIENT_JOBS = tuple(f"patient-{number}" for number in range(6))
STALLED = {
    "get rljobs": "get rljobs",
    "list rayclusters": "get rayclusters",
    "list pods": "get pods",
    "patch rljobs/status": "patch rljobs/status",
    "create secrets": "create secrets",
    "create networkpolicies": "create networkpolicies",
    "create rayclusters": "create rayclusters",
    "delete rayclusters": "delete rayclusters",
    **{f"list all {kind}": f"cannot list all objects: get {kind}" for kind in ("rljobs", "rayclusters", "pods")},
}
"""Requests that get no response, and how the operator's log names them."""


@dataclass(frozen=True)
class SilentWatches:
    """An operator whose watches are open and deliver nothing."""

    testbed: Testbed
    operator: OperatorProcess
    started_at: float
    num_listings: int
    """Number of listings of pods when all pods of the job became ready."""
    listings_by_then: list[int]
    """Number of listings each time the operator wrote a status that knows it."""


@pytest.fixture(scope="module")
def silent_watches(module_testbed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SilentWatches]:
    """It creates a cluster for its job, and receives no event about its pods."""
    testbed = module_testbed.in_new_namespace(tmp_path_factory.mktemp("operator"))
    with api_proxy.running_proxy(testbed.server) as proxy:
        listings_by_then: list[int] = []

        def num_listings() -> int:
            return sum(str(asked) == "list pods" and asked.labels == LABEL_JOB_UID for asked in list(proxy.requests))

        def note(asked: api_proxy.SeenRequest, answer: bytes) -> None:
            if str(asked) == "patch rljobs/status" and b'"readyAt"' in answer:
                listings_by_then.append(num_listings())

        proxy.events, proxy.after = lambda _, __: (), note
        operator = (
            testbed.with_server_url(proxy.url).with_shorter_times({"RELIST_SECONDS": 4.0}).operator("operator-deaf")
        )
        testbed.keep_pods_starting("unheard-1")
        testbed.submit("unheard")
        operator.start()
        try:
            started_at = time.monotonic()
            testbed.wait(lambda: testbed.items("pods"), "the cluster")
            known = num_listings()
            testbed.let_pods_start("unheard-1")
            yield SilentWatches(testbed, operator, started_at, known, listings_by_then)
        finally:
            operator.kill()


@dataclass
class Stall:
    """Of each kind of request the first gets no response and is not carried out, and the second is carried out late."""

    over: threading.Event = field(default_factory=threading.Event)
    asked: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def before(self, request: api_proxy.SeenRequest) -> None:
        what = api_proxy.request_label(request)
        with self.lock:
            self.asked[what] += 1
            number = self.asked[what]
        if what in STALLED and number <= 2 and self.over.wait(None if number == 1 else LIMIT_SECONDS + 1):
            raise ConnectionAbortedError(f"{what}: is not carried out")


@dataclass(frozen=True)
class Unanswered:
    """An operator whose requests stall, with jobs that exist from the start."""

    testbed: Testbed
    operator: OperatorProcess
    stall: Stall
    since: str
    """The version of the RayClusters before the test."""


@pytest.fixture(scope="module")
def unanswered(module_testbed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unanswered]:
    testbed = module_testbed.in_new_namespace(tmp_path_factory.mktemp("operator"))
    since, stall = testbed.clusters_version(), Stall()
    with api_proxy.running_proxy(testbed.server) as proxy:
        proxy.before = stall.before
        quick = testbed.with_server_url(proxy.url).with_shorter_times({"RELIST_SECONDS": 4.0, "TIMEOUT_SECONDS": 4.0})
        operator = quick.operator("operator-unanswered")
        operator.start()
        try:
            for name in PATIENT_JOBS:
                testbed.submit(name)
            yield Unanswered(testbed, operator, stall, since)
        finally:
            stall.over.set()
            operator.kill()


@contextmanager
def behind_a_proxy(testbed: Testbed, name: str) -> Iterator[tuple[OperatorProcess, api_proxy.ApiProxy]]:
    """A replica, and its requests to the API server."""
    with (
        api_proxy.running_proxy(testbed.server) as proxy,
        testbed.with_server_url(proxy.url)
        .with_leader_election({"RETRY_SECONDS": 2.5})
        .operator(name)
        .running() as replica,
    ):
        yield replica, proxy


@pytest.mark.usefixtures("silent_watches", "unanswered")
def test_a_paused_leader_writes_nothing_after_it_wakes(testbed: Testbed, tmp_path: Path) -> None:
    clock = RunningClock(tmp_path / "clock")
    replicas = testbed.with_clock(tmp_path / "clock")
    testbed.http.delete(testbed.lease)
    testbed.dashboard("trains-1").train_forever()
    testbed.keep_pods_starting("begins-1")
    since = testbed.clusters_version()
    with ExitStack() as stack:
        first, asked = stack.enter_context(behind_a_proxy(replicas, "operator-a"))
        testbed.wait(lambda: first.metric("rljob_operator_leader") == 1, "the first to lead")
        second, asked_by_second = stack.enter_context(behind_a_proxy(replicas, "operator-b"))
        for name in ("trains", "begins"):
            testbed.submit(name)
        testbed.wait_for("trains", "Progressing", "Training")
        testbed.wait_for("begins", "ClusterReady", "PodsPending", "False")
        # Events are posted after the status that they are about.
        testbed.wait(
            lambda: {("trains", "Training"), ("begins", "Creating")} <= reported_events(testbed), "their events"
        )

        first.pause()
        asked.seconds_ahead = asked_by_second.seconds_ahead = PAUSE_SECONDS
        clock.advance(PAUSE_SECONDS)
        testbed.let_pods_start("begins-1")
        testbed.wait(lambda: second.metric("rljob_operator_leader") == 1, "the second to lead")
        testbed.wait_for("begins", "Complete", "Succeeded")

        num_asked, term = len(asked.requests), lease_term(testbed)
        assert term[0] == "operator-b"
        renewals = answers_of_renewals(asked)
        first.unpause()
        testbed.wait(lambda: first.exit_code() is not None, "the end of the first: {}", first.log)
        assert first.exit_code() == 1
        assert "could not be renewed for 10 s" in first.log() or "held by operator-b now" in first.log()
        late = asked.requests[num_asked:]
        # The pause may have come between its look at the Lease and the renewal, which the server refuses.
        own_lease = ("update leases", LEASE)
        assert [request for request in late if request.is_write and (str(request), request.name) != own_lease] == []
        assert [answer["code"] for answer in renewals] in ([], [409])
        assert lease_term(testbed) == term
        print(f"woken up, it asked for {[str(request) for request in late]}")

        first.start()
        first.wait_until_healthy()
        testbed.dashboard("trains-1").complete_after(0.1)
        testbed.wait_for("trains", "Complete", "Succeeded")
        assert (first.metric("rljob_operator_leader"), second.metric("rljob_operator_leader")) == (0, 1)
    assert testbed.most_live_clusters(since) == (2, 2)
    for name in ("trains", "begins"):
        assert testbed.dashboard(f"{name}-1").posts == [f"{name}-1-1"]
    testbed.http.delete(testbed.lease)


def lease_term(testbed: Testbed) -> tuple[str, str, int]:
    """Who holds the Lease since when, and how many have before; renewals change nothing of it."""
    spec = testbed.http.get(testbed.lease).raise_for_status().json()["spec"]
    return spec["holderIdentity"], spec["acquireTime"], spec["leaseTransitions"]


def answers_of_renewals(proxy: api_proxy.ApiProxy) -> list[dict[str, Any]]:
    """What the server answers to renewals of the Lease from now on: a Lease, or why it refuses."""
    answers: list[dict[str, Any]] = []

    def note(request: api_proxy.SeenRequest, answer: bytes) -> None:
        if str(request) == "update leases":
            answers.append({"code": 200, **json.loads(answer)})

    proxy.after = note
    return answers


def reported_events(testbed: Testbed) -> set[tuple[str, str]]:
    """Job and reason of each event."""
    return {(event["regarding"]["name"], event["reason"]) for event in testbed.items("events")}


def test_a_listing_makes_up_for_silent_watches(silent_watches: SilentWatches) -> None:
    # After the initial listing comes another one.
    silent_watches.testbed.wait_for("unheard", "Complete", "Succeeded", seconds=RELIST_SECONDS + 30)
    seconds = time.monotonic() - silent_watches.started_at
    print(f"a job behind silent watches was complete {seconds:.0f} s after the operator began")
    # Before that listing the operator could not know what had happened.
    assert silent_watches.listings_by_then[0] > silent_watches.num_listings
    assert silent_watches.testbed.dashboard("unheard-1").posts == ["unheard-1-1"]
    assert silent_watches.operator.probe("/healthz") == 200


def test_requests_without_a_response_time_out_and_are_retried(unanswered: Unanswered) -> None:
    testbed, operator = unanswered.testbed, unanswered.operator
    for name in PATIENT_JOBS:
        testbed.wait_for(name, "Complete", "Succeeded", seconds=300)
        testbed.wait_for(name, "ClusterReady", "Removed", "False")
        assert testbed.dashboard(f"{name}-1").posts == [f"{name}-1-1"]
        assert [attempt["number"] for attempt in testbed.job(name)["status"]["attempts"]] == [1]
    assert testbed.most_live_clusters(unanswered.since)[1] == len(PATIENT_JOBS)
    given_up = [line for line in operator.log().splitlines() if f"timed out after {LIMIT_SECONDS:g} s" in line]
    print(f"{len(given_up)} requests to the API server were given up")
    for asked, logged in STALLED.items():
        assert unanswered.stall.asked[asked] > 2, asked
        assert any(f"{logged} /api" in line for line in given_up), logged
    assert "a bug in the operator" not in operator.log()
    assert operator.probe("/healthz") == 200
