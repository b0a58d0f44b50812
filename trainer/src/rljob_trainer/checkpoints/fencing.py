"""Fencing: which start may write, and which checkpoints of earlier starts count.

A job that is tried again must not mix with a former start that was only paused (a stopped process, a node that comes
back). So start N writes `starts/<N>.json` before it does anything else: the checkpoints that it accepts, which are
those that it finds. From then on earlier starts are refused when they commit, and should one have passed that check
just before, its manifest is not in the list and is ignored by N and by all later starts. Before N saves anything, it
cuts the list down to the checkpoint that it has resumed from and those before it. A start that ends sooner has added
nothing, so it need not take anything away either.

A start is that of a trainer process; `RLJOB_START_NUMBER` has its number. The numbers only have to grow on one folder;
gaps do not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

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
from rljob_trainer.checkpoints.storage import create_absent, durable_file, make_folder, storage_errors, write_all

_FILE_PATTERN = re.compile(r"(\d{4,10})\.json")


class StartRecord(WireModel):
    """Content of `starts/<N>.json`."""

    contract_version: PositiveCount
    start_number: PositiveCount
    accepted: tuple[str, ...]
    """Folder names of checkpoints of earlier starts, newest first. From its first save on, the start has resumed from
    the first of them."""
    started_at: str


def announce_start(root: Path, start_number: int) -> None:
    """Announces the start; earlier ones can no longer commit. To be followed by `accept_up_to` before the first save.

    Raises FencedError where this start or a later one has begun already.
    """
    accepted = visible_checkpoints(root, start_number)
    record = StartRecord(
        contract_version=CONTRACT_VERSION,
        start_number=start_number,
        accepted=tuple(folder.name for folder in accepted),
        started_at=timestamp_now(),
    )
    path = _path(root, start_number)
    with storage_errors(root, "announcing a start"):
        make_folder(path.parent)
        try:
            create_absent(path, seal(record)[0])
        except FileExistsError as error:
            raise FencedError(
                f"{root}: start {start_number} has begun already; give each start of the job its own number"
            ) from error
    refuse_if_fenced(root, start_number)


def accept_up_to(root: Path, start_number: int, resumed_from: CheckpointFolder | None) -> None:
    """Says which checkpoint the announced start has resumed from. It and older ones stay accepted; those that were
    passed over are not any more, so that they can never become the newest again.

    Raises FencedError where a later start has begun.
    """
    refuse_if_fenced(root, start_number)
    path = _path(root, start_number)
    record, _ = read_sealed(path, StartRecord)
    visible = visible_checkpoints(root, start_number)
    accepted = tuple(folder.name for folder in visible if resumed_from and folder <= resumed_from)
    if accepted == record.accepted:
        return
    with storage_errors(root, "announcing what was resumed from"), durable_file(path) as descriptor:
        write_all(descriptor, seal(record.model_copy(update={"accepted": accepted}))[0])


def name_of_resumed(root: Path, start_number: int) -> str | None:
    """Name of the folder that the start has resumed from, once `accept_up_to` has been called; None for step 0.

    Raises CheckpointError where the start's file is damaged."""
    accepted = _read(root, start_number)
    return accepted[0] if accepted else None


def refuse_if_fenced(root: Path, start_number: int) -> None:
    """Raises FencedError where a later start has begun."""
    newest = max(_started(root), default=0)
    if newest > start_number:
        raise FencedError(
            f"{root}: start {newest} has begun, start {start_number} may not change the checkpoints any more; stop it"
        )


def visible_checkpoints(root: Path, start_number: int) -> list[CheckpointFolder]:
    """Committed checkpoints that count for this start, newest first. Only names are looked at, not the content.

    Raises FencedError where a later start has begun, CheckpointError where the list of a start is damaged.
    """
    refuse_if_fenced(root, start_number)
    accepted = {number: set(_read(root, number)) for number in _started(root) if _has_list(root, number)}
    return [
        folder
        for folder in list_checkpoint_folders(root)
        if has_manifest(folder.path)
        and all(folder.name in names for number, names in accepted.items() if number > folder.start_number)
    ]


def newest_of_job(root: Path, start_number: int, job_name: str) -> CheckpointStatus | None:
    """What the start is likely to go on from, by the manifests alone. None where there is nothing, or it cannot be
    told: the search for the checkpoint, which follows, says why."""
    with suppress(CheckpointError, OSError):
        for folder in visible_checkpoints(root, start_number):
            with suppress(DamagedError):
                manifest, digest = read_manifest(folder.path)
                is_of_job = manifest.extra.get("jobName") == job_name
                return status_of(folder.path, manifest, digest) if is_of_job else None
    return None


def timestamp_now() -> str:
    """RFC 3339 in UTC, in whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _started(root: Path) -> Iterator[int]:
    folder = root / STARTS_FOLDER
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    matches = [_FILE_PATTERN.fullmatch(name) for name in names]
    return (int(match[1]) for match in matches if match)


def _path(root: Path, start_number: int) -> Path:
    return root / STARTS_FOLDER / f"{start_number:04d}.json"


def _has_list(root: Path, start_number: int) -> bool:
    # An empty file: the start ended while it announced itself (see `create_absent`), so it has accepted nothing and
    # has written nothing.
    return _path(root, start_number).stat().st_size > 0


def _read(root: Path, start_number: int) -> tuple[str, ...]:
    path = _path(root, start_number)
    try:
        return read_sealed(path, StartRecord)[0].accepted
    except DamagedError as error:
        raise CheckpointError(
            f"{path}: {error}; it says which checkpoints count. Delete it to let all of them count again"
        ) from error
