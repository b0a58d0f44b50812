"""Which events cause a reconcile pass, and when: a finished job costs nothing."""

from __future__ import annotations

import pytest

from rljob_api.requests import as_recorded
from rljob_api.v1alpha1.pools import QUEUE_LABEL
from rljob_operator.handlers import watch_events
from rljob_operator.handlers.watch_events import JobVersions, seconds_until_reconcile
from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, PODS, WORKLOADS
from rljob_operator.kube.cache import is_finished_and_cleaned_up
from rljob_operator.kube.errors import KubeError
from rljob_operator.kube.projections import trimmed_job
from rljob_operator.raw_json import JsonObject
from rljob_testing.operator import manual_clock
from rljob_testing.operator.listed_world import GOING, KEY, OVER, TOO_LONG, ListedWorld, job, part, retry, run, workload


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
    now = manual_clock.synchronized_clock(manual_clock.NOON).clock.now()
    assert seconds_until_reconcile(raw, now) == seconds
    if is_finished_and_cleaned_up(raw):
        assert seconds_until_reconcile(trimmed_job(raw), now) == seconds


def test_objects_that_come_and_go_before_the_first_listing_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing fails; the watches go on."""
    monkeypatch.setattr(watch_events, "MAX_EXTRA_REPORTED", 10)

    async def test(world: ListedWorld) -> None:
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
    async def test(world: ListedWorld) -> None:
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

    async def test(world: ListedWorld) -> None:
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
    async def test(world: ListedWorld) -> None:
        world.api.objects |= {JOBS: [job(OVER)], CLUSTERS: [part(4, name="job-1", uid="c1")], PODS: [part(5)]}
        await world.start()
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

    async def test(world: ListedWorld) -> None:
        world.api.objects[JOBS] = [job(OVER)]
        await world.start()
        world.events.on_event(CLUSTERS, "ADDED", part(15, name="job-2", uid="c2"))
        assert await world.work() == [KEY]

    run(test)


def test_the_end_of_a_kept_cluster_causes_a_pass() -> None:
    """Otherwise the status would say for ever that the finished job holds GPUs."""
    kept = part(4, name="job-1", uid="c1")

    async def test(world: ListedWorld) -> None:
        world.api.objects |= {JOBS: [job({**OVER, "gpus": 2})], CLUSTERS: [kept]}
        await world.start()
        assert await world.work() == [KEY]
        await world.relist.once()
        assert await world.work() == []
        world.events.on_event(CLUSTERS, "DELETED", kept)
        assert await world.work() == [KEY], "an event"
        world.api.objects[CLUSTERS] = []
        await world.relist.once()
        assert await world.work() == [KEY], "a listing, also after a restart of the operator"
        world.events.on_event(JOBS, "MODIFIED", job({**OVER, "gpus": 0}, version=30))
        await world.relist.once()
        assert await world.work() == []

    run(test)


def test_a_finished_job_with_a_ttl_is_reconciled_when_it_expires() -> None:
    async def test(world: ListedWorld) -> None:
        world.api.objects[JOBS] = [job(OVER, lifetime=3600)]
        await world.relist.once()
        await world.relist.once()
        assert (await world.work(), world.queue.num_delayed) == ([], 1)
        world.queue.close()

    run(test)


def test_events_of_other_objects_are_ignored() -> None:
    async def test(world: ListedWorld) -> None:
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


def test_a_change_of_a_workload_causes_a_pass_of_the_job_that_owns_the_cluster() -> None:
    async def test(world: ListedWorld) -> None:
        world.api.objects |= {JOBS: [job({})], CLUSTERS: [part(4, name="job-1", uid="c1")]}
        await world.relist.once()
        assert await world.work() == [KEY]
        world.events.on_event(WORKLOADS, "ADDED", workload(12))
        assert await world.work() == [KEY]
        world.events.on_event(WORKLOADS, "ADDED", workload(12))
        world.events.on_event(WORKLOADS, "ADDED", workload(13, cluster="another"))
        world.events.on_event(WORKLOADS, "ADDED", workload(14, namespace="another"))
        assert await world.work() == [], "twice, of a cluster that no job has, and in another namespace"
        world.events.on_event(WORKLOADS, "DELETED", workload(14))
        assert (await world.work(), world.cache.workload_of("team", "c1")) == ([KEY], None)

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
    in_queue = {"labels": {QUEUE_LABEL: "team"}, "annotations": again}
    assert versions.needs_reconcile(KEY, "MODIFIED", versioned("a", 2, **in_queue))
    deleted = {"deletionTimestamp": "2026-01-31T12:00:00Z"}
    assert versions.needs_reconcile(KEY, "MODIFIED", versioned("a", 2, annotations=again, **deleted))
    assert versions.needs_reconcile(KEY, "ADDED", versioned("b", 1)), "recreated between two watches"
    assert versions.needs_reconcile(KEY, "DELETED", versioned("b", 1))
    assert versions.needs_reconcile(KEY, "ADDED", versioned("b", 1))
