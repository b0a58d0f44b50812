"""What one pass requests from the API server and changes on it: decisions that cannot be undone do not rely on the
cache."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from rljob_api.constants import ANNOTATION_RETRY
from rljob_operator.controller import reconcile_loop
from rljob_operator.controller.reconcile_loop import JobKey
from rljob_operator.kube.allowed_calls import CLUSTERS, JOBS, LEASES, PODS
from rljob_operator.kube.errors import ForbiddenError
from rljob_operator.raw_json import JsonObject, object_at, text_at
from rljob_operator.ray.client import Dashboard
from rljob_operator.ray.run_watcher import RunWatcher
from rljob_operator.reconcile.observed import ObservedRay, Reachability
from rljob_operator.settings import Settings
from rljob_testing.jobs.valid_job import Wire, edited
from rljob_testing.messages import Mentions
from rljob_testing.operator import fake_api

PROVISIONED = {"type": "RayClusterProvisioned", "status": "True"}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return fake_api.controller_settings(tmp_path)


def test_a_pass_reads_nothing_from_the_api_server(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_until_pods_pending(world)
        assert await world.reconcile(fake_api.KEY, 5) == []

    fake_api.run_controller(settings, test)


def test_no_job_is_reconciled_before_the_first_listing(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        world.cache.store(JOBS, "", world.api.objects[JOBS, world.submit("job").name])
        assert await world.reconcile(fake_api.KEY, 1) == []
        assert world.queue.planned == {fake_api.KEY: 0.5}

    fake_api.run_controller(settings, test)


def test_the_intent_is_written_and_old_pods_are_listed_before_a_cluster_is_created(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        world.submit("job")
        await world.relist()
        assert fake_api.writing_calls(await world.reconcile(fake_api.KEY, 1)) == ["patch rljobs"]
        assert await world.reconcile(fake_api.KEY, 1) == [*fake_api.LIVE_READS, "list pods", *fake_api.CREATED]

    fake_api.run_controller(settings, test)


def test_a_cluster_missing_only_from_the_cache_is_not_lost(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_until_pods_pending(world)
        cluster = world.api.objects[CLUSTERS, "job-1"]
        world.cache.store(CLUSTERS, "DELETED", cluster)
        assert await world.reconcile(fake_api.KEY, 1) == fake_api.LIVE_READS
        assert world.condition("job", "ClusterReady") == "PodsPending"
        del world.api.objects[CLUSTERS, "job-1"]
        world.cache.store(CLUSTERS, "DELETED", world.api.put(CLUSTERS, cluster))
        del world.api.objects[CLUSTERS, "job-1"]
        assert "patch rljobs" in await world.reconcile(fake_api.KEY, 1)
        assert world.condition("job", "Retrying") == "ClusterLost"

    fake_api.run_controller(settings, test)


def test_a_cluster_not_yet_in_the_cache_is_not_created_again(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        await world.reconcile(fake_api.KEY, 1)
        assert fake_api.writing_calls(await world.reconcile(fake_api.KEY, 3)) == ["patch rljobs"], (
            "the cluster is only recorded"
        )
        assert [name for kind, name in world.api.objects if kind == CLUSTERS] == ["job-1"]

    fake_api.run_controller(settings, test)


def test_a_cluster_waits_for_all_pods_of_former_ones(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        pods = {"of-a-former-attempt": ("job-0", "uid-of-job"), "of-a-former-job": ("job-1", "former")}
        for name, (cluster, uid) in (pods | {"of-another-job": ("other-1", "other")}).items():
            labels = {"ray.io/cluster": cluster, "rljob.dev/job-uid": uid}
            world.api.put(PODS, {"metadata": {"name": name, "labels": labels}, "status": {"phase": "Running"}})
        assert not set(fake_api.CREATED) & set(await world.reconcile(fake_api.KEY, 2)), (
            "the cache does not have the pods"
        )
        del world.api.objects[PODS, "of-a-former-attempt"]
        await world.relist()
        assert not set(fake_api.CREATED) & set(await world.reconcile(fake_api.KEY, 2))
        assert fake_api.condition_message(world, "ClusterReady") == Mentions("pods of an earlier RayCluster", "1")
        del world.api.objects[PODS, "of-a-former-job"]
        async with asyncio.timeout(60):
            while not set(fake_api.CREATED) <= set(await world.reconcile(fake_api.KEY, 1)):
                await asyncio.sleep(0.02)

    fake_api.run_controller(settings, test)


def test_under_an_older_crd_no_job_is_reconciled_and_one_line_is_logged(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        world.api.stored = without_counters
        first, second = world.submit("first"), world.submit("second")
        await world.relist()
        for key in (first, second, first):
            assert fake_api.writing_calls(await world.reconcile(key, 1)) == ["patch rljobs"]
        assert caplog.text.count("is older than this operator (it drops status.counters)") == 1
        assert world.metrics.registry.get_sample_value("rljob_operator_definition_outdated") == 1
        world.clock.advance(61)
        await world.reconcile(second, 1)
        assert caplog.text.count("is older than this operator") == 2
        world.api.stored = lambda raw: raw
        assert "patch rljobs" in await world.reconcile(first, 1)
        assert world.metrics.registry.get_sample_value("rljob_operator_definition_outdated") == 0

    fake_api.run_controller(settings, test)


def without_counters(raw: JsonObject) -> JsonObject:
    status = {name: value for name, value in object_at(raw, "status").items() if name != "counters"}
    return {**raw, "status": status}


def test_objects_without_read_permission_are_not_acted_upon(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        world.api.errors["list pods"] = ForbiddenError("pods is forbidden")
        assert not set(fake_api.CREATED) & set(await world.reconcile(fake_api.KEY, 2))
        world.cache.note_forbidden(PODS, None, "pods is forbidden")
        assert not set(fake_api.CREATED) & set(await world.reconcile(fake_api.KEY, 2))
        assert world.condition("job", "ClusterReady") == "ReadForbidden"
        assert min(world.queue.planned.values()) >= 1.0

    fake_api.run_controller(settings, test)


def test_a_replica_without_confirmed_leadership_writes_nothing(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        world.submit("job")
        await world.relist()
        world.leads = False
        assert fake_api.writing_calls(await world.reconcile(fake_api.KEY, 2)) == []
        world.leads = True
        await world.reconcile(fake_api.KEY, 1)
        world.leads = False
        assert fake_api.writing_calls(await world.reconcile(fake_api.KEY, 1)) == []
        world.api.interrupted, world.api.in_between = fake_api.CREATED[1], lambda: setattr(world, "leads", False)
        world.leads = True
        assert fake_api.writing_calls(await world.reconcile(fake_api.KEY, 1)) == fake_api.CREATED[:2]
        world.leads = True
        again = [*fake_api.CREATED[:2], "apply networkpolicies", fake_api.CREATED[2]]
        assert fake_api.writing_calls(await world.reconcile(fake_api.KEY, 1)) == again

    fake_api.run_controller(settings, test)


def test_a_conflict_makes_the_job_be_read_again(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        world.submit("job")
        await world.relist()
        world.api.put(JOBS, world.api.objects[JOBS, "job"])
        assert await world.reconcile(fake_api.KEY, 1) == ["patch rljobs"]
        assert world.status("job") == {}
        assert (await world.reconcile(fake_api.KEY, 1))[:2] == ["get rljobs", "patch rljobs"]
        assert world.status("job") != {}

    fake_api.run_controller(settings, test)


def test_fields_of_a_newer_definition_are_logged_once(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        world.submit("job", {"spec.runPolicy.patience": {"minNodes": 1}})
        await world.relist()
        with caplog.at_level(logging.WARNING):
            await world.reconcile(fake_api.KEY, 3)
        assert caplog.text.count("spec.runPolicy.patience") == 1
        assert world.condition("job", "SpecValid") == "Valid"

    fake_api.run_controller(settings, test)


def test_fields_that_a_newer_version_wrote_stay_in_the_status(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_first_attempt(world)
        status = {**world.status("job"), "queuePosition": 3}
        status["counters"] = {**object_at(status, "counters"), "preemptions": 2}
        world.api.put(JOBS, {**world.api.objects[JOBS, "job"], "status": status})
        await world.reconcile(fake_api.KEY, 1)
        await world.relist()
        assert "patch rljobs" in await world.reconcile(fake_api.KEY, 1), "the cluster was recorded"
        assert world.status("job")["queuePosition"] == 3
        assert object_at(world.status("job"), "counters")["preemptions"] == 2
        assert world.condition("job", "ClusterReady") == "PodsPending"

    fake_api.run_controller(settings, test)


def test_an_expired_job_is_deleted(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        world.submit("job", {"spec.runPolicy.ttlSecondsAfterFinished": 60, "spec.checkpoint": {}})
        await world.relist()
        await world.reconcile(fake_api.KEY, 1)
        assert world.condition("job", "Failed") == "StorageMissing"
        assert await world.reconcile(fake_api.KEY, 1) == ["get rljobs"], "finished jobs are kept as trimmed copies"
        assert 50 < world.queue.planned[fake_api.KEY] <= 60
        world.clock.advance(61)
        assert await world.reconcile(fake_api.KEY, 1) == [
            "get rljobs",
            *fake_api.LIVE_READS,
            "create events",
            "delete rljobs",
        ]
        assert (JOBS, "job") not in world.api.objects

    fake_api.run_controller(settings, test)


@pytest.mark.parametrize(
    ("edits", "patched"),
    [
        ({"metadata.annotations": {ANNOTATION_RETRY: "now"}}, True),
        ({"spec.runPolicy.ttlSecondsAfterFinished": 3600}, False),
    ],
    ids=["a retry is requested", "the TTL is raised"],
)
def test_a_change_just_before_its_deletion_keeps_a_job(settings: Settings, edits: Wire, *, patched: bool) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        world.submit("job", {"spec.runPolicy.ttlSecondsAfterFinished": 60, "spec.checkpoint": {}})
        await world.relist()
        await world.reconcile(fake_api.KEY, 1)
        world.clock.advance(61)
        world.api.interrupted = "delete rljobs"
        world.api.in_between = lambda: world.api.put(JOBS, edited(world.api.objects[JOBS, "job"], edits))
        calls = await world.reconcile(fake_api.KEY, 2)
        assert calls.count("delete rljobs") == 1
        assert ("patch rljobs" in calls) == patched
        job = world.api.objects[JOBS, "job"]
        assert edited(job, edits) == job

    fake_api.run_controller(settings, test)


@pytest.mark.parametrize(("num_jobs", "seconds"), [(1, 4.0), (2, 20.0), (5, 30.0)])
def test_more_dashboards_are_polled_less_often(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, num_jobs: int, seconds: float
) -> None:
    monkeypatch.setattr(reconcile_loop, "POLLS_PER_SECOND", 0.1 if num_jobs > 1 else 40.0)

    async def silent(_: RunWatcher, __: str, ___: Dashboard, *____: str | None, **_____: int) -> ObservedRay:
        return ObservedRay(Reachability.UNREACHABLE, error="no answer")

    monkeypatch.setattr(RunWatcher, "observe", silent)

    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        names = [f"job-of-{number}" for number in range(num_jobs)]
        for name in names:
            key = world.submit(name)
            await world.relist()
            await world.reconcile(key, 2)
            uid = text_at(world.api.objects[CLUSTERS, f"{name}-1"], "metadata", "uid")
            fake_api.ready_head(world, name, uid)
        await world.relist()
        for name in names:
            await world.reconcile(JobKey("team", name), 1)
        assert world.queue.planned[JobKey("team", names[-1])] == pytest.approx(seconds)
        for name in names[1:]:
            del world.api.objects[JOBS, name]
        await world.relist()
        for name in (*names[1:], names[0]):
            await world.reconcile(JobKey("team", name), 1)
        assert world.queue.planned[JobKey("team", names[0])] == pytest.approx(10.0 if num_jobs > 1 else 4.0)

    fake_api.run_controller(settings, test)


@pytest.mark.parametrize(
    ("is_renewed", "answers", "reason"), [(False, False, "HeadLost"), (True, False, ""), (False, True, "")]
)
def test_a_head_unreachable_by_dashboard_and_kubelet_is_lost_after_a_minute(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, is_renewed: bool, answers: bool, reason: str
) -> None:
    seconds = 0.0

    async def seen(_: RunWatcher, __: str, ___: Dashboard, *____: str | None, **_____: int) -> ObservedRay:
        how = Reachability.OK if answers else Reachability.UNREACHABLE
        return ObservedRay(how, silent_seconds=0.0 if answers else seconds)

    monkeypatch.setattr(RunWatcher, "observe", seen)

    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        nonlocal seconds
        await fake_api.start_until_pods_pending(world)
        cluster = world.api.objects[CLUSTERS, "job-1"]
        world.api.put(CLUSTERS, cluster | {"status": {"conditions": [PROVISIONED]}})
        fake_api.ready_head(world, "job", text_at(cluster, "metadata", "uid"), is_node_silent=answers)
        await world.relist()
        for number in range(6):
            renewed = f"2026-01-31T12:0{number if is_renewed else 0}:00.000000Z"
            world.api.put(LEASES, {"metadata": {"name": "node-1"}, "spec": {"renewTime": renewed}})
            assert ("get leases" in await world.reconcile(fake_api.KEY, 1)) is not answers
            assert world.condition("job", "Retrying") == "", f"after {seconds} s"
            world.clock.advance(10.0)
            seconds += 10.0
        await world.reconcile(fake_api.KEY, 1)
        assert world.condition("job", "Retrying") == reason

    fake_api.run_controller(settings, test)


@pytest.mark.parametrize(("answers", "reason"), [(False, "HeadLost"), (True, "")])
def test_no_attempt_ends_by_the_last_failure_of_a_dashboard_that_is_polled_rarely(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, answers: bool, reason: str
) -> None:
    polls: list[bool] = []

    async def seen(
        _: RunWatcher, __: str, ___: Dashboard, *____: str | None, num_pods: int, at_once: bool
    ) -> ObservedRay:
        assert num_pods == 1
        polls.append(at_once)
        is_ok = answers and at_once
        return ObservedRay(Reachability.OK if is_ok else Reachability.UNREACHABLE, silent_seconds=0 if is_ok else 90)

    monkeypatch.setattr(RunWatcher, "observe", seen)
    monkeypatch.setattr(RunWatcher, "is_waiting", lambda _, __: True)

    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_until_pods_pending(world)
        cluster = world.api.objects[CLUSTERS, "job-1"]
        world.api.put(CLUSTERS, cluster | {"status": {"conditions": [PROVISIONED]}})
        fake_api.ready_head(world, "job", text_at(cluster, "metadata", "uid"))
        await world.relist()
        world.api.put(LEASES, {"metadata": {"name": "node-1"}, "spec": {"renewTime": "2026-01-31T12:00:00.000000Z"}})
        for _ in range(6):
            await world.reconcile(fake_api.KEY, 1)
            world.clock.advance(10.0)
        assert polls == [False] * 6
        await world.reconcile(fake_api.KEY, 1)
        assert (polls[6:], world.condition("job", "Retrying")) == ([False, True], reason)

    fake_api.run_controller(settings, test)
