"""Kills a process that saves checkpoints at each of its changes to the file system, one fork per change.

The scenario is a second start that resumes at step 20, saves steps 30 and 40 (rank 0 in the foreground, rank 1 in the
background) and removes old checkpoints after each. It is killed before its k-th operation, or in the middle of it where
that is a write, for every k. Then a third start resumes, saves and removes.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rljob_testing.checkpoint_samples import save_step, values_of
from rljob_trainer.checkpoints.fencing import accept_up_to, announce_start
from rljob_trainer.checkpoints.load import find_newest_complete, open_checkpoint
from rljob_trainer.checkpoints.retention import prune

OPERATIONS = ("open", "write", "fsync", "replace", "link", "unlink", "mkdir", "rmdir")
"""The functions of `os` through which the library changes the file system."""


@dataclass(frozen=True)
class CrashResult:
    """What a third start finds after the second was killed."""

    hard_links: bool
    """Whether the storage has them."""
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


def sweep(root: Path) -> list[CrashResult]:
    """Runs the scenario once for every operation (twice for writes: half of one), with hard links and without."""
    out = root / "results.json"
    process = multiprocessing.get_context("spawn").Process(target=_sweep, args=(root, out))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"the sweep failed, exit code {process.exitcode}")
    return [CrashResult(**result) for result in json.loads(out.read_text())]


def _sweep(root: Path, out: Path) -> None:
    torch.set_num_threads(1)
    base = root / "base"
    announce_start(base, 1)
    save_step(base, 10, 1)
    save_step(base, 20, 1)
    results = [asdict(result) for hard_links in (True, False) for result in _kill_everywhere(root, base, hard_links)]
    out.write_text(json.dumps(results))


def _kill_everywhere(root: Path, base: Path, hard_links: bool) -> Iterator[CrashResult]:
    operations: list[str] = []
    _Interruption(operations, hard_links=hard_links).scenario(_copy(base, root / "undisturbed"))
    for index, operation in enumerate(operations):
        for mid_write in (False, True) if operation == "write" else (False,):
            case = _copy(base, root / "case")
            was_killed, committed_step = _run_killed(case, index, mid_write, hard_links)
            found_by_third = _resume(case)
            yield CrashResult(hard_links, operation, index, mid_write, was_killed, committed_step, *found_by_third)


def _copy(base: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(base, target)
    return target


def _run_killed(root: Path, index: int, mid_write: bool, hard_links: bool) -> tuple[bool, int]:
    """Whether the fork was killed, and the newest step that it had reported as committed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _Interruption([], index, mid_write, hard_links, writer).scenario(root)
        finally:
            os._exit(1)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        steps = pipe.read()
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return killed, max(steps, default=20)


def _resume(root: Path) -> tuple[int, bool, list[str], list[str]]:
    """The last four fields of a result."""
    found = find_newest_complete(root, start_number=3)
    assert found is not None
    read = open_checkpoint(found.folder).read("weight")
    announce_start(root, 3)
    accept_up_to(root, 3, found.checkpoint)
    save_step(root, 50, 3)
    prune(root, 3, keep=2)
    are_equal = torch.equal(read, values_of(found.manifest.step))
    rejected = [str(rejection) for rejection in found.rejected]
    return found.manifest.step, are_equal, rejected, sorted(path.name for path in root.iterdir())


class _Interruption:
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
            found = find_newest_complete(root, start_number=2)
            assert found is not None
            announce_start(root, 2)
            accept_up_to(root, 2, found.checkpoint)
            for step in (30, 40):
                save_step(root, step, 2)
                if self._report is not None:
                    self._originals["write"](self._report, bytes([step]))
                prune(root, 2, keep=2)
        finally:
            for name, original in self._originals.items():
                setattr(os, name, original)

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
