"""Pods whose program copies results, without a cluster: as a process of this machine, or as a script of responses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rljob.results import pod_file_server
from rljob.results.connection import BrokenConnectionError
from rljob.results.download import Download, Downloaded
from rljob.results.pod_client import PodClient
from rljob.results.selection import Selection

PROGRAM = Path(pod_file_server.__file__)
EVERYTHING = Selection(without=frozenset())


def write_claim(folder: Path) -> Path:
    """Writes the folder of a job in its claim, with a model of 3 MB, metrics, logs and two checkpoints."""
    files = {
        "run/export/model.safetensors": os.urandom(3_000_000),
        "run/export/config.json": b"{}",
        "run/metrics.jsonl": b'{"step": 1}\n',
        "run/samples.jsonl": b'{"step": 1, "response": "x"}\n',
        "run/resolved.yaml": b"kind: RLJob\n",
        "run/logs/attempt-1/driver.log": b"step 1\n",
        "run/wandb/run-1.wandb": b"history",
        # The command writes these itself; the job's own code may have written others.
        "run/view.html": b"<script>alert(1)</script>",
        "run/.lock": b"7",
        "run/rljob-run-state.json/x": b"{}",
        "checkpoints/step-1/weights.safetensors": b"w" * 1000,
        "checkpoints/step-1/manifest.json": b"{}",
        "checkpoints/step-2/weights.safetensors": b"not complete",
        "checkpoints/starts/list.json": b"[]",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


class LocalConnection:
    """The pod's program as a process of this machine."""

    def __init__(self, claim: Path, break_after: int | None = None) -> None:
        command = [sys.executable, "-I", "-B", "-c", PROGRAM.read_text(), "serve", str(claim)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._break_after = break_after
        self.num_bytes = 0

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def receive(self) -> bytes:
        assert self._process.stdout is not None
        left = 1 << 16 if self._break_after is None else min(1 << 16, self._break_after - self.num_bytes)
        piece = os.read(self._process.stdout.fileno(), left) if left > 0 else b""
        if not piece:
            raise BrokenConnectionError("the test has closed it")
        self.num_bytes += len(piece)
        return piece

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class Pod:
    """Opens connections that break after these numbers of bytes, and then some that do not."""

    claim: Path
    folder: Path
    break_after: list[int] = field(default_factory=list)
    before_connection: Callable[[int], None] | None = None
    """Called with the number of the connection, from 0."""
    connections: list[LocalConnection] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shown: int = 0
    """Bytes that the progress bar shows."""
    planned: int = 0

    def connect(self) -> LocalConnection:
        number = len(self.connections)
        if self.before_connection is not None:
            self.before_connection(number)
        limit = self.break_after[number] if number < len(self.break_after) else None
        self.connections.append(LocalConnection(self.claim, limit))
        return self.connections[-1]

    def plan(self, _num_files: int, num_bytes: int) -> None:
        self.planned = num_bytes

    def advance(self, num_bytes: int) -> None:
        self.shown += num_bytes

    def note(self, text: str) -> None:
        self.notes.append(text)

    def download(self, selection: Selection = EVERYTHING) -> Downloaded:
        self.shown = 0
        copy = Download(lambda: PodClient(self.connect()), selection, self.folder, self, lambda _: None)
        try:
            return copy.run()
        finally:
            copy.close()

    @property
    def received(self) -> int:
        return sum(connection.num_bytes for connection in self.connections)


class ScriptedConnection:
    """Answers a request for a listing with these lines, and each request for files with these bytes."""

    def __init__(self, *lines: dict[str, object], read: bytes = b"") -> None:
        self._listing = json_lines(*lines)
        self._read = read
        self._answer = b""

    def send(self, data: bytes) -> None:
        self._answer += self._read if b'"read"' in data else self._listing

    def receive(self) -> bytes:
        if not self._answer:
            raise BrokenConnectionError("nothing more")
        answer, self._answer = self._answer, b""
        return answer

    def close(self) -> None:
        pass


def json_lines(*lines: dict[str, object]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def names(folder: Path) -> list[str]:
    """The files below a folder, relative to it."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir())
