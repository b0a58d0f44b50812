"""Removing old checkpoints. What is kept is computed from storage each time, so that a restart forgets nothing."""

from __future__ import annotations

from pathlib import Path

from rljob_trainer.checkpoints.errors import DamagedError
from rljob_trainer.checkpoints.fencing import refuse_if_fenced, visible_checkpoints
from rljob_trainer.checkpoints.layout import CheckpointFolder, list_checkpoint_folders
from rljob_trainer.checkpoints.load import check_checkpoint
from rljob_trainer.checkpoints.storage import remove_folder, storage_errors


def prune(root: Path, start_number: int, keep: int) -> list[Path]:
    """Keeps the `keep` newest sound checkpoints and removes older ones; gives the folders that were removed.

    Damaged ones do not count as kept; before anything is removed, one that is kept has been read back and compared byte
    by byte. Also removed are folders without a manifest and checkpoints that no start accepts, of earlier starts,
    and this start's failed saves (those below its newest checkpoint; a running save is above it). To be called by the
    controller, after a commit and after `announce_start`.

    Raises FencedError where a later start has begun, CheckpointError where removing fails.
    """
    assert keep >= 1, keep
    visible = visible_checkpoints(root, start_number)
    removed = []
    for folder in [*_outdated(visible, keep), *_leftovers(root, start_number, visible)]:
        refuse_if_fenced(root, start_number)
        with storage_errors(folder.path, "removing an old checkpoint"):
            remove_folder(folder.path)
        removed.append(folder.path)
    return removed


def _outdated(visible: list[CheckpointFolder], keep: int) -> list[CheckpointFolder]:
    """Those older than `keep` sound ones, newest first like `visible`; the first that is kept is read back in full."""
    if len(visible) <= keep:
        return []
    num_kept = 0
    for index, folder in enumerate(visible):
        if num_kept == keep:
            return visible[index:]
        try:
            check_checkpoint(folder.path, digests=num_kept == 0)
        except DamagedError:
            continue
        num_kept += 1
    return []


def _leftovers(root: Path, start_number: int, visible: list[CheckpointFolder]) -> list[CheckpointFolder]:
    newest_step = max((folder.step for folder in visible if folder.start_number == start_number), default=0)
    return [
        folder
        for folder in list_checkpoint_folders(root)
        if folder not in visible
        and (folder.start_number < start_number or (folder.start_number == start_number and folder.step < newest_step))
    ]
