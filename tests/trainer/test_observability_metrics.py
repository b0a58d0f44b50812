"""Reduction over workers, timings and the estimate of the remaining time."""

from __future__ import annotations

import math

import pytest

from rljob_trainer.observability.metrics import Reduction, reduce_metrics, reduction_of, spread
from rljob_trainer.observability.timing import PhaseTimer, RecordingBudget, RemainingTime


class ManualClock:
    """A clock that only moves when a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def save_fails(clock: ManualClock) -> None:
    clock.now += 1.0
    raise OSError("disk full")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("critic/rewards/mean", Reduction.MEAN),
        ("critic/rewards/max", Reduction.MAX),
        ("response_length/min", Reduction.MIN),
        ("rollout/logprob_diff_max", Reduction.MAX),
        ("rollout/logprob_diff_mean", Reduction.MEAN),
        ("perf/total_num_tokens", Reduction.SUM),
        ("timing_s/rollout", Reduction.MAX),
        ("actor/pg_loss", Reduction.MEAN),
        ("actor/climax", Reduction.MEAN),
    ],
)
def test_the_suffix_of_a_name_decides_how_workers_are_reduced(name: str, expected: Reduction) -> None:
    assert reduction_of(name) is expected


def test_workers_are_reduced_metric_by_metric() -> None:
    first = {"actor/pg_loss": 1.0, "timing_s/step": 2.0, "perf/total_num_tokens": 10.0, "x/min": 4.0}
    second = {"actor/pg_loss": 4.0, "timing_s/step": 5.0, "perf/total_num_tokens": 7.0, "x/min": -1.0, "only/here": 3.0}
    assert reduce_metrics([first, second]) == {
        "actor/pg_loss": 2.5,
        "timing_s/step": 5.0,
        "perf/total_num_tokens": 17.0,
        "x/min": -1.0,
        "only/here": 3.0,
    }


@pytest.mark.parametrize("name", ["a/max", "a/min", "a/mean"])
@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_worker_with_nan_is_not_hidden_by_the_others(name: str, values: tuple[float, float]) -> None:
    assert math.isnan(reduce_metrics([{name: value} for value in values])[name])


def test_spread_gives_mean_max_and_min() -> None:
    assert spread("critic/rewards", [0.0, 1.0, 0.5]) == {
        "critic/rewards/mean": 0.5,
        "critic/rewards/max": 1.0,
        "critic/rewards/min": 0.0,
    }
    assert spread("critic/rewards", []) == {}


def test_phases_add_up_and_are_reset_when_taken() -> None:
    clock = ManualClock()
    timer = PhaseTimer(clock)
    with timer.phase("rollout"):
        clock.now += 2.0
    with timer.phase("rollout"):
        clock.now += 0.5
    with pytest.raises(OSError, match="disk full"), timer.phase("save"):
        save_fails(clock)
    assert timer.seconds("rollout") == 2.5
    assert timer.take() == {"timing_s/rollout": 2.5, "timing_s/save": 1.0}
    assert timer.take() == {}


def test_recording_takes_at_most_its_share_of_the_time() -> None:
    now = [100.0]
    budget, num_recorded = RecordingBudget(lambda: now[0], max_share=0.01), 0
    assert budget.is_due()
    for _ in range(1000):
        if budget.is_due():
            with budget.spending():
                now[0] += 0.25
            num_recorded += 1
        now[0] += 1.0
    # Each of these steps of a second would spend a quarter of a second.
    assert num_recorded == pytest.approx(1000 * 0.01 / 0.25, abs=1)


def test_all_long_steps_and_their_evaluations_are_recorded() -> None:
    now = [100.0]
    budget = RecordingBudget(lambda: now[0], max_share=0.01)
    for _ in range(100):
        # Recording ends a step, and the evaluation and the next step follow at once.
        for seconds in (60.0, 5.0):
            assert budget.is_due()
            now[0] += seconds
            with budget.spending():
                now[0] += 0.25


def test_the_remaining_time_follows_the_newest_steps() -> None:
    remaining = RemainingTime(total_steps=10, window=2)
    remaining.observe(0, 0.0)
    assert remaining.seconds() is None
    remaining.observe(1, 100.0)
    assert remaining.seconds() == pytest.approx(900.0)
    remaining.observe(2, 104.0)
    remaining.observe(3, 108.0)
    assert remaining.seconds() == pytest.approx(7 * 4.0)


def test_a_resumed_run_counts_only_its_own_steps() -> None:
    remaining = RemainingTime(total_steps=100)
    remaining.observe(90, 1000.0)
    remaining.observe(92, 1006.0)
    assert remaining.seconds() == pytest.approx(8 * 3.0)
