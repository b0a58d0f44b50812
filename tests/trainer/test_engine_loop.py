"""The thread that runs a rollout engine: it makes the calls that `generate` makes, hands over what has ended, and fails
its callers when it dies or is stuck. The engine is a fake that makes one token per step."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from rljob_testing.training.whole_rollouts import run_to_empty
from rljob_trainer.engines.rollout.base import (
    FinishedSequence,
    FinishReason,
    GenerationRequest,
    RolloutEngine,
    SamplingSettings,
)
from rljob_trainer.engines.rollout.loop import THREAD_NAME, EngineLoop
from rljob_trainer.errors import ConfigurationError, ResourceError, TrainerError, WorkerError

SECONDS = 60.0
"""Longer than any test waits."""


class FakeEngine:
    """Request `i` ends after as many steps as it has tokens. Records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lengths: dict[str, int] = {}
        self.num_tokens: dict[str, int] = {}
        self.may_step = threading.Semaphore(10**6)
        """`paused` makes each step wait for a `release`."""
        self.before_step: Callable[[], None] = lambda: None
        self.has_begun_step = threading.Event()

    def paused(self) -> FakeEngine:
        """Every step waits until a test releases it."""
        self.may_step = threading.Semaphore(0)
        return self

    def clear_cache(self) -> None:
        self.calls.append("clear")

    def add(self, request: GenerationRequest) -> None:
        self.calls.append(f"add {request.request_id}")
        self.lengths[request.request_id] = request.sampling.max_new_tokens
        self.num_tokens[request.request_id] = 0

    def has_unfinished(self) -> bool:
        return bool(self.lengths)

    def step(self) -> list[FinishedSequence]:
        self.has_begun_step.set()
        assert self.may_step.acquire(timeout=SECONDS)
        self.before_step()
        self.calls.append("step")
        for request_id in self.lengths:
            self.num_tokens[request_id] += 1
        ended = [each for each, length in self.lengths.items() if self.num_tokens[each] == length]
        return [self._end(request_id, FinishReason.LENGTH) for request_id in ended]

    def abort(self, request_ids: Iterable[str]) -> list[FinishedSequence]:
        found = [each for each in request_ids if each in self.lengths]
        self.calls.append(f"abort {' '.join(found)}")
        return [self._end(request_id, FinishReason.ABORTED) for request_id in found]

    def _end(self, request_id: str, reason: FinishReason) -> FinishedSequence:
        del self.lengths[request_id]
        number = self.num_tokens[request_id]
        return FinishedSequence(request_id, (7,) * number, (-1.0,) * number, (0,) * number, "", "", reason)


class SetClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request(number: int, length: int) -> GenerationRequest:
    return GenerationRequest(str(number), (1,), SamplingSettings(1.0, 1.0, 0, length, ()), 0)


def loop_of(
    engine: FakeEngine, stall_seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
) -> EngineLoop:
    return EngineLoop(engine, stall_seconds=stall_seconds, clock=clock)  # type: ignore[arg-type]


def ids(found: Iterable[FinishedSequence]) -> list[str]:
    return [each.request_id for each in found]


def wait_for_steps(engine: FakeEngine, number: int) -> None:
    end = time.monotonic() + SECONDS
    while engine.calls.count("step") < number:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_engine_gets_the_calls_that_generate_makes() -> None:
    requests = [request(0, 3), request(1, 1), request(2, 2)]
    ours, theirs = FakeEngine(), FakeEngine()
    loop = loop_of(ours)
    for _ in range(2):
        theirs.clear_cache()
        assert run_to_empty(loop, requests) == RolloutEngine.generate(theirs, requests)  # type: ignore[arg-type]
    assert ours.calls == theirs.calls


def test_take_returns_what_has_ended_since_the_last_call() -> None:
    engine = FakeEngine().paused()
    loop = loop_of(engine)
    loop.submit([request(0, 1), request(1, 2), request(2, 9)])
    assert loop.take(0.0) == []
    engine.may_step.release(2)
    wait_for_steps(engine, 2)
    first = loop.take(0.1)
    assert ids(first) == ["0", "1"]
    assert loop.num_unfinished == 1
    engine.may_step.release(100)
    # Does not wait longer than until the last one has ended.
    assert ids(loop.take(SECONDS)) == ["2"]
    assert loop.take(SECONDS) == []


def test_a_request_that_the_engine_loses_is_an_error() -> None:
    engine = FakeEngine()
    loop = loop_of(engine)
    engine.has_unfinished = lambda: False  # type: ignore[method-assign]
    loop.submit([request(7, 3)])
    with pytest.raises(WorkerError, match=r"lost 1 requests, such as \['7'\]"):
        loop.take(SECONDS)


def test_take_does_not_return_at_the_first_response() -> None:
    engine = FakeEngine()
    engine.before_step = lambda: time.sleep(0.02)
    loop = loop_of(engine)
    loop.submit([request(0, 1), request(1, 10)])
    assert ids(loop.take(SECONDS)) == ["0", "1"]


def test_later_requests_join_those_that_are_running() -> None:
    engine = FakeEngine().paused()
    loop = loop_of(engine)
    loop.submit([request(0, 3)])
    engine.may_step.release()
    wait_for_steps(engine, 1)
    loop.submit([request(1, 1), request(2, 1)])
    engine.may_step.release(100)
    assert set(ids(loop.take(SECONDS))) == {"0", "1", "2"}
    # Together, between two steps, and without a cleared cache.
    assert engine.calls[:2] == ["clear", "add 0"]
    joined = engine.calls.index("add 1")
    assert engine.calls[joined : joined + 3] == ["add 1", "add 2", "step"]
    assert engine.calls.count("clear") == 1


def test_an_id_that_is_in_use_is_rejected() -> None:
    engine = FakeEngine().paused()
    loop = loop_of(engine)
    loop.submit([request(0, 1)])
    with pytest.raises(AssertionError, match=r"unfinished requests have the ids \['0'\]"):
        loop.submit([request(1, 1), request(0, 1)])
    engine.may_step.release(100)
    assert ids(loop.take(SECONDS)) == ["0"]


def test_abort_returns_the_tokens_so_far() -> None:
    engine = FakeEngine().paused()
    loop = loop_of(engine)
    loop.submit([request(0, 1), request(1, 9), request(2, 9), request(3, 3)])
    engine.may_step.release(2)
    wait_for_steps(engine, 2)
    with ThreadPoolExecutor() as executor:
        aborting = executor.submit(loop.abort, ["0", "1", "2", "unknown"])
        while not loop._inbox:
            time.sleep(0.001)
        engine.may_step.release(100)
        partials = aborting.result()
    assert [(each.request_id, each.finish_reason) for each in partials] == [
        ("1", FinishReason.ABORTED),
        ("2", FinishReason.ABORTED),
    ]
    assert {len(each.token_ids) for each in partials} == {3}
    assert ids(loop.take(SECONDS)) == ["0", "3"]
    assert loop.abort(["1"]) == []


def test_the_random_streams_are_switched_exactly_while_the_thread_uses_the_engine() -> None:
    is_running = False
    seen: list[bool] = []

    @contextmanager
    def while_running() -> Iterator[None]:
        nonlocal is_running
        assert not is_running
        assert threading.current_thread().name == THREAD_NAME
        is_running = True
        yield
        is_running = False

    engine = FakeEngine()
    engine.before_step = lambda: seen.append(is_running)
    loop = loop_of(engine)
    loop.while_running = while_running
    for number in range(20):
        run_to_empty(loop, [request(number, 1)])
        assert not is_running
    assert seen == [True] * 20


def test_requests_from_another_moment_are_never_lost() -> None:
    """Requests arrive while the loop becomes idle."""
    engine = FakeEngine()
    loop = loop_of(engine)
    found: list[str] = []
    chance = random.Random(0)
    for number in range(300):
        loop.submit([request(number, 1)])
        if chance.random() < 0.5:
            found += ids(loop.take(SECONDS if chance.random() < 0.5 else 0.0))
    loop.wait_until_idle()
    found += ids(loop.take(0.0))
    assert sorted(found, key=int) == [str(number) for number in range(300)]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigurationError("spec.x: wrong"), ConfigurationError, r"^spec\.x: wrong$"),
        (ZeroDivisionError("by nothing"), WorkerError, r"(?s)Traceback.*in step.*ZeroDivisionError: by nothing"),
        (MemoryError("full"), WorkerError, r"(?s)MemoryError: full"),
    ],
)
def test_an_error_in_the_thread_is_raised_by_calls_that_wait_and_by_later_ones(
    error: Exception, kind: type[TrainerError], text: str
) -> None:
    engine = FakeEngine().paused()
    loop = loop_of(engine)

    def fail() -> None:
        if engine.calls.count("step") == 1:
            raise error

    engine.before_step = fail
    loop.submit([request(0, 1), request(1, 9)])
    with ThreadPoolExecutor() as executor:
        waiting = executor.submit(loop.take, SECONDS)
        began = time.monotonic()
        engine.may_step.release(2)
        with pytest.raises(kind, match=text) as raised:
            waiting.result()
    assert time.monotonic() - began < SECONDS / 2
    assert type(raised.value) is kind
    chain = [raised.value, raised.value.__cause__, raised.value.__cause__ and raised.value.__cause__.__cause__]
    assert error in chain
    later: list[Callable[[], object]] = [
        lambda: loop.take(0.0),
        lambda: loop.submit([request(2, 1)]),
        lambda: loop.abort([]),
        loop.wait_until_idle,
        lambda: loop.num_unfinished,
    ]
    for call in later:
        with pytest.raises(kind, match=text):
            call()


def test_a_stuck_step_is_reported_with_its_place() -> None:
    engine, clock = FakeEngine().paused(), SetClock()
    loop = loop_of(engine, stall_seconds=600.0, clock=clock)
    loop.submit([request(0, 1)])
    with ThreadPoolExecutor() as executor:
        waiting = executor.submit(loop.wait_until_idle)
        # Before that, the thread notes when it applies the request.
        assert engine.has_begun_step.wait(SECONDS)
        clock.now = 600.0
        assert loop.num_unfinished == 1
        began = time.monotonic()
        clock.now = 605.0
        with pytest.raises(ResourceError) as raised:
            waiting.result()
    assert time.monotonic() - began < 30
    text = str(raised.value)
    assert text.startswith("spec.training.rollout.stallSeconds: a step of the rollout engine takes longer than 600 s")
    assert "(seen: 605 s)" in text
    assert "in step\n    assert self.may_step.acquire(timeout=SECONDS)" in text
    # It stays failed, even if the step ends after all.
    engine.may_step.release(100)
    with pytest.raises(ResourceError, match="605 s"):
        loop.take(0.0)


def test_time_between_rollouts_and_slow_but_progressing_steps_are_no_stall() -> None:
    engine, clock = FakeEngine().paused(), SetClock()
    loop = loop_of(engine, stall_seconds=600.0, clock=clock)
    engine.before_step = lambda: setattr(clock, "now", clock.now + 590)
    engine.may_step.release(100)
    for _ in range(2):
        clock.now += 10_000
        assert len(run_to_empty(loop, [request(0, 5)])) == 1
