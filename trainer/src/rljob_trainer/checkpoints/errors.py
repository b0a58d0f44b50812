"""What can go wrong with checkpoints."""

from __future__ import annotations

from rljob_trainer.errors import TrainerError


class CheckpointError(TrainerError):
    """A checkpoint cannot be written, read or found; the text names the folder and what to do."""


class FencedError(CheckpointError):
    """A newer start of the trainer has begun: this one may no longer change the checkpoints and has to stop."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is not what was written: missing, truncated, changed or unreadable."""
