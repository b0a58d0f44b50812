"""Profiles of steps by NVIDIA Nsight Systems (`nsys`), as reports that its user interface opens.

Only a process that was started by `nsys launch` can be profiled (see `launch_command`). nsys records nothing until
`nsys start`. `nsys stop` returns after the report was written. `nsys profile --capture-range=cudaProfilerApi` is not
used: it writes the reports of all steps only when the process ends, and names them by numbers.
"""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from pathlib import Path

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.observability.spans import SPANS, Annotate, SpanRecorder

NSYS = "nsys"
"""The program, which is found on the PATH."""
TIMEOUT_SECONDS = 600.0
"""How long one command of nsys may take. Most of it is for the report."""


def launch_command(session: str) -> list[str]:
    """Returns the beginning of the command that starts a process under nsys. `session`: a name that no other process
    of the node has."""
    # Kernels, copies and the names of spans. Samples of call stacks would need privileges that containers lack.
    return [NSYS, "launch", f"--session-new={session}", "--trace=cuda,nvtx", "--wait=primary"]


def missing_nsys(where: str) -> ConfigurationError:
    """Returns the error for a machine without nsys."""
    return ConfigurationError(
        f"spec.training.profile.type: nsys is not on the PATH of {where} (seen: Nsys); install NVIDIA Nsight Systems "
        "(on a cluster, in your own image), or set Torch"
    )


class NsysProfile:
    """Profiles one step of this process at a time; a `StepProfile`. `begin`, `end` and `discard` also raise OSError,
    and RuntimeError if nsys fails or does not end."""

    suffix = ".nsys-rep"

    def __init__(self, session: str, annotate: Annotate, spans: SpanRecorder = SPANS) -> None:
        """`annotate`: makes the name of a span a range in the report."""
        self._session = session
        self._annotate = annotate
        self._spans = spans
        self._path: Path | None = None

    @property
    def is_running(self) -> bool:
        """Whether `begin` was called, and afterwards neither `end` nor `discard`."""
        return self._path is not None

    def begin(self, path: Path) -> None:
        """Starts the profile, which `end` writes to `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._run(
            "start", f"--output={_unfinished(path)}", "--force-overwrite=true", "--sample=none", "--cpuctxsw=none"
        )
        self._path = path
        self._spans.annotate = self._annotate

    def end(self) -> None:
        """Stops the profile and writes the report, which appears under its name when it is complete."""
        path = self._stopped()
        try:
            self._run("stop")
            _unfinished(path).replace(path)
        finally:
            _unfinished(path).unlink(missing_ok=True)

    def discard(self) -> None:
        """Stops the profile without a report. Raises RuntimeError if this version of nsys cannot do it; then nsys
        leaves an unfinished report when the process ends."""
        self._stopped()
        self._run("cancel")

    def _stopped(self) -> Path:
        assert self._path is not None, "call begin first"
        path, self._path = self._path, None
        self._spans.annotate = nullcontext
        return path

    def _run(self, command: str, *options: str) -> None:
        """Runs a command of nsys for the session of this process."""
        arguments = [NSYS, command, f"--session={self._session}", *options]
        try:
            done = subprocess.run(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"nsys {command} has not ended within {TIMEOUT_SECONDS:g} s") from error
        if done.returncode != 0:
            reason = " ".join(done.stdout.split())[-500:] or "no message"
            raise RuntimeError(f"nsys {command} ended with exit code {done.returncode}: {reason}")


def _unfinished(path: Path) -> Path:
    return path.with_name(f"unfinished-{path.name}")
