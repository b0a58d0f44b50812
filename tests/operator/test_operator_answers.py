"""Invalid and stale responses of the API server: not JSON, truncated, of another kind, older than what is known. Up to
three reads, or four writes, get such a response in each state of a job of two attempts, and so do listings; more in a
row would only make the operator wait longer. Each kind of response has a job and an operator of its own, all at once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from rljob_testing.operator import api_proxy, scripts
from rljob_testing.operator.testbed import Testbed

pytestmark = [pytest.mark.apiserver, pytest.mark.long]

JOB = "steady"
READS_PER_STATE, WRITES_PER_STATE = 3, 4
STATUS_OBJECT = json.dumps({"kind": "Status", "apiVersion": "v1", "status": "Success"})
PAGE = "<html><body>The proxy has restarted.</body></html>"


@dataclass
class FakeResponder:
    """Responds in the server's place, once for each kind of request and state of the job."""

    answer: Callable[[FakeResponder, api_proxy.SeenRequest, str], api_proxy.Fault | None]
    """Takes the request and the state."""
    to_writes: bool
    """Whether writes get such responses, and are not carried out; otherwise reads."""
    sent: list[tuple[str, str]] = field(default_factory=list)
    """The requests that got such a response, and the job's state then."""
    seen: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """State of the job and response of the server, by request."""
    state: str = "0"
    """Number and state of the job's newest attempt, as the operator has written it."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, request: api_proxy.SeenRequest) -> api_proxy.Fault | None:
        if request.verb == "watch" or request.resource == "events":
            return None
        with self.lock:
            state = self.state
            was_sent = (api_proxy.request_label(request), state) in self.sent
            most = WRITES_PER_STATE if self.to_writes else READS_PER_STATE
            # Everything may be listed in any state.
            in_state = [what for what, before in self.sent if before == state and not what.startswith("list all ")]
            is_enough = len(in_state) >= most
            if was_sent or is_enough or request.is_write != self.to_writes:
                return None
            found = self.answer(self, request, state)
            if found is not None:
                self.sent.append((api_proxy.request_label(request), state))
            return found

    def note(self, request: api_proxy.SeenRequest, data: bytes) -> None:
        with self.lock:
            if str(request) == "patch rljobs/status":
                # A rejected request has no job in its response.
                status = json.loads(data)["status"]
                attempts = status.get("attempts") if isinstance(status, dict) else None
                self.state = f"{attempts[-1]['number']} {attempts[-1]['state']}" if attempts else self.state
            elif request.verb in ("get", "list"):
                self.seen.setdefault(api_proxy.request_label(request), []).append((self.state, data.decode()))


def not_json(_: FakeResponder, __: api_proxy.SeenRequest, ___: str) -> api_proxy.Fault:
    return api_proxy.Fault(200, "", body=PAGE)


def not_found_page(_: FakeResponder, __: api_proxy.SeenRequest, ___: str) -> api_proxy.Fault:
    return api_proxy.Fault(404, "", body=PAGE)


def truncated_json(_: FakeResponder, request: api_proxy.SeenRequest, __: str) -> api_proxy.Fault:
    return api_proxy.Fault(200, "", body='{"kind": "List", "metadata": {"name": "' + request.name)


def another_kind(_: FakeResponder, __: api_proxy.SeenRequest, ___: str) -> api_proxy.Fault:
    return api_proxy.Fault(200, "", body=STATUS_OBJECT)


def other_objects(_: FakeResponder, request: api_proxy.SeenRequest, __: str) -> api_proxy.Fault:
    items = {"kind": "ConfigMapList", "apiVersion": "v1", "metadata": {"resourceVersion": "999999999"}, "items": []}
    other = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "other", "resourceVersion": "999999999"}}
    return api_proxy.Fault(200, "", body=json.dumps(items if request.verb == "list" else other))


def closed_connection(_: FakeResponder, __: api_proxy.SeenRequest, ___: str) -> api_proxy.Fault:
    return api_proxy.Fault(200, "", body=STATUS_OBJECT, num_sent=20)


def oldest(responder: FakeResponder, request: api_proxy.SeenRequest, _: str) -> api_proxy.Fault | None:
    """The first response to such a request."""
    earlier = responder.seen.get(api_proxy.request_label(request))
    return api_proxy.Fault(200, "", body=earlier[0][1]) if earlier else None


def from_previous_state(responder: FakeResponder, request: api_proxy.SeenRequest, state: str) -> api_proxy.Fault | None:
    """The last response to such a request before the job was in this state."""
    earlier = [answer for before, answer in responder.seen.get(api_proxy.request_label(request), []) if before != state]
    return api_proxy.Fault(200, "", body=earlier[-1]) if earlier else None


Response = Callable[[FakeResponder, api_proxy.SeenRequest, str], api_proxy.Fault | None]
ANSWERS: Mapping[str, tuple[Response, bool]] = {
    "no JSON": (not_json, False),
    "half of it": (truncated_json, False),
    "a status": (another_kind, False),
    "other objects": (other_objects, False),
    "cut off": (closed_connection, False),
    "not found": (not_found_page, False),
    "the first answer": (oldest, False),
    "the former answer": (from_previous_state, False),
    "a write: no JSON": (not_json, True),
    "a write: a status": (another_kind, True),
}
READS = {(read, attempt) for read in ("get rljobs", "list rayclusters", "list pods") for attempt in "12"}
WRITES = {
    ("create secrets", "1"),
    ("create rayclusters", "2"),
    ("delete rayclusters", "1"),
    ("patch rljobs/status", "1"),
    ("patch rljobs/status", "2"),
}


def ending_when_seen(testbed: Testbed, number: int, end: scripts.TrainerScript) -> scripts.TrainerScript:
    """A trainer that does not end before the operator has written that the attempt is running, however slow the
    operator is: it reads everything again when the trainer ends."""
    is_seen = threading.Event()

    def life(age: float, environment: Mapping[str, object]) -> scripts.RunMoment:
        attempts = testbed.job(JOB).get("status", {}).get("attempts", [])
        if any((each["number"], each["state"]) == (number, "Running") for each in attempts):
            is_seen.set()
        running = scripts.RunMoment(run_state=scripts.run_state(environment, "Running", 1))
        return end(max(age, 1.0), dict(environment)) if is_seen.is_set() else running

    return life


@dataclass(frozen=True)
class Outcome:
    """The result of a job."""

    status: dict[str, Any]
    sent: list[tuple[str, str]]
    log: str
    clusters: tuple[int, int]
    """The largest number of clusters that existed at the same time, and the number of all clusters."""


def losing_head(testbed: Testbed) -> scripts.TrainerScript:
    """The head pod of the first attempt is deleted while the trainer runs."""

    def life(_: float, environment: Mapping[str, object]) -> scripts.RunMoment:
        testbed.lose_head(f"{JOB}-1")
        return scripts.RunMoment(run_state=scripts.run_state(environment, "Running", 1))

    return life


def run_job_with_false_answers(testbed: Testbed, answer: Response, to_writes: bool) -> Outcome:
    """A job whose first attempt loses its head pod, and whose second one completes."""
    since = testbed.clusters_version()
    for number, end in ((1, losing_head(testbed)), (2, scripts.succeeding(0.1))):
        testbed.dashboard(f"{JOB}-{number}").life = ending_when_seen(testbed, number, end)
    with api_proxy.running_proxy(testbed.server) as proxy:
        operator = testbed.with_server_url(proxy.url).operator()
        testbed.submit(JOB)
        responder = FakeResponder(answer, to_writes)
        proxy.after = responder.note
        proxy.fault = responder.fault
        operator.start()
        try:
            testbed.wait_for(JOB, "ClusterReady", "Removed", "False", seconds=300)
        except AssertionError as error:
            error.add_note(f"exit code {operator.exit_code()}: {operator.log()}")
            raise
        finally:
            operator.kill()
    return Outcome(testbed.job(JOB)["status"], responder.sent, operator.log(), testbed.most_live_clusters(since))


@dataclass(frozen=True)
class Life:
    """A running job."""

    testbed: Testbed
    outcome: Future[Outcome]


@pytest.fixture(scope="module")
def lives(module_testbed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Life]]:
    with ThreadPoolExecutor(len(ANSWERS)) as threads:
        found = {}
        for name, (answer, to_writes) in ANSWERS.items():
            testbed = module_testbed.in_new_namespace(tmp_path_factory.mktemp("operator"))
            found[name] = Life(testbed, threads.submit(run_job_with_false_answers, testbed, answer, to_writes))
        yield found


@pytest.mark.parametrize("name", ANSWERS)
def test_invalid_and_stale_responses_change_nothing(lives: Mapping[str, Life], name: str) -> None:
    life = lives[name]
    outcome = life.outcome.result()
    print(f"{name}: {len(outcome.sent)} answers")
    assert "a bug in the operator" not in outcome.log, outcome.log
    assert [(each["reason"], each["cluster"]) for each in outcome.status["attempts"]] == [
        ("HeadLost", f"{JOB}-1"),
        ("Succeeded", f"{JOB}-2"),
    ]
    assert outcome.clusters == (1, 2)
    for number in (1, 2):
        assert life.testbed.dashboard(f"{JOB}-{number}").posts == [f"{JOB}-{number}-1"]
    expected = WRITES if ANSWERS[name][1] else READS
    assert {(request, state[0]) for request, state in outcome.sent} >= expected, outcome.sent
