"""Runs a function on several gloo ranks, one process each, and brings the results back."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # loaded by the first `fully_shard`: here once, before the ranks are forked
import torch.distributed as dist
import transformers  # noqa: F401 - likewise

from rljob_testing.ports import free_port
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.process_group import join_process_group, leave_process_group

Program = Callable[[WorkerContext], object]


@dataclass(frozen=True)
class RankedRun:
    """One program on so many ranks. It must be picklable: a module's function, or a `functools.partial` of one."""

    program: Program
    num_ranks: int


def run_on_ranks(runs: Sequence[RankedRun]) -> list[list[object]]:
    """For each run the results of its ranks. Raises RuntimeError with the traceback where a rank fails.

    Runs go one after the other. All ranks are forked from one new process, so that torch is imported once."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = multiprocessing.get_context("spawn").Process(target=_fork_ranks, args=(list(runs), Path(folder)))
        launcher.start()
        launcher.join()
        failures = sorted(Path(folder).glob("*.failed"))
        if failures:
            raise RuntimeError(failures[0].read_text())
        return [
            [pickle.loads(_result_file(Path(folder), index, rank).read_bytes()) for rank in range(run.num_ranks)]
            for index, run in enumerate(runs)
        ]


def _fork_ranks(runs: list[RankedRun], folder: Path) -> None:
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    for index, run in enumerate(runs):
        port = free_port()
        ranks = [fork.Process(target=_rank, args=(run, index, rank, port, folder)) for rank in range(run.num_ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


def _rank(run: RankedRun, index: int, rank: int, port: int, folder: Path) -> None:
    context = WorkerContext(rank, run.num_ranks, rank, 0, "127.0.0.1", port, "cpu", 1)
    try:
        join_process_group(context)
        result = run.program(context)
        leave_process_group()
        _result_file(folder, index, rank).write_bytes(pickle.dumps(result))
    except BaseException:
        (folder / f"{index}-{rank}.failed").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise


def _result_file(folder: Path, index: int, rank: int) -> Path:
    return folder / f"{index}-{rank}.result"


@contextmanager
def only_rank(folder: Path, device_type: str = "cpu") -> Iterator[WorkerContext]:
    """Within it there is a group of one, as workers join it on such devices. `folder` must be empty."""
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
