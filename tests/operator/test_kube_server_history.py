"""A restore of the API server's storage is noticed, and nothing else is taken for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_operator.handlers import operator_process
from rljob_operator.kube import server_history
from rljob_operator.kube.allowed_calls import JOBS
from rljob_operator.kube.server_history import StorageRestoredError
from rljob_operator.raw_json import object_at
from rljob_operator.settings import Settings
from rljob_testing.operator import fake_api

SOON, MUCH_LATER = 0.0, 1000.0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return fake_api.controller_settings(tmp_path)


async def is_restored(world: fake_api.ControllerOnFakeApi) -> bool:
    """Whether the operator has found that the storage was restored."""
    try:
        async with asyncio.timeout(0.05):
            await world.history.restored()
    except TimeoutError:
        return False
    except StorageRestoredError:
        return True


def restore_an_earlier_version(world: fake_api.ControllerOnFakeApi) -> None:
    stored = world.api.objects[JOBS, "job"]
    stored["metadata"] = {**object_at(stored, "metadata"), "resourceVersion": "50"}
    world.api.version = 60


def restore_with_a_raised_version(world: fake_api.ControllerOnFakeApi) -> None:
    """As `etcdutl snapshot restore --bump-revision` does it: new versions are larger than all before the restore."""
    restore_an_earlier_version(world)
    world.api.version = 1_000_000


@pytest.mark.parametrize("restore", [restore_an_earlier_version, restore_with_a_raised_version])
def test_two_contradicting_listings_are_a_restored_storage(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, restore: Callable[[fake_api.ControllerOnFakeApi], None]
) -> None:
    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        world.submit("job")
        await world.relist()
        restore(world)
        monkeypatch.setattr(server_history, "CONFIRM_SECONDS", MUCH_LATER)
        await world.relist()
        assert not await is_restored(world), "a single listing may be a stale response"
        monkeypatch.setattr(server_history, "CONFIRM_SECONDS", SOON)
        await world.relist()
        assert await is_restored(world)

    fake_api.run_controller(settings, test)


def test_a_stale_listing_between_others_is_no_restore(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_history, "CONFIRM_SECONDS", 0.001)

    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        world.submit("job")
        for version in (110, 104, 111, 105, 112):
            world.api.version = version
            await world.relist()
            await asyncio.sleep(0.002)
        assert not await is_restored(world)

    fake_api.run_controller(settings, test)


def test_newer_states_deletions_and_new_objects_are_no_restore(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_history, "CONFIRM_SECONDS", SOON)

    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        world.submit("job")
        await world.relist()
        listed = world.api.objects[JOBS, "job"]
        metadata = object_at(listed, "metadata")
        # The listing was requested before this event arrived.
        world.cache.store(JOBS, "MODIFIED", {**listed, "metadata": {**metadata, "resourceVersion": "500"}})
        await world.relist()
        world.api.version = 600
        world.api.objects[JOBS, "job"]["metadata"] = {**metadata, "uid": "another", "resourceVersion": "490"}
        await world.relist()
        del world.api.objects[JOBS, "job"]
        await world.relist()
        assert not await is_restored(world)

    fake_api.run_controller(settings, test)


def test_the_operator_ends_when_the_storage_was_restored(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_history, "CONFIRM_SECONDS", SOON)

    async def test(world: fake_api.ControllerOnFakeApi) -> None:
        world.submit("job")
        await world.relist()
        restore_an_earlier_version(world)
        await world.relist()
        await world.relist()
        waits = operator_process._either(operator_process._wait_for_ever(), world.history.restored())
        with pytest.raises(StorageRestoredError, match="rljobs are listed at version 60"):
            await operator_process._first(asyncio.Event(), waits)

    fake_api.run_controller(settings, test)
