"""The responses that a scorer pool is scoring, and its processes."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from rljob_trainer.errors import RewardError
from rljob_trainer.processes.time_limit import TimeLimit
from rljob_trainer.processes.wire import encode
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest
from rljob_trainer.rewards.scoring_child import ScoringChild


@dataclass
class Batch:
    """The responses of one call of `submit`. `outcomes` has None for each response that has no result yet;
    `num_missing` counts these."""

    future: Future[list[RewardOutcome]]
    outcomes: list[RewardOutcome | None]
    num_missing: int


@dataclass
class QueuedResponse:
    """One response of a batch, as it is sent to a process."""

    batch: Batch
    index: int
    frame: bytes
    """The encoded request (see `wire`)."""
    has_killed: bool = False
    """True if SIGKILL ended a process while it scored this response."""
    has_failed: bool = False
    """True if this response's first attempt exceeded the time limit, or its process died."""
    num_unreachable: int = 0
    """Attempts in which a service that the scorer calls could not be reached."""
    ready_at: float = 0.0
    """Monotonic time of the next attempt, after such an attempt."""


@dataclass
class Slot:
    """One slot of the pool: its current process, and the responses that were sent to this process and have no score
    yet."""

    child: ScoringChild
    number: int
    """Part of the name of the log file; a process that replaces another one gets the same number."""
    time_limit: TimeLimit
    """Of loading the scorer, then of scoring the first of `responses`."""
    is_ready: bool = False
    is_garbled: bool = False
    """True if the connection carried anything but results, because the scorer wrote into it."""
    responses: deque[QueuedResponse] = field(default_factory=deque)
    retried: QueuedResponse | None = None
    """The response that the previous process of this slot was scoring when it ended. This process scores it first, and
    alone."""

    @property
    def is_busy(self) -> bool:
        """Whether the process loads the scorer or scores a response, so that `time_limit` applies."""
        return not self.is_ready or len(self.responses) > 0


def request_frame(request: RewardRequest) -> bytes:
    """Returns the encoded request. Raises RewardError for a row that cannot be sent to a process."""
    try:
        return encode([request.prompt, request.response, request.answer, request.row, list(request.messages)])
    except (TypeError, RecursionError, ValueError) as error:
        raise RewardError(
            f"a dataset row cannot be sent to the reward: {error}; use only strings, numbers, and lists and mappings "
            "that are not deeply nested"
        ) from error
