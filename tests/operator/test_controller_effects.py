"""How effects are carried out: what is requested, how often, and how a failure is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_operator.raw_json import JsonObject
from rljob_operator.ray.client import Dashboard, DashboardOpenError
from rljob_operator.reconcile.decision import ApplyNetworkPolicy, SubmitRayJob
from rljob_operator.settings import Settings
from rljob_testing.operator import fake_api


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
