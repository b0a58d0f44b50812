"""Simulates several data-parallel workers in one process, to try a user's function before real workers exist.

Each worker is a thread. One thread runs at a time, until it waits in `Reduce` or finishes. The threads share the global
variables of modules; real workers are processes and do not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from rljob_trainer.algorithms.interfaces import Reduce

Part = TypeVar("Part")
Result = TypeVar("Result")

PATIENCE_SECONDS = 300.0
"""How long `on_workers` waits for each worker to finish. The limit is for workers that block each other, for example
with a lock."""


def on_workers(
    parts: Sequence[Part], compute: Callable[[Part, Reduce], Result], patience_seconds: float = PATIENCE_SECONDS
) -> list[Result]:
    """Calls `compute(part, reduce)` once for each part, each on its own simulated worker, and returns the results.

    Raises the error of the first worker that fails; the others do not wait for it. If a worker calls `reduce` in
    another way than the other workers, the call raises ValueError in this worker. Raises TimeoutError if workers do not
    finish, and leaves their threads behind.
    """
    rendezvous = _Rendezvous(len(parts))
    results: dict[int, Result] = {}

    def work(rank: int) -> None:
        with rendezvous.running(rank):
            results[rank] = compute(parts[rank], _ThreadReduce(rendezvous, rank))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience_seconds)
        if thread.is_alive():
            break
    if rendezvous.failures:
        raise rendezvous.failures[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"workers: not finished after {patience_seconds:g} s; hold no lock while calling `reduce`")
    return [results[rank] for rank in range(len(parts))]


@dataclass(frozen=True)
class _Call:
    operation: str
    values: Tensor

    def __str__(self) -> str:
        return f"{self.operation} of {list(self.values.shape)} {str(self.values.dtype).removeprefix('torch.')}"


class _Rendezvous:
    """The `reduce` calls of all workers. The worker that runs holds the lock, and releases it while it waits."""

    def __init__(self, num_workers: int) -> None:
        self.calls: list[list[_Call]] = [[] for _ in range(num_workers)]
        self.is_done = [False] * num_workers
        self.failures: list[BaseException] = []
        """Errors of workers in the order in which they were raised."""
        self._turn = threading.Condition()

    @contextmanager
    def running(self, rank: int) -> Iterator[None]:
        """The worker's code runs within this block; an error that it raises is added to `failures`."""
        with self._turn:
            try:
                yield
            except BaseException as error:
                self.failures.append(error)
            finally:
                self.is_done[rank] = True
                self._turn.notify_all()

    def gathered(self, rank: int, call: _Call) -> Tensor:
        """Waits for the matching call of every worker and returns their values, stacked along a new first dimension."""
        number = len(self.calls[rank])

        def have_all_called() -> bool:
            workers = zip(self.calls, self.is_done, strict=True)
            return all(is_done or len(calls) > number for calls, is_done in workers)

        self.calls[rank].append(call)
        self._turn.notify_all()
        self._turn.wait_for(have_all_called)
        matching = [calls[number] for calls in self.calls if len(calls) > number]
        if len(matching) < len(self.calls):
            raise ValueError(
                f"reduce: another worker finished without this call ({call}); make the same number of calls on all "
                "workers, also on those without any token"
            )
        if len(different := sorted({str(each) for each in matching})) > 1:
            raise ValueError(
                f"reduce: the calls of the workers do not match ({', '.join(different)}); make the same calls on all "
                "workers, with tensors of the same shape and dtype"
            )
        return torch.stack([each.values for each in matching])


class _ThreadReduce:
    """`Reduce` for one worker."""

    def __init__(self, rendezvous: _Rendezvous, rank: int) -> None:
        self._rendezvous = rendezvous
        self._rank = rank

    def sum(self, values: Tensor) -> Tensor:
        return self._gathered("sum", values).sum(dim=0, dtype=values.dtype)

    def max(self, values: Tensor) -> Tensor:
        return self._gathered("max", values).amax(dim=0)

    def _gathered(self, operation: str, values: Tensor) -> Tensor:
        # A copy, because this worker may change its tensor before the others have read it.
        return self._rendezvous.gathered(self._rank, _Call(operation, values.detach().clone()))
