"""The program of one scoring process: loads the scorer once, then scores responses from a socket, in order.

`scoring_child` starts it as `python -m rljob_trainer.rewards.scoring_program SOCKET_FD LIFELINE_FD`. Only the scorer
imports large libraries, so the program starts quickly.

Requests are frames of an 8-byte length, a token and a value (see `wire`). The first value is the scorer's class name
and fields, the others are `[prompt, response, answer, row]`. For each frame the program writes one JSON line `[token,
result]`; the token proves that the line was not written by user code. The first result is `{"ready": true}` or
`{"refused": text}`, the others are `[status, score or null, detail, seconds, found or null]`.
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
from rljob_trainer.rewards.base import RewardRequest, RewardStatus, Scorer, ScorerSpec, as_found, as_score
from rljob_trainer.rewards.format import FormatScorer
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.reasoning_gym import ReasoningGymScorer
from rljob_trainer.rewards.unreachable import is_unreachable
from rljob_trainer.rewards.wire import decode
from rljob_trainer.settings import run_folder_or_none
from rljob_trainer.stack_traces import StackFile

MAX_DETAIL_CHARACTERS = 4000
NUM_TRACEBACK_LINES = 8
MAX_LINE_CHARACTERS = 400
"""The maximum number of characters of a line of a traceback."""
TOKEN_CHARACTERS = 16
"""The length of the token of a frame."""
SCORERS = {scorer.__name__: scorer for scorer in (FormatScorer, FunctionScorer, MathAnswerScorer, ReasoningGymScorer)}


def main() -> None:
    """Runs until the parent closes the connection or ends."""
    # User code must be able to print all characters of a response without an error.
    accept_all_characters()
    descriptor, lifeline = int(sys.argv[1]), int(sys.argv[2])
    for inherited in (descriptor, lifeline):
        os.set_inheritable(inherited, False)
    _ignore_stop_signals()
    _start_guardian(descriptor, lifeline)
    StackFile(run_folder_or_none() or "", "scorer")
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
        # Also SystemExit and KeyboardInterrupt, so that user code cannot end the process by accident.
        return [_status_of(error), None, _describe(error), time.monotonic() - started, None]
    seconds = time.monotonic() - started
    try:
        return [RewardStatus.OK, as_score(value), "", seconds, as_found(value)]
    except (TypeError, ValueError) as error:
        return [RewardStatus.ERROR, None, _printable(str(error))[:MAX_DETAIL_CHARACTERS], seconds, None]
    except BaseException as error:
        # Raised by code of the returned value, for example a `__float__` or `__repr__` that exits.
        return [RewardStatus.ERROR, None, _describe(error), seconds, None]


def _status_of(error: BaseException) -> RewardStatus:
    """ERROR or UNREACHABLE; also works if an attribute of the exception raises."""
    try:
        return RewardStatus.UNREACHABLE if is_unreachable(error) else RewardStatus.ERROR
    except BaseException:
        return RewardStatus.ERROR


def _describe(error: BaseException) -> str:
    """The raised error and where it was raised; also works if formatting the error raises."""
    try:
        what = "".join(traceback.format_exception_only(error)).strip()
        # The first frame is that of this file.
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        lines = "".join(traceback.format_tb(frames)).rstrip().splitlines()[-NUM_TRACEBACK_LINES:]
    except BaseException as second:
        what, lines = f"{type(error).__name__}, whose message cannot be formatted ({type(second).__name__})", []
    return _printable(
        "\n".join([f"raised {what[:MAX_DETAIL_CHARACTERS]}", *(line[:MAX_LINE_CHARACTERS] for line in lines)])
    )


def _printable(text: str) -> str:
    """The text with unpaired surrogates escaped, because logs and files cannot contain them."""
    return text.encode(errors="backslashreplace").decode()


def _send(descriptor: int, token: str, result: object) -> None:
    data = json.dumps([token, result]).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _frames(requests: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """The token and the encoded value of each frame."""
    while header := requests.read(8):
        frame = requests.read(int.from_bytes(header, "little"))
        yield frame[:TOKEN_CHARACTERS].decode(), frame[TOKEN_CHARACTERS:]


def _ignore_stop_signals() -> None:
    """Ignores SIGTERM in this process: stopping a Ray job sends it to every child process of the trainer, but the
    trainer needs this process until its step is finished. Children of user code still get SIGTERM."""
    # A handler instead of SIG_IGN, because executed programs would inherit SIG_IGN.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _start_guardian(connection: int, lifeline: int) -> None:
    """Forks a process that waits for the end of the parent and then kills this process group, including itself.

    A thread would not run while user code hangs in C code, and the kernel's signal at the parent's death
    (PR_SET_PDEATHSIG) would not reach processes that user code started. The guardian is forked twice, so that it is not
    a child of this process: user code may wait for all children.
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
