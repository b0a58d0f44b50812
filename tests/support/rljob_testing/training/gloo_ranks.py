"""A function on several gloo ranks, one process each, or this process as the only rank of a process group."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from rljob_testing.local_servers import free_port
from rljob_testing.process_tree import descendants
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.process_group import join_process_group, leave_process_group

Program = Callable[[WorkerContext], object]

TRAINING = ("torch._dynamo", "transformers", "rljob_trainer.engines.train.engine")
"""What every rank loads; the first by the first `fully_shard`."""
VLLM = (*TRAINING, "rljob_trainer.engines.rollout.vllm_engine", "vllm.v1.engine.llm_engine")


@dataclass(frozen=True)
class RankedRun:
    """One program on so many ranks. It must be picklable: a module's function, or a `functools.partial` of one."""

    program: Program
    num_ranks: int


def run_on_ranks(runs: Sequence[RankedRun], libraries: Sequence[str] = TRAINING) -> list[list[object]]:
    """For each run the results of its ranks. Raises RuntimeError with the traceback where a rank fails.

    Runs go one after the other. All ranks are forked from one process, which this process starts once for each tuple of
    `libraries`: it loads them, and the modules of the programs. The environment of a rank is that of this process now,
    except for what a module read when it was loaded."""
    with tempfile.TemporaryDirectory() as folder:
        _launcher_with(tuple(libraries)).run(runs, Path(folder))
        failures = sorted(Path(folder).glob("*.failed"))
        if failures:
            raise RuntimeError(failures[0].read_text())
        return [
            [pickle.loads(_result_file(Path(folder), index, rank).read_bytes()) for rank in range(run.num_ranks)]
            for index, run in enumerate(runs)
        ]


@contextmanager
def process_group_of_one(folder: Path, device_type: str = "cpu") -> Iterator[WorkerContext]:
    """Within it this process is in a group of one, as workers join it on such devices. `folder` must be empty."""
    context = WorkerContext(0, 1, 0, 0, "127.0.0.1", 0, device_type, 1)
    backend = "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(context.device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder / 'meeting'}", rank=0, world_size=1)
    try:
        yield context
    finally:
        dist.destroy_process_group()


class _Launcher:
    """The process that ranks are forked from. It ends when this process closes its end of the connection, or ends."""

    def __init__(self, libraries: tuple[str, ...]) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_launch, args=(theirs, libraries))
        self._process.start()
        theirs.close()
        # Before multiprocessing's own handler, which waits for the process.
        atexit.register(self._connection.close)

    def run(self, runs: Sequence[RankedRun], folder: Path) -> None:
        """Returns when all ranks have ended."""
        request = _Request(pickle.dumps(list(runs)), folder, dict(os.environ))
        try:
            self._connection.send(request)
            self._connection.recv()
        except BaseException:
            # A time limit, or Ctrl-C. The next caller gets a new one.
            self._end()
            raise

    def _end(self) -> None:
        for libraries in [each for each, launcher in _LAUNCHERS.items() if launcher is self]:
            del _LAUNCHERS[libraries]
        self._connection.close()
        ranks = descendants(self._process.pid or 0)
        self._process.kill()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
        self._process.join()


@dataclass(frozen=True)
class _Request:
    runs: bytes
    folder: Path
    environment: Mapping[str, str]


_LAUNCHERS: dict[tuple[str, ...], _Launcher] = {}


def _launcher_with(libraries: tuple[str, ...]) -> _Launcher:
    if libraries not in _LAUNCHERS:
        _LAUNCHERS[libraries] = _Launcher(libraries)
    return _LAUNCHERS[libraries]


def _launch(connection: Connection, libraries: tuple[str, ...]) -> None:
    for library in libraries:
        importlib.import_module(library)
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    while True:
        try:
            request: _Request = connection.recv()
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(request.environment)
        for index, run in enumerate(_loaded(request)):
            port = free_port()
            ranks = [
                fork.Process(target=_rank, args=(run, request.folder, index, rank, port))
                for rank in range(run.num_ranks)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
        connection.send(None)


def _loaded(request: _Request) -> list[RankedRun]:
    """With the modules of the programs and what they import: 700 modules, which would cost each rank a second."""
    try:
        runs: list[RankedRun] = pickle.loads(request.runs)
    except Exception:
        (request.folder / "programs.failed").write_text(f"the programs cannot be loaded:\n{traceback.format_exc()}")
        return []
    return runs


def _rank(run: RankedRun, folder: Path, index: int, rank: int, port: int) -> None:
    try:
        context = WorkerContext(rank, run.num_ranks, rank, 0, "127.0.0.1", port, "cpu", 1)
        join_process_group(context)
        result = run.program(context)
        leave_process_group()
        _result_file(folder, index, rank).write_bytes(pickle.dumps(result))
    except BaseException:
        (folder / f"{index}-{rank}.failed").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise


def _result_file(folder: Path, index: int, rank: int) -> Path:
    return folder / f"{index}-{rank}.result"
