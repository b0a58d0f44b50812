"""The log folder of an attempt: `logs/attempt-<N>` in the run folder, next to the checkpoints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from rljob_api.constants import ATTEMPT_LOGS_PREFIX, LOGS_FOLDER, attempt_logs_folder

NUM_ATTEMPTS_KEPT = 10
"""Attempts whose log folders are kept; older ones are removed."""
MAX_TAIL_BYTES = 1 << 20
"""Maximum size of the copied end of a worker's log."""
_FOLDER = re.compile(rf"{ATTEMPT_LOGS_PREFIX}([1-9][0-9]{{0,9}})")


def attempt_folder(run_folder: Path, attempt: int) -> Path:
    """Returns the log folder of an attempt, which may not exist yet."""
    return run_folder / LOGS_FOLDER / attempt_logs_folder(attempt)


def newest_attempt(run_folder: Path) -> int | None:
    """Returns the number of the attempt whose folder was modified last; None if there is no folder, or if the folders
    cannot be read."""
    attempts = _attempts(run_folder)
    return attempts[0][1] if attempts else None


def prune_attempts(run_folder: Path, running: int) -> None:
    """Removes the folders of old attempts and keeps the newest NUM_ATTEMPTS_KEPT, including that of the attempt with
    the number `running`. Errors are ignored. The modification time decides which folders are old, because a job that is
    deleted and created again starts at attempt 1 again."""
    others = [folder for _, number, folder in _attempts(run_folder) if number != running]
    for folder in others[NUM_ATTEMPTS_KEPT - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)


def keep_tail(log_file: Path, folder: Path, role: str, rank: int) -> Path:
    """Copies the end of a failed worker's log into the attempt's folder, because the next attempt appends to the log.
    Returns the path of the copy. Raises OSError."""
    with log_file.open("rb") as log:
        log.seek(max(0, log_file.stat().st_size - MAX_TAIL_BYTES))
        tail = log.read(MAX_TAIL_BYTES)
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / f"worker-{re.sub(r'[^A-Za-z0-9]+', '+', role)[:100]}-rank{rank}.log"
    copy.write_bytes(tail)
    return copy


def _attempts(run_folder: Path) -> list[tuple[int, int, Path]]:
    """Returns modification time (ns), attempt number and folder of all attempts, the newest first; empty if the folder
    cannot be read."""
    try:
        folders = list((run_folder / LOGS_FOLDER).iterdir())
        numbered = [(int(match[1]), folder) for folder in folders if (match := _FOLDER.fullmatch(folder.name))]
        return sorted(((folder.stat().st_mtime_ns, number, folder) for number, folder in numbered), reverse=True)
    except OSError:
        return []
