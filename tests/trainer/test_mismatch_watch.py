"""When a run warns that the rollout engine and the trainer disagree."""

from __future__ import annotations

import logging
import math

import pytest

from rljob_api.v1alpha1.job import RLJob
from rljob_testing.jobs.valid_job import valid_job
from rljob_trainer.controller.checks.fit import check_algorithm
from rljob_trainer.controller.mismatch_watch import MismatchWatch
from rljob_trainer.observability.metrics import (
    LOGPROB_DIFF_MAX,
    LOGPROB_DIFF_MEAN,
    LOGPROB_DIFF_SHARE,
    MERGE_ERROR,
    REJECTED_FRACTION,
    STALENESS_MAX,
)

_T = "spec.training."
_CORRECTION = _T + "algorithm.rolloutCorrection"
_SYNC = {_T + "rollout.syncEverySteps": 4, "spec.checkpoint.everySteps": 4}


def warnings_of(
    caplog: pytest.LogCaptureFixture, differences: list[float], staleness: float = 0.0, **edits: object
) -> list[str]:
    """The warnings of a float32 run whose steps have these mean differences."""
    caplog.clear()
    edits = {_T + "model.dtype": "Float32", **edits}
    watch = MismatchWatch(RLJob.from_wire(valid_job(edits)).spec)
    for step, mean in enumerate(differences, 1):
        metrics = {LOGPROB_DIFF_MEAN: mean, LOGPROB_DIFF_MAX: 2 * mean, LOGPROB_DIFF_SHARE: 0.5}
        watch.step_done(step, {**metrics, STALENESS_MAX: staleness})
    return [record.getMessage() for record in caplog.records]


def test_a_difference_is_logged_and_again_when_it_has_doubled(caplog: pytest.LogCaptureFixture) -> None:
    first, second = warnings_of(caplog, [1e-6, 9e-4, 2e-3, 3.9e-3, 4.1e-3, math.nan, 5e-3])
    assert first.startswith("step 3: ")
    assert "0.002 nats" in first
    assert second.startswith("step 5: ")
    assert "{type: TokenTruncated}" in first
    assert warnings_of(caplog, [0.04], **{_T + "model.dtype": "BFloat16"}) == []
    assert len(warnings_of(caplog, [0.06], **{_T + "model.dtype": "BFloat16"})) == 1
    for edit in ({".type": "TokenTruncated"}, {".oldLogprobs": "Rollout"}):
        [corrected] = warnings_of(caplog, [1.0], **{_CORRECTION + field: value for field, value in edit.items()})
        assert "rolloutCorrection corrects" in corrected


def test_older_weights_are_expected_to_differ(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, [1.0], staleness=1.0) == []


def test_lost_adapters_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = MismatchWatch(RLJob.from_wire(valid_job({_T + "model.dtype": "BFloat16"})).spec)
    for step, error in enumerate([0.0, 0.1, 0.72, 0.97], 1):
        watch.step_done(step, {MERGE_ERROR: error})
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("step 3: spec.training.model.lora.sync: ")
    for word in ("BFloat16", "72 %", "sync: Adapter", "dtype: Float32"):
        assert word in message


def test_rejecting_most_of_a_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    watch = MismatchWatch(RLJob.from_wire(valid_job({_T + "model.dtype": "Float32"})).spec)
    for step, rejected in enumerate([0.5, 0.6, 0.7, 1.0], 1):
        watch.step_done(step, {REJECTED_FRACTION: rejected})
    second, fourth = (record.getMessage() for record in caplog.records)
    assert second.startswith("step 2: training.algorithm.rolloutCorrection.rejection")
    assert "60 %" in second
    assert fourth.startswith("step 4: training.algorithm.rolloutCorrection.rejection")
    assert "100 %" in fourth


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        (_SYNC, "training.algorithm.rolloutCorrection: {type"),
        ({**_SYNC, _T + "rollout.topP": 0.9}, "topP: 1 and topK: 0"),
        ({**_SYNC, _CORRECTION + ".type": "TokenMasked"}, None),
        ({**_SYNC, _CORRECTION + ".oldLogprobs": "Rollout"}, None),
        ({**_SYNC, _CORRECTION + ".rejection": {"level": "Token", "max": 2}}, None),
        ({}, None),
    ],
)
def test_old_weights_without_correction_are_logged(
    caplog: pytest.LogCaptureFixture, edits: dict[str, object], expected: str | None
) -> None:
    caplog.set_level(logging.WARNING)
    check_algorithm(RLJob.from_wire(valid_job(edits)).spec)
    found = [record.getMessage() for record in caplog.records if "syncEverySteps" in record.getMessage()]
    assert len(found) == (expected is not None)
    assert all(expected is not None and expected in each for each in found)
