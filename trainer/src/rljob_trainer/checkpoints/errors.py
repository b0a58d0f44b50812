"""The errors of checkpoints."""

from __future__ import annotations

from rljob_trainer.errors import TrainerError


class CheckpointError(TrainerError):
    """A checkpoint cannot be written, read or found; the message names the folder and what to do."""


class FencedError(CheckpointError):
    """A newer start of the trainer exists: this one may no longer change the checkpoints and has to stop."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is not what was written: missing, truncated, changed or unreadable."""


class StorageUnavailableError(CheckpointError):
    """The bucket of the checkpoints did not respond, or rejected a request, also after retries. This does not mean that
    a checkpoint is damaged."""
