"""Requests of several rollouts that reach an idle engine shortly after each other begin together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest

from rljob_trainer.engines.rollout.base import FinishedSequence, FinishReason, GenerationRequest, SamplingSettings
from rljob_trainer.engines.rollout.loop import EngineLoop
from rljob_trainer.environments import engine_client
from rljob_trainer.environments.engine_client import EngineClient

LONG_SECONDS = 60.0
"""Longer than any test takes."""


class BatchEngine:
    """Ends all requests of a batch in one step, which waits for `may_step`. The next batch begins after it."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.batches: list[list[str]] = []
        self.may_step = threading.Event()
        self.has_begun = threading.Event()

    def add(self, request: GenerationRequest) -> None:
        self.waiting.append(request.request_id)

    def has_unfinished(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[FinishedSequence]:
        batch, self.waiting = self.waiting, []
        self.batches.append(batch)
        self.has_begun.set()
        assert self.may_step.wait(LONG_SECONDS)
        return [FinishedSequence(each, (1,), (0.0,), (0,), "", "", FinishReason.STOP) for each in batch]


@pytest.fixture
def engine() -> Iterator[BatchEngine]:
    made = BatchEngine()
    yield made
    # So that the engine's thread ends also after a failed test.
    made.may_step.set()


def batches(engine: BatchEngine, num_open: int, groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """The batches of the engine, if the groups of requests come in different iterations of the asyncio loop."""

    async def generated() -> None:
        client = EngineClient(EngineLoop(engine), asyncio.get_running_loop(), lambda: num_open)
        tasks = []
        for group in groups:
            tasks += [asyncio.create_task(client.generate(request(each))) for each in group]
            for _ in range(5):
                await asyncio.sleep(0)
        engine.may_step.set()
        await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(generated(), LONG_SECONDS))
    return engine.batches


def request(request_id: str) -> GenerationRequest:
    return GenerationRequest(request_id, (1,), SamplingSettings(1.0, 1.0, 0, 1, ()), 0)


def test_requests_wait_for_those_of_other_rollouts(engine: BatchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "PAUSE_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(engine_client, "LONGEST_WAIT_SECONDS", LONG_SECONDS)
    # Only because the third rollout has come, and all wait for the engine, are they sent before a minute is over.
    assert batches(engine, 3, [["a"], ["b"], ["c"]]) == [["a", "b", "c"]]


def test_requests_do_not_wait_for_a_rollout_that_does_not_come(engine: BatchEngine) -> None:
    assert [each for batch in batches(engine, 4, [["a"], ["b"]]) for each in batch] == ["a", "b"]


def test_the_wait_ends_also_if_requests_keep_coming(engine: BatchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "PAUSE_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(engine_client, "LONGEST_WAIT_SECONDS", 0.0)
    assert [each for batch in batches(engine, 4, [["a"], ["b"]]) for each in batch] == ["a", "b"]


def test_requests_are_sent_at_once_while_the_engine_is_busy(
    engine: BatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "PAUSE_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(engine_client, "LONGEST_WAIT_SECONDS", LONG_SECONDS)
    num_open = 1

    async def generated() -> None:
        nonlocal num_open
        client = EngineClient(EngineLoop(engine), asyncio.get_running_loop(), lambda: num_open)
        first = asyncio.create_task(client.generate(request("a")))
        await asyncio.to_thread(engine.has_begun.wait, LONG_SECONDS)
        # From now on another rollout is open, whose request never comes.
        num_open = 3
        second = asyncio.create_task(client.generate(request("b")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        engine.may_step.set()
        await asyncio.gather(first, second)

    asyncio.run(asyncio.wait_for(generated(), LONG_SECONDS / 2))
    assert engine.batches == [["a"], ["b"]]


def test_a_cancelled_request_is_not_sent(engine: BatchEngine) -> None:
    async def generated() -> None:
        client = EngineClient(EngineLoop(engine), asyncio.get_running_loop(), lambda: 2)
        cancelled = asyncio.create_task(client.generate(request("a")))
        await asyncio.sleep(0)
        cancelled.cancel()
        engine.may_step.set()
        await client.generate(request("b"))

    asyncio.run(asyncio.wait_for(generated(), LONG_SECONDS))
    assert engine.batches == [["b"]]
