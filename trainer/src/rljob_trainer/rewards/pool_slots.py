"""The responses that a scorer pool is scoring, and the deadline of each of its processes."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from rljob_trainer.errors import RewardError
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest
from rljob_trainer.rewards.scoring_child import CoreUse, ScoringChild
from rljob_trainer.rewards.wire import encode


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
    deadline: float
    """Monotonic time by which the process must have loaded the scorer, or scored the first of `responses`."""
    began: float
    """Monotonic time at which the process started to load, or to score the first of `responses`."""
    use_at_beginning: CoreUse | None = None
    """CPU use at `began`; None while the process loads, and if it cannot be read."""
    seconds_without_core: float = 0.0
    """Seconds since `began` in which the process waited for a core; `deadline` was already extended by them."""
    use_seen: CoreUse | None = None
    """CPU use when `deadline` was last reached."""
    use_seen_at: float = 0.0
    """Monotonic time of the first check that found `use_seen`."""
    is_in_doubt: bool = False
    """True if the process was runnable at `deadline`. It may have waited for a core; this is known when it has run."""
    check_again_at: float = 0.0
    """Monotonic time, after `deadline`, of the next check of a process that is in doubt."""
    seconds_stood_still: float = 0.0
    """Seconds in which the machine was suspended; `deadline` was already extended by them."""
    is_ready: bool = False
    is_garbled: bool = False
    """True if the connection carried anything but results, because the scorer wrote into it."""
    responses: deque[QueuedResponse] = field(default_factory=deque)
    retried: QueuedResponse | None = None
    """The response that the previous process of this slot was scoring when it ended. This process scores it first, and
    alone."""

    @property
    def is_busy(self) -> bool:
        """Whether the process loads the scorer or scores a response, so that `deadline` applies."""
        return not self.is_ready or len(self.responses) > 0

    @property
    def next_check(self) -> float:
        """Monotonic time at which to check whether the process has exceeded its limit."""
        return max(self.deadline, self.check_again_at) if self.is_in_doubt else self.deadline


def request_frame(request: RewardRequest) -> bytes:
    """Returns the encoded request. Raises RewardError for a row that cannot be sent to a process."""
    try:
        return encode([request.prompt, request.response, request.answer, request.row])
    except (TypeError, RecursionError, ValueError) as error:
        raise RewardError(
            f"a dataset row cannot be sent to the reward: {error}; use only strings, numbers, and lists and mappings "
            "that are not deeply nested"
        ) from error
