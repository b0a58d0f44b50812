"""Runs other programs with this package's environment."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from rljob_kind.errors import CommandError
from rljob_kind.settings import command_environment


def run(command: Sequence[str], *, text: str | None = None, timeout_seconds: float | None = None) -> str:
    """Runs a program and returns its standard output; `text` is its standard input.

    Raises CommandError if it fails or exceeds the timeout.
    """
    result = _completed(command, text, timeout_seconds)
    if result.returncode != 0:
        raise CommandError(command, result.returncode, result.stderr or result.stdout)
    return result.stdout


def succeeds(command: Sequence[str], *, timeout_seconds: float | None = None) -> bool:
    """Whether the program ends with exit code 0 in time."""
    try:
        return _completed(command, None, timeout_seconds).returncode == 0
    except (CommandError, FileNotFoundError):
        return False


def run_logged(command: Sequence[str], log: Path) -> None:
    """Runs a long program at low priority with its output in a file. Raises CommandError with the end of the output."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        result = subprocess.run(
            ["nice", "-n", "10", *command],
            env=command_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if result.returncode != 0:
        raise CommandError(command, result.returncode, log.read_text(errors="replace"))


def pipe(source: Sequence[str], sink: Sequence[str]) -> None:
    """Pipes the output of one program into another. Raises CommandError if either fails."""
    environment = command_environment()
    with (
        subprocess.Popen(source, env=environment, stdout=subprocess.PIPE) as first,
        subprocess.Popen(
            sink, env=environment, stdin=first.stdout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as second,
    ):
        if first.stdout is not None:
            first.stdout.close()  # Lets the first program fail with SIGPIPE when the second one ends early.
        output, _ = second.communicate()
    for command, process in ((sink, second), (source, first)):
        if process.returncode != 0:
            raise CommandError(command, process.returncode, output.decode(errors="replace"))


def _completed(
    command: Sequence[str], text: str | None, timeout_seconds: float | None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env=command_environment(),
            input=text if text is not None else "",
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(command, 124, f"not finished after {timeout_seconds} s") from error
