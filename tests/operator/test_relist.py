"""Listings repair what events have missed, and do not wait for kinds that cannot be listed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from rljob_api.conditions import ALARMS, Reason
from rljob_api.v1alpha1.pools import QUEUE_LABEL
from rljob_operator.controller.reconcile_loop import JobKey
from rljob_operator.handlers import relist
from rljob_operator.handlers.relist import NOT_CLEANED_UP
from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, NETWORK_POLICIES, PODS, WORKLOADS
from rljob_operator.kube.errors import ForbiddenError, KubeError, ResourceTypeMissingError
from rljob_operator.raw_json import JsonObject
from rljob_testing.messages import Mentions
from rljob_testing.operator.listed_world import KEY, OVER, ListedWorld, job, part, run


def test_a_deletion_while_the_watches_start_is_found_by_the_second_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event reports it, and the next listing would be a minute away."""
    monkeypatch.setattr(relist, "SECOND_LISTING_AFTER_SECONDS", 0.05)

    async def test(world: ListedWorld) -> None:
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

    async def test(world: ListedWorld) -> None:
        # All jobs are listed at the second time.
        world.api.objects |= {JOBS: [job({})], PODS: [part(5)]}
        world.events.on_event(JOBS, "", job({}))
        world.events.on_event(PODS, "", part(5))
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            listing = tasks.create_task(world.relist.run())
            for _ in range(2):
                world.queue.done(await world.queue.get())
            began = asyncio.get_running_loop().time()
            await world.queue.get()
            assert asyncio.get_running_loop().time() - began >= 0.5
            listing.cancel()

    run(test)


def test_a_cluster_of_a_finished_job_found_by_a_listing_is_reconciled_once() -> None:
    async def test(world: ListedWorld) -> None:
        world.api.objects[JOBS] = [job(OVER)]
        await world.start()
        assert await world.work() == []
        world.api.objects[CLUSTERS] = [part(15, name="job-2", uid="c2")]
        await world.relist.once()
        assert await world.work() == [KEY]
        await world.relist.once()
        assert await world.work() == []

    run(test)


def test_unfinished_jobs_are_counted_by_alarm() -> None:
    """The labels of the metric are bounded, whatever trainers report."""

    async def test(world: ListedWorld) -> None:
        world.api.objects[JOBS] = [
            job({"phase": "Running", "alarms": ["ResponsesCutOff", "EqualScores"]}, name="a"),
            job({"phase": "Running", "alarms": ["EqualScores", "FromANewerTrainer", "Invented"]}, name="b"),
            job({"phase": "Complete", "alarms": ["HighKl"], "result": {"outcome": "Succeeded"}}, name="finished"),
            job({"phase": "Suspended", "alarms": ["HighKl"]}, name="suspended"),
            job({}, name="new"),
        ]
        await world.start()
        lines = world.metrics.exposition().decode().splitlines()
        found = {line for line in lines if line.startswith("rljob_training_alarms{")}
        counts = {"ResponsesCutOff": 1, "EqualScores": 2, "OtherAlarm": 1}
        expected = {reason.value: counts.get(reason, 0) for reason in (*ALARMS, Reason.OTHER_ALARM)}
        assert found == {f'rljob_training_alarms{{reason="{name}"}} {num}.0' for name, num in expected.items()}

    run(test)


def test_a_job_whose_deletion_was_missed_is_forgotten() -> None:
    async def test(world: ListedWorld) -> None:
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
    async def test(world: ListedWorld) -> None:
        world.api.errors[CLUSTERS] = ResourceTypeMissingError("rayclusters")
        world.api.objects[JOBS] = [job({})]
        await world.relist.once()
        assert (world.num_new_kinds, world.cache.is_missing(CLUSTERS), await world.work()) == (0, True, [KEY])
        del world.api.errors[CLUSTERS]
        await world.relist.once()
        assert (world.num_new_kinds, world.cache.is_missing(CLUSTERS), await world.work()) == (1, False, [KEY])

    run(test)


@pytest.mark.parametrize(
    "error", [ResourceTypeMissingError("no kind"), ForbiddenError("no rights"), KubeError("Kueue's webhook fails")]
)
def test_jobs_run_without_workloads(error: KubeError, caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: ListedWorld) -> None:
        world.api.errors[WORKLOADS] = error
        world.api.objects[JOBS] = [job({})]
        await world.relist.once()
        assert (await world.work(), world.relist._pause_seconds()) == ([KEY], relist.RELIST_SECONDS)
        assert world.cache.forbidden("team") is None
        del world.api.errors[WORKLOADS]
        await world.relist.once()
        assert world.num_new_kinds == isinstance(error, ResourceTypeMissingError)

    run(test)
    (logged,) = [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    if isinstance(error, ResourceTypeMissingError):
        # The cluster of such a job is created suspended, whether Kueue exists or not.
        assert logged == Mentions("Kueue is not installed", f"jobs with the label {QUEUE_LABEL} wait", "others run")


def test_a_forbidden_listing_is_logged_and_jobs_do_not_wait_for_it(caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: ListedWorld) -> None:
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
    async def test(world: ListedWorld) -> None:
        world.api.objects[PODS] = [part(5, name=f"pod-{number}", uid=f"u{number}") for number in range(num_pods)]
        world.api.errors[CLUSTERS] = ForbiddenError("no")
        await world.relist.once()
        assert world.relist._pause_seconds() == missing
        world.api.errors.clear()
        await world.relist.once()
        assert world.relist._pause_seconds() == complete

    run(test)


def named(name: str, status: Mapping[str, object], version: int = 1) -> JsonObject:
    return job(status, version=version, name=name, uid=name)


def test_only_jobs_that_are_not_cleaned_up_are_listed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: ListedWorld) -> None:
        world.api.objects[JOBS] = [named("over", OVER), named("runs", {}), named("other", {})]
        await world.relist.once()
        assert (f"rljobs {NOT_CLEANED_UP}" in world.api.listed, "rljobs" in world.api.listed) == (True, False)
        assert world.cache.is_complete, "the operator works on them"
        await world.relist.once()
        assert ("rljobs" in world.api.listed, world.cache.num_objects, world.relist._num_listed) == (True, 3, 3)
        world.api.listed.clear()
        await world.relist.once()
        assert f"rljobs {NOT_CLEANED_UP}" in world.api.listed
        assert (world.cache.num_objects, world.relist._num_listed) == (3, 2)
        monkeypatch.setattr(world.relist, "_all_jobs_due_at", 0.0)
        world.api.objects[JOBS] = [named("runs", {})]
        world.api.version = 20
        await world.relist.once()
        assert ("rljobs" in world.api.listed, world.cache.num_objects) == (True, 1)

    run(test)


def test_an_older_api_server_lists_all_jobs_each_time() -> None:
    async def test(world: ListedWorld) -> None:
        world.api.knows_field_selector = False
        world.api.objects[JOBS] = [named("over", OVER), named("runs", {})]
        for _ in range(2):
            await world.relist.once()
            assert world.relist._num_listed == 2
        world.api.objects[JOBS] = []
        world.api.version = 20
        await world.relist.once()
        assert world.cache.num_objects == 0

    run(test)


def test_a_job_that_left_the_listing_of_unfinished_jobs_is_read() -> None:
    """Its last event was lost: it was deleted, or it was cleaned up."""

    async def test(world: ListedWorld) -> None:
        world.api.objects[JOBS] = [named("deleted", {}), named("finished", {}), named("young", {})]
        await world.start()
        await world.work()
        world.api.objects[JOBS] = [named("finished", OVER, version=15), named("young", {})]
        world.api.version = 20
        world.events.on_event(JOBS, "MODIFIED", named("newer", {}, version=25))
        await world.relist.once()
        assert [each for each in world.api.listed if "/" in each] == ["rljobs team/deleted", "rljobs team/finished"]
        assert (world.cache.job("team", "deleted"), world.cache.is_trimmed("team", "finished")) == (None, True)
        assert world.cache.job("team", "newer") is not None
        assert JobKey("team", "deleted") in await world.work()

    run(test)


def test_a_listing_that_expires_between_two_pages_starts_again() -> None:
    async def test(world: ListedWorld) -> None:
        world.api.objects[PODS] = [part(5, name=f"pod-{number}", uid=f"u{number}") for number in range(5)]
        await world.relist.once()
        world.api.objects[PODS] = world.api.objects[PODS][1:]
        world.api.version = 20
        world.api.expires_after_pages = 1
        await world.relist.once()
        assert (world.cache.num_objects, world.api.expires_after_pages) == (4, None)

    run(test)


def test_the_cluster_whose_network_policy_was_deleted_is_found(caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: ListedWorld) -> None:
        world.api.objects |= {
            JOBS: [job({})],
            CLUSTERS: [part(4, name="job-1", uid="c1"), part(5, name="job-2", uid="c2")],
            NETWORK_POLICIES: [part(2, name="job-1-j1"), part(3, name="job-2-j1")],
        }
        await world.relist.once()
        assert not world.cache.lacks_network_policy("c1")
        world.api.objects[NETWORK_POLICIES] = [part(3, name="job-2-j1")]
        await world.relist.once()
        assert (world.cache.lacks_network_policy("c1"), world.cache.lacks_network_policy("c2")) == (True, False)
        world.cache.note_policy_applied("c1")
        assert not world.cache.lacks_network_policy("c1")
        world.api.errors[NETWORK_POLICIES] = ForbiddenError("networkpolicies is forbidden")
        for _ in range(2):
            await world.relist.once()
        assert not world.cache.lacks_network_policy("c1")
        assert caplog.text.count("networkpolicies is forbidden") == 1

    run(test)


def test_without_clusters_no_network_policies_are_listed() -> None:
    async def test(world: ListedWorld) -> None:
        world.api.objects |= {JOBS: [job({})], NETWORK_POLICIES: [part(2, name="job-1-j1")]}
        await world.start()
        assert "networkpolicies" not in world.api.listed

    run(test)
