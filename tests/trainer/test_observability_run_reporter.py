"""RunState on disk: complete at every moment, versioned, and correct."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rljob_api.run_state import Alarm, RunError, RunPhase, RunState
from rljob_api.v1alpha1.status import CheckpointStatus
from rljob_trainer.controller.run_reporter import RunReporter
from rljob_trainer.errors import ConfigurationError, DeviceMemoryError, FailedWorker, HostMemoryError, WorkerError


class WallClock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def reporter(path: Path, clock: WallClock) -> RunReporter:
    return RunReporter(path, "sort", attempt=2, total_steps=10, num_devices=4, wall_clock=clock)


def test_the_first_state_is_written_at_once_with_its_version(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    reporter(path, WallClock())
    assert json.loads(path.read_text()) == {
        "contractVersion": 1,
        "jobName": "sort",
        "attempt": 2,
        "phase": "Starting",
        "progress": {"step": 0, "totalSteps": 10, "updatedAt": "2023-11-14T22:13:20Z"},
        "writtenAt": "2023-11-14T22:13:20Z",
    }


def test_a_run_from_resume_to_the_end_is_reported(tmp_path: Path) -> None:
    path, clock = tmp_path / "state.json", WallClock()
    run = reporter(path, clock)
    found = CheckpointStatus(step=4, uri="file:checkpoints/4", digest="sha256:0", saved_at="2023-11-14T22:13:00Z")
    run.report_resume(found.model_copy(update={"step": 5}))
    run.report_resume(found)
    state = RunState.model_validate_json(path.read_text())
    assert (state.phase, state.checkpoint, state.resumed_from_step) == (RunPhase.STARTING, found, 4)
    assert state.progress.step == 4
    run.training_started(4, [])
    run.evaluated(0.75)
    clock.now += 6.0
    run.step_done(6, {"critic/rewards/mean": 0.5, "perf/throughput": 100.0}, [])
    run.checkpoint_saved(
        CheckpointStatus(step=6, uri="file:checkpoints/6", digest="sha256:0", saved_at="2023-11-14T22:13:26Z")
    )
    state = RunState.model_validate_json(path.read_text())
    assert state.phase is RunPhase.RUNNING
    assert state.resumed_from_step == 4
    progress = state.progress
    assert (progress.step, progress.reward_mean, progress.eval_score) == (6, 0.5, 0.75)
    assert progress.tokens_per_second == 400.0
    assert progress.eta_seconds == 12
    assert state.checkpoint is not None
    assert state.checkpoint.step == 6
    run.complete("file:export")
    state = RunState.model_validate_json(path.read_text())
    assert (state.phase, state.export_uri, state.progress.step) == (RunPhase.COMPLETE, "file:export", 6)
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


def test_alarms_that_are_no_longer_known_are_not_reported_any_more(tmp_path: Path) -> None:
    path, alarm = tmp_path / "state.json", Alarm(reason="HighKl", value=3.0, message="m", since_step=1, step=1)
    run = reporter(path, WallClock())
    run.training_started(0, [])
    assert RunState.model_validate_json(path.read_text()).alarms == ()
    run.step_done(1, {}, [alarm])
    run.evaluated(0.75)
    assert RunState.model_validate_json(path.read_text()).alarms == (alarm,)
    run.step_done(2, {}, None)
    state = RunState.model_validate_json(path.read_text())
    assert state.alarms is None
    assert (state.progress.step, state.progress.eval_score) == (2, 0.75)


def test_a_failure_message_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    run = reporter(path, WallClock())
    run.step_done(1, {"critic/rewards/mean": 0.5}, [])
    run.step_done(2, {"critic/rewards/mean": math.nan}, [])
    run.failed(RuntimeError("\x1b[31m" + "x" * 10_000))
    state = RunState.model_validate_json(path.read_text())
    assert state.phase is RunPhase.FAILED
    assert state.progress.reward_mean == 0.5
    assert state.error is not None
    assert state.error.kind == "RuntimeError"
    assert state.error.message.startswith("\\x1b[31mxxx")
    assert len(state.error.message) <= 4096


def test_a_failure_of_a_worker_names_its_location_and_one_of_the_controller_does_not(tmp_path: Path) -> None:
    run = reporter(tmp_path / "state.json", WallClock())
    error: WorkerError | ConfigurationError = WorkerError("actor.update_policy: worker rank 3, pod p-3, node n-1: boom")
    error.worker = FailedWorker("actor", 3, "p-3", "n-1")
    run.failed(error)
    assert run.state.error == RunError(
        kind="WorkerError", message=str(error), role="actor", rank=3, pod="p-3", node="n-1"
    )
    error = ConfigurationError("spec.training.rollout.engine: vLLM cannot run this")
    run.failed(error)
    assert run.state.error == RunError(kind="ConfigurationError", message=str(error))
    error.worker = FailedWorker("hybrid", 0, "p-0", "n-0")
    run.failed(error)
    assert run.state.error is not None
    assert run.state.error.message == f"{error} (worker rank 0 (hybrid), pod p-0, node n-0)"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (DeviceMemoryError("any words"), "DeviceMemory"),
        (HostMemoryError("any words"), "HostMemory"),
        (MemoryError(), "HostMemory"),
        (WorkerError("CUDA out of memory"), None),
        (ValueError("out of memory"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_class_of_an_error_decides_its_cause_and_not_its_words(
    tmp_path: Path, error: Exception, cause: str | None
) -> None:
    run = reporter(tmp_path / "state.json", WallClock())
    run.failed(error)
    assert run.state.error is not None
    assert run.state.error.cause == cause


def test_an_error_is_read_by_a_program_that_does_not_know_its_cause() -> None:
    error = {"kind": "E", "message": "m", "cause": "DiskSpaceOfANewerTrainer"}
    assert RunError.from_wire(error).cause == "DiskSpaceOfANewerTrainer"


def test_slow_work_is_reported_at_intervals(tmp_path: Path) -> None:
    path, clock = tmp_path / "state.json", WallClock()
    run = reporter(path, clock)

    def activity() -> tuple[str | None, str]:
        state = RunState.model_validate_json(path.read_text())
        return state.activity, state.written_at[-9:]

    run.doing("loads the data")
    assert activity() == ("loads the data", "22:13:20Z")
    # Before training there are few reports, and each may be about the slow one.
    run.doing("loads models")
    assert activity() == ("loads models", "22:13:20Z")
    run.training_started(0, [])
    assert activity() == (None, "22:13:20Z")
    clock.now += 9.0
    run.in_phase("rollout")
    assert activity() == (None, "22:13:20Z")
    clock.now += 1.0
    run.in_phase("rollout")
    assert activity() == ("generates responses", "22:13:30Z")
    clock.now += 10.0
    run.in_phase("update_actor")
    assert activity() == ("updates the actor", "22:13:40Z")
    clock.now += 10.0
    run.report_progress("worker-1: 3 of 8 micro-batches")
    assert activity() == ("updates the actor; worker-1: 3 of 8 micro-batches", "22:13:50Z")
    # The clock was set back.
    clock.now -= 3610.0
    run.doing("evaluates")
    assert activity() == ("evaluates", "21:13:40Z")
    run.step_done(1, {}, [])
    assert activity() == (None, "21:13:40Z")
