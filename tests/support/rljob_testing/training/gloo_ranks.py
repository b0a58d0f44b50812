"""Runs functions on several gloo ranks, each in its own process, or on this process as the only rank."""

from __future__ import annotations

import atexit
import gc
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
"""Modules that every rank loads. The first would otherwise be loaded by the first call of `fully_shard`."""
VLLM = (
    *TRAINING,
    "rljob_trainer.engines.rollout.vllm_engine",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "rljob_testing.models.small_vllm",
)
NOT_COMPILED: Mapping[str, str] = {"TORCHDYNAMO_DISABLE": "1"}
"""As in workers on CPUs. vLLM decorates small functions with torch.compile even in eager mode, which takes a rank some
seconds at the first calls."""


@dataclass(frozen=True)
class RankedRun:
    """A program and its number of ranks. The program must be picklable: a module-level function or a
    `functools.partial`."""

    program: Program
    num_ranks: int


def run_on_ranks(runs: Sequence[RankedRun], libraries: Sequence[str] = TRAINING) -> list[list[object]]:
    """Runs the programs one after the other and returns, for each one, the results of its ranks.

    Raises RuntimeError with the traceback if a rank fails. All ranks are forked from one process per tuple of
    `libraries`, which loads these libraries and the programs' modules. A rank has the current environment variables of
    this process, except those that a module read at its import.
    """
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
    """Makes this process the only member of a process group within the context, as workers join one. `folder` must be
    empty."""
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
    """The process from which ranks are forked. It ends when this process closes the connection or ends."""

    def __init__(self, libraries: tuple[str, ...]) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_launch, args=(theirs, libraries))
        self._process.start()
        theirs.close()
        # Runs before multiprocessing's own exit handler, which waits for the process.
        atexit.register(self._connection.close)

    def run(self, runs: Sequence[RankedRun], folder: Path) -> None:
        """Runs the programs and returns when all ranks have ended."""
        request = _Request(pickle.dumps(list(runs)), folder, dict(os.environ))
        try:
            self._connection.send(request)
            self._connection.recv()
        except BaseException:
            # A timeout or Ctrl-C. The next caller gets a new launcher.
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
    os.environ.update(NOT_COMPILED)
    # Nothing that an import creates is garbage.
    gc.disable()
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
        os.environ.update({**request.environment, **NOT_COMPILED})
        runs = _loaded(request)
        # Otherwise each garbage collection of a rank would search, and copy, all that was loaded here: 0.2 s.
        gc.freeze()
        for index, run in enumerate(runs):
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
    """Unpickles the programs. This imports their modules, about 700, which would take each rank a second."""
    try:
        runs: list[RankedRun] = pickle.loads(request.runs)
    except Exception:
        (request.folder / "programs.failed").write_text(f"the programs cannot be loaded:\n{traceback.format_exc()}")
        return []
    return runs


def _rank(run: RankedRun, folder: Path, index: int, rank: int, port: int) -> None:
    gc.enable()
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
