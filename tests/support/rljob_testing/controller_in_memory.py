"""Passes of a controller over a job called `job`, with an API server in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

from rljob_operator.controller.loop import JobKey
from rljob_operator.settings import Settings, parse_settings
from rljob_testing.api_in_memory import ControllerInMemory

KEY = JobKey("team", "job")
CREATED = ["create secrets", "create networkpolicies", "create rayclusters"]
LIVE = ["get rljobs", "list rayclusters", "list pods"]
"""What is asked before something is done that cannot be undone."""


def controller_settings(folder: Path) -> Settings:
    """Of an operator whose key for tokens lies in a folder, which is made there."""
    (folder / "key").write_bytes(b"0123456789abcdef")
    return parse_settings(
        {
            "RLJOB_OPERATOR_RAY_VERSION": "2.60.0",
            "RLJOB_OPERATOR_TOKEN_KEYS_FOLDER": str(folder),
            "RLJOB_OPERATOR_POD_NAME": "operator-0",
            "RLJOB_OPERATOR_POD_NAMESPACE": "rljob-system",
        }
    )


def run_in_memory(settings: Settings, test: Callable[[ControllerInMemory], Coroutine[None, None, None]]) -> None:
    """Runs a test of a controller that nothing is known to yet."""

    async def made() -> None:
        world = ControllerInMemory(settings)
        try:
            await test(world)
        finally:
            await world.close()

    asyncio.run(made())


async def written_down(world: ControllerInMemory) -> None:
    """A job whose first attempt is in its status."""
    world.submit("job")
    await world.relist()
    await world.passes(KEY, 1)


async def with_cluster(world: ControllerInMemory) -> None:
    """A job whose cluster is there, and is known to be."""
    await written_down(world)
    await world.passes(KEY, 1)
    await world.relist()
    await world.passes(KEY, 1)
    assert world.condition("job", "ClusterReady") == "PodsPending"


def message(world: ControllerInMemory, kind: str) -> str:
    """Of a condition of the job."""
    conditions = world.status("job")["conditions"]
    assert isinstance(conditions, list)
    return next(str(each["message"]) for each in conditions if each["type"] == kind)


def writes(calls: list[str]) -> list[str]:
    """Those that change something, but for events."""
    return [call for call in calls if call.split()[0] not in ("get", "list") and call != "create events"]
