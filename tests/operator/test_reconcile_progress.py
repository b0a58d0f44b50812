"""The trainer's reports reach the status, with addresses that people can use."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rljob_api.run_state import RunPhase
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_testing.operator import inputs


@pytest.mark.parametrize(
    ("number", "shown"), [(0.619140625, 0.6191), (-1234.56, -1235.0), (1.23456e-7, 1.235e-7), (0.0, 0.0), (None, None)]
)
def test_numbers_in_the_status_have_four_significant_digits(number: float | None, shown: float | None) -> None:
    state = inputs.run_state(step=2)
    values = dict.fromkeys(("reward_mean", "eval_score", "tokens_per_second"), number)
    state = state.model_copy(update={"progress": state.progress.model_copy(update=values)})
    progress = inputs.decide(inputs.healthy(state=state)).status.progress
    assert progress is not None
    assert [progress.reward_mean, progress.eval_score, progress.tokens_per_second] == [shown] * 3


def test_addresses_are_those_of_the_claim() -> None:
    state = inputs.run_state(checkpoint_step=4, export_uri="file:///rljob/storage/run/export")
    status = inputs.decide(inputs.healthy(state=state)).status
    assert status.checkpoint is not None
    assert status.checkpoint.uri == "pvc://ckpt/example/checkpoints/step_00000004"
    assert status.export_uri == "pvc://ckpt/example/run/export"
    own = inputs.spec({"checkpoint.storage": {"persistentVolumeClaim": "shared", "subPath": "team/run/"}})
    moved = inputs.decide(inputs.healthy(state=state, job_spec=own)).status
    assert moved.export_uri == "pvc://shared/team/run/run/export"


def test_addresses_elsewhere_and_too_long_ones_stay_unchanged() -> None:
    elsewhere = inputs.decide(inputs.healthy(state=inputs.run_state(export_uri="s3://bucket/export"))).status
    assert elsewhere.export_uri == "s3://bucket/export"
    deep = inputs.spec({"checkpoint.storage": {"persistentVolumeClaim": "c", "subPath": "a" * 4096}})
    state = inputs.run_state(export_uri="file:///rljob/storage/run/export")
    assert (
        inputs.decide(inputs.healthy(state=state, job_spec=deep)).status.export_uri
        == "file:///rljob/storage/run/export"
    )


def test_a_run_state_accepts_no_address_that_a_status_would_reject() -> None:
    longest = inputs.run_state(export_uri="s3://" + "a" * 4091)
    assert inputs.decide(inputs.healthy(state=longest)).status.export_uri == longest.export_uri
    with pytest.raises(ValidationError, match="4096"):
        inputs.run_state(export_uri="s3://" + "a" * 4092)


def test_an_address_that_does_not_fit_is_left_out_of_the_status() -> None:
    state = inputs.run_state(checkpoint_step=4)
    assert state.checkpoint is not None
    far = "s3://" + "a" * 4092
    checkpoint = state.checkpoint.model_copy(update={"uri": far})
    unchecked = state.model_copy(update={"checkpoint": checkpoint, "export_uri": far})
    status = inputs.decide(inputs.healthy(state=unchecked)).status
    assert (status.checkpoint, status.export_uri) == (None, None)
    assert status.progress == state.progress
    assert RLJobStatus.from_wire(status.to_wire()) == status


def test_reported_fields_stay_when_a_later_run_state_lacks_them() -> None:
    known = inputs.decide(inputs.healthy(state=inputs.run_state(checkpoint_step=4))).status
    later = inputs.decide(
        inputs.healthy(state=inputs.run_state(RunPhase.STARTING, step=0), status=known),
        inputs.at(60),
    ).status
    assert later.checkpoint == known.checkpoint


def test_the_attempt_shows_only_its_own_checkpoint() -> None:
    """Not the checkpoint of an earlier attempt, which a start reports before it has begun to train, or fails."""
    for phase, step, resumed_from, saved in (
        (RunPhase.STARTING, 6, 6, None),
        (RunPhase.FAILED, 6, 6, None),
        (RunPhase.RUNNING, 6, 6, None),
        (RunPhase.RUNNING, 8, 6, 8),
        (RunPhase.RUNNING, 6, None, 6),
    ):
        state = inputs.run_state(phase, step=step, checkpoint_step=step)
        seen = inputs.healthy(state=state.model_copy(update={"resumed_from_step": resumed_from}))
        status = inputs.decide(seen).status
        assert status.attempts[0].checkpoint_step == saved
        assert status.checkpoint is not None


def test_the_attempt_shows_where_it_resumed() -> None:
    state = inputs.run_state().model_copy(update={"resumed_from_step": 3})
    assert inputs.decide(inputs.healthy(state=state)).status.attempts[0].resumed_from_step == 3
