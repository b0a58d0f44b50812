"""The peer's process: reads one JSON object per line from its standard input, does what it requests, and responds with
another one. Between two requests it is idle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rljob_bench.machine import REPOSITORY
from rljob_bench.peer_environment import VERL

BENCH = REPOSITORY / "bench"
STOP_SECONDS = 60.0


class PeerError(Exception):
    """The peer failed; the message has its traceback."""


class PeerProcess:
    """A running peer; created by `peer_process`."""

    def __init__(self, process: subprocess.Popen[str], requests: IO[str], answers: IO[str], log_file: Path) -> None:
        self._process = process
        self._requests = requests
        self._answers = answers
        self._log_file = log_file

    def ask(self, request: str, **details: object) -> dict[str, object]:
        """Sends a request and waits for the response. Raises PeerError with the peer's error, or with the path of its
        log if it ended."""
        try:
            self._requests.write(json.dumps({"request": request, **details}) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            raise PeerError(f"the peer's process has ended; see {self._log_file}") from None
        line = self._answers.readline()
        if not line:
            raise PeerError(f"the peer's process ended during the request {request}; see {self._log_file}")
        answer: dict[str, object] = json.loads(line)
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer

    def seconds(self, request: str, **details: object) -> list[float]:
        """The seconds of each call that a measuring request made."""
        measured = self.ask(request, **details)["seconds"]
        assert isinstance(measured, list)
        return [float(each) for each in measured]


def python_path(packages: Path | None = None) -> str:
    """PYTHONPATH of processes that import these programs, and the peer's packages before all others."""
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, [str(packages) if packages else "", str(BENCH), inherited]))


@contextmanager
def peer_process(
    packages: Path, log_file: Path, variables: Mapping[str, str], program: Path = VERL.program
) -> Iterator[PeerProcess]:
    """Starts the peer's process with additional environment variables and ends it afterwards. Its output goes into the
    log file."""
    environment = {**os.environ, "PYTHONPATH": python_path(packages), "OMP_NUM_THREADS": "1", **variables}
    with log_file.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(program)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield PeerProcess(process, process.stdin, process.stdout, log_file)
    finally:
        process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
