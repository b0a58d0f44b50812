"""Fencing: which start of the trainer may write, and which checkpoints of earlier starts are accepted.

An earlier start may still be alive: perhaps it was only paused (a stopped process, a node that comes back), and
continues later. Its checkpoints must not be used together with those of a retry. So start N first writes
`starts/<N>.json`, a list of the checkpoints that it accepts: all that it finds. Before every commit, a start checks for
such files of later starts.
If there is one, the commit fails. An earlier start may pass this check just before start N writes its file. Then the
new checkpoint is not in N's list, so N and all later starts ignore it. Before N saves anything, it shortens its list to
the checkpoint that it resumed from and older ones. If N ends before it has shortened the list, it has saved nothing, so
the longer list does no harm.

A start is one trainer process. `RLJOB_START_NUMBER` is its number. Numbers must increase for each start on the same
folder; gaps are allowed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime

from rljob_api.base import WireModel
from rljob_api.constants import CONTRACT_VERSION
from rljob_api.scalars import PositiveCount
from rljob_api.v1alpha1.status import CheckpointStatus
from rljob_trainer.checkpoints.errors import CheckpointError, DamagedError, FencedError
from rljob_trainer.checkpoints.layout import (
    STARTS_FOLDER,
    CheckpointFolder,
    has_manifest,
    list_checkpoint_folders,
    read_manifest,
    read_sealed,
    seal,
    status_of,
)
from rljob_trainer.checkpoints.storage import Location, storage_errors, stored, write_file

_FILE_PATTERN = re.compile(r"(\d{4,10})\.json")


class StartRecord(WireModel):
    """Content of `starts/<N>.json`."""

    contract_version: PositiveCount
    start_number: PositiveCount
    accepted: tuple[str, ...]
    """Folder names of the accepted checkpoints of earlier starts, newest first. Once the start saves, the first name is
    that of the checkpoint from which it resumed."""
    started_at: str
    token: str = ""
    """A random text. It distinguishes two processes with the same number, also if they began in the same second."""


def announce_start(root: Location, start_number: int) -> None:
    """Announces the start. Afterwards earlier starts can no longer commit. Call `accept_up_to` before the first save.

    Raises FencedError if this start or a later one was already announced.
    """
    accepted = visible_checkpoints(root, start_number)
    record = StartRecord(
        contract_version=CONTRACT_VERSION,
        start_number=start_number,
        accepted=tuple(folder.name for folder in accepted),
        started_at=timestamp_now(),
        token=secrets.token_hex(16),
    )
    path = _start_file(root, start_number)
    with storage_errors(root, "announcing a start"):
        stored(path.parent).make_folder()
        try:
            stored(path).create(seal(record)[0])
        except FileExistsError as error:
            raise FencedError(
                f"{root}: start {start_number} was already announced; give each start of the job a different number"
            ) from error
    refuse_if_fenced(root, start_number)


def accept_up_to(root: Location, start_number: int, resumed_from: CheckpointFolder | None) -> None:
    """Records which checkpoint the announced start has resumed from. That checkpoint and older ones stay accepted.
    Newer ones were skipped, for example because they are damaged. They are no longer accepted, so that they can never
    become the newest again.

    Raises FencedError if a later start exists.
    """
    refuse_if_fenced(root, start_number)
    path = _start_file(root, start_number)
    record, _ = read_sealed(path, StartRecord)
    visible = visible_checkpoints(root, start_number)
    accepted = tuple(folder.name for folder in visible if resumed_from and folder <= resumed_from)
    if accepted == record.accepted:
        return
    content = seal(record.model_copy(update={"accepted": accepted}))[0]
    with storage_errors(root, "recording the resumed checkpoint"):
        write_file(path, content)


def name_of_resumed(root: Location, start_number: int) -> str | None:
    """Returns the name of the checkpoint that the start has resumed from; None for step 0. Only valid after
    `accept_up_to`.

    Raises CheckpointError if the start's file is damaged."""
    accepted = _accepted_names(root, start_number)
    return accepted[0] if accepted else None


def refuse_if_fenced(root: Location, start_number: int) -> None:
    """Raises FencedError if a later start exists."""
    newest = newest_start(root)
    if newest > start_number:
        raise FencedError(
            f"{root}: a newer start of the trainer exists (start {newest}), so this one (start {start_number}) may no "
            "longer change the checkpoints; stop it"
        )


def newest_start(root: Location, before: int | None = None) -> int:
    """Returns the number of the newest start that was announced, of those with a number less than `before` if it is
    set; 0 if there is none."""
    return max((number for number, _ in _starts(root) if before is None or number < before), default=0)


def visible_checkpoints(root: Location, start_number: int) -> list[CheckpointFolder]:
    """Returns the committed checkpoints that are accepted for this start, newest first, without reading their content.

    Raises FencedError if a later start exists, CheckpointError if the list of a start is damaged.
    """
    refuse_if_fenced(root, start_number)
    # An empty file means that the start ended while it was announcing itself (see `create_absent`), before it saved
    # anything.
    accepted = {number: set(_accepted_names(root, number)) for number, size in _starts(root) if size > 0}
    return [
        folder
        for folder in list_checkpoint_folders(root)
        if has_manifest(folder.path)
        and all(folder.name in names for number, names in accepted.items() if number > folder.start_number)
    ]


def newest_of_job(root: Location, start_number: int, job_name: str) -> CheckpointStatus | None:
    """Returns the newest checkpoint whose manifest can be read, from which this start will probably resume. Reads only
    manifests; `find_newest_complete`, which is called later, reports damage.

    Returns None if there is no such checkpoint, if another job has saved it, or if the accepted checkpoints cannot be
    determined."""
    with suppress(CheckpointError, OSError):
        for folder in visible_checkpoints(root, start_number):
            with suppress(DamagedError):
                manifest, digest = read_manifest(folder.path)
                is_of_job = manifest.extra.get("jobName") == job_name
                return status_of(folder.path, manifest, digest) if is_of_job else None
    return None


def timestamp_now() -> str:
    """Returns the current UTC time in RFC 3339 format, such as `2026-11-25T12:00:00Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _starts(root: Location) -> Iterator[tuple[int, int]]:
    """The number of each announced start, and the size of its file."""
    for name, size in stored(root / STARTS_FOLDER).files().items():
        if match := _FILE_PATTERN.fullmatch(name):
            yield int(match[1]), size


def _start_file(root: Location, start_number: int) -> Location:
    return root / STARTS_FOLDER / f"{start_number:04d}.json"


def _accepted_names(root: Location, start_number: int) -> tuple[str, ...]:
    path = _start_file(root, start_number)
    try:
        return read_sealed(path, StartRecord)[0].accepted
    except DamagedError as error:
        raise CheckpointError(
            f"{path}: {error}; this file lists the accepted checkpoints. Delete it to accept all checkpoints again"
        ) from error
