"""A worker that is killed while no call to it is running is noticed as quickly as one with a running call."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from rljob_testing.training import training_runs
from rljob_trainer.stack_traces import traced_processes

pytestmark = [pytest.mark.ray, pytest.mark.long]

SECONDS_TO_BEGIN = 120.0
SECONDS_TO_END = 120.0
"""On a busy machine. If the others waited for the lost one, it would be half an hour, the time limit of a
collective."""


def job() -> training_runs.Document:
    """A job whose reference policy is on a GPU of its own."""
    kl: training_runs.Document = {"kl": {"coefficient": 0.1}}
    document = training_runs.small_job(num_workers=2, batchSize=32, rollout={"groupSize": 16}, steps=100, algorithm=kl)
    spec = cast(training_runs.Document, document["spec"])
    spec["pools"] = [{"name": "main", "gpusPerNode": 2}, {"name": "judges", "gpusPerNode": 1}]
    spec["roles"] = {"ref": {"pool": "judges"}}
    return document


def kill_the_reference(files: training_runs.RunFiles) -> tuple[int, float]:
    """Kills the reference worker after the first step. Returns its process id and the time."""
    deadline = time.monotonic() + SECONDS_TO_BEGIN
    while not files.training_steps():
        assert time.monotonic() < deadline, "no step"
        time.sleep(0.05)
    [victim] = [each.process_id for each in traced_processes(files.folder) if each.role == "ref"]
    os.kill(victim, signal.SIGKILL)
    return victim, time.monotonic()


def test_the_death_of_an_idle_worker_of_another_pool_is_noticed_as_quickly(
    run_trainer: training_runs.RunTrainer, cluster: str
) -> None:
    with ThreadPoolExecutor(1) as thread:
        killed = thread.submit(kill_the_reference, run_trainer.files)
        run = run_trainer(job(), cluster)
        victim, killed_at = killed.result()
    assert run.exit_code == 75, run.terminal
    assert time.monotonic() - killed_at < SECONDS_TO_END
    expected = rf"worker rank 0 \(ref; process {victim} on \S+\) died"
    assert re.search(expected, run.terminal), run.terminal
