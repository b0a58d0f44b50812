"""Events are requested once for all jobs of a namespace, and unreadable events block nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import cast

import pytest

from rljob_operator.kube import explaining_events
from rljob_operator.kube.allowed_calls import CORE_EVENTS, KubeObjects, Listing, ResourceType
from rljob_operator.kube.errors import ForbiddenError, KubeError, UnavailableError
from rljob_operator.kube.explaining_events import (
    FORGOTTEN_AFTER_SECONDS,
    MAX_PAGES,
    REUSED_SECONDS,
    ExplainingEvents,
    by_pod,
)
from rljob_operator.raw_json import JsonObject
from rljob_testing.operator import manual_clock

FAILED_MOUNT: JsonObject = {"reason": "FailedMount", "involvedObject": {"uid": "p1"}, "metadata": {}}


def event(reason: str, uid: str, minute: int, message: str = "") -> JsonObject:
    return {
        "metadata": {"name": "x", "creationTimestamp": f"2026-01-31T12:{minute:02}:00Z", "managedFields": ["..."]},
        "involvedObject": {"kind": "Pod", "name": "x", "uid": uid},
        "reason": reason,
        "message": message,
    }


class Api:
    """The API server's events."""

    def __init__(self) -> None:
        self.error: KubeError | None = None
        self.seconds = 0.0
        self.asked: list[tuple[str | None, str]] = []
        self.events: tuple[JsonObject, ...] = (FAILED_MOUNT,)
        self.has_endless_pages = False
        self.num_pages = 0

    async def pages(self, kind: ResourceType, namespace: str | None, *, fields: str) -> AsyncIterator[Listing]:
        assert kind == CORE_EVENTS
        self.asked.append((namespace, fields))
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        while True:
            self.num_pages += 1
            yield Listing(self.events, "7")
            if not self.has_endless_pages:
                return


def in_world(test: Callable[[Api, manual_clock.ManualClock, ExplainingEvents], Coroutine[None, None, None]]) -> None:
    api, clock = Api(), manual_clock.synchronized_clock()
    asyncio.run(test(api, clock, ExplainingEvents(cast(KubeObjects, api), clock.clock)))


def test_all_jobs_of_a_namespace_share_a_response_for_some_seconds() -> None:
    async def test(api: Api, clock: manual_clock.ManualClock, events: ExplainingEvents) -> None:
        found = await asyncio.gather(*(events.of_pods("team") for _ in range(100)))
        assert found == [(FAILED_MOUNT,)] * 100
        assert api.asked == [("team", "involvedObject.kind=Pod,type=Warning")]
        await events.of_pods("another")
        await events.of_cluster("team", "c1")
        assert api.asked[1:] == [
            ("another", "involvedObject.kind=Pod,type=Warning"),
            ("team", "involvedObject.kind=RayCluster,type=Warning"),
        ]
        clock.advance(REUSED_SECONDS)
        await events.of_pods("team")
        assert len(api.asked) == 4

    in_world(test)


@pytest.mark.parametrize("error", [ForbiddenError("not allowed"), UnavailableError("too many requests")])
def test_an_unreadable_list_of_events_returns_the_last_one(error: KubeError, caplog: pytest.LogCaptureFixture) -> None:
    async def test(api: Api, clock: manual_clock.ManualClock, events: ExplainingEvents) -> None:
        await events.of_pods("team")
        api.error = error
        for _ in range(3):
            clock.advance(REUSED_SECONDS)
            assert await events.of_pods("team") == (FAILED_MOUNT,)
        assert await events.of_pods("another") == ()
        assert len(api.asked) == 5

    with caplog.at_level(logging.WARNING):
        in_world(test)
    assert len(caplog.messages) == 1, "it is logged once in ten minutes"


def test_events_of_jobs_that_nobody_asks_about_are_forgotten() -> None:
    async def test(_: Api, clock: manual_clock.ManualClock, events: ExplainingEvents) -> None:
        for number in range(100):
            await events.of_cluster(f"team-{number}", "c1")
        clock.advance(FORGOTTEN_AFTER_SECONDS)
        await events.of_pods("team")
        assert len(events._cached) == 1

    in_world(test)


def test_a_slow_response_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining_events, "TIMEOUT_SECONDS", 0.05)

    async def test(api: Api, _: manual_clock.ManualClock, events: ExplainingEvents) -> None:
        api.seconds = 600.0
        async with asyncio.timeout(120):
            assert await events.of_pods("team") == ()
            assert await events.of_pods("team") == ()
        assert len(api.asked) == 1, "and the request is not repeated at once"

    in_world(test)


def test_events_belong_to_pods() -> None:
    assert by_pod((FAILED_MOUNT, FAILED_MOUNT)) == {"p1": [FAILED_MOUNT, FAILED_MOUNT]}


def test_of_many_events_only_the_newest_explaining_one_of_each_object_is_kept() -> None:
    async def test(api: Api, _: manual_clock.ManualClock, events: ExplainingEvents) -> None:
        api.events = (
            event("InvalidRayClusterSpec", "c1", 1, "old"),
            event("InvalidRayClusterSpec", "c1", 3, "new"),
            event("InvalidRayClusterSpec", "c1", 2, "between"),
            event("InvalidRayClusterSpec", "c2", 4, "of another cluster"),
            event("BackOff", "c1", 5, "explains nothing"),
        )
        (found,) = await events.of_cluster("team", "c1")
        assert found == {
            "metadata": {"creationTimestamp": "2026-01-31T12:03:00Z"},
            "involvedObject": {"uid": "c1"},
            "reason": "InvalidRayClusterSpec",
            "message": "new",
        }
        assert len(await events.of_cluster("team", "c2")) == 1
        assert (len(api.asked), len(events._cached)) == (1, 1)

    in_world(test)


def test_only_some_pages_of_a_tenants_events_are_read() -> None:
    async def test(api: Api, _: manual_clock.ManualClock, events: ExplainingEvents) -> None:
        api.has_endless_pages = True
        assert await events.of_pods("team") == (FAILED_MOUNT,)
        assert api.num_pages == MAX_PAGES

    in_world(test)
