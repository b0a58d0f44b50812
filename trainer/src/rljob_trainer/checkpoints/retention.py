"""Removes old checkpoints. The decision only depends on the storage, so that a restart does not change it."""

from __future__ import annotations

from collections.abc import Collection

from rljob_trainer.checkpoints.errors import DamagedError
from rljob_trainer.checkpoints.fencing import name_of_resumed, refuse_if_fenced, visible_checkpoints
from rljob_trainer.checkpoints.layout import MANIFEST_FILE, CheckpointFolder, list_checkpoint_folders
from rljob_trainer.checkpoints.load import check_checkpoint
from rljob_trainer.checkpoints.storage import Location, storage_errors, stored


def prune(root: Location, start_number: int, keep: int, best_steps: Collection[int] = ()) -> list[Location]:
    """Keeps the `keep` newest intact checkpoints and those of `best_steps`, and removes older ones. Returns the folders
    that were removed.

    A checkpoint counts as intact if its manifest is valid and all files exist with the right sizes. Tensors are not
    read. Otherwise training would wait at every save until the whole model and its optimizer state are read. Much of it
    would be read from caches, which proves nothing about the storage. Two kinds of checkpoints are known to be good
    without reading tensors. The first kind was written by this start: every rank hashed the bytes that it wrote, and
    all files were synced before the commit. The second kind is the checkpoint from which this start has resumed: its
    ranks have verified every byte. Older checkpoints are removed only if at least one of the kept ones is of these
    kinds. So one kept checkpoint is always known to be good.

    `prune` also removes what earlier starts left behind (folders without a manifest, checkpoints that are not accepted)
    and failed saves of this start. A failed save is older than this start's newest checkpoint; a save in progress is
    newer. Call `prune` after a commit, and so after `announce_start` and `accept_up_to`.

    Raises FencedError if a later start exists, CheckpointError if removing fails.
    """
    assert keep >= 1, keep
    visible = visible_checkpoints(root, start_number)
    removed: list[Location] = []
    outdated = [each for each in _outdated(root, start_number, visible, keep) if each.step not in best_steps]
    for folder in [*outdated, *_leftovers(root, start_number, visible)]:
        refuse_if_fenced(root, start_number)
        with storage_errors(folder.path, "removing an old checkpoint"):
            # The manifest goes first, so that after an interruption the rest does not look like a checkpoint.
            stored(folder.path).remove_folder(first=MANIFEST_FILE)
        removed.append(folder.path)
    return removed


def _outdated(root: Location, start_number: int, visible: list[CheckpointFolder], keep: int) -> list[CheckpointFolder]:
    """Returns the checkpoints that are older than the `keep` newest intact ones, newest first. Returns nothing if none
    of the kept checkpoints is known to be good."""
    if len(visible) <= keep:
        return []
    resumed_from = name_of_resumed(root, start_number)
    num_kept, is_one_known_good = 0, False
    for index, folder in enumerate(visible):
        if num_kept == keep:
            return visible[index:] if is_one_known_good else []
        try:
            check_checkpoint(folder.path, digests=False)
        except DamagedError:
            continue
        num_kept += 1
        is_one_known_good |= folder.start_number == start_number or folder.name == resumed_from
    return []


def _leftovers(root: Location, start_number: int, visible: list[CheckpointFolder]) -> list[CheckpointFolder]:
    """Returns what earlier starts left behind, and failed saves of this start (see `prune`)."""
    newest_step = max((folder.step for folder in visible if folder.start_number == start_number), default=0)
    return [
        folder
        for folder in list_checkpoint_folders(root)
        if folder not in visible
        and (folder.start_number < start_number or (folder.start_number == start_number and folder.step < newest_step))
    ]
