"""The operator is killed around every write of a job's life; the job does not notice."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rljob_testing.operator_process import OperatorProcess
from rljob_testing.operator_process_jobs import JobPlace
from rljob_testing.operator_process_proxy import ApiProxy, SeenRequest, api_proxy
from rljob_testing.ray_dashboard_stand_in import succeeding

pytestmark = pytest.mark.apiserver

TIMES = {
    *("lastTransitionTime", "started", "ended", "clusterUid", "updatedAt", "savedAt"),
    *("admittedAt", "readyAt", "runningSince", "progressedAt", "runStateAt", "endingSeenAt", "at", "cleanedUpAt"),
    *("activeSeconds", "startNumber", "tokensPerSecond"),
}
REPEATED = ("patch rljobs/status", "create events")


class Killer:
    """Kills the operator `before` each write or `after` it: around what is made once, once; around each status and
    event. The write that cost one life is let through in the next."""

    def __init__(self, operator: OperatorProcess, moment: str) -> None:
        self._operator = operator
        self._moment = moment
        self._owed: str | None = None
        self._lock = threading.Lock()
        self.victims: list[str] = []

    def around(self, what: str, moment: str) -> None:
        """Called before and after each write."""
        if moment != self._moment:
            return
        with self._lock:
            paid = what in self.victims and what not in REPEATED
            if paid or what == self._owed:
                self._owed = None
                return
            self._owed = what if moment == "before" else None
            self.victims.append(what)
            self._operator.kill()

    def revive(self) -> None:
        """Starts the operator, if it does not run."""
        if not self._operator.is_running():
            self._operator.start()


@contextmanager
def haunted(place: JobPlace, proxy: ApiProxy, killer: Killer) -> Iterator[None]:
    """The killer stands at the API server's door and at the dashboard's."""

    def at(moment: str) -> None:
        killer.around("start of the trainer", moment)

    def around(moment: str, request: SeenRequest) -> None:
        if request.is_write:
            killer.around(str(request), moment)

    proxy.before = lambda request: around("before", request)
    proxy.after = lambda request: around("after", request)
    place.dashboards.on_submit = at
    try:
        yield
    finally:
        place.dashboards.on_submit = lambda _: None


def without_times(value: Any) -> Any:
    """A status without what differs between two runs."""
    if isinstance(value, dict):
        return {name: without_times(item) for name, item in value.items() if name not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else copy.deepcopy(value)


def is_over(place: JobPlace, job: str) -> bool:
    return place.condition(job, "ClusterReady").get("reason") == "Removed"


def run_undisturbed(place: JobPlace) -> dict[str, Any]:
    operator = place.operator()
    operator.start()
    try:
        place.dashboard("steady-1").life = succeeding(0.5)
        place.submit("steady")
        place.wait(lambda: is_over(place, "steady"), "the end", lambda: place.job("steady").get("status"))
    finally:
        operator.kill()
    status: dict[str, Any] = without_times(place.job("steady")["status"])
    return status


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_around_every_write(place: JobPlace, moment: str) -> None:
    expected = run_undisturbed(place)
    place.delete("steady")
    place.wait(lambda: not place.items("rayclusters") and not place.items("pods"), "the first job's remains")
    place.dashboard("steady-1").started.clear()
    with api_proxy(place.server) as proxy:
        operator = place.through(proxy.url).operator("operator-1")
        killer = Killer(operator, moment)
        clusters: set[str] = set()
        with haunted(place, proxy, killer):
            place.submit("steady")

            def over() -> bool:
                killer.revive()
                clusters.update(cluster["metadata"]["uid"] for cluster in place.items("rayclusters"))
                return is_over(place, "steady")

            place.wait(over, "the end; it says {}", lambda: (place.job("steady").get("status"), operator.log()), 180)
        operator.kill()
    assert without_times(place.job("steady")["status"]) == expected
    assert len(clusters) == 1
    assert list(place.dashboard("steady-1").started) == ["steady-1-1"]
    assert killer.victims.count("patch rljobs/status") >= 4
    # Events come last in a pass, so the lives do not get as far as each of them.
    assert set(killer.victims) >= {
        "patch rljobs/status",
        "create secrets",
        "create networkpolicies",
        "create rayclusters",
        "start of the trainer",
        "delete rayclusters",
    }
