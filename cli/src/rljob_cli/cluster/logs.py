"""`rljob logs`: prints the log of a pod, or the copy of a log in the job's claim."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.text import Text

from rljob.cluster import Cluster
from rljob.errors import NoLogError
from rljob.log_options import LogOptions
from rljob.pod_logs import read_log
from rljob.polling import Clock
from rljob_api.constants import ExitCode
from rljob_cli.cluster.kept_logs import kept_log, pieces_of, print_which


def show_logs(cluster: Cluster, name: str, options: LogOptions, console: Console, clock: Clock | None = None) -> int:
    """Copies the log unchanged to standard output. All other output goes to `console`. Returns 0 if there was a log,
    else 1; 130 after Ctrl-C.

    Raises:
        NoLogError: there is no log yet.
        RejectedError: there is no such pod.
    """
    try:
        _copy(read_log(cluster, name, options, clock or Clock(), lambda text: _note(console, text)))
    except NoLogError as error:
        if error.exit_code != ExitCode.APPLICATION:
            raise
        console.print(Text(str(error)), soft_wrap=True)
        return ExitCode.APPLICATION
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.SUCCESS


def show_kept_logs(name: str, storage: Path, options: LogOptions, console: Console) -> int:
    """Prints the copy of a log from the claim to standard output, and its path to `console`. Returns 0, or 130 for
    Ctrl-C.

    Raises:
        CliError: there is no such log.
    """
    log = kept_log(name, storage, options)
    print_which(log, console)
    try:
        _copy(pieces_of(log, options.num_lines))
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.SUCCESS


def _standard_output() -> BinaryIO:
    return sys.stdout.buffer


def _copy(pieces: Iterator[bytes]) -> None:
    output = _standard_output()
    for piece in pieces:
        output.write(piece)
        output.flush()


def _note(console: Console, text: str) -> None:
    console.print(Text(text, "dim"), soft_wrap=True)
