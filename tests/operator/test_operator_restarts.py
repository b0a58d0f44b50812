"""The operator is killed around each of its requests, in every state of several attempts, without effect on the job.
Beside each job whose operator is killed runs one whose operator lives: their final statuses are compared."""

from __future__ import annotations

import copy
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from rljob_api.constants import STACKS_SECONDS
from rljob_testing.operator import operator_killer, scripts
from rljob_testing.operator.testbed import Testbed
from rljob_testing.running_clock import RunningClock

pytestmark = [pytest.mark.apiserver, pytest.mark.long]

JOB = "steady"
WAIT_SECONDS = 300.0
TIMES = {
    *("lastTransitionTime", "started", "ended", "clusterUid", "headPodUid", "updatedAt", "savedAt", "scheduledAt"),
    *(
        "activeSince",
        "readyAt",
        "runningSince",
        "progressedAt",
        "runStateAt",
        "endReportedAt",
        "at",
        "cleanedUpAt",
    ),
    *("activeSeconds", "startNumber", "tokensPerSecond", "requestedAt", "sentAt", "handledRequests"),
}
STALL_SECONDS = 10
LISTS = 3
"""Number of requests of an operator that starts."""
REQUESTS_PER_POLL = LISTS + 4
"""The same with its first poll of a dashboard."""
Environment = Mapping[str, object]


@dataclass
class Course:
    """A job, the fate of its trainers, and the program that kills the operator, if there is one."""

    testbed: Testbed
    killer: operator_killer.OperatorKiller | None
    moments: dict[int, Callable[[Environment], scripts.RunMoment]] = field(default_factory=dict)
    """The run of the trainer of each attempt."""

    def begin(self, clusters: Iterable[str], edits: Mapping[str, object] | None = None) -> None:
        """Submits the job; the test starts its clusters."""
        for name in clusters:
            self.testbed.dashboard(name).life = lambda _, environment: self._moment(environment)
            self.testbed.keep_pods_starting(name)
        self.testbed.submit(JOB, edits)

    def wait_for_state(self, attempt: int, state: str, num_requests: int) -> None:
        """Waits until an attempt is in this state, and the operator has made all requests in it around which it is
        killed."""

        def reached() -> bool:
            if self._is_busy(num_requests):
                return False
            attempts = self.status().get("attempts", [{"number": 0, "state": "New"}])
            return (attempts[-1]["number"], attempts[-1]["state"]) == (attempt, state)

        self.testbed.wait(reached, f"attempt {attempt} to be {state}; its status is {{}}", self.status, WAIT_SECONDS)

    def wait_until_removed(self, condition: str) -> None:
        """Waits until nothing of the job runs any more, and a condition says why."""

        def reached() -> bool:
            if self._is_busy(LISTS) or self.testbed.condition(JOB, condition).get("status") != "True":
                return False
            is_gone = not self.testbed.items("rayclusters") and not self.testbed.items("pods")
            return is_gone and self.testbed.condition(JOB, "ClusterReady").get("reason") in ("Removed", "Suspended")

        self.testbed.wait(reached, f"{condition}; its status is {{}}", self.status, WAIT_SECONDS)

    def train(self, attempt: int, step: int, written_at: Callable[[], str] = lambda: scripts.LONG_AGO) -> None:
        """Takes an attempt with a cluster of its own through all states until its trainer runs, and returns when the
        trainer wrote."""
        self.wait_for_state(attempt, "Provisioning", LISTS)
        self.testbed.let_pods_start(f"{JOB}-{attempt}")
        self.wait_for_state(attempt, "Starting", REQUESTS_PER_POLL)
        self.moments[attempt] = lambda environment: scripts.RunMoment(
            run_state=scripts.run_state(environment, "Running", step, written_at())
        )
        self.wait_for_state(attempt, "Running", REQUESTS_PER_POLL)

    def ask(self, annotation: str) -> None:
        """Writes an annotation as `rljob stop` and `rljob retry` do."""
        self.testbed.change(JOB, {"metadata": {"annotations": {f"rljob.dev/{annotation}-requested-at": "now"}}})

    def status(self) -> dict[str, Any]:
        return dict(self.testbed.job(JOB).get("status", {}))

    def _is_busy(self, num_requests: int) -> bool:
        """Whether the operator is dead, or restarted and still on its way to its next wait."""
        if self.killer is None:
            return False
        self.killer.revive()
        return not self.killer.is_done(num_requests)

    def _moment(self, environment: Environment) -> scripts.RunMoment:
        starting = scripts.RunMoment(run_state=scripts.run_state(environment, "Starting", 0))
        moment = self.moments.get(int(str(environment["RLJOB_ATTEMPT"])))
        return starting if moment is None else moment(environment)


def exited(code: int, kind: str) -> Callable[[Environment], scripts.RunMoment]:
    def moment(environment: Environment) -> scripts.RunMoment:
        state = scripts.run_state(environment, "Failed", 2, error={"kind": kind, "message": "failed"})
        message = f"Job entrypoint command failed with exit code {code}, last available logs:\nlog"
        return scripts.RunMoment("FAILED", message, "JOB_ENTRYPOINT_COMMAND_ERROR", code, state, "log\n")

    return moment


def completed(environment: Environment) -> scripts.RunMoment:
    state = scripts.run_state(environment, "Complete", 4, exportUri="file:///rljob/storage/run/export")
    return scripts.RunMoment("SUCCEEDED", "Job finished successfully.", run_state=state, exit_code=0)


def fails_twice(course: Course) -> None:
    """The head pod is lost; then the training fails, on a new cluster, which is reused."""
    course.begin(["steady-1", "steady-2"])
    course.train(1, 2)
    course.testbed.lose_head("steady-1")
    course.train(2, 4)
    course.moments[3] = completed
    course.moments[2] = exited(1, "RewardError")
    course.wait_until_removed("Complete")


def is_steered(course: Course) -> None:
    """Stopped and retried; suspended and resumed."""
    course.begin(["steady-1", "steady-2"])
    course.train(1, 2)
    stop_with(course, 1, lambda: course.ask("stop"))
    course.wait_until_removed("Failed")
    course.ask("retry")
    course.train(2, 2)
    stop_with(course, 2, lambda: course.testbed.change(JOB, {"spec": {"suspend": True}}))
    course.wait_until_removed("Suspended")
    course.moments[3] = completed
    course.testbed.change(JOB, {"spec": {"suspend": False}})
    course.wait_until_removed("Complete")


def stop_with(course: Course, attempt: int, order: Callable[[], None]) -> None:
    """The trainer takes its time to stop."""
    dashboard = course.testbed.dashboard(f"{JOB}-{attempt}")
    dashboard.stops_late = True
    order()
    course.wait_for_state(attempt, "Stopping", REQUESTS_PER_POLL)
    dashboard.stops_late = False


def hangs(course: Course) -> None:
    """The trainer makes no progress: its stacks are written, then it is stopped, and the job continues on a new
    cluster."""
    course.begin(["steady-1"], {"spec.runPolicy.stallDeadlineSeconds": STALL_SECONDS})
    # It does not hang before the operator was killed around all requests about a healthy trainer.
    course.train(1, 2, lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    course.moments[1] = lambda environment: scripts.RunMoment(run_state=scripts.run_state(environment, "Running", 2))
    course.testbed.dashboard("steady-2").life = lambda _, environment: completed(environment)
    course.wait_until_removed("Complete")
    assert [attempt["reason"] for attempt in course.status()["attempts"]] == ["Stalled", "Succeeded"]
    dashboard = course.testbed.dashboard("steady-1")
    stopped, stacks_asked = dashboard.stopped["steady-1-1"], dashboard.started["steady-1-1-stacks"][0]
    sent_at = datetime.fromisoformat(course.status()["attempts"][0]["stop"]["sentAt"]).timestamp()
    assert stopped - (sent_at - time.time() + time.monotonic()) >= STACKS_SECONDS - 2  # Clocks of two operators.
    # The time in which an operator is dead between its decision and its request counts.
    assert stopped > stacks_asked
    assert course.killer is not None or stopped - stacks_asked >= STACKS_SECONDS - 5


@dataclass(frozen=True)
class Story:
    """What happens to the job, and the expected result."""

    run: Callable[[Course], None]
    submissions: Mapping[str, list[str]]
    """Ray jobs, by cluster."""
    deadly: frozenset[tuple[int, str]]
    """Numbers and states of the attempts in which the operator is killed."""
    writes: tuple[str, ...]
    """The operator is killed before and after each of these writes."""
    num_points: int
    """The least number of places at which the operator is killed."""


GETS_THERE = ("Provisioning", "Starting", "Running", "Ended nextAttempt")
TWO_CLUSTERS = {"steady-1": ["steady-1-1"], "steady-2": ["steady-2-1", "steady-3-1"]}
WRITES = (
    "patch rljobs/status",
    "create secrets",
    "create networkpolicies",
    "create rayclusters",
    "ray submit",
    "delete rayclusters",
)
STORIES = {
    "dies in the first attempt": Story(
        fails_twice,
        TWO_CLUSTERS,
        frozenset([(0, ""), (0, "New"), *((1, state) for state in GETS_THERE)]),
        WRITES,
        40,
    ),
    "dies in the second attempt": Story(
        fails_twice,
        TWO_CLUSTERS,
        frozenset([*((2, state) for state in GETS_THERE), (3, "Provisioning"), (3, "Ended result")]),
        WRITES,
        50,
    ),
    "dies while it stops": Story(
        is_steered,
        {f"{JOB}-{number}": [f"{JOB}-{number}-1"] for number in (1, 2, 3)},
        frozenset([(1, "Stopping"), (1, "Ended result"), (2, "Stopping"), (2, "Ended"), (2, "Ended suspendedAt")]),
        ("patch rljobs/status", "ray stop", "delete rayclusters"),
        30,
    ),
    "dies while the trainer hangs": Story(
        hangs,
        {"steady-1": ["steady-1-1", "steady-1-1-stacks"], "steady-2": ["steady-2-1"]},
        frozenset([(1, "Running"), (1, "Stopping")]),
        ("patch rljobs/status", "ray submit", "ray stop"),
        15,
    ),
}


def without_times(value: Any) -> Any:
    """A status without what differs between two runs."""
    if isinstance(value, dict):
        return {name: without_times(item) for name, item in value.items() if name not in TIMES}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return re.sub(r"no progress for \d+ s", "no progress", value) if isinstance(value, str) else copy.deepcopy(value)


def run_undisturbed(testbed: Testbed, run: Callable[[Course], None]) -> dict[str, Any]:
    """The final status."""
    operator = testbed.operator()
    operator.start()
    try:
        course = Course(testbed, None)
        run(course)
    finally:
        operator.kill()
    return course.status()


def run_killed(testbed: Testbed, story: Story) -> tuple[dict[str, Any], list[operator_killer.Point]]:
    """The final status, and where the operator was killed."""
    with operator_killer.killer_at_every_request(testbed, story.deadly) as killer:
        course = Course(testbed, killer)
        story.run(course)
    log = killer.operator.log()
    assert "a bug in the operator" not in log, log
    return course.status(), killer.victims


@dataclass(frozen=True)
class Lives:
    """A running story, with an operator that is killed and with one that lives."""

    testbed: Testbed
    since: str
    """The version of the RayClusters before the test."""
    killed: Future[tuple[dict[str, Any], list[operator_killer.Point]]]
    undisturbed: Future[dict[str, Any]]


@pytest.fixture(scope="module")
def lives(module_testbed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Lives]]:
    """All stories at once: most of the time they wait. A machine that stands still while an operator is dead takes
    nothing from the time in which a hanging trainer writes its stacks."""
    clock = tmp_path_factory.mktemp("clock") / "clock"
    RunningClock(clock)

    def new() -> Testbed:
        testbed = module_testbed.in_new_namespace(tmp_path_factory.mktemp("operator"))
        return testbed.with_clock(clock)

    with ThreadPoolExecutor(2 * len(STORIES)) as threads:
        runs = {story.run for story in STORIES.values()}
        undisturbed = {run: threads.submit(run_undisturbed, new(), run) for run in runs}
        found = {}
        for name, story in STORIES.items():
            testbed = new()
            since = testbed.clusters_version()
            found[name] = Lives(testbed, since, threads.submit(run_killed, testbed, story), undisturbed[story.run])
        yield found


@pytest.mark.parametrize("name", STORIES)
def test_killing_the_operator_around_every_request_changes_nothing(lives: Mapping[str, Lives], name: str) -> None:
    story, life = STORIES[name], lives[name]
    testbed = life.testbed
    status, victims = life.killed.result()
    counted = Counter((point.attempt, point.state) for point in victims)
    print(f"{name}: the operator died {len(victims)} times: {dict(sorted(counted.items()))}")
    assert without_times(status) == without_times(life.undisturbed.result())
    assert testbed.most_live_clusters(life.since) == (1, len(story.submissions))
    for cluster, jobs in story.submissions.items():
        assert testbed.dashboard(cluster).posts == jobs
    assert set(counted) == story.deadly
    around = {(point.request, point.moment) for point in victims}
    assert {(write, moment) for write in story.writes for moment in ("before", "after")} <= around
    assert len(victims) >= story.num_points
    testbed.delete(JOB)
    for kind in ("secrets", "networkpolicies"):
        testbed.wait(lambda kind=kind: not testbed.items(kind), f"no {kind} to be left")
