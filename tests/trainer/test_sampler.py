"""Requests are distributed over the engines, and finished responses are scored while others are generated."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_testing.training.simulated_engines import SimulatedRollouts
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.sampler import Engines, ScoringSettings
from rljob_trainer.controller.stop_request import StepAbandonedError
from rljob_trainer.errors import RewardError
from rljob_trainer.workers.columns import (
    ENVIRONMENT_RESULTS,
    IS_LOST,
    RESPONSE_TEXTS,
    SAMPLE_IDS,
    score_column,
)


def test_engines_get_equal_parts_at_once_and_rows_come_back_in_order() -> None:
    world = SimulatedRollouts([3, 1, 2, 1, 5, 1, 1], Engines(2, 1, 4))
    ids = world.submit_all()
    assert world.submitted == [[[0, 1, 2, 3], [4, 5, 6]]]
    world.sampler.drain()
    assert world.num_polls == 5
    order = torch.tensor([6, 0, 3])
    assert world.sampler.take_rows(order).object_column(RESPONSE_TEXTS) == ("text 6", "text 0", "text 3")
    assert world.sampler.finish_scoring(ids)[score_column("score")].tolist() == [10.0 * each for each in range(7)]


def test_all_rows_of_a_response_come_together_and_its_last_row_is_scored_once() -> None:
    world = SimulatedRollouts([3, 1, 2, 1], Engines(2, 1, 4), num_rows=(2, 1, 3))
    world.failures.update({2: 1})
    ids = world.submit_all()
    world.sampler.drain()
    assert world.submitted == [[[0, 1], [2, 3]], [[], [2]]]
    assert sorted(world.scored_pairs) == [(f"prompt {each}", f"text {each}") for each in range(4)]
    rows = world.sampler.take_rows(torch.tensor([2, 1, 3, 0]))
    assert rows[SAMPLE_IDS].tolist() == [2, 2, 2, 1, 3, 3, 0, 0]
    assert rows.object_column(RESPONSE_TEXTS)[:4] == ("row 0", "row 1", "text 2", "text 1")
    assert world.sampler.finish_scoring(ids)[score_column("score")].tolist() == [0.0, 10.0, 20.0, 30.0]


def test_each_response_is_scored_when_it_has_finished_by_a_rank_of_its_engine() -> None:
    world = SimulatedRollouts([3, 1, 2, 1, 5, 1, 1, 1], Engines(2, 2, 4))
    world.submit_all()
    world.sampler.drain()
    assert sorted(world.scored_pairs) == [(f"prompt {each}", f"text {each}") for each in range(8)]
    assert {each: at for each, (at, _) in world.scored_at.items()} == dict(enumerate([3, 1, 2, 1, 5, 1, 1, 1]))
    # Ranks 0 and 1 share the first engine, ranks 2 and 3 the second.
    assert {each: rank for each, (_, rank) in world.scored_at.items()} == dict(enumerate([0, 1, 0, 1, 2, 3, 2, 3]))


def test_a_group_is_scored_by_one_rank_when_its_last_response_has_finished() -> None:
    world = SimulatedRollouts([3, 1, 2, 1, 5, 1, 1, 1], Engines(2, 2, 4), scoring=ScoringSettings(sees_groups=True))
    # The engines have responses 0 to 3 and 4 to 7, so the middle group is in both.
    ids = world.submit_all(group_size=3)
    world.sampler.drain()
    assert {each: at for each, (at, _) in world.scored_at.items()} == dict(enumerate([3, 3, 3, 5, 5, 5, 1, 1]))
    assert {each: rank for each, (_, rank) in world.scored_at.items()} == dict(enumerate([0, 0, 0, 1, 1, 1, 2, 2]))
    assert sorted(world.scored_groups) == [[0, 0, 0], [3, 3, 3], [6, 6]]
    assert world.sampler.finish_scoring(ids)[score_column("score")].tolist() == [10.0 * each for each in range(8)]


def test_abandoned_groups_are_forgotten() -> None:
    world = SimulatedRollouts([1, 3, 1, 1], scoring=ScoringSettings(sees_groups=True))
    world.submit_all(group_size=2)
    world.sampler.poll()
    world.sampler.abandon()
    assert list(world.scored_at) == [2, 3]
    assert not world.sampler.num_in_flight


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    num_engines=st.integers(1, 4),
    num_slots=st.integers(1, 8),
)
def test_load_balancing_is_as_fast_as_a_list_schedule(lengths: list[int], num_engines: int, num_slots: int) -> None:
    """Graham's bound for list scheduling: no slot is idle before the last responses are distributed. Those that wait in
    an engine then, at most one for each slot, begin when its running ones have ended."""
    world = SimulatedRollouts(lengths, Engines(num_engines, 1, num_slots, is_load_balanced=True))
    ids = world.submit_all()
    for engine in world.simulated:
        assert len(engine.remaining) <= num_slots
    world.sampler.drain()
    assert sorted(world.scored_at) == ids.tolist()
    bound = sum(lengths) / (num_engines * num_slots) + 2 * max(lengths)
    assert world.num_polls <= bound


def test_an_engine_that_is_done_gets_more_work_with_load_balancing() -> None:
    """The first half of the responses is long, so with equal parts one engine has most of the work."""
    lengths = [10] * 16 + [1] * 16
    equal, balanced = (SimulatedRollouts(lengths, Engines(2, 1, 4, is_load_balanced=each)) for each in (False, True))
    for world in (equal, balanced):
        world.submit_all()
        world.sampler.drain()
    # The best: 176 / 8 = 22.
    assert (equal.num_polls, balanced.num_polls) == (40, 22)


def test_slots_that_become_free_between_two_polls_are_filled_with_load_balancing() -> None:
    """In each poll the slots could generate eight responses, but in the first one the engine has only four."""
    world = SimulatedRollouts([2] * 60, Engines(1, 1, 4, is_load_balanced=True), steps_per_poll=4)
    world.submit_all()
    world.sampler.drain()
    assert world.num_polls == 1 + (60 - 4) // 8
    # The next step begins as the first one did.
    world.simulated[0].lengths = world.lengths = [2] * 120
    world.submit_all(60)
    assert len(world.submitted[-1][0]) == 4


def test_a_stop_request_drops_what_has_not_finished() -> None:
    world = SimulatedRollouts([1, 9, 9])
    world.submit_all()
    assert world.sampler.poll() == [0]
    world.stop.is_requested = True
    with pytest.raises(StepAbandonedError):
        world.sampler.poll()
    world.sampler.abandon()
    assert world.num_aborts == 1
    assert not world.sampler.num_in_flight


def test_rollouts_of_an_environment_that_end_after_a_stop_request_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop signal may have reached what the environment had started, so its reward may be wrong."""
    world = SimulatedRollouts([1, 2])
    take = world.take

    def with_results(seconds: float) -> DataProto:
        batch = take(seconds)
        results: tuple[object, ...] = (("OK", 1.0, ""),) * len(batch)
        return batch.with_columns(objects={ENVIRONMENT_RESULTS: results})

    monkeypatch.setattr(world, "take", with_results)
    ids = world.submit_all()
    assert world.sampler.poll() == [0]
    world.stop.is_requested = True
    with pytest.raises(StepAbandonedError):
        world.sampler.poll()
    assert [world.sampler.are_finished(each) for each in ids.split(1)] == [True, False]


def test_a_response_that_an_engine_does_not_complete_is_requested_once_more() -> None:
    """The first one fails once, the third always."""
    world = SimulatedRollouts([1, 2, 3], Engines(3, 1, 4))
    world.failures.update({0: 1, 2: 9})
    ids = world.submit_all()
    world.sampler.drain()
    assert world.submitted == [[[0], [1], [2]], [[0], [], []], [[], [], [2]]]
    # The same seed, from the same engine, and only the last attempt is scored.
    assert sorted(world.scored_pairs) == [(f"prompt {each}", f"text {each}") for each in range(3)]
    assert world.sampler.take_rows(ids)[IS_LOST].tolist() == [False, False, True]


def test_a_scoring_that_does_not_start_is_an_error_of_the_wait_for_scores() -> None:
    """Its responses never have scores, so the wait would never end."""

    class FailedCall:
        def result(self) -> DataProto:
            raise RewardError("a row cannot be sent")

    world = SimulatedRollouts([1])
    world.start_scoring = lambda _batch: FailedCall()  # type: ignore[method-assign, assignment, return-value]
    world.submit_all()
    world.sampler.drain()
    with pytest.raises(RewardError, match="a row cannot be sent"):
        world.sampler.poll_scores()
