"""Micro-batches that the controller plans for all ranks change how a step is computed, not its results."""

from __future__ import annotations

import math

import pytest

from rljob_testing import compare
from rljob_testing.training import gloo_ranks, planned_runs
from rljob_trainer.observability.metrics import POLICY_LOSS

COUNTS = (2, 4)
CLOSE = 1e-6


@pytest.fixture(scope="module")
def seen() -> dict[int, list[planned_runs.Runs]]:
    found = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(planned_runs.both_runs, count) for count in COUNTS])
    return {
        count: [each for each in ranks if isinstance(each, planned_runs.Runs)]
        for count, ranks in zip(COUNTS, found, strict=True)
    }


@pytest.mark.parametrize("num_ranks", COUNTS)
def test_losses_and_gradients_are_those_of_ranks_that_pack_alone(
    seen: dict[int, list[planned_runs.Runs]], num_ranks: int
) -> None:
    assert len(seen[num_ranks]) == num_ranks
    for rank in seen[num_ranks]:
        assert len(rank.planned.gradients) == len(rank.alone.gradients) == 2
        first, second = map(compare.relative_difference, rank.planned.gradients, rank.alone.gradients)
        assert first < CLOSE
        # After AdamW's first step, whose sign-like changes enlarge differences of small gradients.
        assert second < compare.RELATIVE
        assert math.isclose(rank.planned.metrics[POLICY_LOSS], rank.alone.metrics[POLICY_LOSS], abs_tol=CLOSE)
        compare.assert_same_metrics(rank.planned.metrics, rank.alone.metrics)


@pytest.mark.parametrize("num_ranks", COUNTS)
def test_all_passes_follow_the_plan(seen: dict[int, list[planned_runs.Runs]], num_ranks: int) -> None:
    """The passes for old log-probabilities and values have the rows of both updates."""
    for rank in seen[num_ranks]:
        old, values, *updates = [sum(map(len, each)) for each in rank.micro_batches]
        of_critic, of_actor = updates[:2], updates[2:]
        assert len(of_actor) == 2
        assert old == values == sum(of_critic) == sum(of_actor)
    for passes in zip(*(rank.micro_batches for rank in seen[num_ranks]), strict=True):
        assert len({len(each) for each in passes}) == 1
    assert max(len(each) for rank in seen[2] for each in rank.micro_batches) > 1


@pytest.mark.parametrize("num_ranks", COUNTS)
def test_a_plan_that_does_not_fit_one_rank_is_followed_by_none(
    seen: dict[int, list[planned_runs.Runs]], num_ranks: int
) -> None:
    assert [rank.foreign for rank in seen[num_ranks]] == [None] * num_ranks
