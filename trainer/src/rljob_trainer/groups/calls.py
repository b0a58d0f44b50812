"""Calls under way: waiting for the ranks, and turning what went wrong into one error that names its cause."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RaySystemError, RayTaskError, UnserializableException

from rljob_trainer.errors import CallTimeoutError, FailedWorker, TrainerError, WorkerDiedError, WorkerError
from rljob_trainer.groups.death import Place, cause_of_death
from rljob_trainer.groups.ray_session import check_connected

T = TypeVar("T")

FAILURE_GRACE_SECONDS = 5.0
"""How long the other ranks have to end after the first has failed: some cannot, because they wait for it."""
FOLLOW_UP = re.compile(
    r"closed by peer|[Cc]onnection (?:reset|refused|was closed|was likely closed|closed)|[Bb]roken pipe"
    r"|remote process exited|caused pair closure|Socket closed|[Tt]imed out waiting|Socket Timeout"
    r"|NCCL (?:communicator was aborted|timeout)|ncclRemoteError"
)
"""What collectives (gloo, NCCL, torch's store) say on a rank whose peer has failed."""

UNREADABLE = (RaySystemError, UnserializableException)
"""What Ray says of a result that came and could not be unpickled. Its other errors: a process or node is gone."""

LIVENESS_SECONDS = 1.0
"""How often a call that waits looks whether some process is gone."""


@dataclass(frozen=True)
class Ranks:
    """What a call waits for: one reference per rank, and what the call is named in errors."""

    what: str
    references: Mapping[int, ray.ObjectRef]
    place_of: Callable[[int], Place]
    raise_if_dead: Callable[[], None]
    """Raises for a process that is gone, also of others than these ranks."""

    def results(self, timeout_seconds: float | None = None) -> list[object]:
        """In the order of the ranks. Raised is the cause rather than what followed from it: one of our own errors, else
        a rank that died (its peers fail in their collectives, often sooner than the death is known, and in many words),
        else the first failure that does not speak of a peer (`FOLLOW_UP`); after the first failure the rest get
        `FAILURE_GRACE_SECONDS` to end.

        Raises TrainerError as the worker raised it, WorkerError, WorkerDiedError, CallTimeoutError; ResourceError when
        the connection to Ray has been closed."""
        check_connected(self.what)
        ranks = sorted(self.references)
        references = [self.references[rank] for rank in ranks]
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            remaining = deadline - time.monotonic()
            try:
                # One wait for all while nothing goes wrong.
                return list(ray.get(references, timeout=max(0.0, min(remaining, LIVENESS_SECONDS))))
            except RayTaskError:
                # First: it is a GetTimeoutError, too, where a worker has raised one.
                return self._results_one_by_one(ranks)
            except GetTimeoutError:
                if remaining <= LIVENESS_SECONDS:
                    raise CallTimeoutError(f"{self.what}: no result within {timeout_seconds:g} s") from None
                self.raise_if_dead()
            except RayError:
                return self._results_one_by_one(ranks)

    def done(self) -> bool:
        """Whether `results` would not wait."""
        check_connected(self.what)
        references = list(self.references.values())
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        return len(ready) == len(references)

    def _results_one_by_one(self, ranks: list[int]) -> list[object]:
        results: dict[int, object] = {}
        errors: list[TrainerError] = []
        deaths: list[WorkerDiedError] = []
        deadline: float | None = None
        pending = {self.references[rank]: rank for rank in ranks}
        while pending:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=remaining)
            if not ready:
                break
            rank = pending.pop(ready[0])
            try:
                results[rank] = ray.get(ready[0])
            except RayTaskError as error:
                errors.append(self._failed(rank, error))
            except UNREADABLE as error:
                errors.append(WorkerError(f"{self.what}: worker rank {rank}: its result cannot be read: {error}"))
            except RayError as error:
                deaths.append(self._died(rank, error))
                break
            if errors and deadline is None:
                deadline = time.monotonic() + FAILURE_GRACE_SECONDS
        causes = [error for error in errors if not FOLLOW_UP.search(str(error))]
        if deaths:
            raise next((error for error in causes if not isinstance(error, WorkerError)), deaths[0])
        if errors:
            raise min(causes or errors, key=lambda error: isinstance(error, WorkerError))
        return [results[rank] for rank in ranks]

    def _failed(self, rank: int, error: RayTaskError) -> TrainerError:
        """Our own errors come back as they were raised; others become WorkerError with the worker's traceback."""
        failed: TrainerError
        worker = self._failed_worker(rank)
        where = f"{self.what}: worker rank {rank}{worker.place}"
        if isinstance(error.cause, TrainerError) and type(error.cause) is not WorkerError:
            failed = error.cause
        elif isinstance(error.cause, WorkerError):
            failed = WorkerError(f"{where}: {error.cause}")
        else:
            failed = WorkerError(f"{where}: {error.cause!r}\n{error}")
        failed.worker = worker
        return failed

    def _failed_worker(self, rank: int) -> FailedWorker:
        return self.place_of(rank).failed_worker(rank, self.what.partition(".")[0])

    def _died(self, rank: int, error: RayError) -> WorkerDiedError:
        place = self.place_of(rank)
        died = WorkerDiedError(
            f"worker rank {rank} ({place}) died in {self.what}: {cause_of_death(error, place)}{place.more}"
        )
        died.worker = self._failed_worker(rank)
        return died


class Pending(Generic[T]):
    """The result of a call that was not waited for. It can be an argument of another call."""

    def __init__(self, ranks: Ranks, gather: Callable[[list[object]], T], parts: tuple[object, ...] = ()) -> None:
        """`parts`: arguments for other calls that, one after the other, are the whole; none where it is not so."""
        self.ranks = ranks
        self.parts = parts
        self._gather = gather
        self._result: tuple[T] | None = None

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._result is not None or self.ranks.done()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a Pending travels only as an argument of its own, not within another one; give its result()")

    def result(self, timeout_seconds: float | None = None) -> T:
        """Waits; the same result each time.

        Raises CallTimeoutError after the time, and the call may go on; what a worker raised; WorkerDiedError."""
        if self._result is None:
            self._result = (self._gather(self.ranks.results(timeout_seconds)),)
        return self._result[0]
