"""The program of one scoring process: loads the scorer once, then scores what comes through a socket, in order.

Started as `python -m rljob_trainer.rewards.scoring_program SOCKET_FD LIFELINE_FD` by `scoring_child`. Imports nothing
heavy itself. Requests: frames of an 8-byte length, a token and a value (see `wire`), the first one the scorer's class
name and fields, then `[prompt, response, answer, row]`. Results: one JSON line `[token, answer]` for each frame, with
its token, so that nothing else that is written into the socket can be taken for one; the answer is first
`{"ready": true}` or `{"refused": text}`, then `[score or null, detail, seconds, found or null]`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import BinaryIO

from rljob_api.standard_streams import accept_all_characters
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.base import RewardRequest, Scorer, ScorerSpec, as_found, as_score
from rljob_trainer.rewards.format import FormatScorer
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.reasoning_gym import ReasoningGymScorer
from rljob_trainer.rewards.wire import decode
from rljob_trainer.settings import told_run_folder
from rljob_trainer.stack_traces import StackFile

MAX_DETAIL_CHARACTERS = 4000
NUM_TRACEBACK_LINES = 8
MAX_LINE = 400
"""Characters of a line of a traceback."""
TOKEN_CHARACTERS = 16
SCORERS = {scorer.__name__: scorer for scorer in (FormatScorer, FunctionScorer, MathAnswerScorer, ReasoningGymScorer)}


def main() -> None:
    """Runs until the parent closes the connection, or is gone."""
    # What user code prints of a response must not be an error of its reward.
    accept_all_characters()
    descriptor, lifeline = int(sys.argv[1]), int(sys.argv[2])
    for inherited in (descriptor, lifeline):
        os.set_inheritable(inherited, False)
    _outlive_stop_signals()
    _start_guardian(descriptor, lifeline)
    StackFile(told_run_folder() or "", "scorer")
    frames = _frames(os.fdopen(descriptor, "rb"))
    token, frame = next(frames)
    try:
        scorer = _make_spec(frame).load()
    except ConfigurationError as error:
        _send(descriptor, token, {"refused": _printable(str(error))})
        return
    _send(descriptor, token, {"ready": True})
    for token, frame in frames:
        _send(descriptor, token, _score(scorer, frame))


def _make_spec(frame: bytes) -> ScorerSpec:
    match decode(frame):
        case [str() as name, dict() as fields] if name in SCORERS:
            spec: ScorerSpec = SCORERS[name](**fields)
            return spec
    raise ConfigurationError(f"spec.training.rewards: no scorer is called {frame!r:.200}")


def _make_request(frame: bytes) -> RewardRequest:
    match decode(frame):
        case [str() as prompt, str() as response, answer, dict() as row]:
            return RewardRequest(prompt, response, answer, row)
    raise TypeError(f"not a request: {frame!r:.200}")


def _score(scorer: Scorer, frame: bytes) -> list[float | str | None]:
    started = time.monotonic()
    try:
        value = scorer(_make_request(frame))
    except BaseException as error:
        # SystemExit and KeyboardInterrupt, too: user code must not be able to end the process by accident.
        return [None, _describe(error), time.monotonic() - started, None]
    seconds = time.monotonic() - started
    try:
        return [as_score(value), "", seconds, as_found(value)]
    except (TypeError, ValueError) as error:
        return [None, _printable(str(error))[:MAX_DETAIL_CHARACTERS], seconds, None]
    except BaseException as error:
        # From the code of what was returned: a float() or repr() that exits, for example.
        return [None, _describe(error), seconds, None]


def _describe(error: BaseException) -> str:
    """What was raised and where, whatever the error does when it is asked for its text."""
    try:
        what = "".join(traceback.format_exception_only(error)).strip()
        # The first frame is this file's.
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        lines = "".join(traceback.format_tb(frames)).rstrip().splitlines()[-NUM_TRACEBACK_LINES:]
    except BaseException as second:
        what, lines = f"{type(error).__name__}, whose text cannot be had ({type(second).__name__})", []
    return _printable("\n".join([f"raised {what[:MAX_DETAIL_CHARACTERS]}", *(line[:MAX_LINE] for line in lines)]))


def _printable(text: str) -> str:
    """Without unpaired surrogates, which no log and no file of the run can hold."""
    return text.encode(errors="backslashreplace").decode()


def _send(descriptor: int, token: str, answer: object) -> None:
    data = json.dumps([token, answer]).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _frames(requests: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Tokens and values."""
    while header := requests.read(8):
        frame = requests.read(int.from_bytes(header, "little"))
        yield frame[:TOKEN_CHARACTERS].decode(), frame[TOKEN_CHARACTERS:]


def _outlive_stop_signals() -> None:
    """Stopping a Ray job signals every process below the trainer, which needs this one until its step is done. User
    code's own children, forked or executed, can be terminated as ever."""
    # Not ignored: what is executed would ignore it, too.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _start_guardian(connection: int, lifeline: int) -> None:
    """Forks a process that waits for the end of the parent and then kills this process group, itself included.

    A thread would get no turn while user code hangs inside C code, and a signal of the kernel at the parent's death
    (PR_SET_PDEATHSIG) would spare what user code has started. Forked twice, so that it is no child of user code's.
    """
    if child := os.fork():
        os.waitpid(child, 0)
        os.close(lifeline)
        return
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.close(connection)
    os.read(lifeline, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
