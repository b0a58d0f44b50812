"""Pending calls: waits for the results of all ranks, and raises one error, the cause, if several ranks fail."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RaySystemError, RayTaskError, UnserializableException

from rljob_trainer.errors import CallTimeoutError, FailedWorker, TrainerError, WorkerDiedError, WorkerError
from rljob_trainer.groups.ray_session import check_connected
from rljob_trainer.groups.worker_failure import WorkerLocation, failure_cause

T = TypeVar("T")

FAILURE_GRACE_SECONDS = 5.0
"""How long to wait for the other ranks after the first failure: some never finish, because they wait for the failed
rank in a collective."""
PEER_FAILED = re.compile(
    r"closed by peer|[Cc]onnection (?:reset|refused|was closed|was likely closed|closed)|[Bb]roken pipe"
    r"|remote process exited|caused pair closure|Socket closed|[Tt]imed out waiting|Socket Timeout"
    r"|NCCL (?:communicator was aborted|timeout)|ncclRemoteError"
)
"""Matches the errors of collectives (gloo, NCCL, torch's store) on a rank whose peer has failed."""

UNREADABLE = (RaySystemError, UnserializableException)
"""Ray's errors for a result that arrived but cannot be unpickled. Other Ray errors mean that a process or node is
lost."""

LIVENESS_CHECK_SECONDS = 1.0
"""The time between two checks, in a waiting call, whether any process has died."""


@dataclass(frozen=True)
class StartedCall:
    """A call that was sent to some or all ranks of a group, and the references to their results."""

    name: str
    """The call's name in errors, such as `actor.update_policy`."""
    references: Mapping[int, ray.ObjectRef]
    """Rank -> reference to its result."""
    location_of: Callable[[int], WorkerLocation]
    """Returns where a rank runs."""
    raise_if_dead: Callable[[], None]
    """Raises WorkerDiedError if any process of the pool has died, even if the process is not part of this call."""

    def results(self, timeout_seconds: float | None = None) -> list[object]:
        """Waits for all results and returns them in the order of the ranks.

        If several ranks fail, the cause is raised and not an error that follows from it. In this order: a TrainerError
        that a worker raised; the death of a rank (its peers fail in their collectives, often before the death is
        known); the first error that does not blame a peer (`PEER_FAILED`). After the first error the other ranks have
        `FAILURE_GRACE_SECONDS` to finish.

        Raises a worker's TrainerError unchanged, WorkerError for a worker's other errors, WorkerDiedError, and
        CallTimeoutError; ResourceError if the connection to Ray is closed."""
        check_connected(self.name)
        ranks = sorted(self.references)
        references = [self.references[rank] for rank in ranks]
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            remaining = deadline - time.monotonic()
            try:
                # The normal case: one wait for all ranks.
                return list(ray.get(references, timeout=max(0.0, min(remaining, LIVENESS_CHECK_SECONDS))))
            except RayTaskError:
                # Must come before GetTimeoutError: if a worker raised a GetTimeoutError, Ray's error is both types.
                return self._results_one_by_one(ranks)
            except GetTimeoutError:
                if remaining <= LIVENESS_CHECK_SECONDS:
                    raise CallTimeoutError(f"{self.name}: no result within {timeout_seconds:g} s") from None
                self.raise_if_dead()
            except RayError:
                return self._results_one_by_one(ranks)

    def done(self) -> bool:
        """Whether `results` returns without waiting."""
        check_connected(self.name)
        references = list(self.references.values())
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        return len(ready) == len(references)

    def waiting_for(self) -> list[ray.ObjectRef]:
        """Returns the references without a result; none if a rank has failed, because `results` raises its error."""
        references = list(self.references.values())
        waiting: list[ray.ObjectRef]
        ready, waiting = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        if ready and waiting:
            try:
                ray.get(ready)
            except RayError:
                return []
        return waiting

    def _results_one_by_one(self, ranks: list[int]) -> list[object]:
        """Like `results`, for a call in which a rank has failed: collects the errors of the ranks, until one has died
        or the time for the others is over, and raises the cause."""
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
                errors.append(
                    WorkerError(
                        f"{self.name}: worker rank {rank}: its result cannot be unpickled "
                        f"({error}); return only objects whose classes the controller can import"
                    )
                )
            except RayError as error:
                deaths.append(self._died(rank, error))
                break
            if errors and deadline is None:
                deadline = time.monotonic() + FAILURE_GRACE_SECONDS
        causes = [error for error in errors if not PEER_FAILED.search(str(error))]
        if deaths:
            raise next((error for error in causes if not isinstance(error, WorkerError)), deaths[0])
        if errors:
            raise min(causes or errors, key=lambda error: isinstance(error, WorkerError))
        return [results[rank] for rank in ranks]

    def _failed(self, rank: int, error: RayTaskError) -> TrainerError:
        """Returns the error that the caller gets for a rank's error: a TrainerError unchanged, a WorkerError with the
        call and the rank before its text, and for any other error a WorkerError with the worker's traceback."""
        failed: TrainerError
        worker = self._failed_worker(rank)
        where = f"{self.name}: worker rank {rank}{worker.location}"
        if isinstance(error.cause, TrainerError) and type(error.cause) is not WorkerError:
            failed = error.cause
        elif isinstance(error.cause, WorkerError):
            failed = WorkerError(f"{where}: {error.cause}")
            failed.known_cause = error.cause.known_cause
        else:
            failed = WorkerError(f"{where}: {error.cause!r}\n{error}")
        failed.worker = worker
        return failed

    def _failed_worker(self, rank: int) -> FailedWorker:
        return self.location_of(rank).failed_worker(rank, self.name.partition(".")[0])

    def _died(self, rank: int, error: RayError) -> WorkerDiedError:
        location = self.location_of(rank)
        cause = failure_cause(error, location)
        died = WorkerDiedError(f"worker rank {rank} ({location}) died in {self.name}: {cause}{location.log_hint}")
        died.known_cause = cause.known_cause
        died.worker = self._failed_worker(rank)
        return died


class Pending(Generic[T]):
    """The future result of a non-blocking call. It can be passed as an argument to another call."""

    def __init__(self, call: StartedCall, gather: Callable[[list[object]], T], parts: tuple[object, ...] = ()) -> None:
        """`gather` makes the caller's result from the results of the ranks. `parts`: one part of the result per data
        rank, as an argument for other calls; empty if the result cannot be passed on in parts."""
        self.call = call
        self.parts = parts
        self._gather = gather
        self._result: tuple[T] | None = None

    def done(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._result is not None or self.call.done()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "a Pending cannot be inside another argument, such as a list; pass it as a separate argument, or pass its "
            "result()"
        )

    def result(self, timeout_seconds: float | None = None) -> T:
        """Waits for the result and returns it; later calls return the same object.

        Raises CallTimeoutError after the timeout (the workers continue with the call), and the other errors of
        `StartedCall.results`."""
        if self._result is None:
            self._result = (self._gather(self.call.results(timeout_seconds)),)
        return self._result[0]


def wait_for_any(pendings: Sequence[Pending[T]], timeout_seconds: float | None = None) -> list[Pending[T]]:
    """Waits until at least one of the calls is done, and returns those that are, in the given order. A call that has
    failed on any rank is done: its `result` raises the error. Returns an empty list after the timeout, and without
    calls.

    Raises WorkerDiedError if a process of a pool has died, even if the process is not part of a call; ResourceError if
    the connection to Ray is closed."""
    deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
    while pendings:
        check_connected(pendings[0].call.name)
        waiting_for = [pending.call.waiting_for() for pending in pendings]
        done = [pending for pending, references in zip(pendings, waiting_for, strict=True) if not references]
        remaining = deadline - time.monotonic()
        if done or remaining <= 0:
            return done
        for pending in pendings:
            pending.call.raise_if_dead()
        references = [reference for of_call in waiting_for for reference in of_call]
        ray.wait(references, num_returns=1, timeout=min(remaining, LIVENESS_CHECK_SECONDS), fetch_local=False)
    return []
