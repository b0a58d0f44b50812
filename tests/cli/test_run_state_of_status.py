"""The run state that `rljob view` makes from a job's status, for a run whose trainer is on a cluster."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rljob.results.run_state_of_status import run_state_of_status
from rljob.stored_job import stored_job
from rljob_api.conditions import ALARMS
from rljob_api.constants import ANNOTATION_RETRY
from rljob_api.contract_documents import load_run_state
from rljob_api.run_state import RunPhase, RunState
from rljob_page.run_files import read_files
from rljob_page.verdict import Level, verdict_of
from rljob_testing.cli import job_statuses

CREATED = "2026-01-31T12:00:00Z"


def wire_state(status: dict[str, object], annotations: dict[str, str] | None = None) -> dict[str, object] | None:
    names = {"name": "small", "namespace": "team-a", "uid": "u", "creationTimestamp": CREATED}
    metadata = {**names, "annotations": annotations or {}}
    return run_state_of_status(stored_job({"metadata": metadata, "spec": {}, "status": status}))


def state_of(status: dict[str, object]) -> RunState:
    """Parsed as the page parses it."""
    return load_run_state(json.dumps(wire_state(status)))


def test_a_running_job_has_its_progress_and_its_checkpoint() -> None:
    status = job_statuses.RUNNING
    state = state_of(status)
    assert (state.phase, state.attempt, state.job_name, state.error) == (RunPhase.RUNNING, 1, "small", None)
    assert state.progress.to_wire() == status["progress"]
    assert state.checkpoint is not None
    assert state.checkpoint.to_wire() == status["checkpoint"]
    assert state.written_at == state.progress.updated_at


@pytest.mark.parametrize(
    ("changes", "phase", "kind", "message"),
    [
        ({"result": job_statuses.COMPLETE}, RunPhase.COMPLETE, None, ""),
        ({"result": job_statuses.FAILED}, RunPhase.FAILED, "OutOfMemory", "head: 8Gi"),
        ({"result": job_statuses.FAILED | {"reason": "StoppedByUser"}}, RunPhase.STOPPED, None, ""),
        ({"suspendedAt": CREATED, "attempts": [job_statuses.ENDED]}, RunPhase.STARTING, None, ""),
        ({"nextAttempt": job_statuses.BETWEEN, "attempts": [job_statuses.ENDED]}, RunPhase.STARTING, None, ""),
        ({"attempts": [job_statuses.ATTEMPT | {"state": "Provisioning"}]}, RunPhase.STARTING, None, ""),
    ],
)
def test_the_end_of_a_job_is_the_end_of_its_run(
    changes: dict[str, object], phase: RunPhase, kind: str | None, message: str
) -> None:
    state = state_of(job_statuses.RUNNING | changes)
    assert state.phase is phase
    assert (state.error.kind if state.error else None, state.error.message if state.error else "") == (kind, message)


QUEUED = job_statuses.condition("QuotaReserved", "False", "Queued", CREATED, "waits in queue research")


@pytest.mark.parametrize(
    ("changes", "annotations", "activity"),
    [
        (
            {"nextAttempt": job_statuses.BETWEEN, "attempts": [job_statuses.ENDED]},
            {},
            "for its next attempt (HeadLost)",
        ),
        (
            {"attempts": [job_statuses.ATTEMPT | {"state": "Queued"}], "conditions": [QUEUED]},
            {},
            "Queued: waits in queue research",
        ),
        (
            {"attempts": [job_statuses.ENDED], "result": job_statuses.FAILED},
            {ANNOTATION_RETRY: "now"},
            "for its next attempt (a retry was requested)",
        ),
    ],
)
def test_a_job_that_waits_has_not_failed_and_is_not_silent(
    tmp_path: Path, changes: dict[str, object], annotations: dict[str, str], activity: str
) -> None:
    state = wire_state(job_statuses.RUNNING | changes, annotations)
    (tmp_path / "rljob-run-state.json").write_text(json.dumps(state))
    (tmp_path / "metrics.jsonl").touch()
    verdict = verdict_of(read_files(tmp_path), datetime.now(UTC))
    assert (verdict.is_active, verdict.level) == (True, Level.INFO)
    assert verdict.title == f"Waiting at step 12 of 80: {activity}"


def test_a_trainer_that_has_just_started_again_is_not_silent() -> None:
    since = "2026-01-31T15:00:00Z"
    state = state_of(job_statuses.RUNNING | {"attempts": [job_statuses.ATTEMPT | {"runningSince": since}]})
    assert state.written_at == since
    newer = {"runningSince": since, "runStateAt": "2026-01-31T15:00:30.5Z"}
    state = state_of(job_statuses.RUNNING | {"attempts": [job_statuses.ATTEMPT | newer]})
    assert state.written_at == newer["runStateAt"]


def test_the_run_has_all_alarms_of_the_status_and_no_steps_that_the_status_does_not_have() -> None:
    text = "90 % of the groups (since step 12, last in step 39)"
    unhealthy = job_statuses.condition("TrainingHealthy", "False", "EqualScores", CREATED, text)
    names = ["EqualScores", "ResponsesCutOff", "EntropyCollapse"]
    status = job_statuses.RUNNING | {"conditions": [unhealthy], "alarms": names}
    alarms = state_of(status).alarms or ()
    assert [alarm.reason for alarm in alarms] == names
    assert [alarm.steps for alarm in alarms] == ["", "", ""]
    first, cut_off, unknown = (alarm.message for alarm in alarms)
    assert first == text
    assert cut_off.startswith("In several steps more than half of the responses were truncated")
    assert "Increase rollout.maxNewTokens" in cut_off
    assert "does not know" in unknown
    healthy = job_statuses.condition("TrainingHealthy", "True", "NoAlarms", CREATED)
    assert state_of(job_statuses.RUNNING | {"conditions": [healthy]}).alarms == ()
    starting = job_statuses.condition("TrainingHealthy", "Unknown", "Starting", CREATED)
    assert state_of(job_statuses.RUNNING | {"conditions": [starting]}).alarms is None


def test_the_explanation_of_every_alarm_fits_a_run_state() -> None:
    unhealthy = job_statuses.condition("TrainingHealthy", "False", "EqualScores", CREATED, "text")
    names = ["EqualScores", *(each for each in ALARMS if each != "EqualScores")]
    alarms = state_of(job_statuses.RUNNING | {"conditions": [unhealthy], "alarms": names}).alarms or ()
    assert len(alarms) == len(ALARMS)
    assert all(alarm.message.endswith((".", "text")) for alarm in alarms)


def test_without_progress_there_is_no_state() -> None:
    assert wire_state({"attempts": [job_statuses.ATTEMPT]}) is None
    assert wire_state({}) is None
