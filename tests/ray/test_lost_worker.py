"""A worker process that is killed: one error that says which and why, nothing left behind, and the next run goes on."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from rljob_testing.processes import Process, is_alive
from rljob_testing.training_runs import Document, LocalRun, small_job

pytestmark = [pytest.mark.ray, pytest.mark.long]

NUM_STEPS = 24
SECONDS_TO_END = 120.0
"""On a busy machine. Where the others waited for the lost one, it would be the time limit of a collective."""


def job() -> Document:
    """The reference is on a GPU of its own."""
    kl: Document = {"kl": {"coefficient": 0.1}}
    document = small_job(num_workers=2, batchSize=32, rollout={"groupSize": 16}, steps=NUM_STEPS, algorithm=kl)
    spec = cast(Document, document["spec"])
    spec["pools"] = [{"name": "main", "gpusPerNode": 2}, {"name": "judges", "gpusPerNode": 1}]
    spec["roles"] = {"ref": {"pool": "judges"}}
    return document


@dataclass(frozen=True)
class Killed:
    """A run that lost a worker after a checkpoint."""

    run: LocalRun
    victim: Process
    seconds_to_end: float
    last_step: int
    """That it has done."""
    newest: str
    """Of its complete checkpoints."""

    @property
    def newest_step(self) -> int:
        """Of that checkpoint."""
        return int(self.newest.removeprefix("step-").partition(".")[0])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """A run that lost an actor in a step after its second checkpoint."""
    where = {"RLJOB_POD_NAME": "small-1-main-0", "RLJOB_NODE_NAME": "node-7"}
    run = LocalRun(tmp_path_factory.mktemp("killed"), job(), **where)
    run.wait_for(lambda: run.files.newest_checkpoint() >= 2)
    time.sleep(0.3)
    return lost(run, "main")


def lost(run: LocalRun, pool: str) -> Killed:
    """What becomes of a run when a worker of this pool is killed."""
    workers = [
        process
        for process in run.seen
        if "RayWorker" in process.title
        and is_alive(process)
        and Path(f"/proc/{process.pid}/fd/1").readlink().parent.name == pool
    ]
    # Not one that a worker has started.
    victim = min(workers, key=lambda process: process.started)
    os.kill(victim.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    run.end()
    seconds = time.monotonic() - killed_at
    complete = sorted(path.parent.name for path in run.files.checkpoints.glob("step-*/manifest.json"))
    return Killed(run, victim, seconds, run.files.training_steps()[-1], complete[-1])


def test_the_error_names_the_rank_and_the_cause(killed: Killed) -> None:
    run = killed.run
    assert run.process.returncode == 75, run.output
    errors = [line for line in run.output.splitlines() if " ERROR " in line]
    assert len(errors) == 1, run.output
    expected = (
        rf"worker rank [01] \(reward, actor, rollout, hybrid; process {killed.victim.pid}"
        r" on pod small-1-main-0, node node-7\) died( in \S+)?: its process ended without a word; the kernel killed"
        r" nothing there for lack of memory, .*kill -9.*; its last words are in .*worker-[01]\.log"
    )
    assert re.search(expected, errors[0]), errors[0]
    assert "Traceback" not in run.output
    assert "exit code 75: a worker or a device was lost" in run.output


def test_it_ends_soon_and_leaves_no_process(killed: Killed) -> None:
    assert killed.seconds_to_end < SECONDS_TO_END
    assert len(killed.run.seen) > 5
    assert killed.run.left_behind() == []


def test_run_state_tells_the_same(killed: Killed) -> None:
    state = killed.run.files.state()
    assert state.phase == "Failed"
    assert state.error is not None
    assert state.error.kind == "WorkerDiedError"
    assert f"process {killed.victim.pid} on pod small-1-main-0, node node-7)" in state.error.message


@pytest.fixture(scope="module")
def killed_again(killed: Killed) -> Killed:
    """The next run, which loses the worker of the reference: nobody calls it while the actor is at work."""
    run = LocalRun(killed.run.files.folder.parents[1], job(), "--resume")
    run.wait_for(lambda: run.files.state().attempt == 2 and run.files.newest_checkpoint() > killed.newest_step)
    return lost(run, "judges")


def test_a_worker_of_another_pool_is_missed_as_soon(killed_again: Killed) -> None:
    run = killed_again.run
    assert run.process.returncode == 75, run.output
    assert killed_again.seconds_to_end < SECONDS_TO_END
    told = rf"worker rank 0 \(ref; process {killed_again.victim.pid} on \S+\) died"
    assert re.search(told, run.output), run.output
    assert run.left_behind() == []


def test_the_next_run_resumes_from_the_newest_checkpoint(killed: Killed, killed_again: Killed) -> None:
    # Written while the next step is trained, and complete before that step's own is begun: when that step is done and
    # the worker dies before the saves meet, two steps are lost.
    assert killed.newest_step in [killed.last_step - lost for lost in (0, 1, 2)]
    run = killed_again.run
    assert f"resumed from step {killed.newest_step} ({killed.newest})" in run.output
    steps = run.files.training_steps()
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > killed.newest_step
    # Checkpoints of the lost attempt that were not complete are gone.
    assert all((path / "manifest.json").exists() for path in run.files.checkpoints.glob("step-*.start-0001"))
