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

import time
from collections.abc import Coroutine
from dataclasses import dataclass

from rljob_trainer.errors import ConfigurationError, ResourceError
from rljob_trainer.processes.child_program import FrameReader, connect, printable, send
from rljob_trainer.processes.wire import decode
from rljob_trainer.rewards.base import AsyncCalls, Scorer, ScorerSpec, SyncCalls
from rljob_trainer.rewards.code import CodeScorer
from rljob_trainer.rewards.format import FormatScorer
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.reasoning_gym import ReasoningGymScorer
from rljob_trainer.rewards.scoring_results import Result, failure_of, requests_of, result_of
from rljob_trainer.rewards.services.scorers import JudgeScorer, RemoteScorer

SCORERS = {
    scorer.__name__: scorer
    for scorer in (
        CodeScorer,
        FormatScorer,
        FunctionScorer,
        JudgeScorer,
        MathAnswerScorer,
        ReasoningGymScorer,
        RemoteScorer,
    )
}


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
            _run_async(scorer.probe())
    except (ConfigurationError, ResourceError) as error:
        is_temporary = isinstance(error, ResourceError)
        send(descriptor, token, {"refused": printable(str(error)), "is_temporary": is_temporary})
        return
    send(descriptor, token, {"ready": True, "is_async": isinstance(scorer, AsyncCalls)})
    if isinstance(scorer, AsyncCalls):
        from rljob_trainer.rewards.async_program import AsyncProgram

        _run_async(AsyncProgram(descriptor, token, scorer, start.timeout_seconds).run(reader))
        return
    for token, frame in reader:
        send(descriptor, token, _results(scorer, frame))


def _run_async(work: Coroutine[object, object, None]) -> None:
    """Only these processes import asyncio: it needs time and memory."""
    import asyncio

    asyncio.run(work)


def _start_of(frame: bytes) -> _Start:
    match decode(frame):
        case [str() as name, dict() as fields, int() | float() as seconds, bool() as probes] if name in SCORERS:
            return _Start(SCORERS[name](**fields), seconds, probes)
    raise ConfigurationError(f"spec.training.rewards: no scorer is called {frame!r:.200}")


def _results(scorer: Scorer | SyncCalls, frame: bytes) -> list[Result]:
    requests, started = requests_of(frame), time.monotonic()
    values: list[object] = []
    try:
        if isinstance(scorer, SyncCalls):
            values.extend(scorer.score(requests))
        else:
            for request in requests:
                values.append(scorer(request))
    except BaseException as error:
        # Also SystemExit and KeyboardInterrupt, so that user code cannot end the process by accident.
        return [failure_of(error, time.monotonic() - started)] * len(requests)
    seconds = time.monotonic() - started
    return [result_of(value, seconds) for value in values]


if __name__ == "__main__":
    main()
