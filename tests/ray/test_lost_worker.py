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

from rljob_testing.processes import Process
from rljob_testing.training_runs import Document, LocalRun, small_job

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(300)]

NUM_STEPS = 24
SECONDS_TO_END = 30.0


def job() -> Document:
    return small_job(num_workers=2, batchSize=32, rollout={"groupSize": 16}, steps=NUM_STEPS)


@dataclass(frozen=True)
class Killed:
    """A run that lost a worker in a step after its second checkpoint."""

    run: LocalRun
    victim: Process
    seconds_to_end: float
    checkpoints: list[str]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    where = {"RLJOB_POD_NAME": "small-1-main-0", "RLJOB_NODE_NAME": "node-7"}
    run = LocalRun(tmp_path_factory.mktemp("killed"), job(), **where)
    run.wait_for(lambda: run.files.newest_checkpoint() >= 2)
    # Not one that a worker has started, which may have ended.
    victim = min((process for process in run.seen if "RayWorker" in process.title), key=lambda process: process.started)
    time.sleep(0.3)
    os.kill(victim.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    run.end()
    return Killed(run, victim, time.monotonic() - killed_at, run.files.checkpoint_names())


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


def test_a_worker_of_another_pool(tmp_path: Path) -> None:
    """The reference is on a GPU of its own, and nobody calls it while the actor is at work."""
    document = job()
    spec = cast(Document, document["spec"])
    spec["pools"] = [{"name": "main", "gpusPerNode": 1}, {"name": "judges", "gpusPerNode": 1}]
    spec["roles"] = {"ref": {"pool": "judges"}}
    cast(Document, spec["training"])["algorithm"] = {"kl": {"coefficient": 0.1}}
    run = LocalRun(tmp_path, document)
    run.wait_for(lambda: run.files.newest_checkpoint() >= 1)
    victim = next(
        process.pid
        for process in run.seen
        if "RayWorker" in process.title and Path(f"/proc/{process.pid}/fd/1").readlink().parent.name == "judges"
    )
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()
    assert run.end() == 75, run.output
    assert time.monotonic() - killed_at < SECONDS_TO_END
    assert re.search(rf"worker rank 0 \(ref; process {victim} on \S+\) died", run.output), run.output
    assert run.left_behind() == []


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


def test_the_next_run_resumes_from_the_newest_checkpoint(killed: Killed) -> None:
    newest = killed.run.files.training_steps()[-1]
    complete = [name for name in killed.checkpoints if (killed.run.files.checkpoints / name / "manifest.json").exists()]
    # Written while the next step is trained, and complete before that step's own is begun: when that step is done and
    # the worker dies before the saves meet, two steps are lost.
    assert complete[-1] in [f"step-{newest - lost:08d}.start-0001" for lost in (0, 1, 2)]
    run = LocalRun(killed.run.files.folder.parents[1], job(), "--resume")
    assert run.end() == 0, run.output
    assert f"({complete[-1]})" in run.output
    assert run.files.training_steps() == list(range(1, NUM_STEPS + 1))
    # Checkpoints of the lost attempt that were not complete are gone.
    assert all((path / "manifest.json").exists() for path in run.files.checkpoints.glob("step-*"))
    assert run.left_behind() == []
