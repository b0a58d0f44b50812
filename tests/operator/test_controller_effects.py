"""How effects are carried out: what is requested, how often, and how a failure is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rljob_api.run_state import RunPhase
from rljob_operator.controller import effect_executor, reconcile_loop
from rljob_operator.kube.allowed_calls import CLUSTERS, EVENTS, JOBS, NETWORK_POLICIES
from rljob_operator.kube.errors import RefusedError, UnknownFieldError
from rljob_operator.raw_json import JsonObject, at, object_at, objects_at, text_at
from rljob_operator.ray.client import Dashboard, DashboardOpenError
from rljob_operator.ray.run_watcher import RunWatcher
from rljob_operator.reconcile.decision import ApplyNetworkPolicy, SubmitRayJob
from rljob_operator.reconcile.observed import ObservedRay, ObservedRayJob, RayJobStatus
from rljob_operator.settings import JobNetworkPolicy, Settings
from rljob_testing.jobs.valid_job import edited
from rljob_testing.messages import Mentions
from rljob_testing.operator import fake_api, inputs


def posted(world: fake_api.ControllerOnFakeApi, reason: str) -> list[JsonObject]:
    """The events with this reason."""
    return [raw for (kind, _), raw in world.api.objects.items() if kind == EVENTS and text_at(raw, "reason") == reason]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return fake_api.controller_settings(tmp_path)


def test_a_network_policy_is_applied_once_a_minute(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_until_pods_pending(world)
        job = await world.observer.read_job(*fake_api.KEY)
        seen = await world.observer.observe(job, None)
        world.api.calls.clear()
        effects = (ApplyNetworkPolicy("job-1"),)
        for _ in range(3):
            assert await world.executor.execute(effects, seen, "1") is None
        assert world.api.calls == ["apply networkpolicies"]
        world.clock.advance(60)
        await world.executor.execute(effects, seen, "1")
        assert world.api.calls == ["apply networkpolicies"] * 2

    fake_api.run_controller(settings, test)


def test_the_network_policy_of_a_running_attempt_is_restored(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_until_pods_pending(world)
        job = await world.observer.read_job(*fake_api.KEY)
        seen = await world.observer.observe(job, None)
        (name,) = [name for kind, name in world.api.objects if kind == NETWORK_POLICIES]
        del world.api.objects[NETWORK_POLICIES, name]
        await world.relist()
        world.api.calls.clear()
        for _ in range(2):
            await world.executor.execute((), seen, "1")
        assert world.api.calls == ["apply networkpolicies"]
        await world.relist()
        await world.executor.execute((), seen, "1")
        assert world.api.calls == []

        # A failure changes nothing for the job; the next listing finds it again.
        del world.api.objects[NETWORK_POLICIES, name]
        await world.relist()
        world.api.errors["apply networkpolicies"] = RefusedError("not allowed")
        assert await world.executor.execute((), seen, "1") is None
        world.api.calls.clear()
        await world.executor.execute((), seen, "1")
        assert world.api.calls == []

    fake_api.run_controller(settings, test)


@pytest.mark.parametrize("changed", [None, "", "7", "one", "9" * 63])
def test_the_network_policy_does_not_depend_on_a_label_that_a_user_can_change(
    settings: Settings, changed: str | None
) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_until_pods_pending(world)
        seen = await world.observer.observe(await world.observer.read_job(*fake_api.KEY), None)
        [(policy, created)] = [(key, each) for key, each in world.api.objects.items() if key[0] == NETWORK_POLICIES]
        metadata = dict(object_at(seen.clusters["job-1"], "metadata"))
        metadata["labels"] = {} if changed is None else {"rljob.dev/attempt": changed}
        changed_cluster = {**seen.clusters["job-1"], "metadata": metadata}
        del world.api.objects[policy]
        world.clock.advance(600)
        effects = (ApplyNetworkPolicy("job-1"),)
        assert await world.executor.execute(effects, replace(seen, clusters={"job-1": changed_cluster}), "1") is None
        assert object_at(world.api.objects[policy], "spec") == object_at(created, "spec")

    fake_api.run_controller(settings, test)


def test_without_network_policies_none_is_created_or_restored(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_until_pods_pending(world)
        seen = await world.observer.observe(await world.observer.read_job(*fake_api.KEY), None)
        for _ in range(3):
            world.clock.advance(600)
            await world.executor.execute((ApplyNetworkPolicy("job-1"),), seen, "1")
        assert [kind for kind, _ in world.api.objects if kind == NETWORK_POLICIES] == []

    without = replace(settings, job_network_policy=JobNetworkPolicy(enabled=False))
    fake_api.run_controller(without, test)


def test_rules_of_the_installer_that_the_api_server_rejects_are_reported(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        world.api.errors["create networkpolicies"] = UnknownFieldError('unknown field "spec.ingress[2].fromm"')
        key = world.submit("job")
        await world.relist()
        await world.reconcile(key, 3)
        (condition,) = [each for each in conditions(world) if each["type"] == "ClusterReady"]
        assert condition["reason"] == "CreationRejected"
        assert condition["message"] == Mentions("check jobs.networkPolicy of the operator's chart", "fromm")

    fake_api.run_controller(settings, test)


def conditions(world: fake_api.ControllerOnFakeApi) -> list[dict[str, object]]:
    found = world.status("job")["conditions"]
    assert isinstance(found, list)
    return found


def test_a_dashboard_that_no_longer_requires_a_token_gets_no_request_with_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []

    async def submit(_: Dashboard, __: JsonObject) -> None:
        raise DashboardOpenError("HTTP 200 without a token")

    async def job(_: Dashboard, submission_id: str) -> None:
        requests.append(submission_id)

    monkeypatch.setattr(Dashboard, "submit", submit)
    monkeypatch.setattr(Dashboard, "job", job)

    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_until_pods_pending(world)
        seen = await world.observer.observe(await world.observer.read_job(*fake_api.KEY), None)
        failure = await world.executor.execute((SubmitRayJob("job-1-1", 1, 7),), seen, "1")
        assert failure is not None
        assert (failure.reason, requests) == ("AuthenticationMissing", [])

    fake_api.run_controller(settings, test)


def test_an_event_on_the_job_reports_the_deletion_after_its_ttl(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        world.submit("job", {"spec.runPolicy.ttlSecondsAfterFinished": 60, "spec.checkpoint": {}})
        await world.relist()
        await world.reconcile(fake_api.KEY, 1)
        world.clock.advance(61)
        world.api.errors["delete rljobs"] = RefusedError("the webhook denies it")
        await world.reconcile(fake_api.KEY, 1)
        del world.api.errors["delete rljobs"]
        world.controller._memories.clear()
        calls = await world.reconcile(fake_api.KEY, 1)
        assert calls.index("create events") < calls.index("delete rljobs")
        assert (JOBS, "job") not in world.api.objects
        (event,) = posted(world, "JobDeleted")
        assert "ttlSecondsAfterFinished" in text_at(event, "note")
        assert text_at(event, "reportingController") == "rljob.dev/operator"
        assert text_at(event, "reportingInstance") == "operator-0"
        assert (text_at(event, "regarding", "name"), text_at(event, "regarding", "uid")) == ("job", "uid-of-job")

    fake_api.run_controller(settings, test)


def test_an_event_on_the_job_reports_the_deletion_of_a_cluster_that_no_attempt_uses(settings: Settings) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        await fake_api.start_until_pods_pending(world)
        own = world.api.objects[CLUSTERS, "job-1"]
        metadata = {name: value for name, value in object_at(own, "metadata").items() if name != "uid"}
        world.api.put(CLUSTERS, {**own, "metadata": {**metadata, "name": "job-7"}})
        await world.relist()
        await world.reconcile(fake_api.KEY, 1)
        assert (CLUSTERS, "job-7") not in world.api.objects
        (event,) = posted(world, "ClusterDeleted")
        assert "RayCluster job-7" in text_at(event, "note")

    fake_api.run_controller(settings, test)


@pytest.mark.parametrize(
    ("fault", "reason", "words"),
    [
        ("unreadable", "StatusUnreadable", "status.attempts is empty"),
        ("not_written", "StatusNotWritten", "request entity too large"),
    ],
)
def test_a_fault_of_the_status_is_counted_and_shown_on_the_job_at_most_every_10_minutes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str, words: str
) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        world.submit("job")
        if fault == "unreadable":
            status = {"counters": {"attempts": 2}}
            world.api.put(JOBS, edited(world.api.objects[JOBS, "job"], {"status": status}))
        else:
            world.api.errors["patch rljobs"] = RefusedError("request entity too large")
        await world.relist()
        calls = await world.reconcile(fake_api.KEY, 3)
        assert fake_api.writing_calls([call for call in calls if call != "patch rljobs"]) == []
        (event,) = posted(world, reason)
        assert words in text_at(event, "note")
        assert (text_at(event, "type"), text_at(event, "regarding", "uid")) == ("Warning", "uid-of-job")
        assert f'rljob_operator_status_faults_total{{fault="{fault}"}} 3.0' in world.metrics.exposition().decode()
        monkeypatch.setattr(reconcile_loop, "STATUS_FAULT_SECONDS", 0.0)
        world.clock.advance(1)
        await world.reconcile(fake_api.KEY, 1)
        assert len(posted(world, reason)) == 2

    fake_api.run_controller(settings, test)


async def start_training(world: fake_api.ControllerOnFakeApi) -> None:
    await fake_api.start_until_pods_pending(world)
    stored = world.api.objects[JOBS, "job"]
    status = object_at(stored, "status")
    [attempt] = objects_at(status, "attempts")
    fake_api.ready_head(world, "job", text_at(world.api.objects[CLUSTERS, "job-1"], "metadata", "uid"))
    began: dict[str, object] = {"submissions": 1, "startNumber": 1, "runningSince": "2026-01-31T12:00:00Z"}
    world.api.put(JOBS, {**stored, "status": {**status, "attempts": [{**attempt, **began}]}})
    await world.relist()


def test_what_only_explains_is_written_at_one_pace(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    step, phase = 0, RunPhase.RUNNING
    running = ObservedRayJob("job-1-1", RayJobStatus.RUNNING, "", None, None)

    async def seen(_: RunWatcher, __: str, ___: Dashboard, *____: str | None, **_____: int) -> ObservedRay:
        alarms = (inputs.alarm(step=step),) if step >= 4 else ()
        return inputs.ray(running, inputs.run_state(phase, step=step, alarms=alarms))

    monkeypatch.setattr(RunWatcher, "observe", seen)

    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        nonlocal step, phase
        await start_training(world)

        async def written_step() -> object:
            await world.reconcile(fake_api.KEY, 1)
            return at(world.status("job"), "progress", "step")

        assert await written_step() == 0
        written, num_events = [], []
        for _ in range(8):
            step += 1
            world.clock.advance(4)
            written.append(await written_step())
            num_events.append(len(posted(world, "ResponsesCutOff")))
        # One write in 8 seconds, with polls every 4 seconds. The event about an alarm is posted with it.
        assert written == [0, 2, 2, 4, 4, 6, 6, 8]
        assert num_events == [0, 0, 0, 1, 1, 1, 1, 1]
        assert world.queue.planned[fake_api.KEY] <= 8
        # A change that decides something is written at once, with the newest progress.
        step, phase = 9, RunPhase.STOPPING
        assert await written_step() == 9
        step = 10
        world.clock.advance(6)
        assert await written_step() == 9

    fake_api.run_controller(settings, test)


def test_an_alarm_that_comes_and_goes_gets_few_events(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    names: tuple[str, ...] = ()
    running = ObservedRayJob("job-1-1", RayJobStatus.RUNNING, "", None, None)

    async def seen(_: RunWatcher, __: str, ___: Dashboard, *____: str | None, **_____: int) -> ObservedRay:
        alarms = tuple(inputs.alarm(name) for name in names)
        return inputs.ray(running, inputs.run_state(RunPhase.RUNNING, step=4, alarms=alarms))

    monkeypatch.setattr(RunWatcher, "observe", seen)
    monkeypatch.setattr(effect_executor, "ALARM_EVENT_SECONDS", 660.0)

    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        nonlocal names
        await start_training(world)

        async def passes(number: int) -> tuple[int, ...]:
            nonlocal names
            for step in range(number):
                # Names that the operator does not know are one alarm, however many there are.
                names = ("EqualScores",) if step % 2 else (f"Alarm{step}",)
                world.clock.advance(60)
                await world.reconcile(fake_api.KEY, 1)
                assert at(world.status("job"), "alarms") == [*names]
            return tuple(len(posted(world, reason)) for reason in ("EqualScores", "OtherAlarm"))

        assert await passes(10) == (1, 1)
        # After a while there is another one.
        assert await passes(10) == (2, 2)

    fake_api.run_controller(settings, test)
