"""Time without a word: a leader that is stopped and wakes up when another one leads; watches that bring nothing;
requests to the API server that nobody answers, and such as are carried out when they have been given up.

All at the same time, and each with time limits that are shorter than on a cluster.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

from rljob_api.constants import LABEL_JOB_UID
from rljob_operator.handlers import relist
from rljob_operator.kube.client import TIMEOUT_SECONDS
from rljob_testing.api_proxy import ApiProxy, SeenRequest, api_proxy, in_words
from rljob_testing.apiserver import ApiServer
from rljob_testing.job_place import JobPlace, new_place
from rljob_testing.kuberay_stand_in import HAPPY, STARTING, ClusterScript, KubeRayStandIn
from rljob_testing.operator_process import LEASE as LEASE_NAME
from rljob_testing.operator_process import OPERATOR_NAMESPACE, QUICK, OperatorProcess
from rljob_testing.ray_dashboard_stand_in import RayDashboardStandIn, running_for_ever, succeeding

pytestmark = [pytest.mark.apiserver, pytest.mark.long]

LEASE_PATH = f"/apis/coordination.k8s.io/v1/namespaces/{OPERATOR_NAMESPACE}/leases/{LEASE_NAME}"
LEASE = dict.fromkeys(("LEASE_SECONDS", "RENEW_SECONDS", "RETRY_SECONDS"), 2.5)
"""How many times shorter they are here: 6 s until a holder is taken for dead, 4 s in which it must renew."""
PAUSE_SECONDS = 24.0
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
    **{f"list all {kind}": f"relist: get {kind}" for kind in ("rljobs", "rayclusters", "pods")},
}
"""Requests that get no answer, and how the operator's log names them."""


@dataclass(frozen=True)
class Deaf:
    """An operator whose watches are open and bring nothing."""

    place: JobPlace
    operator: OperatorProcess
    started_at: float
    num_listings: int
    """That there had been of pods when all pods of the job became ready."""
    listings_by_then: list[int]
    """That there had been each time the operator wrote a status that knows it."""


@pytest.fixture(scope="module")
def deaf(
    server: ApiServer,
    kuberay: KubeRayStandIn,
    dashboards: RayDashboardStandIn,
    account_token: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deaf]:
    """It makes a cluster for its job, and hears nothing of its pods."""
    place = new_place(server, kuberay, dashboards, account_token, tmp_path_factory.mktemp("operator"))
    with api_proxy(server) as proxy:
        listings_by_then: list[int] = []

        def num_listings() -> int:
            return sum(str(asked) == "list pods" and asked.labels == LABEL_JOB_UID for asked in list(proxy.requests))

        def note(asked: SeenRequest, answer: bytes) -> None:
            if str(asked) == "patch rljobs/status" and b'"readyAt"' in answer:
                listings_by_then.append(num_listings())

        proxy.events, proxy.after = lambda _, __: (), note
        operator = place.through(proxy.url).with_pauses({**QUICK, "RELIST_SECONDS": 4.0}).operator("operator-deaf")
        place.script("unheard-1", ClusterScript({"main": STARTING}))
        place.submit("unheard")
        operator.start()
        try:
            started_at = time.monotonic()
            place.wait(lambda: place.items("pods"), "the cluster")
            known = num_listings()
            place.script("unheard-1", HAPPY)
            yield Deaf(place, operator, started_at, known, listings_by_then)
        finally:
            operator.kill()


@dataclass
class Stall:
    """Of each kind of request the first is never answered nor carried out, and the second is carried out late."""

    over: threading.Event = field(default_factory=threading.Event)
    asked: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def before(self, request: SeenRequest) -> None:
        what = in_words(request)
        with self.lock:
            self.asked[what] += 1
            number = self.asked[what]
        if what in STALLED and number <= 2 and self.over.wait(None if number == 1 else LIMIT_SECONDS + 1):
            raise ConnectionAbortedError(f"{what}: is not carried out")


@dataclass(frozen=True)
class Unanswered:
    """An operator whose requests stall, with jobs that it begins with."""

    place: JobPlace
    operator: OperatorProcess
    stall: Stall
    since: str
    """The version of the RayClusters before."""


@pytest.fixture(scope="module")
def unanswered(
    server: ApiServer,
    kuberay: KubeRayStandIn,
    dashboards: RayDashboardStandIn,
    account_token: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Unanswered]:
    place = new_place(server, kuberay, dashboards, account_token, tmp_path_factory.mktemp("operator"))
    since, stall = place.clusters_version(), Stall()
    with api_proxy(server) as proxy:
        proxy.before = stall.before
        quick = place.through(proxy.url).with_pauses({**QUICK, "RELIST_SECONDS": 4.0, "TIMEOUT_SECONDS": 4.0})
        operator = quick.operator("operator-unanswered")
        operator.start()
        try:
            for name in PATIENT_JOBS:
                place.submit(name)
            yield Unanswered(place, operator, stall, since)
        finally:
            stall.over.set()
            operator.kill()


@contextmanager
def behind_a_proxy(place: JobPlace, name: str) -> Iterator[tuple[OperatorProcess, ApiProxy]]:
    """A replica, and what it asks of the API server."""
    with api_proxy(place.server) as proxy:
        electing = place.through(proxy.url).with_environment({"RLJOB_OPERATOR_LEADER_ELECTION": "true"})
        replica = electing.with_pauses({**QUICK, **LEASE}).operator(name)
        replica.start()
        try:
            replica.wait_until_healthy()
            yield replica, proxy
        finally:
            replica.kill()


@pytest.mark.usefixtures("deaf", "unanswered")
def test_a_leader_that_sleeps_has_nothing_more_to_say(place: JobPlace) -> None:
    place.http.delete(LEASE_PATH)
    place.dashboard("trains-1").life = running_for_ever()
    place.script("begins-1", ClusterScript({"main": STARTING}))
    since = place.clusters_version()
    with ExitStack() as stack:
        first, asked = stack.enter_context(behind_a_proxy(place, "operator-a"))
        place.wait(lambda: first.metric("rljob_operator_leader") == 1, "the first to lead")
        second, _ = stack.enter_context(behind_a_proxy(place, "operator-b"))
        for name in ("trains", "begins"):
            place.submit(name)
        place.wait_for("trains", "Progressing", "Training")
        place.wait_for("begins", "ClusterReady", "PodsPending", "False")
        # Events are posted after the status that they tell of.
        place.wait(lambda: {("trains", "Training"), ("begins", "Creating")} <= told(place), "their events")

        first.pause()
        paused_at = time.monotonic()
        place.script("begins-1", HAPPY)
        place.wait(lambda: second.metric("rljob_operator_leader") == 1, "the second to lead")
        print(f"the second replica led {time.monotonic() - paused_at:.1f} s after the first was stopped")
        place.wait_for("begins", "Complete", "Succeeded")
        time.sleep(max(0.0, paused_at + PAUSE_SECONDS - time.monotonic()))

        num_asked = len(asked.requests)
        first.go_on()
        place.wait(lambda: first.exit_code() is not None, "the end of the first: {}", first.log)
        assert first.exit_code() == 1
        assert "could not be renewed for 4 s" in first.log()
        late = asked.requests[num_asked:]
        assert [request for request in late if request.is_write] == []
        print(f"woken up, it asked for {[str(request) for request in late]}")

        first.start()
        first.wait_until_healthy()
        place.dashboard("trains-1").life = succeeding(0.1)
        place.wait_for("trains", "Complete", "Succeeded")
        assert (first.metric("rljob_operator_leader"), second.metric("rljob_operator_leader")) == (0, 1)
    assert place.most_live_clusters(since) == (2, 2)
    for name in ("trains", "begins"):
        assert place.dashboard(f"{name}-1").posts == [f"{name}-1-1"]
    place.http.delete(LEASE_PATH)


def told(place: JobPlace) -> set[tuple[str, str]]:
    """Job and reason of each event."""
    return {(event["regarding"]["name"], event["reason"]) for event in place.items("events")}


def test_watches_that_bring_nothing_are_made_up_for_by_a_listing(deaf: Deaf) -> None:
    # After the listing that everything began with comes another one.
    deaf.place.wait_for("unheard", "Complete", "Succeeded", seconds=RELIST_SECONDS + 30)
    print(
        f"a job behind silent watches was complete {time.monotonic() - deaf.started_at:.0f} s after the operator began"
    )
    # Before that listing nothing was known of what had happened.
    assert deaf.listings_by_then[0] > deaf.num_listings
    assert deaf.place.dashboard("unheard-1").posts == ["unheard-1-1"]
    assert deaf.operator.probe("/healthz") == 200


def test_requests_without_an_answer_are_given_up_and_made_again(unanswered: Unanswered) -> None:
    place, operator = unanswered.place, unanswered.operator
    for name in PATIENT_JOBS:
        place.wait_for(name, "Complete", "Succeeded", seconds=300)
        place.wait_for(name, "ClusterReady", "Removed", "False")
        assert place.dashboard(f"{name}-1").posts == [f"{name}-1-1"]
        assert [attempt["number"] for attempt in place.job(name)["status"]["attempts"]] == [1]
    assert place.most_live_clusters(unanswered.since)[1] == len(PATIENT_JOBS)
    given_up = [line for line in operator.log().splitlines() if f"no answer within {LIMIT_SECONDS:g} s" in line]
    print(f"{len(given_up)} requests to the API server were given up")
    for asked, said in STALLED.items():
        assert unanswered.stall.asked[asked] > 2, asked
        assert any(f"{said} /api" in line for line in given_up), said
    assert "mistake in the operator" not in operator.log()
    assert operator.probe("/healthz") == 200
