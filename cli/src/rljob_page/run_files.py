"""Reads the files that a run has written so far. The run may still be active, so a last line may be incomplete.

A damaged job, run state or metrics file is an error, because the page would say something wrong without it. Damaged
samples, tokens and timelines are left out, with a note.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from rljob_api.constants import RUN_STATE_FILE_NAME
from rljob_api.contract_documents import load_run_state
from rljob_api.errors import DocumentError, JobFileError
from rljob_api.job_file import load_job_file
from rljob_api.run_state import RunState
from rljob_api.scalars import MAX_COUNT
from rljob_api.standard_streams import printable
from rljob_api.v1alpha1.job import RLJob
from rljob_page.curves import MAX_NUMBER, MAX_VALUE, Curves, curves_of, is_step
from rljob_page.errors import PageError

JOB_FILE_NAME = "job.yaml"
RESOLVED_JOB_FILE_NAME = "resolved.yaml"
METRICS_FILE_NAME = "metrics.jsonl"
SAMPLES_FILE_NAME = "samples.jsonl"
ATTEMPTS_FILE_NAME = "attempts.jsonl"
LOCK_FILE_NAME = ".lock"
TOKENS_FOLDER_NAME, TIMELINES_FOLDER_NAME = "tokens", "timelines"
READ_NAMES = (
    RESOLVED_JOB_FILE_NAME,
    JOB_FILE_NAME,
    RUN_STATE_FILE_NAME,
    METRICS_FILE_NAME,
    SAMPLES_FILE_NAME,
    ATTEMPTS_FILE_NAME,
    LOCK_FILE_NAME,
    TOKENS_FOLDER_NAME,
    TIMELINES_FOLDER_NAME,
)
"""Files and folders in the folder of a run that a page is made of."""
MAX_SAMPLES = 5000
"""The newest samples of a run that are read."""
_MAX_SAMPLES_BYTES = 8 * 2**20
"""The largest part of `samples.jsonl` that is read, from its end. More has no place on a page, which is smaller."""
_MAX_FILE_BYTES = 16 * 2**20
"""The largest size of a timeline or a file of tokens that is read."""
_MAX_TIMELINES = 4
_STEP_NAME = re.compile(r"step-[0-9]+")
_MAX_NAME = 253

MetricsLine = Mapping[str, float]
Json = dict[str, object]


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt of a run on this machine, from attempts.jsonl. Times are ISO 8601 in UTC; empty if unknown."""

    number: int
    started: str = ""
    ended: str = ""
    exit_code: int | None = None
    """None if the attempt has not ended, or ended without a record."""


@dataclass(frozen=True)
class RunFiles:
    """The content of a run's folder."""

    folder: Path
    job: RLJob | None
    """The job as it ran; None if the folder has only files of the trainer."""
    state: RunState | None
    curves: Curves
    """The metrics of metrics.jsonl, by name. `wall_time` is among them."""
    samples: tuple[Json, ...]
    """The newest samples, oldest first."""
    tokens: Mapping[str, Json]
    """The content of tokens/training.json and tokens/evaluation.json, by the name without the ending."""
    timelines: Mapping[str, Json]
    """The newest timelines by name, such as `step-000012` or `newest`."""
    attempts: tuple[AttemptRecord, ...]
    process: int | None
    """Id of the process that started the newest attempt; None if the folder does not name it."""
    has_process: bool
    """Whether that process exists on this machine."""
    notes: tuple[str, ...]
    """What was left out because it is damaged or too large."""

    @property
    def name(self) -> str:
        """The name of the job, else of the folder."""
        if self.job is not None and self.job.metadata.name:
            return self.job.metadata.name
        # The name in the state may have any length.
        return self.state.job_name[:_MAX_NAME] if self.state is not None else self.folder.absolute().name


def read_files(folder: Path) -> RunFiles:
    """Reads a run's folder. Raises PageError if it is not the folder of a run, if the run is of an unsupported version,
    or if its job, run state or metrics are damaged."""
    try:
        return _read_files(folder)
    except OSError as error:
        raise PageError(f"{folder}: cannot be read ({error.strerror}); check the path and its permissions") from None


def _read_files(folder: Path) -> RunFiles:
    if not folder.is_dir():
        raise PageError(f"{folder}: is not a folder; pass the folder of a run, such as runs/NAME")
    names = (RESOLVED_JOB_FILE_NAME, JOB_FILE_NAME, RUN_STATE_FILE_NAME, METRICS_FILE_NAME)
    if not any((folder / name).is_file() for name in names):
        raise PageError(f"{folder}: is not the folder of a run: it has no {JOB_FILE_NAME}; pass one such as runs/NAME")
    notes: list[str] = []
    process = _process(folder / LOCK_FILE_NAME)
    return RunFiles(
        folder=folder,
        job=read_job(folder),
        state=read_state(folder / RUN_STATE_FILE_NAME),
        curves=curves_of(_metrics_rows(folder / METRICS_FILE_NAME)),
        samples=tuple(_samples(folder / SAMPLES_FILE_NAME, notes)),
        tokens=dict(_documents(_token_files(folder / TOKENS_FOLDER_NAME), notes)),
        timelines=dict(_documents(_newest_timelines(folder / TIMELINES_FOLDER_NAME, notes), notes)),
        attempts=_attempts(folder / ATTEMPTS_FILE_NAME, notes),
        process=process,
        has_process=process is not None and _exists(process),
        notes=tuple(notes),
    )


def read_job(folder: Path) -> RLJob | None:
    """The job of the run: from `resolved.yaml`, which has the values that the trainer chose for `Auto`; if the training
    never began, from `job.yaml`. None if the folder has neither. Raises PageError."""
    for name in (RESOLVED_JOB_FILE_NAME, JOB_FILE_NAME):
        if (folder / name).is_file():
            try:
                return load_job_file(folder / name)
            except JobFileError as error:
                raise PageError(
                    f"{folder / name}: this version of rljob cannot read it ({_one_line(error)}); use the version that"
                    " made the run, or fix the file"
                ) from None
    return None


def read_state(file: Path) -> RunState | None:
    """The trainer's last run state, of any attempt; None before it has written one. Raises PageError."""
    try:
        return load_run_state(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except DocumentError as error:
        raise PageError(f"{file}: {_one_line(error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PageError(f"{file}: cannot be read ({_one_line(error)}); check the file") from None


def read_metrics(file: Path) -> tuple[MetricsLine, ...]:
    """The finite numbers of each line; empty if the file does not exist. The last line is skipped if it is incomplete,
    because the run may still be writing it. Raises PageError."""
    return tuple({name: value for name, value in row.items() if is_finite(value)} for row in _metrics_rows(file))


def _metrics_rows(file: Path) -> Iterator[Json]:
    """The content of each line; the last line is skipped if it is incomplete. Raises PageError."""
    fault = ""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if fault:
                    raise PageError(fault)
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    fault = f"{file}: line {number} is not valid JSON ({_one_line(error)}); remove the line"
                    continue
                if isinstance(row, dict):
                    yield row
                else:
                    fault = f"{file}: line {number} is not a JSON object; remove the line"
    except FileNotFoundError:
        return
    except OSError as error:
        raise PageError(f"{file}: cannot be read ({_one_line(error)}); check the file") from None


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether a value of a JSON document is a finite number that is small enough for sums (`MAX_VALUE`)."""
    kind = type(value)
    if kind is int:
        return -MAX_NUMBER < value < MAX_NUMBER  # type: ignore[operator]
    return kind is float and -MAX_VALUE < value < MAX_VALUE  # type: ignore[operator]


def attempt_rows(file: Path) -> Iterator[tuple[int, Json]]:
    """The attempt's number and the content of each valid line of attempts.jsonl. Raises OSError."""
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        number = row.get("attempt") if isinstance(row, dict) else None
        if isinstance(number, int) and 0 < number < MAX_COUNT:
            yield number, row


def newest_change(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, time of change and size of each file that the page shows; the result differs after a change of any."""
    names = (RUN_STATE_FILE_NAME, METRICS_FILE_NAME, SAMPLES_FILE_NAME, ATTEMPTS_FILE_NAME)
    sub_folders = (folder / TOKENS_FOLDER_NAME, folder / TIMELINES_FOLDER_NAME)
    files = [
        *(folder / name for name in names),
        *(file for each in sub_folders for file in sorted(each.glob("*.json"))),
    ]
    found = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue
        found.append((str(file), status.st_mtime_ns, status.st_size))
    return tuple(found)


def _attempts(file: Path, notes: list[str]) -> tuple[AttemptRecord, ...]:
    found: dict[int, Json] = {}
    try:
        for number, row in attempt_rows(file):
            found.setdefault(number, {}).update(row)
    except FileNotFoundError:
        return ()
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error.strerror}); it says how the attempts ended")
        return ()
    if not found:
        notes.append(f"{file.name} is damaged; it says how the attempts ended")
    return tuple(
        AttemptRecord(number, str(row.get("started", "")), str(row.get("ended", "")), _integer(row.get("exitCode")))
        for number, row in sorted(found.items())
    )


def _samples(file: Path, notes: list[str]) -> Iterator[Json]:
    """The newest samples. The file may be much larger than what is shown, so only its end is read."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            begin = stream.seek(max(0, size - _MAX_SAMPLES_BYTES))
            lines = stream.read().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error.strerror}); no samples are shown")
        return
    # Unless the file is read from its first byte, the first line may be incomplete; so may the last.
    last = lines[-1]
    lines = [line for line in lines[1 if begin else 0 :] if line.strip()]
    if begin and not lines:
        notes.append(f"no samples are shown: the last line of {file.name} has more than 8 MiB")
    elif begin or len(lines) > MAX_SAMPLES:
        notes.append(f"only the newest samples are shown; older ones are in {file.name}")
    num_damaged = 0
    for line in lines[-MAX_SAMPLES:]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            num_damaged += line is not last
            continue
        if isinstance(row, dict) and is_step(row.get("step")):
            yield row
        else:
            num_damaged += 1
    if num_damaged:
        notes.append(f"{num_damaged} damaged lines of {file.name} are left out")


def _token_files(folder: Path) -> list[Path]:
    return [file for file in (folder / "evaluation.json", folder / "training.json") if file.is_file()]


def _newest_timelines(folder: Path, notes: list[str]) -> list[Path]:
    """The files of the last steps in the order of the steps, then `newest.json`; at most `_MAX_TIMELINES`."""
    # Files with other names are not read: such names may contain control characters.
    steps = sorted(file for file in folder.glob("step-*.json") if _STEP_NAME.fullmatch(file.stem))
    found = [*steps, *(file for file in (folder / "newest.json",) if file.is_file())]
    if len(found) > _MAX_TIMELINES:
        notes.append(f"only the newest {_MAX_TIMELINES} timelines are shown; all are in {folder.name}/")
    return found[-_MAX_TIMELINES:]


def _documents(files: list[Path], notes: list[str]) -> Iterator[tuple[str, Json]]:
    """The JSON objects in the files, by name. What cannot be read is left out, with a note."""
    for file in files:
        name = f"{file.parent.name}/{file.name}"
        try:
            size = file.stat().st_size
            if size > _MAX_FILE_BYTES:
                notes.append(f"{name} is left out, because it has {size / 2**20:.0f} MiB (limit: 16 MiB)")
                continue
            document = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            notes.append(f"{name} is left out, because it cannot be read ({_one_line(error)})")
            continue
        if isinstance(document, dict):
            yield file.stem, document
        else:
            notes.append(f"{name} is left out, because it is not a JSON object")


def _process(lock_file: Path) -> int | None:
    try:
        return int(lock_file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _integer(value: object) -> int | None:
    return value if type(value) is int else None


def _one_line(error: object) -> str:
    return " ".join(printable(str(error)).split())
