"""The fit of constants to steps recovers the true constants, and keeps those that no step measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rljob_planner.advice import calibration
from rljob_planner.advice.calibration import STEP, Adjustable, Observation
from rljob_planner.constants import Constants
from rljob_planner.timing.step import step_time
from rljob_planner.workload import TokenLengths, Workload
from rljob_testing.planner import samples

KIND = samples.gpu().name
DEFAULT = Constants()
TRUE = replace(
    DEFAULT,
    training_efficiency={KIND: 0.45},
    forward_efficiency={KIND: 0.25},
    decode_step_seconds=4e-3,
    decode_bandwidth_efficiency=0.75,
    step_seconds=8.0,
    update_seconds=0.5,
    wake_seconds=3.0,
)


UPDATES, PASSES = (Adjustable(0.5, (f"{name}_efficiency",)) for name in ("training", "forward"))
DECODING = (calibration.DECODE_STEP, calibration.DECODE_BANDWIDTH)
PARTS = (calibration.PER_STEP, calibration.PER_PASS, calibration.PER_UPDATE, calibration.PER_WAKE_UP)


def fit(seen: Sequence[Observation], noise: float = 0.05) -> Constants:
    return calibration.fit(DEFAULT, seen, (UPDATES, PASSES, *DECODING, *PARTS), noise)


def jobs() -> list[Workload]:
    """Jobs of different sizes and lengths, so that fixed costs can be separated from growing ones."""
    base = samples.workload(needs_old_logprobs=True)
    sizes = ((32, 8, 300.0), (64, 64, 1000.0), (256, 32, 600.0), (128, 128, 1500.0))
    return [
        replace(
            base, batch_size=batch, mini_batch_size=mini, lengths=TokenLengths(256.0, 1024, mean, 3072, response_cv=0.5)
        )
        for batch, mini, mean in sizes
    ]


def observed(job: Workload, constants: Constants = TRUE, factor: float = 1.0) -> Observation:
    time = step_time(job, samples.placement(samples.one_pool(job)), constants)
    seconds = {phase.name: factor * phase.waited.likely for phase in time.phases}
    return Observation(job, samples.placement(samples.one_pool(job)), {**seconds, STEP: factor * time.total.likely})


def predicted(job: Workload, constants: Constants) -> float:
    return step_time(job, samples.placement(samples.one_pool(job)), constants).total.likely


def test_the_fit_recovers_the_true_constants() -> None:
    found = fit([observed(job) for job in jobs()], noise=0.003)
    assert found.training_efficiency_of(KIND) == pytest.approx(0.45, rel=0.02)
    assert found.forward_efficiency_of(KIND) == pytest.approx(0.25, rel=0.02)
    assert found.decode_step_seconds == pytest.approx(4e-3, rel=0.05)
    assert found.decode_bandwidth_efficiency == pytest.approx(0.75, rel=0.03)
    assert found.step_seconds == pytest.approx(8.0, rel=0.05)
    assert found.update_seconds == pytest.approx(0.5, rel=0.1)
    assert found.wake_seconds == pytest.approx(3.0, rel=0.05)
    assert found.spread == 0.1


def test_one_step_improves_other_predictions() -> None:
    *others, seen = jobs()
    found = fit([observed(seen)])
    for job in others:
        before, after = (predicted(job, each) / predicted(job, TRUE) - 1 for each in (DEFAULT, found))
        assert abs(after) < 0.15
        assert abs(after) < max(0.06, abs(before))


def test_constants_without_measurements_keep_their_defaults() -> None:
    job = jobs()[0]
    only = Observation(job, samples.placement(samples.one_pool(job)), {"update_actor": 20.0})
    found = fit([only])
    assert found.decode_step_seconds == DEFAULT.decode_step_seconds
    assert found.step_seconds == DEFAULT.step_seconds
    assert found.forward_efficiency_of(KIND) == DEFAULT.forward_efficiency_of(KIND)
    assert found.training_efficiency_of(KIND) < DEFAULT.training_efficiency_of(KIND)
    assert fit([]) is DEFAULT


def test_correct_defaults_hardly_change() -> None:
    found = fit([observed(job, DEFAULT) for job in jobs()])
    assert found.training_efficiency_of(KIND) == pytest.approx(DEFAULT.default_efficiency, rel=1e-3)
    assert found.decode_step_seconds == pytest.approx(DEFAULT.decode_step_seconds, rel=1e-3)
    assert (found.pass_seconds, found.update_seconds, found.wake_seconds) == pytest.approx((0, 0, 0), abs=1e-3)


def test_an_outlier_does_not_dominate_the_fit() -> None:
    good = [observed(job, DEFAULT) for job in jobs()]
    found = fit([*good, observed(jobs()[0], DEFAULT, factor=5.0)])
    for job in jobs():
        assert predicted(job, found) == pytest.approx(predicted(job, DEFAULT), rel=0.12)


def test_only_adjustable_constants_change() -> None:
    other = replace(DEFAULT, training_efficiency={KIND: 0.45}, decode_step_seconds=6e-3, step_seconds=5.0)
    found = calibration.fit(DEFAULT, [observed(job, other) for job in jobs()], (UPDATES, calibration.DECODE_STEP))
    assert found.step_seconds == DEFAULT.step_seconds
    assert found.decode_bandwidth_efficiency == DEFAULT.decode_bandwidth_efficiency
    assert found.training_efficiency_of(KIND) == pytest.approx(0.45, rel=0.05)
    assert found.decode_step_seconds == pytest.approx(6e-3, rel=0.15)


def test_the_spread_follows_from_the_remaining_errors() -> None:
    # Nothing distinguishes these four steps of one job, but their times differ.
    job = jobs()[1]
    unlike = [observed(job, DEFAULT, factor) for factor in (0.8, 0.9, 1.1, 1.25)]
    assert 0.1 < fit(unlike).spread <= DEFAULT.spread
