"""Where what an attempt leaves for people lies: `logs/attempt-<N>` in the run's folder, beside the checkpoints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from rljob_api.constants import ATTEMPT_LOGS_PREFIX, LOGS_FOLDER, attempt_logs_folder

NUM_ATTEMPTS_KEPT = 10
MAX_TAIL_BYTES = 1 << 20
_FOLDER = re.compile(rf"{ATTEMPT_LOGS_PREFIX}([1-9][0-9]{{0,9}})")


def attempt_folder(run_folder: Path, attempt: int) -> Path:
    """The folder of an attempt, which may not be there yet."""
    return run_folder / LOGS_FOLDER / attempt_logs_folder(attempt)


def newest_attempt(run_folder: Path) -> int | None:
    """The attempt whose folder was written to last."""
    attempts = _attempts(run_folder)
    return attempts[0][1] if attempts else None


def prune_attempts(run_folder: Path, running: int) -> None:
    """Removes the folders of all but the newest attempts, that which is running among them, as far as they can be
    removed. A job that was made again counts from 1 again: it is the time that counts here."""
    others = [folder for _, number, folder in _attempts(run_folder) if number != running]
    for folder in others[NUM_ATTEMPTS_KEPT - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)


def keep_tail(log_file: Path, folder: Path, role: str, rank: int) -> Path:
    """Copies the end of a worker's log, which the next attempt adds to, into the folder of the attempt in which it has
    failed. Raises OSError."""
    with log_file.open("rb") as log:
        log.seek(max(0, log_file.stat().st_size - MAX_TAIL_BYTES))
        tail = log.read(MAX_TAIL_BYTES)
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"worker-{re.sub(r'[^A-Za-z0-9]+', '+', role)[:100]}-rank{rank}.log"
    kept.write_bytes(tail)
    return kept


def _attempts(run_folder: Path) -> list[tuple[int, int, Path]]:
    """When each was written to, its number and its folder, the newest first; none where that cannot be read."""
    try:
        folders = list((run_folder / LOGS_FOLDER).iterdir())
        numbered = [(int(match[1]), folder) for folder in folders if (match := _FOLDER.fullmatch(folder.name))]
        return sorted(((folder.stat().st_mtime_ns, number, folder) for number, folder in numbered), reverse=True)
    except OSError:
        return []
