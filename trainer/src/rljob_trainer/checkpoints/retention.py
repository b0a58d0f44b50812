"""Removing old checkpoints. What is kept is computed from storage each time, so that a restart forgets nothing."""

from __future__ import annotations

from pathlib import Path

from rljob_trainer.checkpoints.errors import DamagedError
from rljob_trainer.checkpoints.fencing import name_of_resumed, refuse_if_fenced, visible_checkpoints
from rljob_trainer.checkpoints.layout import CheckpointFolder, list_checkpoint_folders
from rljob_trainer.checkpoints.load import check_checkpoint
from rljob_trainer.checkpoints.storage import remove_folder, storage_errors


def prune(root: Path, start_number: int, keep: int) -> list[Path]:
    """Keeps the `keep` newest sound checkpoints and removes older ones; gives the folders that were removed.

    Sound means: the manifest is as it was sealed, and all files are there with the sizes that it says; others do not
    count as kept. No tensor is read: that would be the whole model and its optimizer at every save while training
    waits, much of it from caches, which say nothing about the storage. What it would prove is known already of the
    checkpoints that this start has written (every rank hashed the bytes from which it wrote, and all files were synced
    before the commit) and of the one that it has resumed from (its ranks have read and compared every byte). So nothing
    is removed unless one of these is among those that are kept: checkpoints that nobody has read since an earlier start
    are never all that is left.

    Also removed are folders without a manifest and checkpoints that no start accepts, of earlier starts, and this
    start's failed saves (those below its newest checkpoint; a running save is above it). To be called by the
    controller, after a commit, `announce_start` and `accept_up_to`.

    Raises FencedError where a later start has begun, CheckpointError where removing fails.
    """
    assert keep >= 1, keep
    visible = visible_checkpoints(root, start_number)
    removed = []
    for folder in [*_outdated(root, start_number, visible, keep), *_leftovers(root, start_number, visible)]:
        refuse_if_fenced(root, start_number)
        with storage_errors(folder.path, "removing an old checkpoint"):
            remove_folder(folder.path)
        removed.append(folder.path)
    return removed


def _outdated(root: Path, start_number: int, visible: list[CheckpointFolder], keep: int) -> list[CheckpointFolder]:
    """Those older than `keep` sound ones, newest first like `visible`; none where no kept one is known to be good."""
    if len(visible) <= keep:
        return []
    was_read = name_of_resumed(root, start_number)
    num_kept, is_one_known = 0, False
    for index, folder in enumerate(visible):
        if num_kept == keep:
            return visible[index:] if is_one_known else []
        try:
            check_checkpoint(folder.path, digests=False)
        except DamagedError:
            continue
        num_kept += 1
        is_one_known |= folder.start_number == start_number or folder.name == was_read
    return []


def _leftovers(root: Path, start_number: int, visible: list[CheckpointFolder]) -> list[CheckpointFolder]:
    newest_step = max((folder.step for folder in visible if folder.start_number == start_number), default=0)
    return [
        folder
        for folder in list_checkpoint_folders(root)
        if folder not in visible
        and (folder.start_number < start_number or (folder.start_number == start_number and folder.step < newest_step))
    ]
