"""What keeps a pass from acting: stale responses, objects of others, missing permissions, failures that are in
backoff."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path

import pytest

from rljob_api.constants import ANNOTATION_STOP
from rljob_operator.controller import reconcile_loop
from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, PODS, ResourceType
from rljob_operator.kube.errors import ForbiddenError, RefusedError
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.raw_json import JsonObject, object_at, objects_at, text_at
from rljob_operator.ray.client import Dashboard
from rljob_operator.ray.run_watcher import RunWatcher
from rljob_operator.reconcile.decision import Decision
from rljob_operator.reconcile.observed import Observed, ObservedRay, ObservedRayJob, RayJobStatus, Reachability
from rljob_operator.settings import Settings
from rljob_operator.workqueue import Slots, work_through
from rljob_testing.jobs.valid_job import edited
from rljob_testing.operator import fake_api

FUTURE_VERSION = "999"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return fake_api.controller_settings(tmp_path)


def of_version(raw: JsonObject, version: str) -> JsonObject:
    return {**raw, "metadata": {**object_at(raw, "metadata"), "resourceVersion": version}}


async def start_until_a_stop_is_requested(world: fake_api.ControllerOnFakeApi) -> None:
    """The next pass ends the job and deletes its cluster."""
    await fake_api.start_until_pods_pending(world)
    world.api.put(JOBS, edited(world.api.objects[JOBS, "job"], {"metadata.annotations": {ANNOTATION_STOP: "now"}}))
    await world.relist()


def test_without_permission_to_list_pods_no_cluster_is_deleted(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await start_until_a_stop_is_requested(world)
        world.api.errors["list pods"] = ForbiddenError("pods is forbidden")
        assert "delete rayclusters" not in await world.reconcile(fake_api.KEY, 3)
        del world.api.errors["list pods"]
        assert "delete rayclusters" in await world.reconcile(fake_api.KEY, 1)

    fake_api.run_controller(settings, test)


@pytest.mark.parametrize("kind", [JOBS, CLUSTERS])
def test_nothing_is_deleted_by_a_stale_response(settings: Settings, kind: ResourceType) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await start_until_a_stop_is_requested(world)
        name = "job" if kind == JOBS else "job-1"
        world.cache.store(kind, "MODIFIED", of_version(world.api.objects[kind, name], FUTURE_VERSION))
        assert fake_api.writing_calls(await world.reconcile(fake_api.KEY, 2)) == []
        world.api.objects[kind, name] = dict(of_version(world.api.objects[kind, name], FUTURE_VERSION))
        world.api.version = int(FUTURE_VERSION)
        assert "delete rayclusters" in await world.reconcile(fake_api.KEY, 1)

    fake_api.run_controller(settings, test)


def test_a_job_that_is_created_again_during_a_pass_is_not_acted_upon(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        stored = world.api.objects[JOBS, "job"]
        new = {**stored, "metadata": {**object_at(stored, "metadata"), "uid": "uid-of-the-second"}, "status": {}}
        world.api.interrupted, world.api.in_between = "get rljobs", lambda: world.api.put(JOBS, new)
        assert fake_api.writing_calls(await world.reconcile(fake_api.KEY, 1)) == []

    fake_api.run_controller(settings, test)


def test_a_cluster_with_copied_labels_does_not_belong_to_the_job(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_until_pods_pending(world)
        copied = {"name": "another", "labels": object_at(world.api.objects[CLUSTERS, "job-1"], "metadata", "labels")}
        world.api.put(CLUSTERS, {"metadata": copied, "spec": {}})
        await world.relist()
        assert "delete rayclusters" not in await world.reconcile(fake_api.KEY, 2)
        assert (CLUSTERS, "another") in world.api.objects

    fake_api.run_controller(settings, test)


@pytest.mark.parametrize("is_owned", [True, False])
def test_only_the_head_of_the_attempts_own_cluster_is_polled(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, is_owned: bool
) -> None:
    polls: list[str] = []

    async def poll(_: RunWatcher, job: str, __: Dashboard, *___: str | None, **_____: int) -> ObservedRay:
        polls.append(job)
        return ObservedRay(Reachability.UNREACHABLE, error="no answer")

    monkeypatch.setattr(RunWatcher, "observe", poll)

    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_until_pods_pending(world)
        uid = text_at(world.api.objects[CLUSTERS, "job-1"], "metadata", "uid")
        labels = {"ray.io/cluster": "job-1", "ray.io/node-type": "head", "rljob.dev/job-uid": "uid-of-job"}
        owners = [{"kind": "RayCluster", "uid": uid if is_owned else "of-an-earlier-cluster", "controller": True}]
        ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        metadata = {"name": "head", "labels": labels, "ownerReferences": owners}
        world.api.put(PODS, {"metadata": metadata, "status": ready})
        await world.relist()
        await world.reconcile(fake_api.KEY, 1)
        assert polls == (["team/job"] if is_owned else [])

    fake_api.run_controller(settings, test)


CLUSTER_LABEL = {"ray.io/cluster": "job-1"}
OF_CLUSTER = {"kind": "RayCluster", "uid": "c1", "controller": True}


@pytest.mark.parametrize(
    ("labels", "owners", "counts"),
    [
        (CLUSTER_LABEL, [OF_CLUSTER], True),
        # Somebody has deleted the cluster without its pods.
        (CLUSTER_LABEL, [], True),
        # A pod that may connect to the job's pods, as their network policy allows.
        ({}, [], False),
        ({}, [{"kind": "Job", "uid": "x", "controller": True}], False),
        (CLUSTER_LABEL, [{"kind": "Job", "uid": "x", "controller": True}], False),
    ],
)
def test_only_pods_of_ray_clusters_keep_a_job_from_its_next_step(
    settings: Settings, labels: dict[str, str], owners: list[JsonObject], counts: bool
) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await start_until_a_stop_is_requested(world)
        metadata = {"name": "other", "labels": {"rljob.dev/job-uid": "uid-of-job", **labels}, "ownerReferences": owners}
        world.api.put(PODS, {"metadata": metadata, "status": {"phase": "Running"}})
        for _ in range(3):
            await world.relist()
            await world.reconcile(fake_api.KEY, 1)
        assert (CLUSTERS, "job-1") not in world.api.objects
        assert ("cleanedUpAt" in object_at(world.status("job"), "result")) is not counts

    fake_api.run_controller(settings, test)


def test_a_rejected_creation_is_not_repeated_before_its_backoff_is_over(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        world.api.errors["create rayclusters"] = RefusedError("exceeded quota: gpus")
        await world.reconcile(fake_api.KEY, 1)
        held = world.controller._memories[fake_api.KEY].failed_effect
        assert held is not None
        rest = held.retry_at - asyncio.get_running_loop().time()
        calls = await world.reconcile(fake_api.KEY, 5)
        assert "create rayclusters" not in calls
        assert 0 < world.queue.planned[fake_api.KEY] <= rest
        assert world.condition("job", "ClusterReady") == "CreationRejected"

    fake_api.run_controller(settings, test)


def test_events_are_posted_though_an_effect_raises(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await start_until_a_stop_is_requested(world)
        world.api.errors["delete rayclusters"] = RuntimeError("a bug")  # type: ignore[assignment]
        calls = await world.reconcile(fake_api.KEY, 1)
        assert calls.index("delete rayclusters") < calls.index("create events")
        assert objects_at(world.status("job"), "conditions")

    fake_api.run_controller(settings, test)


def test_an_operator_that_starts_late_requests_the_stacks_of_a_hanging_trainer(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str | None, ...]] = []
    hanging = ObservedRayJob("job-1-1", RayJobStatus.RUNNING, "", None, None)

    async def seen(_: RunWatcher, __: str, ___: Dashboard, *ids: str | None, **____: int) -> ObservedRay:
        asked.append(ids)
        return ObservedRay(Reachability.OK, job=hanging, stacks_missing=True)

    monkeypatch.setattr(RunWatcher, "observe", seen)

    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_until_pods_pending(world)
        fake_api.ready_head(world, "job", text_at(world.api.objects[CLUSTERS, "job-1"], "metadata", "uid"))
        stored = world.api.objects[JOBS, "job"]
        status = object_at(stored, "status")
        [attempt] = objects_at(status, "attempts")
        began, requested = "2026-01-31T11:40:00Z", "2026-01-31T11:50:00Z"
        stop = {"reason": "Stalled", "requestedAt": requested}
        for changes, stacks in [
            ({}, None),
            ({"stop": stop}, None),
            ({"stop": stop | {"sentAt": requested}}, "job-1-1-stacks"),
        ]:
            running = attempt | {"submissions": 1, "startNumber": 1, "runningSince": began} | changes
            world.api.put(JOBS, stored | {"status": status | {"attempts": [running]}})
            await world.relist()
            await world.reconcile(fake_api.KEY, 1)
            assert asked[-1] == ("job-1-1", stacks)
        [attempt] = objects_at(world.status("job"), "attempts")
        assert object_at(attempt, "stop") == stop | {"sentAt": "2026-01-31T12:00:00Z"}

    fake_api.run_controller(settings, test)


def test_a_job_whose_passes_always_fail_delays_no_other_job(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconcile, failures = reconcile_loop.reconcile, []

    def fails_for_poison(seen: Observed, now: datetime, defaults: Defaults) -> Decision:
        if seen.job.name == "poison":
            failures.append(asyncio.get_running_loop().time())
            raise ZeroDivisionError
        return reconcile(seen, now, defaults)

    monkeypatch.setattr(reconcile_loop, "reconcile", fails_for_poison)

    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        others = [f"job-of-{number}" for number in range(20)]
        for name in ("poison", *others):
            world.submit(name)
        await world.relist()
        work = asyncio.create_task(work_through(world.queue, Slots(1), world.controller.work))
        async with asyncio.timeout(120):
            while not all(world.condition(name, "ClusterReady") for name in others):
                await asyncio.sleep(0.01)
            num_passes = world.metrics.registry.get_sample_value("rljob_operator_passes_total", {"outcome": "done"})
            assert num_passes is not None
            assert len(failures) < num_passes
            while len(failures) < 3:
                await asyncio.sleep(0.01)
        first, second, third = failures[:3]
        assert second - first >= 0.4
        assert third - second >= 0.8
        assert world.status("poison") == {}
        world.queue.close()
        await work

    fake_api.run_controller(settings, test)
