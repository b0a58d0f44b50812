"""Runs programs in the sandbox, from a scoring process: starts the zygote, and gives it programs.

`Run.failure` says why a program failed. `SandboxError` means that the sandbox itself failed, which says nothing about
the program.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rljob_trainer
from rljob_trainer.sandbox.confinement import SECONDS_TO_SIGKILL, Layers
from rljob_trainer.sandbox.programs import Mode
from rljob_trainer.sandbox.watching import Process, Stream, watch

ZYGOTE = "rljob_trainer.sandbox.zygote"
MAX_MESSAGE_BYTES = 1 << 16
MAX_ERROR_BYTES = 1 << 20
"""The limit for standard error."""
MAX_LINE_CHARACTERS = 200
"""The maximum length of the line of an exception in `Run.failure`."""
ROUNDING_SECONDS = 0.01
"""Tolerance: for a process that has reached its limit of CPU time, the kernel may report this much less."""
OUTPUT, ERRORS, CHANNEL = 0, 1, 2
"""Indices in `Process.streams`."""
KILLED = "was killed by SIGKILL, probably because the machine is out of memory; reduce numProcesses or code.memory"
"""The end of a message, after the name of the process."""


class SandboxError(Exception):
    """The sandbox failed; this says nothing about the program."""


class SandboxUnavailableError(SandboxError):
    """This machine cannot confine programs."""


class SandboxKilledError(SandboxError):
    """Something outside ended a process of the sandbox with SIGKILL, probably because the machine is out of memory.
    Programs cannot send SIGKILL."""


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of one run."""

    seconds: float
    """Time in which the program has a core or sleeps. Time in which it waits for a core does not count."""
    max_output_bytes: int

    @property
    def cpu_seconds(self) -> int:
        """The limit of CPU time, at which the kernel sends SIGXCPU. The parent ends a program earlier; this limit is
        for the case that the parent is stopped."""
        return math.ceil(self.seconds) + 1


@dataclass(frozen=True)
class Run:
    """How a program ended."""

    failure: str
    """Why it failed, such as `ValueError: no` or `ran longer than 4 s`; empty if it ended with exit code 0."""
    output: bytes = b""
    """What it wrote to standard output."""
    result: bytes = b""
    """What it wrote into its channel."""


class Sandbox:
    """Runs one program after the other, each in a process of its own."""

    def __init__(self, memory_bytes: int) -> None:
        """Starts the zygote. `memory_bytes`: the limit of each program. Raises SandboxUnavailableError if this machine
        cannot confine programs, and SandboxError."""
        self._memory_bytes = memory_bytes
        with _machine_errors():
            self._start_zygote()
        reply, _ = self._receive()
        if "unavailable" in reply:
            raise SandboxUnavailableError(reply["unavailable"])
        self.layers = Layers(**reply["layers"])

    def _start_zygote(self) -> None:
        self._connection, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._zygote = subprocess.Popen(
            [sys.executable, "-s", "-P", "-X", "utf8", "-m", ZYGOTE, str(zygote_end.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # With a fixed hash seed, the same program gives the same output. NumPy must not start threads.
            env={
                "PYTHONPATH": str(Path(rljob_trainer.__file__).parents[1]),
                "PYTHONHASHSEED": "0",
                "OPENBLAS_NUM_THREADS": "1",
            },
            pass_fds=(zygote_end.fileno(),),
        )
        zygote_end.close()

    def close(self) -> None:
        """Ends the zygote. May be called repeatedly."""
        self._connection.close()
        self._zygote.wait()

    def run(self, mode: Mode, program: Mapping[str, object], stdin: bytes, limits: ProgramLimits) -> Run:
        """Runs a program of the modes SCRIPT and CALL."""
        with _machine_errors(), Descriptors() as descriptors, _folder() as folder:
            channels = [descriptors.pipe()] if mode is Mode.CALL else []
            writers = [writer for _, writer in channels]
            process = self._start(descriptors, mode, program, stdin, writers, folder, limits)
            process.streams += [Stream(reader, "its result", limits.max_output_bytes) for reader, _ in channels]
            descriptors.close(writers)
            (failure,) = self._finish([process], limits)
            result = bytes(process.streams[CHANNEL].data) if channels else b""
            return Run(failure, bytes(process.streams[OUTPUT].data), result)

    def run_statement(self, code: str, statement: str, limits: ProgramLimits) -> Run:
        """Runs an assert statement on the code, each in a process of its own. `Run.result` is that of the statement."""
        with _machine_errors(), Descriptors() as descriptors, _folder() as folder:
            request, reply, result = descriptors.pipe(), descriptors.pipe(), descriptors.pipe()
            of_code, of_statement = [request[0], reply[1]], [request[1], reply[0], result[1]]
            serving = self._start(descriptors, Mode.SERVE, {"code": code}, b"", of_code, folder, limits)
            descriptors.close(of_code)
            program = {"statement": statement}
            asserting = self._start(descriptors, Mode.STATEMENT, program, b"", of_statement, None, limits)
            descriptors.close(of_statement)
            asserting.streams.append(Stream(result[0], "its result", limits.max_output_bytes))
            failures = self._finish([asserting, serving], limits)
            output, written = bytes(serving.streams[OUTPUT].data), bytes(asserting.streams[CHANNEL].data)
            if not failures[0] and failures[1] and not serving.was_killed and b'"passed"' not in written:
                # The statement only knows that its connection has ended.
                return Run(failures[1], output)
            return Run(failures[0], output, written)

    def _start(
        self,
        descriptors: Descriptors,
        mode: Mode,
        program: Mapping[str, object],
        stdin: bytes,
        channels: Sequence[int],
        folder: Path | None,
        limits: ProgramLimits,
    ) -> Process:
        """Starts a process, and waits until it is confined."""
        (output, output_writer), (errors, errors_writer) = descriptors.pipe(), descriptors.pipe()
        confined, confined_writer = descriptors.pipe()
        input_file, program_file = (
            descriptors.file(stdin),
            descriptors.file(json.dumps({"mode": mode, **program}).encode()),
        )
        passed = [input_file, output_writer, errors_writer, *channels, program_file, confined_writer]
        resources = {"cpu_seconds": limits.cpu_seconds, "memory_bytes": self._memory_bytes}
        message = {"start": {"folder": None if folder is None else str(folder), "limits": resources}}
        self._send(message, passed)
        reply, (pidfd,) = self._receive(1)
        descriptors.add(pidfd)
        descriptors.close([input_file, output_writer, errors_writer, program_file, confined_writer])
        streams = [
            Stream(output, "standard output", limits.max_output_bytes),
            Stream(errors, "standard error", MAX_ERROR_BYTES),
        ]
        process = Process(reply["pid"], pidfd, folder, streams)
        if not os.read(confined, 1):
            text = os.read(errors, MAX_MESSAGE_BYTES).decode(errors="replace")
            exit_code = os.waitstatus_to_exitcode(self._reap(process)["status"])
            if exit_code == -signal.SIGKILL:
                raise SandboxKilledError(f"a process of the sandbox {KILLED}")
            raise SandboxError(f"a process could not be confined: {text or f'it {_described(exit_code)}'}")
        return process

    def _finish(self, processes: Sequence[Process], limits: ProgramLimits) -> list[str]:
        """Waits for the first process, then ends the others. Returns for each why it failed, or an empty string."""
        stopped = watch(processes, limits.seconds)
        endings = [self._reap(process) for process in processes]
        if stopped:
            return [stopped for _ in processes]
        return [failure_of(*each, limits) for each in zip(processes, endings, strict=True)]

    def _reap(self, process: Process) -> dict[str, Any]:
        self._send({"reap": process.pid})
        return self._receive()[0]

    def _send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._connection, [json.dumps(message).encode()], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended() from None

    def _receive(self, num_descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._connection, MAX_MESSAGE_BYTES, num_descriptors)
        except ConnectionResetError:
            data, descriptors = b"", []
        if not data:
            raise self._ended()
        reply: dict[str, Any] = json.loads(data)
        if "error" in reply:
            raise SandboxError(reply["error"])
        if len(descriptors) < num_descriptors:
            raise SandboxError("a descriptor was lost: this process has too many open files")
        return reply, descriptors

    def _ended(self) -> SandboxError:
        exit_code = self._zygote.wait()
        if exit_code == -signal.SIGKILL:
            return SandboxKilledError(f"the sandbox's parent process (zygote) {KILLED}")
        return SandboxError(f"the sandbox's parent process (zygote) {_described(exit_code)}")


@contextlib.contextmanager
def _machine_errors() -> Iterator[None]:
    """Converts errors of this process, such as a full disk or too many open files, into SandboxError."""
    try:
        yield
    except (OSError, MemoryError) as error:
        raise SandboxError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """The folder of one program, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="rljob-") as folder:
        yield Path(folder)


def failure_of(process: Process, ending: Mapping[str, Any], limits: ProgramLimits) -> str:
    """Why a process failed, by its wait status and standard error; empty if it did not. Raises SandboxKilledError."""
    code = os.waitstatus_to_exitcode(ending["status"])
    if code >= 0:
        lines = bytes(process.streams[ERRORS].data).decode(errors="replace").strip().splitlines()
        return "" if code == 0 else lines[-1][:MAX_LINE_CHARACTERS] if lines else f"exit code {code}"
    number = -code
    is_at_hard_limit = ending["cpu_seconds"] > limits.cpu_seconds + SECONDS_TO_SIGKILL - ROUNDING_SECONDS
    if number == signal.SIGXCPU or (number == signal.SIGKILL and is_at_hard_limit):
        return "used too much processor time"
    if number == signal.SIGKILL and not process.was_killed:
        raise SandboxKilledError(f"a process that ran a program {KILLED}")
    return _described(code)


def _described(exit_code: int) -> str:
    """Describes how a process ended; a negative number is a signal, as in `os.waitstatus_to_exitcode`."""
    return (
        f"ended by signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"
    )


class Descriptors:
    """The open descriptors of one run. It closes them at the end of the `with` block."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(set(self._open))

    def pipe(self) -> tuple[int, int]:
        """The reading and the writing end of a new pipe."""
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def file(self, data: bytes) -> int:
        """A file in memory with this data, to be read from its beginning."""
        descriptor = os.memfd_create("rljob", os.MFD_CLOEXEC)
        self._open.add(descriptor)
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def add(self, descriptor: int) -> None:
        """Adds an open descriptor, which is then closed with the others."""
        self._open.add(descriptor)

    def close(self, descriptors: Iterable[int]) -> None:
        """Closes these descriptors now."""
        for descriptor in descriptors:
            self._open.remove(descriptor)
            os.close(descriptor)
