"""Which events and listings cause a reconcile pass, and when: a finished job costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import cast

import pytest

from rljob_api.requests import as_recorded
from rljob_operator.controller.reconcile_loop import JobKey
from rljob_operator.handlers import relist, watch_events
from rljob_operator.handlers.relist import Relist
from rljob_operator.handlers.watch_events import JobVersions, WatchEventRouter, seconds_until_reconcile
from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, PODS, KubeObjects, Listing, ResourceType
from rljob_operator.kube.cache import ObjectCache
from rljob_operator.kube.errors import ForbiddenError, KubeError, ResourceTypeMissingError
from rljob_operator.kube.server_history import ServerHistory
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject
from rljob_operator.workqueue import WorkQueue
from rljob_testing.operator import manual_clock

KEY = JobKey("team", "job")
TOO_LONG = "x" * 300
"""A request that the status records as its hash."""
OVER: Mapping[str, object] = {
    "observedGeneration": 1,
    "result": {"outcome": "Failed", "reason": "Stalled", "at": "2026-01-31T11:59:00Z", "cleanedUpAt": "x"},
    "handledRequests": {"retry": "first"},
}
GOING: Mapping[str, object] = {
    "observedGeneration": 1,
    "result": {"outcome": "Failed", "reason": "Stalled", "at": "2026-01-31T11:59:00Z"},
    "conditions": [
        {"type": "Failed", "status": "True"},
        {"type": "ClusterReady", "status": "False", "reason": "Deleting"},
    ],
}


def job(status: Mapping[str, object], lifetime: int | None = None, version: int = 1, **metadata: object) -> JsonObject:
    """A job as stored; `lifetime` is in seconds after its end."""
    policy = {} if lifetime is None else {"ttlSecondsAfterFinished": lifetime}
    return {
        "metadata": {
            "name": "job",
            "namespace": "team",
            "uid": "j1",
            "generation": 1,
            "resourceVersion": str(version),
            **metadata,
        },
        "spec": {"runPolicy": policy},
        "status": status,
    }


def part(version: int, name: str = "job-1-head", uid: str = "p1", job_uid: str = "j1") -> JsonObject:
    """A cluster or a pod of the job."""
    labels = {"rljob.dev/job": "job", "rljob.dev/job-uid": job_uid}
    metadata = {"name": name, "namespace": "team", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata}


def retry(value: str) -> dict[str, object]:
    return {"annotations": {"rljob.dev/retry-requested-at": value}}


@pytest.mark.parametrize(
    ("raw", "seconds"),
    [
        (job({}), 0),
        (job({"observedGeneration": 1, "phase": "Running"}), 0),
        (job(GOING), 0),
        (job(OVER), None),
        # It ended a minute and half a second before now.
        (job(OVER, lifetime=100), 39.5),
        (job(OVER, lifetime=60), 0),
        (job(OVER, lifetime=0), 0),
        (job(OVER, **retry("first")), None),
        (job(OVER, **retry("second")), 0),
        (job({**OVER, "handledRequests": {"retry": as_recorded(TOO_LONG)}}, **retry(TOO_LONG)), None),
        (job(OVER, generation=2), 0),
        (job(OVER, deletionTimestamp="2026-01-31T11:59:00Z"), 0),
    ],
)
def test_a_finished_job_is_reconciled_only_when_something_is_due(raw: JsonObject, seconds: float | None) -> None:
    assert seconds_until_reconcile(raw, manual_clock.synchronized_clock(manual_clock.NOON).clock.now()) == seconds


class ApiObjects:
    """Listings of the API server."""

    def __init__(self) -> None:
        self.objects: dict[ResourceType, Sequence[JsonObject]] = {JOBS: (), CLUSTERS: (), PODS: ()}
        self.errors: dict[ResourceType, KubeError] = {}
        self.version = 10

    async def listing(
        self, kind: ResourceType, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> Listing:
        assert (namespace, labels, fields) == (None, "" if kind == JOBS else "rljob.dev/job-uid", "")
        if kind in self.errors:
            raise self.errors[kind]
        return Listing(tuple(self.objects[kind]), str(self.version))


class World:
    """The parts that `handlers` need, without kopf."""

    def __init__(self) -> None:
        self.api = ApiObjects()
        self.cache = ObjectCache((None,))
        self.queue: WorkQueue[JobKey] = WorkQueue(lambda: 0.5, lambda key: key.namespace)
        clock = manual_clock.synchronized_clock(manual_clock.NOON)
        self.events = WatchEventRouter(self.cache, self.queue, clock.clock)
        self.num_new_kinds = 0
        ages, history, objects = clock.ages, ServerHistory(self.cache), cast(KubeObjects, self.api)
        self.relist = Relist(objects, (None,), self.cache, ages, self.events, self._on_new_kind, Metrics(), history)

    def _on_new_kind(self) -> None:
        self.num_new_kinds += 1

    async def work(self) -> list[JobKey]:
        """Returns the keys that wait for work, and marks them as done."""
        found = []
        while self.queue.num_waiting:
            found.append(await self.queue.get())
            self.queue.done(found[-1])
        return found


def run(test: Callable[[World], Coroutine[None, None, None]]) -> None:
    async def made() -> None:
        await test(World())

    asyncio.run(made())


def test_a_deletion_while_the_watches_start_is_found_by_the_second_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event reports it, and the next listing would be a minute away."""
    monkeypatch.setattr(relist, "SECOND_LISTING_AFTER_SECONDS", 0.05)

    async def test(world: World) -> None:
        world.api.objects |= {JOBS: [job({})], PODS: [part(5)]}
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            listing = tasks.create_task(world.relist.run())
            for num_pods in (1, 0):
                key = await world.queue.get()
                world.queue.done(key)
                assert (key, len(world.cache.of_job(PODS, key.namespace, "j1"))) == (KEY, num_pods)
                world.api.objects[PODS] = ()
                world.api.version = 20
            listing.cancel()

    run(test)


def test_objects_that_the_watches_reported_are_not_listed_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relist, "SECOND_LISTING_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(relist, "RELIST_SECONDS", 0.5)

    async def test(world: World) -> None:
        world.api.objects |= {JOBS: [job({})], PODS: [part(5)]}
        world.events.on_event(JOBS, "", job({}))
        world.events.on_event(PODS, "", part(5))
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            listing = tasks.create_task(world.relist.run())
            world.queue.done(await world.queue.get())
            began = asyncio.get_running_loop().time()
            await world.queue.get()
            assert asyncio.get_running_loop().time() - began >= 0.5
            listing.cancel()

    run(test)


def test_objects_that_come_and_go_before_the_first_listing_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing fails; the watches go on."""
    monkeypatch.setattr(watch_events, "MAX_EXTRA_REPORTED", 10)

    async def test(world: World) -> None:
        world.events.on_event(PODS, "", part(1, name="stays", uid="stays"))
        for number in range(2, 200):
            pod = part(number, name=f"pod-{number}", uid=f"u{number}")
            world.events.on_event(PODS, "ADDED", pod)
            world.events.on_event(PODS, "DELETED", pod)
        reported = world.events._reported
        assert reported is not None
        assert "stays" in reported
        assert len(reported) <= 13
        world.api.objects |= {PODS: [part(1, name="stays", uid="stays")]}
        await world.relist.once()
        assert world.events.have_reported_all()

    run(test)


def test_no_job_is_queued_before_the_first_listing() -> None:
    async def test(world: World) -> None:
        world.events.on_event(JOBS, "", job({}))
        world.events.on_event(PODS, "", part(5))
        world.api.errors[PODS] = KubeError("not now")
        with pytest.raises(KubeError):
            await world.relist.once()
        assert await world.work() == []
        del world.api.errors[PODS]
        world.api.objects[JOBS] = [job({})]
        await world.relist.once()
        assert await world.work() == [KEY]

    run(test)


def test_the_end_of_the_last_pod_after_the_end_of_the_job_causes_a_pass() -> None:
    """Also if nobody saw it end: the job used to be left as it was until the operator's next start."""

    async def test(world: World) -> None:
        world.api.objects |= {JOBS: [job(GOING)], PODS: [part(5)]}
        await world.relist.once()
        assert await world.work() == [KEY]
        world.events.on_event(PODS, "DELETED", part(12))
        assert await world.work() == [KEY], "an event"
        await world.relist.once()
        await world.work()
        world.api.objects[PODS] = []
        world.api.version = 20
        await world.relist.once()
        assert await world.work() == [KEY], "a listing, after an event was lost"

    run(test)


def test_a_finished_job_costs_no_requests() -> None:
    async def test(world: World) -> None:
        world.api.objects |= {JOBS: [job(OVER)], CLUSTERS: [part(4, name="job-1", uid="c1")], PODS: [part(5)]}
        await world.relist.once()
        assert await world.work() == [KEY]
        world.events.on_event(JOBS, "", job(OVER))
        world.events.on_event(PODS, "MODIFIED", part(12))
        world.events.on_event(CLUSTERS, "MODIFIED", part(13, name="job-1", uid="c1"))
        await world.relist.once()
        assert (await world.work(), world.queue.num_delayed) == ([], 0)
        world.events.on_event(JOBS, "MODIFIED", job(OVER, version=14, **retry("second")))
        assert await world.work() == [KEY]

    run(test)


def test_a_cluster_created_after_the_end_of_its_job_causes_a_pass() -> None:
    """For example by a leader that was paused before it created the cluster."""

    async def test(world: World) -> None:
        world.api.objects[JOBS] = [job(OVER)]
        await world.relist.once()
        world.events.on_event(CLUSTERS, "ADDED", part(15, name="job-2", uid="c2"))
        assert await world.work() == [KEY]

    run(test)


def test_a_cluster_of_a_finished_job_found_by_a_listing_is_reconciled_once() -> None:
    async def test(world: World) -> None:
        world.api.objects[JOBS] = [job(OVER)]
        await world.relist.once()
        assert await world.work() == []
        world.api.objects[CLUSTERS] = [part(15, name="job-2", uid="c2")]
        await world.relist.once()
        assert await world.work() == [KEY]
        await world.relist.once()
        assert await world.work() == []

    run(test)


def test_the_end_of_a_kept_cluster_causes_a_pass() -> None:
    """Otherwise the status would say for ever that the finished job holds GPUs."""
    kept = part(4, name="job-1", uid="c1")

    async def test(world: World) -> None:
        world.api.objects |= {JOBS: [job({**OVER, "gpus": 2})], CLUSTERS: [kept]}
        await world.relist.once()
        assert await world.work() == [KEY]
        await world.relist.once()
        assert await world.work() == []
        world.events.on_event(CLUSTERS, "DELETED", kept)
        assert await world.work() == [KEY], "an event"
        world.api.objects[CLUSTERS] = []
        await world.relist.once()
        assert await world.work() == [KEY], "a listing, also after a restart of the operator"
        world.api.objects[JOBS] = [job({**OVER, "gpus": 0}, version=30)]
        await world.relist.once()
        assert await world.work() == []

    run(test)


def test_a_finished_job_with_a_ttl_is_reconciled_when_it_expires() -> None:
    async def test(world: World) -> None:
        world.api.objects[JOBS] = [job(OVER, lifetime=3600)]
        await world.relist.once()
        await world.relist.once()
        assert (await world.work(), world.queue.num_delayed) == ([], 1)
        world.queue.close()

    run(test)


def test_events_of_other_objects_are_ignored() -> None:
    async def test(world: World) -> None:
        world.api.objects[JOBS] = [job({})]
        await world.relist.once()
        await world.work()
        world.events.on_event(PODS, "ADDED", part(12, job_uid="a former job of this name"))
        world.events.on_event(PODS, "ADDED", part(13))
        assert await world.work() == [KEY]
        world.events.on_event(PODS, "ADDED", part(13))
        world.events.on_event(PODS, "MODIFIED", part(9))
        assert await world.work() == [], "twice, and late"

    run(test)


def test_a_job_whose_deletion_was_missed_is_forgotten() -> None:
    async def test(world: World) -> None:
        world.events.on_event(JOBS, "", job({}))
        world.api.objects[JOBS] = [job({})]
        await world.relist.once()
        await world.work()
        world.api.objects[JOBS] = []
        await world.relist.once()
        assert (await world.work(), world.cache.job(*KEY)) == ([KEY], None)
        world.events.on_event(JOBS, "ADDED", job({}, version=30))
        assert await world.work() == [KEY]

    run(test)


def test_a_kind_that_is_installed_later_restarts_the_watches() -> None:
    async def test(world: World) -> None:
        world.api.errors[CLUSTERS] = ResourceTypeMissingError("rayclusters")
        world.api.objects[JOBS] = [job({})]
        await world.relist.once()
        assert (world.num_new_kinds, world.cache.is_missing(CLUSTERS), await world.work()) == (0, True, [KEY])
        del world.api.errors[CLUSTERS]
        await world.relist.once()
        assert (world.num_new_kinds, world.cache.is_missing(CLUSTERS), await world.work()) == (1, False, [KEY])

    run(test)


def test_a_forbidden_listing_is_logged_and_jobs_do_not_wait_for_it(caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: World) -> None:
        world.api.errors[PODS] = ForbiddenError("pods is forbidden")
        world.api.objects[JOBS] = [job({})]
        for _ in range(3):
            await world.relist.once()
            assert await world.work() == [KEY]
        assert world.cache.forbidden("team") == "pods is forbidden"
        assert caplog.text.count("pods is forbidden") == 1

    run(test)


@pytest.mark.parametrize(("num_pods", "missing", "complete"), [(2, 5, 60), (9000, 90, 90)])
def test_many_objects_are_listed_less_often(num_pods: int, missing: float, complete: float) -> None:
    async def test(world: World) -> None:
        world.api.objects[PODS] = [part(5, name=f"pod-{number}", uid=f"u{number}") for number in range(num_pods)]
        world.api.errors[CLUSTERS] = ForbiddenError("no")
        await world.relist.once()
        assert world.relist._pause_seconds() == missing
        world.api.errors.clear()
        await world.relist.once()
        assert world.relist._pause_seconds() == complete

    run(test)


def versioned(uid: str, generation: int, **metadata: object) -> JsonObject:
    return {"metadata": {"uid": uid, "generation": generation, "resourceVersion": "1", **metadata}}


def test_a_change_of_only_the_status_causes_no_pass() -> None:
    versions = JobVersions()
    assert versions.needs_reconcile(KEY, "", versioned("a", 1))
    assert not versions.needs_reconcile(KEY, "MODIFIED", versioned("a", 1))
    assert not versions.needs_reconcile(KEY, "", versioned("a", 1)), "listed again after a gap"
    assert versions.needs_reconcile(KEY, "MODIFIED", versioned("a", 2))
    assert not versions.needs_reconcile(KEY, "MODIFIED", versioned("a", 2, annotations={"note": "x"}))
    request = {"rljob.dev/stop-requested-at": "now"}
    assert versions.needs_reconcile(KEY, "MODIFIED", versioned("a", 2, annotations=request))
    again = request | {"rljob.dev/retry-requested-at": "now"}
    assert versions.needs_reconcile(KEY, "MODIFIED", versioned("a", 2, annotations=again))
    deleted = {"deletionTimestamp": "2026-01-31T12:00:00Z"}
    assert versions.needs_reconcile(KEY, "MODIFIED", versioned("a", 2, annotations=again, **deleted))
    assert versions.needs_reconcile(KEY, "ADDED", versioned("b", 1)), "recreated between two watches"
    assert versions.needs_reconcile(KEY, "DELETED", versioned("b", 1))
    assert versions.needs_reconcile(KEY, "ADDED", versioned("b", 1))
