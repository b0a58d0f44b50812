"""Plain Ray actors as a contender: the speed without any layer on top of Ray.

Batches are dictionaries of NumPy arrays, which Ray stores with one copy and reads without a copy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import ray
import torch

from rljob_bench.columns import (
    NUM_ROWS,
    Columns,
    check_plus_one,
    check_sums,
    first_values,
    new_columns,
    plus_one,
    row_sums,
)
from rljob_bench.peer_process import python_path
from rljob_bench.processes import wait_until_gone
from rljob_bench.rounds import timed_calls

Arrays = dict[str, npt.NDArray[np.generic]]


class BareWorker:
    """The class of the Ray actors. It imports torch when it is constructed."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def empty(self) -> None:
        """Does nothing."""

    def process_id(self) -> int:
        """The process id of this worker."""
        return os.getpid()

    def read(self, batch: Arrays) -> npt.NDArray[np.generic]:
        """One number per row, from everything in the row."""
        return row_sums(_tensors(batch)).numpy()

    def fresh(self, batch: Arrays) -> Arrays:
        """New columns of the same size."""
        return _arrays(plus_one(_tensors(batch)))

    def make(self, num_bytes: int, num_rows: int) -> Arrays:
        """Columns of `num_bytes`, created on each worker."""
        return _arrays(new_columns(num_bytes, num_rows))

    def first_values(self, batch: Arrays) -> npt.NDArray[np.generic]:
        """One number per row, from its first position."""
        return first_values(_tensors(batch)).numpy()


class BareGroup:
    """A number of actors without declared resources. End it with `close`."""

    def __init__(self, num_workers: int, has_environment: bool = True) -> None:
        """`has_environment`: the actors get their own environment variables, like workers of worker groups; without
        them Ray can use processes that it has started in advance."""
        begin = time.perf_counter()
        options: dict[str, object] = {"num_cpus": 0}
        if has_environment:
            options["runtime_env"] = {"env_vars": {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}}
        actor_class = ray.remote(BareWorker).options(**options)
        self._actors = [actor_class.remote() for _ in range(num_workers)]
        self._all("empty")
        self.start_seconds = time.perf_counter() - begin
        """Seconds until every actor had responded to a call."""
        self._process_ids = self._all("process_id")
        self._sent: tuple[int, Columns] = (0, {})

    def close(self) -> None:
        """Ends the actors and waits until their processes have ended."""
        for actor in self._actors:
            ray.kill(actor)
        wait_until_gone(self._process_ids)

    def check(self, num_bytes: int) -> None:
        """Raises AssertionError unless the workers compute correct results."""
        sent = self._batch(num_bytes)
        check_sums(torch.from_numpy(self._read(sent)), sent)
        check_plus_one(_tensors(self._fresh(sent)), sent)

    def measure(self, operation: str, num_calls: int, num_bytes: int = 0) -> list[float]:
        """The seconds of each call of an operation."""
        return timed_calls(self._operation(operation, num_bytes), num_calls)

    def _operation(self, operation: str, num_bytes: int) -> Callable[[], object]:
        if operation == "empty":
            return lambda: self._all("empty")
        if operation == "pass_on":
            num_workers = len(self._actors)
            made = [actor.make.remote(num_bytes // num_workers, NUM_ROWS // num_workers) for actor in self._actors]
            ray.wait(made, num_returns=num_workers, fetch_local=False)
            return lambda: np.concatenate(self._with("first_values", made))
        sent = self._batch(num_bytes)
        return lambda: (self._read if operation == "read" else self._fresh)(sent)

    def _read(self, sent: Columns) -> npt.NDArray[np.generic]:
        return np.concatenate(self._with("read", self._shares(sent)))

    def _fresh(self, sent: Columns) -> Arrays:
        parts = self._with("fresh", self._shares(sent))
        return {name: np.concatenate([part[name] for part in parts]) for name in sent}

    def _shares(self, sent: Columns) -> list[Arrays]:
        size = NUM_ROWS // len(self._actors)
        starts = range(0, NUM_ROWS, size)
        return [_arrays({name: column[start : start + size] for name, column in sent.items()}) for start in starts]

    def _all(self, method: str) -> list:  # type: ignore[type-arg]
        return ray.get([getattr(actor, method).remote() for actor in self._actors])  # type: ignore[no-any-return]

    def _with(self, method: str, arguments: list) -> list:  # type: ignore[type-arg]
        calls = zip(self._actors, arguments, strict=True)
        return ray.get([getattr(actor, method).remote(argument) for actor, argument in calls])  # type: ignore[no-any-return]

    def _batch(self, num_bytes: int) -> Columns:
        if self._sent[0] != num_bytes:
            self._sent = (num_bytes, new_columns(num_bytes))
        return self._sent[1]


def _arrays(columns: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: column.numpy() for name, column in columns.items()}


def _tensors(arrays: Arrays) -> Columns:
    # torch warns once per process that memory of the object store must not be written; nothing here writes to it.
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
