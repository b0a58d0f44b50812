"""The logs of `rljob logs --storage`: copies in the job's claim, which is mounted on this machine.

Copies can be read without the cluster, also after the job was deleted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rljob.cluster import checked_name
from rljob.log_options import Container, LogOptions
from rljob.plain_text import one_line
from rljob_api.constants import (
    ATTEMPT_LOGS_PREFIX,
    POD_LOGS_FOLDER,
    POD_STORAGE_FOLDER,
)
from rljob_cli.errors import CliError

PIECE_BYTES = 1 << 16
LOGS_IN_JOB_FOLDER = POD_LOGS_FOLDER.removeprefix(f"{POD_STORAGE_FOLDER}/")
"""Path of the logs, relative to the job's folder in the claim."""


@dataclass(frozen=True)
class KeptLog:
    """A log, possibly in several files, in the order in which they were written."""

    files: Sequence[Path]
    about: str
    """Text for users that says which log it is, such as `attempt 2`."""


def kept_log(name: str, storage: Path, options: LogOptions) -> KeptLog:
    """The log that the options select. Raises CliError if there is none (with a list of the existing files), or if an
    option cannot be used with --storage."""
    if options.follow:
        raise CliError("--follow: cannot be combined with --storage; remove one of them")
    if options.container is not None and options.container_name != _kept_container(options):
        raise CliError(
            f"--container {options.container}: not available with --storage, which has only the driver's log and, with"
            " --pool, the workers' logs; remove --container"
        )
    if options.since_seconds is not None:
        raise CliError("--since: cannot be combined with --storage, because the copies have no times; use --tail")
    logs = _logs_folder(checked_name("NAME", name), storage)
    if options.previous:
        newest, _ = _attempt_folder(logs, None)
        if newest == 1:
            raise CliError(
                f"{logs}: the newest log is that of attempt 1, so there is no previous one; remove --previous"
            )
        options = replace(options, attempt=newest - 1, previous=False)
    return _log_of_worker(logs, options) if options.pool else _log_of_driver(logs, options.attempt)


def pieces_of(log: KeptLog, num_lines: int | None) -> Iterator[bytes]:
    """The last `num_lines` lines of a log; None for the whole log, in pieces. Raises CliError if it cannot be read."""
    pieces = _pieces(log) if num_lines is None else _lines(log)
    return iter(pieces if num_lines is None else deque(pieces, maxlen=num_lines))


def print_which(log: KeptLog, console: Console) -> None:
    """Prints which log it is, and the paths of its files."""
    console.print(Text(f"{log.about}: {', '.join(map(one_line, log.files))}", "dim"), soft_wrap=True)


def _kept_container(options: LogOptions) -> Container:
    """The only container of the pod whose log has a copy in the claim."""
    return Container.RAY if options.pool else Container.DRIVER


def _logs_folder(name: str, storage: Path) -> Path:
    """The folder of the job's logs. `storage`: the folder where the claim is mounted, or the job's folder below it."""
    candidates = [storage / name / LOGS_IN_JOB_FOLDER, storage / LOGS_IN_JOB_FOLDER]
    found = next((folder for folder in candidates if folder.is_dir()), None)
    if found is None:
        found_instead = f"{storage} has only: {_listed(storage)}" if storage.is_dir() else f"there is no {storage}"
        raise CliError(
            f"--storage {storage}: neither {candidates[0]} nor {candidates[1]} exists ({found_instead}); give the"
            " folder with the copies of the logs: where the claim is mounted, such as /mnt; if the job has"
            " checkpoint.storage.subPath: a/b, give /mnt/a/b"
        )
    return found


def _log_of_driver(logs: Path, attempt: int | None) -> KeptLog:
    number, folder = _attempt_folder(logs, attempt)
    files = sorted((file for file in folder.glob("driver*.log") if file.is_file()), key=_order_of_copy)
    if not files:
        raise CliError(f"{folder}: has no driver.log; it contains {_listed(folder)}")
    return KeptLog(files, f"attempt {number}")


def _order_of_copy(file: Path) -> tuple[int, str, int]:
    """A key that sorts copies of the driver's log in the order in which their lines were printed. A long log has
    several files: `driver.first.log`, `driver.part-3.log`, `driver.log`. `driver.old.log` is of an earlier job."""
    name, _, middle = file.stem.partition(".")
    kinds = ("old", "first", "part", "")
    kind = middle.partition("-")[0]
    return len(name), name, kinds.index(kind) if kind in kinds else 0


def _log_of_worker(logs: Path, options: LogOptions) -> KeptLog:
    """The log of a worker, of all attempts. With --attempt: the end of its log, which is kept if the worker failed in
    that attempt."""
    if options.attempt is None:
        candidates = [logs / f"{options.pool}" / f"worker-{options.index}.log", logs / f"worker-{options.index}.log"]
        files = [file for file in candidates if file.is_file()][:1]
        if not files:
            raise CliError(
                f"{logs}: has no log of worker {options.index} of pool {options.pool}; it contains {_listed(logs)}"
            )
        return KeptLog(files, f"worker {options.index}, all attempts")
    number, folder = _attempt_folder(logs, options.attempt)
    files = sorted(folder.glob(f"worker-*-rank{options.index}.log"))
    if len(files) != 1:
        raise CliError(
            f"{folder}: has {len(files) or 'no'} logs of a failed worker {options.index} (it contains"
            f" {_listed(folder)}); remove --attempt to print that worker's log of all attempts"
        )
    return KeptLog(files, f"attempt {number}, end of the worker's log")


def _attempt_folder(logs: Path, attempt: int | None) -> tuple[int, Path]:
    """The number and the folder of the attempt; for None, of the attempt whose folder was written last. This need not
    be the highest number, because a job that is deleted and created again counts its attempts from 1 again."""
    numbered = {
        int(number): folder
        for folder in _entries(logs)
        if (number := folder.name.removeprefix(ATTEMPT_LOGS_PREFIX)) != folder.name
        and number.isdecimal()
        and folder.is_dir()
    }
    if attempt is None and numbered:
        return max(numbered.items(), key=lambda each: (_written_at_ns(each[1]), each[0]))
    if attempt is None or attempt not in numbered:
        if not numbered:
            raise CliError(f"{logs}: has no log of an attempt; it contains {_listed(logs)}")
        kept = ", ".join(str(number) for number in sorted(numbered))
        raise CliError(
            f"{logs}: has logs of the attempts {kept} (seen: --attempt {attempt}); choose one of them, because only"
            " the logs of the newest ten attempts are kept"
        )
    return attempt, numbered[attempt]


def _written_at_ns(folder: Path) -> int:
    return max((file.stat().st_mtime_ns for file in _entries(folder)), default=0)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise CliError(f"{folder}: cannot be read ({error.strerror}); check its permissions") from None


def _listed(folder: Path) -> str:
    names = [f"'{one_line(entry.name)}'" for entry in _entries(folder)]
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") or "nothing"


def _pieces(log: KeptLog) -> Iterator[bytes]:
    for file in log.files:
        try:
            with file.open("rb") as opened:
                while piece := opened.read(PIECE_BYTES):
                    yield piece
        except OSError as error:
            raise CliError(f"{file}: cannot be read ({error.strerror}); check its permissions") from None


def _lines(log: KeptLog) -> Iterable[bytes]:
    """The lines of a log, each with its line end."""
    # Pieces of a line whose end was not read yet. They are joined only once, so that very long lines are not slow.
    begun: list[bytes] = []
    for piece in _pieces(log):
        *lines, rest = piece.split(b"\n")
        for line in lines:
            begun.append(line)
            yield b"".join(begun) + b"\n"
            begun.clear()
        begun.append(rest)
    if any(begun):
        yield b"".join(begun)
