"""A process that is killed anywhere in a save loses nothing that was committed, and leaves nothing behind permanently.
It is killed at each of its changes to the file system, one fork per change.

The scenario is a second start that resumes at step 20, saves steps 30 and 40 (rank 0 in the foreground, rank 1 in the
background) and removes old checkpoints after each. It is killed before its k-th operation, or in the middle of it if
that is a write, for every k. Then a third start resumes, saves and removes.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from rljob_testing.training import gloo_ranks, small_checkpoints
from rljob_trainer.checkpoints.fencing import announce_start
from rljob_trainer.dispatch.worker import WorkerContext

OPERATIONS = ("open", "write", "fsync", "replace", "link", "unlink", "mkdir", "rmdir")
"""The functions of `os` through which the library changes the file system."""


@dataclass(frozen=True)
class CrashResult:
    """What a third start finds after the second was killed."""

    hard_links: bool
    """Whether the storage supports hard links."""
    operation: str
    index: int
    mid_write: bool
    was_killed: bool
    committed_step: int
    """The newest step whose commit had returned before the kill (20: none of this start)."""
    resumed_step: int
    tensors_equal: bool
    rejected: list[str]
    left_at_end: list[str]
    """Folders below the root after the third start has saved step 50 and pruned to two."""


def sweep(root: Path, _: WorkerContext) -> list[CrashResult]:
    """Runs the scenario once for every operation (twice for writes: half of one), with hard links and without."""
    with pytest.MonkeyPatch.context() as patch:
        # A killed process loses nothing that it has written; what fsync adds is for a machine that fails. Its calls are
        # counted, and its thousands of writes to the disk are left out. fstat rejects a closed file, too.
        patch.setattr(os, "fsync", os.fstat)
        base = root / "base"
        announce_start(base, 1)
        small_checkpoints.save_step(base, 10, 1)
        small_checkpoints.save_step(base, 20, 1)
        return [result for hard_links in (True, False) for result in kill_everywhere(root, base, hard_links)]


def kill_everywhere(root: Path, base: Path, hard_links: bool) -> Iterator[CrashResult]:
    operations: list[str] = []
    Interruption(operations, hard_links=hard_links).scenario(copy_of(base, root / "undisturbed"))
    for index, operation in enumerate(operations):
        for mid_write in (False, True) if operation == "write" else (False,):
            case = copy_of(base, root / "case")
            was_killed, committed_step = run_killed(case, index, mid_write, hard_links)
            found_by_third = resume(case)
            yield CrashResult(hard_links, operation, index, mid_write, was_killed, committed_step, *found_by_third)


def copy_of(base: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(base, target)
    return target


def run_killed(root: Path, index: int, mid_write: bool, hard_links: bool) -> tuple[bool, int]:
    """Whether the fork was killed, and the newest step that it had reported as committed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            Interruption([], index, mid_write, hard_links, writer).scenario(root)
        finally:
            os._exit(1)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        steps = pipe.read()
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return killed, max(steps, default=20)


def resume(root: Path) -> tuple[int, bool, list[str], list[str]]:
    """The last four fields of a result."""
    step, are_equal, rejected = small_checkpoints.third_start(root)
    return step, are_equal, rejected, sorted(path.name for path in root.iterdir())


class Interruption:
    """The scenario with `os` replaced: operations are counted, and the process kills itself at the chosen one."""

    def __init__(
        self,
        operations: list[str],
        kill_at: int | None = None,
        mid_write: bool = False,
        hard_links: bool = True,
        report: int | None = None,
    ) -> None:
        self._operations = operations
        self._kill_at = kill_at
        self._mid_write = mid_write
        self._hard_links = hard_links
        self._report = report
        self._lock = threading.Lock()
        self._originals = {name: vars(os)[name] for name in OPERATIONS}

    def scenario(self, root: Path) -> None:
        for name in OPERATIONS:
            setattr(os, name, self._counted(name, self._originals[name]))
        try:
            small_checkpoints.second_start(root, self._report_commit)
        finally:
            for name, original in self._originals.items():
                setattr(os, name, original)

    def _report_commit(self, step: int) -> None:
        if self._report is not None:
            self._originals["write"](self._report, bytes([step]))

    def _counted(self, name: str, original: Callable[..., object]) -> Callable[..., object]:
        def operation(*args: object, **options: object) -> object:
            with self._lock:
                if len(self._operations) == self._kill_at:
                    self._kill(name, original, args)
                self._operations.append(name)
            if name == "link" and not self._hard_links:
                raise OSError(errno.EPERM, "hard links are switched off")
            return original(*args, **options)

        return operation

    def _kill(self, name: str, original: Callable[..., object], args: tuple[object, ...]) -> None:
        if name == "write" and self._mid_write:
            descriptor, data = args
            assert isinstance(data, memoryview)
            original(descriptor, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def all_results(tmp_path_factory: pytest.TempPathFactory) -> list[CrashResult]:
    [[results]] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(partial(sweep, tmp_path_factory.mktemp("sweep")), 1)])
    assert isinstance(results, list)
    return results


@pytest.mark.parametrize("hard_links", [True, False], ids=["hard links", "no hard links"])
def test_killed_at_every_operation_resumes_from_the_newest_complete_checkpoint(
    all_results: list[CrashResult], hard_links: bool
) -> None:
    results = [result for result in all_results if result.hard_links == hard_links]
    # Two saves of two shards and a manifest, one start file: 7 durable files, of which shards have header and data.
    counts = Counter(result.operation for result in results if not result.mid_write)
    assert counts["write"] == 4 * 2 + 3
    assert counts["link"] == 3
    # 7 files; their folders: 4 shards, 3 created files, 2 new checkpoint folders; and the two that are removed:
    # before the files go and after.
    assert counts["fsync"] == 7 + 7 + 2 + 2 * 2
    assert counts["rmdir"] == 2
    for result in results:
        assert result.was_killed, result
        assert result.tensors_equal, result
        assert result.resumed_step in (20, 30, 40), result
        assert result.resumed_step >= result.committed_step, result
        assert len(result.left_at_end) == 3, result
        assert result.left_at_end[0] == "starts", result
        assert result.left_at_end[-1] == "step-00000050.start-0003", result
        aborted_commit = "manifest.json is empty"
        assert not result.rejected or (not hard_links and aborted_commit in result.rejected[0]), result
    assert {result.resumed_step for result in results} == {20, 30, 40}
