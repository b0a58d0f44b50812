"""Signals, as they come from a cluster and at awkward moments."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from rljob_testing.trainer_program import RunTrainer
from rljob_testing.training_runs import LocalRun, small_job

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SECONDS_TO_STOP = 20.0


def test_sigterm_finishes_the_step_and_saves(run_trainer: RunTrainer, cluster: str) -> None:
    # Ray puts a handler of its own for SIGTERM, which is what a pod gets; ours has to be the one that counts.
    job = small_job(steps=1000, checkpoint={"everySteps": 1000})
    process = run_trainer.start(job, cluster)
    while not run_trainer.files.training_steps():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    state = run_trainer.files.state()
    assert state.phase == "Stopped"
    assert state.checkpoint is not None
    assert state.checkpoint.step == state.progress.step == run_trainer.files.training_steps()[-1] < 1000
    assert f"stopped as asked after step {state.progress.step}; its checkpoint is complete" in output


def test_a_stop_while_ray_starts_stops_at_once(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, small_job())
    run.wait_for(lambda: "Ray: starting" in run.output)
    time.sleep(1)
    run.process.send_signal(signal.SIGINT)
    asked_at = time.monotonic()
    assert run.end() == 130, run.output
    assert time.monotonic() - asked_at < SECONDS_TO_STOP
    assert "stopped at once; no step was done" in run.output
    assert "Traceback" not in run.output
    assert run.files.state().phase == "Stopped"
    assert run.left_behind() == []
    # There is nothing to resume, so the same command goes on.
    assert run.output.endswith("to go on: rljob run job.yaml\n")
