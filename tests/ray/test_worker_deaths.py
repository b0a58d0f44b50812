"""The error after the death of a worker process reports its exit code, its crash, or an out-of-memory kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from rljob_api.constants import ErrorCause
from rljob_testing.ray_clusters import echo_workers
from rljob_trainer.errors import WorkerDiedError
from rljob_trainer.groups.worker_failure import memory_kills
from rljob_trainer.groups.worker_group import WorkerGroup, spawn
from rljob_trainer.groups.worker_processes import BuildSettings, WorkerProcesses, start_processes
from rljob_trainer.groups.worker_side import ProcessInfo
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_driver")]

CONTROL_GROUPS = Path("/sys/fs/cgroup")
LIMIT_BYTES = 200 * 2**20


@contextmanager
def started() -> Iterator[tuple[ResourcePool, WorkerProcesses, int]]:
    """One process that has not been built, and its id."""
    pool = ResourcePool(PoolSettings("main", 1, 1, False, 0.1, 60))
    try:
        processes = start_processes(pool, {"PYTHONPATH": echo_workers.PYTHON_PATH, "OMP_NUM_THREADS": "1"})
        try:
            info = ray.get(processes.handles[0].info.remote())
            assert isinstance(info, ProcessInfo)
            yield pool, processes, info.process_id
        finally:
            processes.close()
    finally:
        pool.release()


def built(pool: ResourcePool, processes: WorkerProcesses, log_folder: Path) -> WorkerGroup:
    processes.build(pool.slots(), BuildSettings("cpu", 1, log_folder), echo_workers.ROLES)
    return spawn(processes)["first"]


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("exit", r"Worker exits unexpectedly\. Worker exits with an exit code 7\."),
        (str(int(signal.SIGSEGV)), r"it crashed in native code \(SIGSEGV\)"),
        (str(int(signal.SIGABRT)), r"it crashed in native code \(SIGABRT\)"),
        (str(int(signal.SIGKILL)), r".*not out of memory.*\(kill -9\)"),
    ],
    ids=["exit code", "SIGSEGV", "SIGABRT", "SIGKILL"],
)
def test_the_error_reports_how_the_process_ended(tmp_path: Path, how: str, cause: str) -> None:
    with started() as (pool, processes, process_id):
        group = built(pool, processes, tmp_path)
        with pytest.raises(WorkerDiedError, match=rf"rank 0 .*process {process_id} on .* died in first\.fail: {cause}"):
            echo_workers.call(group, "fail", 0, how)


def test_a_death_is_reported_whatever_its_peers_report() -> None:
    with echo_workers.echo_processes(2) as processes:
        group = spawn(processes)["first"]
        with pytest.raises(WorkerDiedError, match=r"^worker rank 1 "):
            echo_workers.call(group, "fail", 1, "a death that peers report with messages of their own")


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[Path]:
    """A control group with this memory limit, where this process may create one; version 1 or 2."""
    old, new = CONTROL_GROUPS / "memory", CONTROL_GROUPS
    is_old = (old / "memory.limit_in_bytes").exists()
    folder = (old if is_old else new) / f"rljob-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(num_bytes))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"needs the right to make a control group with a memory limit ({error}); run as root")
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Removes the control group as soon as the kernel has freed the memory of its processes."""
    deadline = time.monotonic() + 30
    while True:
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def test_an_out_of_memory_kill_is_reported(tmp_path: Path) -> None:
    with memory_limit(LIMIT_BYTES) as folder, started() as (pool, processes, process_id):
        (folder / "cgroup.procs").write_text(str(process_id))
        group = built(pool, processes, tmp_path)
        counter = r"/\S+/memory\.(events|oom_control)"
        with pytest.raises(
            WorkerDiedError,
            match=rf"died in first\.fail: out of memory.*\(oom_kill in {counter} rose from 0 to 1 .*; give .* memory",
        ) as raised:
            echo_workers.call(group, "fail", 0, "memory")
        assert raised.value.known_cause is ErrorCause.HOST_MEMORY


FILES = {
    "version two": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "oom 4\noom_kill 3\n"}, 3),
    "version one": (
        {
            "proc/self/cgroup": "4:memory:/kubepods/pod1\n0::/\n",
            "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            "proc/vmstat": "oom_kill 9\n",
        },
        2,
    ),
    "no container": ({"proc/self/cgroup": "0::/\n", "proc/vmstat": "pgfault 1\noom_kill 9\n"}, 9),
}


@pytest.mark.parametrize("kind", FILES)
def test_the_kernels_kill_counter_is_found(tmp_path: Path, kind: str) -> None:
    files, expected = FILES[kind]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = memory_kills(tmp_path)
    assert found is not None
    assert found.count == expected


def test_an_old_kernel_has_no_kill_counter(tmp_path: Path) -> None:
    assert memory_kills(tmp_path) is None
