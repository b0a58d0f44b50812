"""The program of the zygote: a process that has Python's usual modules loaded and forks a child for each program, in
1 ms instead of the 30 ms in which Python starts.

`sandbox` starts it as `python -m rljob_trainer.sandbox.zygote SOCKET_FD`. Each message is a JSON object, with
descriptors. `{"start": ...}` forks a confined child; the reply has its process id, and its pidfd. `{"reap": pid}` waits
for a child that has ended; the reply says how it ended. The zygote itself never has a program or its input: the child
reads them.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rljob_trainer.sandbox.confinement import Layers, Limits, available_layers, confine, readable_files
from rljob_trainer.sandbox.programs import load_usual_modules, run
from rljob_trainer.sandbox.settings import remove_all_variables

MAX_MESSAGE_BYTES = 1 << 16
MAX_DESCRIPTORS = 8
NUM_STANDARD = 3
FIRST_FREE = 100
"""Descriptors are moved to this number and above before they get their final numbers."""


def main() -> None:
    """Runs until the scoring process closes the connection or ends."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    layers = available_layers()
    if isinstance(layers, str):
        connection.send(json.dumps({"error": layers}).encode())
        return
    load_usual_modules()
    remove_all_variables()
    sys.set_int_max_str_digits(0)
    readable = readable_files()
    gc.collect()
    gc.freeze()
    connection.send(json.dumps({"layers": vars(layers)}).encode())
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not data:
            return
        match json.loads(data):
            case {"start": request}:
                _start(connection, layers, readable, request, descriptors)
            case {"reap": int() as child}:
                _, status, usage = os.wait4(child, 0)
                reply = {"status": status, "cpu_seconds": usage.ru_utime + usage.ru_stime}
                connection.send(json.dumps(reply).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _start(
    connection: socket.socket, layers: Layers, readable: list[str], request: dict[str, Any], descriptors: Sequence[int]
) -> None:
    try:
        child = os.fork()
    except OSError as error:
        advice = "increase the pod's limit of processes, or reduce numProcesses"
        connection.send(json.dumps({"error": f"fork: {error}; {advice}"}).encode())
        return
    if child == 0:
        _be_child(connection, layers, readable, request, descriptors)
    pidfd = os.pidfd_open(child)
    socket.send_fds(connection, [json.dumps({"pid": child}).encode()], [pidfd])
    os.close(pidfd)


def _be_child(
    connection: socket.socket, layers: Layers, readable: list[str], request: dict[str, Any], descriptors: Sequence[int]
) -> NoReturn:
    """Confines this process and runs the program. The descriptors are standard input, output and error, the channels
    of the program, the file with the program, and the pipe that gets a byte when the process is confined."""
    try:
        # The objects must not close descriptors that get another meaning.
        connection.detach()
        signal.set_wakeup_fd(-1)
        os.setsid()
        last = _move_descriptors(descriptors)
        standard = _open_standard_streams()
        folder = request["folder"]
        os.chdir(folder or "/")
        with open(last - 1, closefd=False) as file:
            program = json.load(file)
        os.close(last - 1)
        random.seed(0)
        confine(layers, Limits(**request["limits"]), readable, Path(folder) if folder else None)
        os.write(last, b"\0")
        os.close(last)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    # The code may read the variables of these functions: they hold no secrets.
    run(program)
    os._exit(0 if standard else 1)


def _open_standard_streams() -> list[object]:
    """Opens the streams of this process. Returns the old ones: if they were freed, they would close the descriptors."""
    old = [sys.stdin, sys.stdout, sys.stderr]
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    return [*old]


def _move_descriptors(descriptors: Sequence[int]) -> int:
    """Gives the descriptors the numbers from 0, and closes all others. Returns the last number."""
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, FIRST_FREE) for each in descriptors]
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number)
    os.closerange(len(high), os.sysconf("SC_OPEN_MAX"))
    return len(high) - 1


if __name__ == "__main__":
    main()
