"""The program of one scoring process: loads the scorer once, then makes the calls that arrive on a socket.

`child_process` starts it as `python -m rljob_trainer.rewards.scoring_program SOCKET_FD LIFELINE_FD`. Only the scorer
imports large libraries, so the program starts quickly.

Requests are frames (see `child_program`) with values (see `wire`). The first value is the scorer's class name, its
fields, the time limit of a call in seconds, and whether the scorer first tries the service that it calls. The others
are calls: lists of `[prompt, response, answer, row, messages]`. For each frame the program writes one reply. The first
one is `{"ready": true, "is_async": flag}` or `{"refused": text, "is_temporary": flag}`, the others have one result per
response: `[status, score or null, detail, seconds, found or null, counts]`.

Calls are made in order, one at a time; those of an asynchronous scorer at the same time, by `AsyncProgram`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rljob_trainer.errors import ConfigurationError, ResourceError
from rljob_trainer.processes.child_program import (
    MAX_DETAIL_CHARACTERS,
    FrameReader,
    connect,
    describe_error,
    printable,
    send,
)
from rljob_trainer.processes.wire import decode
from rljob_trainer.rewards.base import (
    AsyncCalls,
    RewardOutcome,
    RewardRequest,
    RewardStatus,
    Scorer,
    ScorerSpec,
    SyncCalls,
    as_found,
    as_score,
)
from rljob_trainer.rewards.format import FormatScorer
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.judge import JudgeScorer
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.reasoning_gym import ReasoningGymScorer
from rljob_trainer.rewards.remote import RemoteScorer
from rljob_trainer.rewards.unreachable import is_unreachable

SCORERS = {
    scorer.__name__: scorer
    for scorer in (FormatScorer, FunctionScorer, JudgeScorer, MathAnswerScorer, ReasoningGymScorer, RemoteScorer)
}
ALIVE_SECONDS = 1.0
"""The longest time between two signs that the event loop runs; at most a quarter of the time limit of a call."""
CANCEL_SECONDS = 1.0
"""How long a call may continue after it was cancelled."""

Result = list[float | str | dict[str, float] | None]


@dataclass(frozen=True)
class _Start:
    """The value of the first frame."""

    spec: ScorerSpec
    timeout_seconds: float
    probes_service: bool


def main() -> None:
    """Runs until the parent closes the connection or ends."""
    descriptor = connect("scorer")
    reader = FrameReader(descriptor)
    token, frame = next(iter(reader))
    try:
        start = _start_of(frame)
        scorer = start.spec.load()
        if isinstance(scorer, AsyncCalls) and scorer.probe is not None and start.probes_service:
            asyncio.run(_probed(scorer))
    except (ConfigurationError, ResourceError) as error:
        is_temporary = isinstance(error, ResourceError)
        send(descriptor, token, {"refused": printable(str(error)), "is_temporary": is_temporary})
        return
    send(descriptor, token, {"ready": True, "is_async": isinstance(scorer, AsyncCalls)})
    if isinstance(scorer, AsyncCalls):
        asyncio.run(AsyncProgram(descriptor, token, scorer, start.timeout_seconds).run(reader))
        return
    for token, frame in reader:
        send(descriptor, token, _results(scorer, frame))


async def _probed(scorer: AsyncCalls) -> None:
    assert scorer.probe is not None
    await scorer.probe()


def _start_of(frame: bytes) -> _Start:
    match decode(frame):
        case [str() as name, dict() as fields, int() | float() as seconds, bool() as probes] if name in SCORERS:
            return _Start(SCORERS[name](**fields), seconds, probes)
    raise ConfigurationError(f"spec.training.rewards: no scorer is called {frame!r:.200}")


def _requests_of(frame: bytes) -> list[RewardRequest]:
    call = decode(frame)
    if not isinstance(call, list):
        raise TypeError(f"not a call: {frame!r:.200}")
    return [_request_of(each) for each in call]


def _request_of(value: object) -> RewardRequest:
    match value:
        case [str() as prompt, str() as response, answer, dict() as row, [*messages]]:
            return RewardRequest(prompt, response, answer, row, [each for each in messages if isinstance(each, dict)])
    raise TypeError(f"not a request: {value!r:.200}")


def _results(scorer: Scorer | SyncCalls, frame: bytes) -> list[Result]:
    requests, started = _requests_of(frame), time.monotonic()
    values: list[object] = []
    try:
        if isinstance(scorer, SyncCalls):
            values.extend(scorer.score(requests))
        else:
            for request in requests:
                values.append(scorer(request))
    except BaseException as error:
        # Also SystemExit and KeyboardInterrupt, so that user code cannot end the process by accident.
        return [_failure(error, time.monotonic() - started)] * len(requests)
    seconds = time.monotonic() - started
    return [_result(value, seconds) for value in values]


class AsyncProgram:
    """Makes calls at the same time, and regularly tells the parent that the event loop runs. The parent limits the
    number of calls."""

    def __init__(self, descriptor: int, token: str, scorer: AsyncCalls, timeout_seconds: float) -> None:
        """`token`: that of the first frame."""
        self._descriptor = descriptor
        self._token = token
        self._scorer = scorer
        self._timeout_seconds = timeout_seconds
        self._tasks = set[asyncio.Task[None]]()
        self._is_closed = asyncio.Event()

    async def run(self, reader: FrameReader) -> None:
        """Runs until the parent closes the connection."""
        asyncio.get_running_loop().add_reader(self._descriptor, self._read, reader)
        # Frames that arrived together with the first one are in the reader already.
        self._read(reader)
        interval = min(ALIVE_SECONDS, self._timeout_seconds / 4)
        while not self._is_closed.is_set():
            send(self._descriptor, self._token, {"alive": True})
            try:
                await asyncio.wait_for(self._is_closed.wait(), interval)
            except TimeoutError:
                continue

    def _read(self, reader: FrameReader) -> None:
        frames = reader.read_available()
        if frames is None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._is_closed.set()
            return
        for token, frame in frames:
            task = asyncio.get_running_loop().create_task(self._answer(token, frame))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, token: str, frame: bytes) -> None:
        requests, started = _requests_of(frame), time.monotonic()
        task = asyncio.get_running_loop().create_task(_caught(self._scorer, requests))
        limit = None if self._scorer.has_own_limits else self._timeout_seconds
        await asyncio.wait({task}, timeout=limit)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
            detail = f"ran longer than {self._timeout_seconds:g} s and was cancelled"
            timeout: Result = [RewardStatus.TIMEOUT, None, detail, self._timeout_seconds, None, {}]
            send(self._descriptor, token, [timeout] * len(requests))
            return
        seconds, found = time.monotonic() - started, task.result()
        if isinstance(found, BaseException):
            send(self._descriptor, token, [_failure(found, seconds)] * len(requests))
        else:
            send(self._descriptor, token, [_result(value, seconds) for value in found])


async def _caught(scorer: AsyncCalls, requests: Sequence[RewardRequest]) -> Sequence[object] | BaseException:
    """The scores, or the exception: SystemExit in a task would end the event loop."""
    try:
        return await scorer.score(requests)
    except BaseException as error:
        return error


def _failure(error: BaseException, seconds: float) -> Result:
    return [_status_of(error), None, describe_error(error), seconds, None, {}]


def _result(value: object, seconds: float) -> Result:
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


if __name__ == "__main__":
    main()
