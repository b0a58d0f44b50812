"""Names and numbers that more than one program must spell the same way: environment, exit codes, files, versions."""

from __future__ import annotations

from enum import IntEnum

API_GROUP = "rljob.dev"
API_VERSION = "v1alpha1"
KIND = "RLJob"

CONTRACT_VERSION = 1
"""Version of the spec handed to the trainer, of RunState and of the checkpoint manifest. Readers take N and N-1."""

OLDEST_READABLE_CONTRACT_VERSION = 1

ENV_SPEC = "RLJOB_SPEC"
"""The whole job as one JSON document (see `handover.TrainerJob`), at most `MAX_SPEC_BYTES`."""
ENV_RUN_FOLDER = "RLJOB_RUN_FOLDER"
"""Folder for metrics, samples, plots and the export."""
ENV_CHECKPOINT_FOLDER = "RLJOB_CHECKPOINT_FOLDER"
"""Folder of the job's checkpoints; shared by all attempts."""
ENV_RUN_STATE_FILE = "RLJOB_RUN_STATE_FILE"
"""File into which the trainer writes RunState (atomic replace)."""
ENV_ATTEMPT = "RLJOB_ATTEMPT"
"""Number of this attempt, from 1."""
ENV_JOB_FOLDER = "RLJOB_JOB_FOLDER"
"""Folder that relative paths in the job (datasets, models) start from: locally that of the job file."""
ENV_DEVICE = "RLJOB_DEVICE"
"""What the workers compute on: `cuda` or `cpu`. Found out by the trainer when unset."""

MAX_SPEC_BYTES = 64 * 1024
RUN_STATE_FILE_NAME = "rljob-run-state.json"


class ExitCode(IntEnum):
    """Exit codes of the trainer. The operator turns them into a failure class."""

    SUCCESS = 0
    APPLICATION = 1
    """The training or the user's code failed; another attempt may help."""
    CONFIGURATION = 2
    """The job can never work as written; not retried."""
    INFRASTRUCTURE = 75
    """Not the job's fault, and another try may work (EX_TEMPFAIL): a worker, node or device was lost, Ray could not
    start, memory, devices or the network were missing, or a later attempt has taken over."""
    INTERRUPTED = 130
    """Stopped on request: after a checkpoint, or without one where no step was done or a second signal came."""
