"""Requests are dealt to engines, and finished responses are scored while others are generated. The engines are
simulated: by default each poll is one unit of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_testing.training.joined_workers import FinishedCall
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.sampler import REWARD_COLUMNS, Engines, Sampler
from rljob_trainer.controller.stop_request import StepAbandonedError, StopRequest
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.workers.columns import (
    PROMPT_TEXTS,
    PROMPT_TOKEN_IDS,
    RESPONSE_LENGTHS,
    RESPONSE_TEXTS,
    SAMPLE_IDS,
    SAMPLE_SEEDS,
    score_column,
)

SAMPLING = SamplingSettings(1.0, 1.0, 0, 8, ())
ONE_ENGINE = Engines()


@dataclass
class SimulatedEngine:
    """Generates the oldest `num_slots` responses at the same time; response i takes `lengths[i]` steps."""

    lengths: Sequence[int]
    num_slots: int
    remaining: dict[int, int] = field(default_factory=dict)
    """Steps that each response still needs, in the order of the requests."""

    def advance(self) -> list[int]:
        """Returns the responses that finish in this step."""
        running = list(self.remaining)[: self.num_slots]
        for sample_id in running:
            self.remaining[sample_id] -= 1
        finished = [sample_id for sample_id in running if not self.remaining[sample_id]]
        for sample_id in finished:
            del self.remaining[sample_id]
        return finished


@dataclass
class World:
    """Engines and scoring processes. The score of a response is ten times its number."""

    lengths: Sequence[int]
    engines: Engines = ONE_ENGINE
    polls_until_scored: int = 0
    steps_per_poll: int = 1
    stop: StopRequest = field(default_factory=StopRequest)
    num_polls: int = 0
    submitted: list[list[list[int]]] = field(default_factory=list)
    """For each call of `submit`, the responses of each engine."""
    scored_at: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Response -> (the poll after which its scoring began, its rank)."""
    num_aborts: int = 0

    def __post_init__(self) -> None:
        slots = self.engines.max_num_sequences
        self.simulated = [SimulatedEngine(self.lengths, slots) for _ in range(self.engines.num_engines)]
        self.sampler = Sampler(self, self, self.engines, self.stop)

    def begin_rollout(self, syncs: bool) -> list[None]:
        assert syncs
        return [None]

    def submit(self, batch: list[DataProto], sampling: SamplingSettings) -> DataProto:
        assert sampling == SAMPLING
        self.submitted.append([part[SAMPLE_IDS].tolist() for part in batch])
        for engine, part in zip(self.simulated, batch, strict=True):
            # The seed of a response is its number plus 100.
            assert torch.equal(part[SAMPLE_SEEDS], part[SAMPLE_IDS] + 100)
            engine.remaining |= {sample_id: self.lengths[sample_id] for sample_id in part[SAMPLE_IDS].tolist()}
        return DataProto.concat(batch)

    def take(self, max_seconds: float) -> DataProto:
        assert max_seconds > 0
        self.num_polls += 1
        steps = range(self.steps_per_poll)
        ids = [sample_id for engine in self.simulated for _ in steps for sample_id in engine.advance()]
        return DataProto(
            {SAMPLE_IDS: torch.tensor(ids, dtype=torch.int64), RESPONSE_LENGTHS: torch.ones(len(ids))},
            {RESPONSE_TEXTS: tuple(f"response {each}" for each in ids)},
        )

    def abort(self) -> list[None]:
        self.num_aborts += 1
        for engine in self.simulated:
            engine.remaining.clear()
        return [None]

    def start_scoring(self, batch: list[DataProto]) -> FinishedCall[DataProto]:
        assert len(batch) == self.engines.num_ranks
        for rank, part in enumerate(batch):
            for sample_id, text, prompt in zip(
                part[SAMPLE_IDS].tolist(), *map(part.object_column, (RESPONSE_TEXTS, PROMPT_TEXTS)), strict=True
            ):
                assert (text, prompt) == (f"response {sample_id}", f"prompt {sample_id}")
                self.scored_at[sample_id] = (self.num_polls, rank)
        return FinishedCall(DataProto())

    def finish_scoring(self, batch: list[DataProto]) -> DataProto:
        for rank, part in enumerate(batch):
            assert {self.scored_at[sample_id][1] for sample_id in part[SAMPLE_IDS].tolist()} <= {rank}
        return DataProto({score_column("score"): 10.0 * torch.cat([part[SAMPLE_IDS] for part in batch])})

    def scored(self, max_seconds: float) -> list[list[int]]:
        del max_seconds
        return [[each for each, (at, _) in self.scored_at.items() if at + self.polls_until_scored <= self.num_polls]]

    def drop_scores(self) -> list[None]:
        return [None]

    def response_texts(self, batch: DataProto) -> DataProto:
        return batch

    def take_metrics(self) -> Metrics:
        return {}

    def take_memory(self) -> Metrics:
        return {}

    def submit_all(self) -> torch.Tensor:
        """Requests all responses."""
        ids = torch.arange(len(self.lengths))
        columns = {name: tuple(f"prompt {each}" for each in ids.tolist()) for name in REWARD_COLUMNS}
        self.sampler.begin(SAMPLING, syncs=True)
        inputs = DataProto({SAMPLE_SEEDS: ids + 100, PROMPT_TOKEN_IDS: ids}, {**columns})
        return self.sampler.submit(inputs)


def test_engines_get_equal_parts_at_once_and_rows_come_back_in_order() -> None:
    world = World([3, 1, 2, 1, 5, 1, 1], Engines(2, 1, 4))
    ids = world.submit_all()
    assert world.submitted == [[[0, 1, 2, 3], [4, 5, 6]]]
    world.sampler.drain()
    assert world.num_polls == 5
    order = torch.tensor([6, 0, 3])
    assert world.sampler.take_rows(order).object_column(RESPONSE_TEXTS) == ("response 6", "response 0", "response 3")
    assert world.sampler.finish_scoring(ids)[score_column("score")].tolist() == [10.0 * each for each in range(7)]


def test_each_response_is_scored_when_it_has_finished_by_a_rank_of_its_engine() -> None:
    world = World([3, 1, 2, 1, 5, 1, 1, 1], Engines(2, 2, 4))
    world.submit_all()
    world.sampler.drain()
    assert {each: at for each, (at, _) in world.scored_at.items()} == dict(enumerate([3, 1, 2, 1, 5, 1, 1, 1]))
    # Ranks 0 and 1 share the first engine, ranks 2 and 3 the second.
    assert {each: rank for each, (_, rank) in world.scored_at.items()} == dict(enumerate([0, 1, 0, 1, 2, 3, 2, 3]))


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    num_engines=st.integers(1, 4),
    num_slots=st.integers(1, 8),
)
def test_dealing_by_load_is_as_fast_as_a_list_schedule(lengths: list[int], num_engines: int, num_slots: int) -> None:
    """Graham's bound for list scheduling: no slot is idle before the last responses are dealt. Those that wait in an
    engine then, at most one for each slot, begin when its running ones have ended."""
    world = World(lengths, Engines(num_engines, 1, num_slots, deals_by_load=True))
    ids = world.submit_all()
    for engine in world.simulated:
        assert len(engine.remaining) <= num_slots
    world.sampler.drain()
    assert sorted(world.scored_at) == ids.tolist()
    bound = sum(lengths) / (num_engines * num_slots) + 2 * max(lengths)
    assert world.num_polls <= bound


def test_an_engine_that_is_done_gets_more_work_when_dealing_by_load() -> None:
    """The first half of the responses is long, so with equal parts one engine has most of the work."""
    lengths = [10] * 16 + [1] * 16
    equal, by_load = (World(lengths, Engines(2, 1, 4, deals_by_load=each)) for each in (False, True))
    for world in (equal, by_load):
        world.submit_all()
        world.sampler.drain()
    # The best: 176 / 8 = 22.
    assert (equal.num_polls, by_load.num_polls) == (40, 22)


def test_slots_that_become_free_between_two_polls_are_filled_when_dealing_by_load() -> None:
    """In each poll the slots could generate eight responses, but in the first one the engine has only four."""
    world = World([2] * 60, Engines(1, 1, 4, deals_by_load=True), steps_per_poll=4)
    world.submit_all()
    world.sampler.drain()
    assert world.num_polls == 1 + (60 - 4) // 8
    # The next step begins as the first one did.
    world.lengths = world.simulated[0].lengths = [2] * 120
    world.sampler.begin(SAMPLING, syncs=True)
    ids = torch.arange(60, 120)
    columns = {name: tuple(f"prompt {each}" for each in ids.tolist()) for name in REWARD_COLUMNS}
    world.sampler.submit(DataProto({SAMPLE_SEEDS: ids + 100, PROMPT_TOKEN_IDS: ids}, {**columns}))
    assert len(world.submitted[-1][0]) == 4


def test_a_stop_request_drops_what_has_not_finished() -> None:
    world = World([1, 9, 9])
    world.submit_all()
    assert world.sampler.poll() == [0]
    world.stop.is_requested = True
    with pytest.raises(StepAbandonedError):
        world.sampler.poll()
    assert world.num_aborts == 1
    assert not world.sampler.num_in_flight
