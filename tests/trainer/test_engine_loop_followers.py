"""Ranks that share a model in conversations: only the leader gets requests, and the other rank makes the same calls of
the engine until the leader releases it. Without Ray; the engine is a fake that makes one token per step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from rljob_testing.training import gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.process_group import group_of_model_ranks
from rljob_trainer.engines.rollout.base import FinishedSequence, FinishReason, GenerationRequest, SamplingSettings
from rljob_trainer.engines.rollout.loop import EngineLoop, ModelPeers

SECONDS = 60.0
"""Longer than any test waits."""
LAG_SECONDS = 0.2
NUM_PHASES = 6
ENDLESS = 10**9


class FakeEngine:
    """A request ends after as many steps as it may have tokens. Records its calls, without steps."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.num_left: dict[str, int] = {}

    def clear_cache(self) -> None:
        self.calls.append(("clear",))

    def add(self, request: GenerationRequest) -> None:
        self.calls.append(("add", request.request_id))
        self.num_left[request.request_id] = request.sampling.max_new_tokens

    def has_unfinished(self) -> bool:
        return bool(self.num_left)

    def step(self) -> list[FinishedSequence]:
        time.sleep(0.001)
        self.num_left = {name: number - 1 for name, number in self.num_left.items()}
        ended = [name for name, number in self.num_left.items() if not number]
        return [self._end(name, FinishReason.STOP) for name in ended]

    def abort(self, request_ids: Iterable[str]) -> list[FinishedSequence]:
        found = [name for name in request_ids if name in self.num_left]
        return [self._end(name, FinishReason.ABORTED) for name in found]

    def _end(self, name: str, reason: FinishReason) -> FinishedSequence:
        self.calls.append((reason.value, name))
        del self.num_left[name]
        return FinishedSequence(name, (7,), (-1.0,), (0,), "", "", reason)


@dataclass(frozen=True)
class Seen:
    """What one rank has seen."""

    calls: list[tuple[str, ...]]
    finished: list[str]


def request(name: str, num_tokens: int) -> GenerationRequest:
    return GenerationRequest(name, (1,), SamplingSettings(1.0, 1.0, 0, num_tokens, ()), 0)


def on_a_rank(late_rank: int, context: WorkerContext) -> Seen:
    """Phases of conversations of three turns each; in every other phase the last turn is aborted. `late_rank`: its
    caller comes later."""
    engine, finished, changed = FakeEngine(), list[str](), threading.Condition()
    group = group_of_model_ranks(context, 2, timedelta(seconds=SECONDS))
    assert group is not None
    loop = EngineLoop(engine, peers=ModelPeers(group, 0), shares=True)  # type: ignore[arg-type]

    def note(sequences: list[FinishedSequence]) -> None:
        with changed:
            finished.extend(each.request_id for each in sequences)
            changed.notify_all()

    def wait_for(name: str) -> None:
        with changed:
            assert changed.wait_for(lambda: name in finished, SECONDS)

    if loop.is_leader:
        loop.on_finished = note
    for phase in range(1, NUM_PHASES + 1):
        time.sleep(LAG_SECONDS * (context.rank == late_rank))
        if not loop.is_leader:
            loop.follow(phase)
            # As a worker that is asked for results, and then to end the phase.
            loop.check()
            loop.wait_until_idle()
            continue
        for turn in range(2):
            loop.submit([request(f"{phase}/{turn}", 3), request(f"{phase}/{turn}b", 5)], keeps_cache=True)
            wait_for(f"{phase}/{turn}b")
            time.sleep(0.02)  # An environment answers; nothing is generated.
        loop.submit([request(f"{phase}/last", ENDLESS if phase % 2 else 2)], keeps_cache=True)
        if phase % 2:
            [partial_response] = loop.abort([f"{phase}/last"])
            assert partial_response.finish_reason is FinishReason.ABORTED
        else:
            wait_for(f"{phase}/last")
        loop.release(phase)
        loop.wait_until_idle()
    dist.barrier()
    return Seen(engine.calls, finished)


@pytest.mark.parametrize("late_rank", [0, 1])
def test_the_follower_makes_the_calls_of_the_leader(late_rank: int) -> None:
    [found] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(partial(on_a_rank, late_rank), 2)])
    leader, follower = (each for each in found if isinstance(each, Seen))
    assert follower.calls == leader.calls
    assert ("clear",) not in leader.calls
    assert [call for call in leader.calls if call[0] == "abort"] == [("abort", f"{phase}/last") for phase in (1, 3, 5)]
    assert len(leader.finished) == 4 * NUM_PHASES + NUM_PHASES // 2
    assert not follower.finished
