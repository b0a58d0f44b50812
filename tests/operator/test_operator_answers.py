"""Answers of the API server that are not to be believed: no JSON, half of it, another kind, older than what is known.

Up to three reads, or four writes, are answered so in each state of a job of two attempts; more in a row would only make
the operator wait longer. Each kind of answer has a job and an operator of its own, all at once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from rljob_testing.api_proxy import Fault, SeenRequest, api_proxy, in_words
from rljob_testing.apiserver import ApiServer
from rljob_testing.job_place import JobPlace, new_place
from rljob_testing.kuberay_stand_in import KubeRayStandIn
from rljob_testing.ray_dashboard_stand_in import Life as TrainerLife
from rljob_testing.ray_dashboard_stand_in import RayDashboardStandIn, RunMoment, failing, run_state, succeeding

pytestmark = [pytest.mark.apiserver, pytest.mark.long]

JOB = "steady"
READS_PER_STATE, WRITES_PER_STATE = 3, 4
STATUS_OBJECT = json.dumps({"kind": "Status", "apiVersion": "v1", "status": "Success"})
PAGE = "<html><body>The proxy has restarted.</body></html>"


@dataclass
class Liar:
    """Answers in the server's place, once for each kind of request and state of the job."""

    place: JobPlace
    answer: Callable[[Liar, SeenRequest, str], Fault | None]
    """Given the request and the state."""
    to_writes: bool
    """Whether writes are answered so, which are not carried out; else reads."""
    told: list[tuple[str, str]] = field(default_factory=list)
    """What was answered so, and in which state."""
    heard: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """State and answer of the server, by request."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, request: SeenRequest) -> Fault | None:
        if request.verb == "watch" or request.resource == "events":
            return None
        state = self._state()
        with self.lock:
            is_told = (in_words(request), state) in self.told
            most = WRITES_PER_STATE if self.to_writes else READS_PER_STATE
            is_enough = sum(before == state for _, before in self.told) >= most
            if is_told or is_enough or request.is_write != self.to_writes:
                return None
            found = self.answer(self, request, state)
            if found is not None:
                self.told.append((in_words(request), state))
            return found

    def note(self, request: SeenRequest, data: bytes) -> None:
        if request.verb in ("get", "list"):
            state = self._state()
            with self.lock:
                self.heard.setdefault(in_words(request), []).append((state, data.decode()))

    def _state(self) -> str:
        attempts = self.place.job(JOB).get("status", {}).get("attempts", [])
        return f"{attempts[-1]['number']} {attempts[-1]['state']}" if attempts else "0"


def no_json(_: Liar, __: SeenRequest, ___: str) -> Fault:
    return Fault(200, "", body=PAGE)


def a_page_that_is_not_found(_: Liar, __: SeenRequest, ___: str) -> Fault:
    return Fault(404, "", body=PAGE)


def half_json(_: Liar, request: SeenRequest, __: str) -> Fault:
    return Fault(200, "", body='{"kind": "List", "metadata": {"name": "' + request.name)


def of_another_kind(_: Liar, __: SeenRequest, ___: str) -> Fault:
    return Fault(200, "", body=STATUS_OBJECT)


def of_other_objects(_: Liar, request: SeenRequest, __: str) -> Fault:
    items = {"kind": "ConfigMapList", "apiVersion": "v1", "metadata": {"resourceVersion": "999999999"}, "items": []}
    other = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "other", "resourceVersion": "999999999"}}
    return Fault(200, "", body=json.dumps(items if request.verb == "list" else other))


def cut_off(_: Liar, __: SeenRequest, ___: str) -> Fault:
    return Fault(200, "", body=STATUS_OBJECT, num_sent=20)


def oldest(liar: Liar, request: SeenRequest, _: str) -> Fault | None:
    """The first answer to such a request."""
    heard = liar.heard.get(in_words(request))
    return Fault(200, "", body=heard[0][1]) if heard else None


def of_the_former_state(liar: Liar, request: SeenRequest, state: str) -> Fault | None:
    """The last answer to such a request before the job was in this state."""
    heard = [answer for before, answer in liar.heard.get(in_words(request), []) if before != state]
    return Fault(200, "", body=heard[-1]) if heard else None


Answer = Callable[[Liar, SeenRequest, str], Fault | None]
LIES: Mapping[str, tuple[Answer, bool]] = {
    "no JSON": (no_json, False),
    "half of it": (half_json, False),
    "a status": (of_another_kind, False),
    "other objects": (of_other_objects, False),
    "cut off": (cut_off, False),
    "not found": (a_page_that_is_not_found, False),
    "the first answer": (oldest, False),
    "the former answer": (of_the_former_state, False),
    "a write: no JSON": (no_json, True),
    "a write: a status": (of_another_kind, True),
}
READS = {(read, attempt) for read in ("get rljobs", "list rayclusters", "list pods") for attempt in "12"}
WRITES = {
    ("create secrets", "1"),
    ("create rayclusters", "2"),
    ("delete rayclusters", "1"),
    ("patch rljobs/status", "1"),
    ("patch rljobs/status", "2"),
}


def ending_when_seen(place: JobPlace, number: int, end: TrainerLife) -> TrainerLife:
    """A trainer that does not end before the operator has written that this attempt's is running, however slow it is:
    it asks for everything again when it ends."""
    is_seen = threading.Event()

    def life(age: float, environment: Mapping[str, object]) -> RunMoment:
        attempts = place.job(JOB).get("status", {}).get("attempts", [])
        if any((each["number"], each["state"]) == (number, "Running") for each in attempts):
            is_seen.set()
        running = RunMoment(run_state=run_state(environment, "Running", 1))
        return end(max(age, 1.0), dict(environment)) if is_seen.is_set() else running

    return life


@dataclass(frozen=True)
class Outcome:
    """What came of a job."""

    status: dict[str, Any]
    told: list[tuple[str, str]]
    log: str
    clusters: tuple[int, int]
    """Those that were live at the same time at most, and all."""


def live_with(place: JobPlace, lie: Answer, to_writes: bool) -> Outcome:
    """A job whose first attempt ends with a lost node, and whose second one completes."""
    since = place.clusters_version()
    for number, end in ((1, failing(75, ("WorkerLostError", "told"), "")), (2, succeeding(0.1))):
        place.dashboard(f"{JOB}-{number}").life = ending_when_seen(place, number, end)
    with api_proxy(place.server) as proxy:
        operator = place.through(proxy.url).operator()
        place.submit(JOB)
        liar = Liar(place, lie, to_writes)
        proxy.after = liar.note
        proxy.fault = liar.fault
        operator.start()
        try:
            place.wait_for(JOB, "ClusterReady", "Removed", "False", seconds=300)
        except AssertionError as error:
            error.add_note(f"exit code {operator.exit_code()}: {operator.log()}")
            raise
        finally:
            operator.kill()
    return Outcome(place.job(JOB)["status"], liar.told, operator.log(), place.most_live_clusters(since))


@dataclass(frozen=True)
class Life:
    """A job under way."""

    place: JobPlace
    outcome: Future[Outcome]


@pytest.fixture(scope="module")
def lives(
    server: ApiServer,
    kuberay: KubeRayStandIn,
    dashboards: RayDashboardStandIn,
    account_token: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Mapping[str, Life]]:
    with ThreadPoolExecutor(len(LIES)) as threads:
        found = {}
        for name, (lie, to_writes) in LIES.items():
            place = new_place(server, kuberay, dashboards, account_token, tmp_path_factory.mktemp("operator"))
            found[name] = Life(place, threads.submit(live_with, place, lie, to_writes))
        yield found


@pytest.mark.parametrize("name", LIES)
def test_an_answer_that_is_no_answer_changes_nothing(lives: Mapping[str, Life], name: str) -> None:
    life = lives[name]
    outcome = life.outcome.result()
    print(f"{name}: {len(outcome.told)} answers")
    assert "mistake in the operator" not in outcome.log, outcome.log
    assert [(each["reason"], each["cluster"]) for each in outcome.status["attempts"]] == [
        ("InfrastructureError", f"{JOB}-1"),
        ("Succeeded", f"{JOB}-2"),
    ]
    assert outcome.clusters == (1, 2)
    for number in (1, 2):
        assert life.place.dashboard(f"{JOB}-{number}").posts == [f"{JOB}-{number}-1"]
    expected = WRITES if LIES[name][1] else READS
    assert {(request, state[0]) for request, state in outcome.told} >= expected, outcome.told
