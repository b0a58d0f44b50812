"""What a scoring process reads and writes: the requests of a call, and the result of each response, which is `[status,
score or null, detail, seconds, found or null, counts]`."""

from __future__ import annotations

from rljob_trainer.processes.child_program import MAX_DETAIL_CHARACTERS, describe_error, printable
from rljob_trainer.processes.wire import decode
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest, RewardStatus, as_found, as_score
from rljob_trainer.rewards.unreachable import is_unreachable

Result = list[float | str | dict[str, float] | None]


def requests_of(frame: bytes) -> list[RewardRequest]:
    """The requests of a call."""
    call = decode(frame)
    if not isinstance(call, list):
        raise TypeError(f"not a call: {frame!r:.200}")
    return [_request_of(each) for each in call]


def _request_of(value: object) -> RewardRequest:
    match value:
        case [str() as prompt, str() as response, answer, dict() as row, [*messages]]:
            return RewardRequest(prompt, response, answer, row, [each for each in messages if isinstance(each, dict)])
    raise TypeError(f"not a request: {value!r:.200}")


def failure_of(error: BaseException, seconds: float) -> Result:
    """The result of a call that raised an exception."""
    return [_status_of(error), None, describe_error(error), seconds, None, {}]


def result_of(value: object, seconds: float) -> Result:
    """The result for a value that the scorer returned."""
    if isinstance(value, RewardOutcome):
        detail = printable(value.detail)[:MAX_DETAIL_CHARACTERS]
        found = None if value.found is None else printable(value.found)
        return [value.status, value.score, detail, value.seconds, found, dict(value.counts)]
    try:
        return [RewardStatus.OK, as_score(value), "", seconds, as_found(value), {}]
    except (TypeError, ValueError) as error:
        return [RewardStatus.ERROR, None, printable(str(error))[:MAX_DETAIL_CHARACTERS], seconds, None, {}]
    except BaseException as error:
        # Raised by code of the returned value, for example a `__float__` or `__repr__` that exits.
        return [RewardStatus.ERROR, None, describe_error(error), seconds, None, {}]


def _status_of(error: BaseException) -> RewardStatus:
    """ERROR or UNREACHABLE; also works if an attribute of the exception raises."""
    try:
        return RewardStatus.UNREACHABLE if is_unreachable(error) else RewardStatus.ERROR
    except BaseException:
        return RewardStatus.ERROR
