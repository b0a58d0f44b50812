"""Fencing: which attempt may write, and which checkpoints of earlier attempts count.

A job that is tried again must not mix with a former attempt that was only paused (a stopped process, a node that comes
back). So attempt N writes `attempts/<N>.json` before it does anything else: the checkpoints that it accepts, which are
the one it resumes from and those before it. From then on earlier attempts are refused when they commit, and should one
have passed that check just before, its manifest is not in the list and is ignored by N and by all later attempts.

An attempt is here one start of the trainer. The numbers only have to grow on one folder; gaps do not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from rljob_api.base import Contract
from rljob_api.contract import CONTRACT_VERSION
from rljob_api.scalars import PositiveCount
from rljob_trainer.checkpoints.errors import CheckpointError, DamagedError, FencedError
from rljob_trainer.checkpoints.layout import (
    ATTEMPTS_FOLDER,
    CheckpointFolder,
    has_manifest,
    list_checkpoint_folders,
    read_sealed,
    seal,
)
from rljob_trainer.checkpoints.storage import create_absent, make_folder, storage_errors

_FILE_PATTERN = re.compile(r"(\d{4,10})\.json")


class AttemptRecord(Contract):
    """Content of `attempts/<N>.json`."""

    contract_version: PositiveCount
    attempt: PositiveCount
    accepted: tuple[str, ...]
    """Folder names of checkpoints of earlier attempts, newest first."""
    started_at: str


def start_attempt(root: Path, attempt: int, resumed_from: CheckpointFolder | None) -> None:
    """Announces the attempt; earlier ones can no longer commit.

    `resumed_from` is the checkpoint that `find_newest_complete(root, attempt)` gave. It and older ones are accepted;
    those that were rejected or came later are not, so that they can never become the newest again.

    Raises FencedError where this attempt or a later one has started already.
    """
    refuse_if_fenced(root, attempt)
    accepted = [folder.name for folder in visible_checkpoints(root, attempt) if resumed_from and folder <= resumed_from]
    record = AttemptRecord(
        contract_version=CONTRACT_VERSION,
        attempt=attempt,
        accepted=tuple(accepted),
        started_at=timestamp_now(),
    )
    path = _path(root, attempt)
    with storage_errors(root, "starting an attempt"):
        make_folder(path.parent)
        try:
            create_absent(path, seal(record)[0])
        except FileExistsError as error:
            raise FencedError(
                f"{root}: attempt {attempt} has started already; give each start of the job its own number"
            ) from error
    refuse_if_fenced(root, attempt)


def refuse_if_fenced(root: Path, attempt: int) -> None:
    """Raises FencedError where a later attempt has started."""
    newest = max(_started(root), default=0)
    if newest > attempt:
        raise FencedError(
            f"{root}: attempt {newest} has started, attempt {attempt} may not change the checkpoints any more; stop it"
        )


def visible_checkpoints(root: Path, attempt: int) -> list[CheckpointFolder]:
    """Committed checkpoints that count for this attempt, newest first. Only names are looked at, not the content.

    Raises FencedError where a later attempt has started, CheckpointError where the list of an attempt is damaged.
    """
    refuse_if_fenced(root, attempt)
    accepted = {number: set(_read(root, number)) for number in _started(root) if _has_list(root, number)}
    return [
        folder
        for folder in list_checkpoint_folders(root)
        if has_manifest(folder.path)
        and all(folder.name in names for number, names in accepted.items() if number > folder.attempt)
    ]


def timestamp_now() -> str:
    """RFC 3339 in UTC, in whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _started(root: Path) -> Iterator[int]:
    folder = root / ATTEMPTS_FOLDER
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    matches = [_FILE_PATTERN.fullmatch(name) for name in names]
    return (int(match[1]) for match in matches if match)


def _path(root: Path, attempt: int) -> Path:
    return root / ATTEMPTS_FOLDER / f"{attempt:04d}.json"


def _has_list(root: Path, attempt: int) -> bool:
    # An empty file: the attempt ended while it announced itself (see `create_absent`), so it has accepted nothing and
    # has written nothing.
    return _path(root, attempt).stat().st_size > 0


def _read(root: Path, attempt: int) -> tuple[str, ...]:
    path = _path(root, attempt)
    try:
        return read_sealed(path, AttemptRecord)[0].accepted
    except DamagedError as error:
        raise CheckpointError(
            f"{path}: {error}; it says which checkpoints count. Delete it to let all of them count again"
        ) from error
