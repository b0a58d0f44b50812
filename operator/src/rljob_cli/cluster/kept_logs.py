"""`rljob logs --storage`: the logs that a job has left in its claim, which is mounted on this machine.

No cluster is asked, so it works when the job has been deleted, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rljob_api.constants import ATTEMPT_LOGS_PREFIX, POD_LOGS_FOLDER, POD_STORAGE_FOLDER
from rljob_cli.cluster.log_options import Container, LogOptions
from rljob_cli.errors import CliError
from rljob_cli.plain_text import one_line

PIECE_BYTES = 1 << 16
BELOW_THE_JOB = POD_LOGS_FOLDER.removeprefix(f"{POD_STORAGE_FOLDER}/")
"""Where the logs are in the job's folder of the claim."""


@dataclass(frozen=True)
class KeptLog:
    """Files that are one log, in the order in which they were written."""

    files: Sequence[Path]
    about: str


def kept_log(name: str, storage: Path, options: LogOptions) -> KeptLog:
    """The log that the options name. Raises CliError where there is none, with what there is."""
    if options.follow:
        raise CliError("--follow: what was kept of a log does not grow; leave out --follow or --storage")
    if options.container is not None and options.container_name != _kept_container(options):
        raise CliError(
            f"--container {options.container}: kept are the driver's log, and with --pool those of workers;"
            " leave it out with --storage"
        )
    logs = _logs_folder(name, storage)
    return _log_of_worker(logs, options) if options.pool else _log_of_driver(logs, options.attempt)


def pieces_of(log: KeptLog, num_lines: int | None) -> Iterator[bytes]:
    """Its bytes, or those of so many lines from its end. Raises CliError."""
    pieces = _pieces(log) if num_lines is None else _lines(log)
    return iter(pieces if num_lines is None else deque(pieces, maxlen=num_lines))


def tell_which(log: KeptLog, console: Console) -> None:
    """Says whose log it is, and where it lies."""
    console.print(Text(f"{log.about}: {', '.join(map(one_line, log.files))}", "dim"), soft_wrap=True)


def _kept_container(options: LogOptions) -> Container:
    return Container.RAY if options.pool else Container.DRIVER


def _logs_folder(name: str, storage: Path) -> Path:
    """Of a folder that is the claim, or the job's own folder in it."""
    candidates = [storage / name / BELOW_THE_JOB, storage / BELOW_THE_JOB]
    found = next((folder for folder in candidates if folder.is_dir()), None)
    if found is None:
        there = f"it has {_listed(storage)}" if storage.is_dir() else "there is no such folder"
        raise CliError(
            f"--storage {storage}: neither {candidates[0]} nor {candidates[1]} is there ({there}); name the folder"
            " where the claim is mounted, or, where the job has a subPath, that folder in it"
        )
    return found


def _log_of_driver(logs: Path, attempt: int | None) -> KeptLog:
    number, folder = _attempt_folder(logs, attempt)
    files = sorted(
        (file for file in folder.glob("driver*.log") if file.is_file()), key=lambda file: (len(file.name), file.name)
    )
    if not files:
        raise CliError(f"{folder}: no driver.log was kept; it has {_listed(folder)}")
    return KeptLog(files, f"attempt {number}")


def _log_of_worker(logs: Path, options: LogOptions) -> KeptLog:
    """Its own file, of all attempts, or what was kept of an attempt in which it has failed."""
    if options.attempt is None:
        places = [logs / f"{options.pool}" / f"worker-{options.index}.log", logs / f"worker-{options.index}.log"]
        files = [file for file in places if file.is_file()][:1]
        if not files:
            raise CliError(f"{logs}: worker {options.index} of pool {options.pool} has no log; it has {_listed(logs)}")
        return KeptLog(files, f"worker {options.index}, all attempts")
    number, folder = _attempt_folder(logs, options.attempt)
    files = sorted(folder.glob(f"worker-*-rank{options.index}.log"))
    if len(files) != 1:
        raise CliError(
            f"{folder}: has {len(files) or 'no'} logs of a failed worker {options.index}, and has"
            f" {_listed(folder)}; leave out --attempt for that worker's log of all attempts"
        )
    return KeptLog(files, f"attempt {number}, the end of what that worker printed")


def _attempt_folder(logs: Path, attempt: int | None) -> tuple[int, Path]:
    """The one that is named, else the one that was written to last: a job that was made again counts from 1 again."""
    numbered = {
        int(number): folder
        for folder in _entries(logs)
        if (number := folder.name.removeprefix(ATTEMPT_LOGS_PREFIX)) != folder.name
        and number.isdecimal()
        and folder.is_dir()
    }
    if attempt is None and numbered:
        return max(numbered.items(), key=lambda each: (_written_at(each[1]), each[0]))
    if attempt is None or attempt not in numbered:
        kept = ", ".join(str(number) for number in sorted(numbered)) or "none"
        wanted = "" if attempt is None else f" (seen: --attempt {attempt})"
        raise CliError(f"{logs}: logs are kept of attempts {kept}{wanted}; those of the newest ten are")
    return attempt, numbered[attempt]


def _written_at(folder: Path) -> int:
    return max((file.stat().st_mtime_ns for file in _entries(folder)), default=0)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise CliError(f"{folder}: cannot be read ({error.strerror}); ask for the right to it") from None


def _listed(folder: Path) -> str:
    names = [one_line(entry.name) for entry in _entries(folder)]
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") or "nothing"


def _pieces(log: KeptLog) -> Iterator[bytes]:
    for file in log.files:
        try:
            with file.open("rb") as opened:
                while piece := opened.read(PIECE_BYTES):
                    yield piece
        except OSError as error:
            raise CliError(f"{file}: cannot be read ({error.strerror}); ask for the right to it") from None


def _lines(log: KeptLog) -> Iterable[bytes]:
    begun: list[bytes] = []
    """Pieces of a line whose end is not there yet. They are put together once, however long it is."""
    for piece in _pieces(log):
        *lines, rest = piece.split(b"\n")
        for line in lines:
            begun.append(line)
            yield b"".join(begun) + b"\n"
            begun.clear()
        begun.append(rest)
    if any(begun):
        yield b"".join(begun)
