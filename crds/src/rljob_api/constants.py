"""Names and numbers that more than one program must spell the same way: environment, exit codes, files, versions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

API_GROUP = "rljob.dev"
API_VERSION = "v1alpha1"
KIND = "RLJob"

CONTRACT_VERSION = 1
"""Version of the spec handed to the trainer, of RunState and of the checkpoint manifest. Readers take N, N-1
and N+1; of the last, what they understand."""

OLDEST_READABLE_CONTRACT_VERSION = 1
NEWEST_READABLE_CONTRACT_VERSION = CONTRACT_VERSION + 1

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
ENV_START_NUMBER = "RLJOB_START_NUMBER"
"""Grows with every start of a trainer on the same checkpoint folder, over jobs that were deleted and made again too:
the newest start fences all older ones. The attempt when unset."""
ENV_POOL_NODES = "RLJOB_POOL_NODES"
"""Numbers of nodes, by pools, as a JSON object: of an attempt that runs on fewer than the job asks for."""
ENV_JOB_FOLDER = "RLJOB_JOB_FOLDER"
"""Folder that relative paths in the job (datasets, models) start from: locally that of the job file."""
ENV_SHIPPED_CODE = "RLJOB_SHIPPED_CODE"
"""A folder that goes along to the nodes of an existing Ray cluster, as the working directory of all workers."""
ENV_DEVICE = "RLJOB_DEVICE"
"""What the workers compute on: `cuda` or `cpu`. Found out by the trainer when unset."""

ENV_POD_NAME = "RLJOB_POD_NAME"
"""The pod that a process runs in, so that messages can name it; unset outside of Kubernetes."""
ENV_NODE_NAME = "RLJOB_NODE_NAME"
"""The Kubernetes node of that pod; unset outside of Kubernetes."""
ENV_CACHE = "RLJOB_CACHE"
"""Folder for converted models, kept between runs where there is room for it."""
ENV_GRACE_SECONDS = "RLJOB_GRACE_SECONDS"
"""How long the stop hooks of a pod may wait for the trainer to save and end."""

POOL_RESOURCE_PREFIX = "rljob-pool-"
"""Before a pool's name: the Ray resource of which each node of the pool has one per GPU, so that no other pool's
workers take its place."""

MAX_SPEC_BYTES = 64 * 1024
RUN_STATE_FILE_NAME = "rljob-run-state.json"

TRAINER_ENTRYPOINT = "python -m rljob_trainer"
"""The command of every Ray job. A constant: what a user writes travels as data, never through a shell."""

LABEL_JOB = "rljob.dev/job"
"""On everything that belongs to a job: its name."""
LABEL_JOB_UID = "rljob.dev/job-uid"
LABEL_ATTEMPT = "rljob.dev/attempt"
LABEL_POOL = "rljob.dev/pool"
"""On worker pods: the pool's name."""
ANNOTATION_TOKEN_KEY = "rljob.dev/token-key"
"""On a RayCluster: which of the operator's keys its token was derived from."""

ANNOTATION_STOP = "rljob.dev/stop-requested-at"
"""On an RLJob: a new value asks the operator to stop the job with a checkpoint, for good."""
ANNOTATION_RETRY = "rljob.dev/retry-requested-at"
"""On an RLJob: a new value asks for another attempt, now, with all retries given back; of one that has failed, too."""

POD_CODE_FOLDER = "/rljob/code"
"""The job's `code`, on PYTHONPATH of all pods, and what relative paths in the job start from."""
POD_STORAGE_FOLDER = "/rljob/storage"
"""The folder of this job within `checkpoint.storage`, the same in all pods."""
POD_CHECKPOINT_FOLDER = f"{POD_STORAGE_FOLDER}/checkpoints"
POD_RUN_FOLDER = f"{POD_STORAGE_FOLDER}/run"
POD_CACHE_FOLDER = "/rljob/cache"
"""Scratch space of one pod."""
POD_RAY_LOG_FOLDER = "/tmp/ray/session_latest/logs"
"""What Ray's dashboard serves as log files, the run state among them."""

MIN_RAY_VERSION = "2.54.0"
"""The oldest Ray that may run a job on a cluster. Older ones let others delete jobs without a token (CVE-2026-27482),
and those before 2.52 ask nobody for one."""

RAY_HEALTH_CHECK: Mapping[str, str] = MappingProxyType(
    {
        "RAY_health_check_initial_delay_ms": "5000",
        "RAY_health_check_period_ms": "3000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_health_check_failure_threshold": "4",
    }
)
"""Of Ray's head: how it finds a node that is lost or frozen, and with it the worker processes there."""
RAY_WORKER_NICENESS = ("RAY_worker_niceness", "0")
"""Ray's own default is 15: the processes that compute would wait for whatever else their node does."""

HEAD_GROUP = "head"
"""The head pod, where pods are grouped by pool; no pool has this name."""
RAY_CONTAINER = "ray"
DRIVER_LOG_CONTAINER = "driver"
"""In the head pod: prints the driver's log, so that `kubectl logs` shows it."""
DASHBOARD_PORT = 8265

STACKS_ENTRYPOINT = "python -m rljob_trainer.pod.dump_stacks"
"""The command of the Ray job that writes down where the processes of a trainer stand."""
STACKS_SECONDS = 30
"""What that has before a trainer that stalls is asked to stop; added to its grace period."""
LOGS_FOLDER = "logs"
"""Of the logs of workers, in the run folder; what is kept of an attempt is in `attempt_logs_folder` below it."""
ATTEMPT_LOGS_PREFIX = "attempt-"
POD_LOGS_FOLDER = f"{POD_RUN_FOLDER}/{LOGS_FOLDER}"


def attempt_logs_folder(attempt: int) -> str:
    """Name of the folder of an attempt's logs."""
    return f"{ATTEMPT_LOGS_PREFIX}{attempt}"


def run_state_file_name(submission_id: str) -> str:
    """The run state of one submission, in Ray's log folder."""
    return f"rljob-run-state-{submission_id}.json"


def driver_log_file_name(submission_id: str) -> str:
    """Where Ray writes what a submission prints, in its log folder."""
    return f"job-driver-{submission_id}.log"


class ExitCode(IntEnum):
    """Exit codes of the trainer. The operator turns them into a failure class."""

    SUCCESS = 0
    APPLICATION = 1
    """The training or the user's code failed."""
    CONFIGURATION = 2
    """The job can never work as written."""
    INFRASTRUCTURE = 75
    """Not the job's fault, and another try may work (EX_TEMPFAIL): a worker, node or device was lost, Ray could not
    start, memory, devices or the network were missing, or a later attempt has taken over."""
    INTERRUPTED = 130
    """Stopped on request: after a checkpoint, or without one where no step was done or a second signal came."""
