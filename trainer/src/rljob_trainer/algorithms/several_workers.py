"""What runs on every data-parallel worker, run for several of them in one process: to try a function before there are
workers.

Each worker is a thread, and one thread runs at a time, until it waits in `Reduce` or is done. What a module keeps in
globals they share, unlike real workers, which are processes.
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
"""For workers that block each other outside of `Reduce`. Within it they wait as long as any other may still call."""


def on_workers(
    parts: Sequence[Part], compute: Callable[[Part, Reduce], Result], patience_seconds: float = PATIENCE_SECONDS
) -> list[Result]:
    """`compute(part, reduce)` for every part, as on so many workers.

    Raises what the first worker to fail raises; none is left waiting for it. Calls of `reduce` that do not match those
    of the other workers raise ValueError in it. Workers that do not come to an end are left behind with a TimeoutError.
    """
    meeting = _Meeting(len(parts))
    results: dict[int, Result] = {}

    def work(rank: int) -> None:
        with meeting.attended(rank):
            results[rank] = compute(parts[rank], _Member(meeting, rank))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience_seconds)
        if thread.is_alive():
            break
    if meeting.failures:
        raise meeting.failures[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"workers: not done after {patience_seconds:g} s; hold no lock while calling `reduce`")
    return [results[rank] for rank in range(len(parts))]


@dataclass(frozen=True)
class _Call:
    operation: str
    values: Tensor

    def __str__(self) -> str:
        return f"{self.operation} of {list(self.values.shape)} {str(self.values.dtype).removeprefix('torch.')}"


class _Meeting:
    """The calls of all workers. Whoever runs holds the lock; waiting lends it to the others."""

    def __init__(self, num_workers: int) -> None:
        self.calls: list[list[_Call]] = [[] for _ in range(num_workers)]
        self.is_done = [False] * num_workers
        self.failures: list[BaseException] = []
        """In the order of their time."""
        self._turn = threading.Condition()

    @contextmanager
    def attended(self, rank: int) -> Iterator[None]:
        """What the worker does is done within; what it raises is kept."""
        with self._turn:
            try:
                yield
            except BaseException as error:
                self.failures.append(error)
            finally:
                self.is_done[rank] = True
                self._turn.notify_all()

    def of_all(self, rank: int, call: _Call) -> Tensor:
        """The values of this call and of those of the other workers that it meets, in a first dimension."""
        place = len(self.calls[rank])

        def have_all_come() -> bool:
            places = zip(self.calls, self.is_done, strict=True)
            return all(is_done or len(calls) > place for calls, is_done in places)

        self.calls[rank].append(call)
        self._turn.notify_all()
        self._turn.wait_for(have_all_come)
        met = [calls[place] for calls in self.calls if len(calls) > place]
        if len(met) < len(self.calls):
            raise ValueError(
                f"reduce: another worker has ended without this call ({call}); call it equally often on all workers, "
                "those without any token, too"
            )
        if len(different := sorted({str(each) for each in met})) > 1:
            raise ValueError(
                f"reduce: calls of the workers that should meet differ ({', '.join(different)}); make the same ones on "
                "all workers, with tensors of the same shape and dtype"
            )
        return torch.stack([each.values for each in met])


class _Member:
    """`Reduce` for one worker."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def sum(self, values: Tensor) -> Tensor:
        return self._of_all("sum", values).sum(dim=0, dtype=values.dtype)

    def max(self, values: Tensor) -> Tensor:
        return self._of_all("max", values).amax(dim=0)

    def _of_all(self, operation: str, values: Tensor) -> Tensor:
        # A copy, because this worker may go on to change its own before the others have looked.
        return self._meeting.of_all(self._rank, _Call(operation, values.detach().clone()))
