"""The program of one scoring process: loads the scorer once, then scores responses from a socket, in order.

`child_process` starts it as `python -m rljob_trainer.rewards.scoring_program SOCKET_FD LIFELINE_FD`. Only the scorer
imports large libraries, so the program starts quickly.

Requests are frames (see `child_program`) with values (see `wire`). The first value is the scorer's class name and
fields, the others are `[prompt, response, answer, row]`. For each frame the program writes one reply. The first one is
`{"ready": true}` or `{"refused": text}`, the others are `[status, score or null, detail, seconds, found or null]`.
"""

from __future__ import annotations

import time

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.processes.child_program import (
    MAX_DETAIL_CHARACTERS,
    FrameReader,
    connect,
    describe_error,
    printable,
    send,
)
from rljob_trainer.processes.wire import decode
from rljob_trainer.rewards.base import RewardRequest, RewardStatus, Scorer, ScorerSpec, as_found, as_score
from rljob_trainer.rewards.code import CodeScorer
from rljob_trainer.rewards.format import FormatScorer
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.reasoning_gym import ReasoningGymScorer
from rljob_trainer.rewards.unreachable import is_unreachable

SCORERS = {
    scorer.__name__: scorer
    for scorer in (CodeScorer, FormatScorer, FunctionScorer, MathAnswerScorer, ReasoningGymScorer)
}


def main() -> None:
    """Runs until the parent closes the connection or ends."""
    descriptor = connect("scorer")
    frames = iter(FrameReader(descriptor))
    token, frame = next(frames)
    try:
        scorer = _make_spec(frame).load()
    except ConfigurationError as error:
        send(descriptor, token, {"refused": printable(str(error))})
        return
    send(descriptor, token, {"ready": True})
    for token, frame in frames:
        send(descriptor, token, _score(scorer, frame))


def _make_spec(frame: bytes) -> ScorerSpec:
    match decode(frame):
        case [str() as name, dict() as fields] if name in SCORERS:
            spec: ScorerSpec = SCORERS[name](**fields)
            return spec
    raise ConfigurationError(f"spec.training.rewards: no scorer is called {frame!r:.200}")


def _make_request(frame: bytes) -> RewardRequest:
    match decode(frame):
        case [str() as prompt, str() as response, answer, dict() as row, [*messages]]:
            return RewardRequest(prompt, response, answer, row, [each for each in messages if isinstance(each, dict)])
    raise TypeError(f"not a request: {frame!r:.200}")


def _score(scorer: Scorer, frame: bytes) -> list[float | str | None]:
    started = time.monotonic()
    try:
        value = scorer(_make_request(frame))
    except BaseException as error:
        # Also SystemExit and KeyboardInterrupt, so that user code cannot end the process by accident.
        return [_status_of(error), None, describe_error(error), time.monotonic() - started, None]
    seconds = time.monotonic() - started
    try:
        return [RewardStatus.OK, as_score(value), "", seconds, as_found(value)]
    except (TypeError, ValueError) as error:
        return [RewardStatus.ERROR, None, printable(str(error))[:MAX_DETAIL_CHARACTERS], seconds, None]
    except BaseException as error:
        # Raised by code of the returned value, for example a `__float__` or `__repr__` that exits.
        return [RewardStatus.ERROR, None, describe_error(error), seconds, None]


def _status_of(error: BaseException) -> RewardStatus:
    """ERROR or UNREACHABLE; also works if an attribute of the exception raises."""
    try:
        return RewardStatus.UNREACHABLE if is_unreachable(error) else RewardStatus.ERROR
    except BaseException:
        return RewardStatus.ERROR


if __name__ == "__main__":
    main()
