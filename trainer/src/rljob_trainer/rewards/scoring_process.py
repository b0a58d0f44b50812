"""The program of one scoring process: loads the scorer once, then scores what comes through a socket, in order.

Started as `python -m rljob_trainer.rewards.scoring_process SOCKET_FD` by `scoring_child`. Imports nothing
heavy itself. Requests: frames of an 8-byte length and a value (see `wire`), the first one the scorer's class name and
fields, then `[prompt, response, answer, row]`. Results: JSON lines, first `{"ready": true}` or `{"refused": text}`,
then `[score or null, detail, seconds]` for each request.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from typing import BinaryIO

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.base import RewardRequest, Scorer, ScorerSpec, as_score
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.reasoning_gym import ReasoningGymScorer
from rljob_trainer.rewards.wire import decode

MAX_DETAIL_CHARACTERS = 4000
NUM_TRACEBACK_LINES = 8
PR_SET_PDEATHSIG = 1
SCORERS = {scorer.__name__: scorer for scorer in (FunctionScorer, MathAnswerScorer, ReasoningGymScorer)}


def main() -> None:
    """Runs until the parent closes the connection, or is gone."""
    _die_with_parent()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_frames, args=(os.fdopen(descriptor, "rb"), frames), daemon=True).start()
    try:
        scorer = _make_spec(frames.get()).load()
    except ConfigurationError as error:
        _send(descriptor, {"refused": str(error)})
        return
    _send(descriptor, {"ready": True})
    while True:
        _send(descriptor, _score(scorer, frames.get()))


def _make_spec(frame: bytes) -> ScorerSpec:
    match decode(frame):
        case [str() as name, dict() as fields] if name in SCORERS:
            spec: ScorerSpec = SCORERS[name](**fields)
            return spec
    raise ConfigurationError(f"spec.training.reward: no scorer is called {frame!r:.200}")


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
        return [None, _describe(error), time.monotonic() - started]
    seconds = time.monotonic() - started
    try:
        return [as_score(value), "", seconds]
    except (TypeError, ValueError) as error:
        return [None, str(error), seconds]


def _describe(error: BaseException) -> str:
    what = "".join(traceback.format_exception_only(error)).strip()
    # The first frame is this file's.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    lines = "".join(traceback.format_tb(frames)).rstrip().splitlines()[-NUM_TRACEBACK_LINES:]
    return "\n".join([f"raised {what[:MAX_DETAIL_CHARACTERS]}", *lines])


def _send(descriptor: int, message: object) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _read_frames(requests: BinaryIO, frames: queue.SimpleQueue[bytes]) -> None:
    """Ends the process, and all that it started in its process group, as soon as the parent's end is closed."""
    while header := requests.read(8):
        frames.put(requests.read(int.from_bytes(header, "little")))
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _die_with_parent() -> None:
    # The end of the connection does the same, but its thread gets no turn while user code hangs inside C code.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
