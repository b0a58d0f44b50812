"""The learning rate as a function of the step."""

from __future__ import annotations

import pytest

from rljob_api.v1alpha1.optimizer import Optimizer, Schedule
from rljob_trainer.engines.train.optimizer import learning_rate


def rates(schedule: Schedule, warmup_steps: int) -> list[float]:
    spec = Optimizer(learning_rate=0.1, schedule=schedule, warmup_steps=warmup_steps)
    return [learning_rate(spec, step, 6) for step in range(6)]


def test_warm_up_rises_linearly_to_the_full_rate() -> None:
    assert rates(Schedule.CONSTANT, 2) == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.1, 0.1])


def test_linear_falls_to_zero_over_the_steps_after_warm_up() -> None:
    assert rates(Schedule.LINEAR, 2) == pytest.approx([0.05, 0.1, 0.1, 0.075, 0.05, 0.025])


def test_cosine_is_at_half_in_the_middle() -> None:
    assert rates(Schedule.COSINE, 2)[4] == pytest.approx(0.05)
