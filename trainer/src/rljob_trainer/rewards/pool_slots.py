"""The calls that a scorer pool makes, and its processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rljob_trainer.errors import RewardError
from rljob_trainer.processes.time_limit import TimeLimit
from rljob_trainer.processes.wire import encode
from rljob_trainer.rewards.base import CallSettings, RewardOutcome, RewardRequest, RewardStatus, Takes
from rljob_trainer.rewards.scoring_child import ScoringChild

MAX_CHUNK = 64
"""The maximum number of calls that are sent together to a process that makes one at a time."""


@dataclass
class Batch:
    """The responses of one call of `submit`. `outcomes` has None for each response that has no result yet;
    `num_missing` counts these."""

    future: Future[list[RewardOutcome]]
    outcomes: list[RewardOutcome | None]
    num_missing: int


@dataclass(frozen=True)
class QueuedResponse:
    """One response of a batch."""

    batch: Batch
    index: int
    frame: bytes
    """The encoded request (see `wire`)."""


@dataclass
class QueuedCall:
    """One call of the scorer, with the responses that it gets. They fail together."""

    responses: tuple[QueuedResponse, ...]
    has_killed: bool = False
    """True if SIGKILL ended a process while it made this call."""
    has_failed: bool = False
    """True if this call's first attempt exceeded the time limit, or its process died."""
    is_alone: bool = False
    """True if a process ended while it made this call. The next process makes no other calls at the same time, so that
    the call that ends a process can be identified."""
    num_unreachable: int = 0
    """Attempts in which a service that the scorer calls could not be reached."""
    ready_at: float = 0.0
    """Monotonic time of the next attempt, after such an attempt."""

    @property
    def frame(self) -> bytes:
        """The encoded list of requests."""
        return b"[" + b",".join(each.frame for each in self.responses) + b"]"

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for its scores any more."""
        return all(each.batch.future.cancelled() for each in self.responses)

    @property
    def was_tried(self) -> bool:
        """Whether an attempt has failed."""
        return self.has_killed or self.has_failed or self.is_alone or self.num_unreachable > 0


@dataclass
class Slot:
    """One slot of the pool: its current process, and the calls that were sent to this process and have no result
    yet."""

    child: ScoringChild
    number: int
    """Part of the name of the log file; a process that replaces another one gets the same number."""
    time_limit: TimeLimit
    """The limit for loading the scorer, then for the first of `calls`. For a process that makes several calls at the
    same time: the time within which it must show that its event loop runs."""
    is_ready: bool = False
    is_async: bool = False
    """Whether the process makes several calls at the same time."""
    is_garbled: bool = False
    """True if the connection carried anything but results, because the scorer wrote into it."""
    calls: list[QueuedCall] = field(default_factory=list)
    """In the order in which they were sent."""
    retried: QueuedCall | None = None
    """The call that the previous process of this slot was making when it ended. This process makes it first, and
    alone."""

    @property
    def is_busy(self) -> bool:
        """Whether the process loads the scorer or makes a call, so that `time_limit` applies."""
        return not self.is_ready or len(self.calls) > 0


def calls_for(responses: Sequence[QueuedResponse], groups: Sequence[int] | None) -> list[QueuedCall]:
    """Returns one call for each response, or for each group if `groups` names the group of each response."""
    if groups is None:
        return [QueuedCall((each,)) for each in responses]
    by_group: dict[int, list[QueuedResponse]] = {}
    for response, group in zip(responses, groups, strict=True):
        by_group.setdefault(group, []).append(response)
    return [QueuedCall(tuple(each)) for each in by_group.values()]


def next_calls(slot: Slot, pending: deque[QueuedCall], settings: CallSettings, num_processes: int) -> list[QueuedCall]:
    """Takes the calls from `pending` that are sent to a process now: as many as it may make at the same time, or a
    chunk if it has none. Chunks get smaller towards the end."""
    if not slot.is_async:
        size = 1 if settings.takes is Takes.BATCH else min(MAX_CHUNK, -(-len(pending) // (2 * num_processes)))
        return [] if slot.calls else [_merged(pending, settings) for _ in range(size) if pending]
    found: list[QueuedCall] = []
    while pending and len(slot.calls) + len(found) < settings.max_calls:
        made = [*slot.calls, *found]
        if any(each.is_alone for each in made) or (made and pending[0].is_alone):
            break
        found.append(_merged(pending, settings))
    return found


def _merged(pending: deque[QueuedCall], settings: CallSettings) -> QueuedCall:
    """Takes the first call; a call that takes a batch gets the responses of the next calls. A call that has failed
    keeps its responses."""
    call = pending.popleft()
    if settings.takes is not Takes.BATCH or call.was_tried:
        return call
    responses = list(call.responses)
    while len(responses) < settings.max_responses and pending and not pending[0].was_tried:
        responses.extend(pending.popleft().responses)
    return QueuedCall(tuple(responses))


def outcome_of(result: object) -> RewardOutcome | None:
    """Reads the result of one response; None if it is not a result."""
    match result:
        case [
            "OK" | "ERROR" | "UNREACHABLE" | "TIMEOUT" as status,
            int() | float() | None as score,
            str() as detail,
            int() | float() as seconds,
            str() | None as found,
            dict() as counts,
        ]:
            return RewardOutcome(score, RewardStatus(status), detail, seconds, found, counts)
    return None


def request_frame(request: RewardRequest) -> bytes:
    """Returns the encoded request. Raises RewardError for a row that cannot be sent to a process."""
    try:
        return encode([request.prompt, request.response, request.answer, request.row, list(request.messages)])
    except (TypeError, RecursionError, ValueError) as error:
        raise RewardError(
            f"a dataset row cannot be sent to the reward: {error}; use only strings, numbers, and lists and mappings "
            "that are not deeply nested"
        ) from error
