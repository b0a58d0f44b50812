"""What the programs of processes that run user code share: the connection to the parent, the end with the parent, and
the description of errors.

`child_process` starts such a program as `python -m PROGRAM SOCKET_FD LIFELINE_FD`. The parent sends frames: an 8-byte
length, a token, and a value (see `wire`). The program replies with JSON lines `[token, value]`; the token proves that
user code did not write the line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from rljob_api.standard_streams import accept_all_characters
from rljob_trainer.settings import run_folder_or_none
from rljob_trainer.stack_traces import StackFile

MAX_DETAIL_CHARACTERS = 4000
NUM_TRACEBACK_LINES = 8
MAX_LINE_CHARACTERS = 400
"""The maximum number of characters of a line of a traceback."""
TOKEN_CHARACTERS = 16
"""The length of the token of a frame."""
LENGTH_BYTES = 8
READ_BYTES = 1 << 16


def connect(role: str) -> int:
    """Prepares this process for user code, and returns the descriptor of the connection to the parent, which the
    program's arguments name. `role` says in one word what this process is, such as `scorer`."""
    # User code must be able to print all characters of a response without an error.
    accept_all_characters()
    descriptor, lifeline = int(sys.argv[1]), int(sys.argv[2])
    for inherited in (descriptor, lifeline):
        os.set_inheritable(inherited, False)
    _ignore_stop_signals()
    _start_guardian(descriptor, lifeline)
    StackFile(run_folder_or_none() or "", role)
    return descriptor


class FrameReader:
    """Reads frames from the connection to the parent."""

    def __init__(self, descriptor: int) -> None:
        self._connection = socket.socket(fileno=descriptor)
        self._unread = bytearray()

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        """The token and the encoded value of each frame, until the parent closes the connection. Waits for frames."""
        while True:
            yield from self._complete_frames()
            if not (data := self._connection.recv(READ_BYTES)):
                return
            self._unread += data

    def read_available(self) -> list[tuple[str, bytes]] | None:
        """The frames that are complete, without waiting; None if the parent has closed the connection."""
        with contextlib.suppress(BlockingIOError):
            while data := self._connection.recv(READ_BYTES, socket.MSG_DONTWAIT):
                self._unread += data
            return None
        return list(self._complete_frames())

    def _complete_frames(self) -> Iterator[tuple[str, bytes]]:
        while len(self._unread) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._unread[:LENGTH_BYTES], "little")
            if len(self._unread) < end:
                return
            frame = bytes(self._unread[LENGTH_BYTES:end])
            del self._unread[:end]
            yield frame[:TOKEN_CHARACTERS].decode(), frame[TOKEN_CHARACTERS:]


def send(descriptor: int, token: str, value: object) -> None:
    """Writes a reply to the frame with this token."""
    data = json.dumps([token, value]).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def describe_error(error: BaseException, own_folder: Path | None = None) -> str:
    """The raised error and where it was raised; also works if formatting the error raises.

    The first frame, which is that of the program, is left out; with `own_folder` also the next ones in this folder."""
    try:
        what = "".join(traceback.format_exception_only(error)).strip()
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        while own_folder is not None and frames is not None and _file_of(frames).is_relative_to(own_folder):
            frames = frames.tb_next
        lines = "".join(traceback.format_tb(frames)).rstrip().splitlines()[-NUM_TRACEBACK_LINES:]
    except BaseException as second:
        what, lines = f"{type(error).__name__}, whose message cannot be formatted ({type(second).__name__})", []
    return printable(
        "\n".join([f"raised {what[:MAX_DETAIL_CHARACTERS]}", *(line[:MAX_LINE_CHARACTERS] for line in lines)])
    )


def _file_of(frame: TracebackType) -> Path:
    return Path(frame.tb_frame.f_code.co_filename)


def printable(text: str) -> str:
    """The text with unpaired surrogates escaped, because logs and files cannot contain them."""
    return text.encode(errors="backslashreplace").decode()


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
