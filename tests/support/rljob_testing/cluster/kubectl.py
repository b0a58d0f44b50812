"""Runs kubectl for the tests on a real cluster, and records every status of a job."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rljob_api.v1alpha1.status import RLJobStatus
from rljob_testing.settings import inherited_environment

SeenT = TypeVar("SeenT")


class CommandFailed(Exception):
    """kubectl failed; the text is what it printed."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl for one cluster and namespace."""

    program: Path
    kubeconfig: Path
    namespace: str

    def __call__(self, *arguments: str, stdin: str | None = None, timeout_seconds: float = 120.0) -> str:
        """Runs a kubectl command and returns what it prints. Raises CommandFailed."""
        result = subprocess.run(
            self.command(*arguments),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
            env=inherited_environment(),
        )
        if result.returncode != 0:
            raise CommandFailed(f"kubectl {' '.join(arguments)}: {result.stderr.strip()}")
        return result.stdout

    def command(self, *arguments: str) -> list[str]:
        """The complete command line."""
        return [str(self.program), f"--kubeconfig={self.kubeconfig}", f"--namespace={self.namespace}", *arguments]

    def names(self, kind: str, selector: str = "") -> list[str]:
        """`kind/name` of all objects of a kind."""
        return self("get", kind, "-o", "name", *([f"--selector={selector}"] if selector else [])).split()

    def status(self, job: str) -> RLJobStatus:
        """The job's status; empty before the operator has processed the job."""
        found = json.loads(self("get", "rljob", job, "-o", "json"))
        return RLJobStatus.from_wire(found.get("status", {}))


def wait_for(look: Callable[[], SeenT | None], what: str, timeout_seconds: float, every_seconds: float = 1.0) -> SeenT:
    """Calls `look` until it returns something other than None, False or empty, and returns that. Raises AssertionError
    after the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() < deadline, f"timed out after {timeout_seconds:.0f} s: {what}"
        time.sleep(every_seconds)


@dataclass(frozen=True)
class Sighting:
    """A status and the time at which it arrived."""

    at: float
    """Unix time in seconds."""
    status: RLJobStatus


@dataclass
class StatusRecording:
    """All statuses of a job, in the order in which the API server sent them."""

    sightings: list[Sighting] = field(default_factory=list)

    def when(self, condition: str, status: str = "True") -> float | None:
        """Time at which a condition first had this status (Unix time); None if it never had."""
        for sighting in self.sightings:
            if any(c.type == condition and c.status == status for c in sighting.status.conditions):
                return sighting.at
        return None

    def first_step(self) -> float | None:
        """Time at which the status first reported a completed training step; None if it never did."""
        for sighting in self.sightings:
            if sighting.status.progress and sighting.status.progress.step > 0:
                return sighting.at
        return None


@contextmanager
def recorded_statuses(kubectl: Kubectl, job: str) -> Iterator[StatusRecording]:
    """Records the statuses of a job, which must exist, until the end of the context."""
    recording = StatusRecording()
    command = kubectl.command("get", "rljob", job, "--watch", "--output-watch-events", "-o", "json")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=inherited_environment()
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:  # one event each
            found = json.loads(line)["object"]
            recording.sightings.append(Sighting(time.time(), RLJobStatus.from_wire(found.get("status", {}))))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield recording
    finally:
        process.terminate()
        process.wait()
        reader.join(10)
