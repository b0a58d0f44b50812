"""Names and numbers that several programs share: environment variables, exit codes, files, labels, versions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from types import MappingProxyType

API_GROUP = "rljob.dev"
API_VERSION = "v1alpha1"
KIND = "RLJob"

CONTRACT_VERSION = 1
"""Version N of the trainer's job, of RunState and of the checkpoint manifest. Readers support N - 1, N, and those
documents of N + 1 that they can read."""

OLDEST_READABLE_CONTRACT_VERSION = 1
"""There is no version 0."""
NEWEST_READABLE_CONTRACT_VERSION = CONTRACT_VERSION + 1

ENV_SPEC = "RLJOB_SPEC"
"""The job as one JSON document of at most `MAX_SPEC_BYTES` bytes (see `contract_documents.TrainerJob`)."""
ENV_RUN_FOLDER = "RLJOB_RUN_FOLDER"
"""Folder for metrics, samples, plots, logs and the export."""
ENV_CHECKPOINT_FOLDER = "RLJOB_CHECKPOINT_FOLDER"
"""Folder of the job's checkpoints, shared by all attempts."""
ENV_RUN_STATE_FILE = "RLJOB_RUN_STATE_FILE"
"""File to which the trainer writes RunState; it is replaced atomically."""
ENV_ATTEMPT = "RLJOB_ATTEMPT"
"""Number of this attempt, from 1."""
ENV_START_NUMBER = "RLJOB_START_NUMBER"
"""Number of this start of the trainer, for fencing. It grows with every start on the same checkpoint folder, even if
the job is deleted and created again. Checkpoints that an older start saves later are not used. When unset, the number
of the attempt."""
ENV_POOL_NODES = "RLJOB_POOL_NODES"
"""Number of nodes of each pool, as JSON, for example `{"main": 3}`; set if the attempt runs on fewer nodes than the job
requests."""
ENV_JOB_FOLDER = "RLJOB_JOB_FOLDER"
"""Folder at which relative paths in the job (datasets, models) start. `rljob run` sets the folder of the job file."""
ENV_SHIPPED_CODE = "RLJOB_SHIPPED_CODE"
"""A folder that Ray copies to the nodes of an existing Ray cluster, as the working directory of all workers."""
ENV_DEVICE = "RLJOB_DEVICE"
"""Device type of the workers: `cuda` or `cpu`. The trainer detects it when unset."""

ENV_POD_NAME = "RLJOB_POD_NAME"
"""Name of the pod in which this process runs, for messages; unset outside Kubernetes."""
ENV_NODE_NAME = "RLJOB_NODE_NAME"
"""Name of the Kubernetes node on which that pod runs; unset outside Kubernetes."""
ENV_CACHE = "RLJOB_CACHE"
"""Folder for downloads and converted models. On a cluster it is `POD_CACHE_FOLDER`; elsewhere later runs reuse it."""
ENV_GRACE_SECONDS = "RLJOB_GRACE_SECONDS"
"""Seconds that the stop hooks of a pod wait for the trainer to save a checkpoint and exit."""

BUCKET_CREDENTIALS: Mapping[str, bool] = MappingProxyType(
    {"AWS_ACCESS_KEY_ID": False, "AWS_SECRET_ACCESS_KEY": False, "AWS_SESSION_TOKEN": True}
)
"""Keys of the Secret of a bucket, and variables in the pods, with whether the key is optional."""

POOL_RESOURCE_PREFIX = "rljob-pool-"
"""A pool's custom Ray resource is named by this prefix and the pool's name. Each node of the pool has one unit per GPU,
so that workers of other pools are not placed there."""

MAX_SPEC_BYTES = 64 * 1024
RUN_STATE_FILE_NAME = "rljob-run-state.json"
"""Name of the run state file in a run folder (`rljob run`). On a cluster it is `run_state_file_name`."""

TRAINER_ENTRYPOINT = "python -m rljob_trainer"
"""The command of the Ray job that runs the trainer. It is constant: user input is passed as data, never through a
shell."""

PHASE_BEFORE_STATUS = "New"
"""Phase that `rljob` and the metric `rljob_jobs` show for a job that no operator has processed yet. The status of such
a job has no phase."""

LABEL_JOB = "rljob.dev/job"
"""Label of all objects of a job, such as its RayCluster and its pods: the job's name."""
LABEL_JOB_UID = "rljob.dev/job-uid"
LABEL_ATTEMPT = "rljob.dev/attempt"
LABEL_RESULTS_OF = "rljob.dev/results-of"
"""Label of the pod of `rljob get-results`: the job's UID. Such a pod has no other label of the job, so
that it does not count as a pod of an attempt."""
LABEL_POOL = "rljob.dev/pool"
"""Label of worker pods: the pool's name."""
ANNOTATION_TOKEN_KEY = "rljob.dev/token-key"
"""Annotation of a RayCluster: a short id of the operator's key from which the cluster's token was derived. The id does
not reveal the key."""

ANNOTATION_STOP = "rljob.dev/stop-requested-at"
"""Annotation of an RLJob: a new value asks the operator to save a checkpoint and end the job."""
ANNOTATION_RETRY = "rljob.dev/retry-requested-at"
"""Annotation of an RLJob, also of a failed one: a new value asks the operator to start another attempt immediately,
with both retry budgets reset."""

POD_CODE_FOLDER = "/rljob/code"
"""Folder of the job's `code`, on PYTHONPATH of all pods. Relative paths in the job start here."""
POD_STORAGE_FOLDER = "/rljob/storage"
"""Folder of the job within `checkpoint.storage`, the same in all pods."""
POD_CHECKPOINT_FOLDER = f"{POD_STORAGE_FOLDER}/checkpoints"
POD_RUN_FOLDER = f"{POD_STORAGE_FOLDER}/run"
POD_CACHE_FOLDER = "/rljob/cache"
"""Temporary storage of one pod."""
POD_RAY_LOG_FOLDER = "/tmp/ray/session_latest/logs"
"""Folder whose files Ray's dashboard serves as log files, among them the run state."""

MIN_RAY_VERSION = "2.54.0"
"""Oldest supported version of Ray on a cluster. Older versions accept requests without a token that delete jobs
(CVE-2026-27482), and versions before 2.52 have no tokens."""

RAY_HEALTH_CHECK: Mapping[str, str] = MappingProxyType(
    {
        "RAY_health_check_initial_delay_ms": "5000",
        "RAY_health_check_period_ms": "3000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_health_check_failure_threshold": "4",
    }
)
"""Settings of the health check by which Ray's head detects a lost or frozen node, and so the loss of the worker
processes on this node."""
RAY_WORKER_NICENESS = ("RAY_worker_niceness", "0")
"""Ray's default is 15, with which the training processes would get less CPU time than other processes of the node."""
RAY_USAGE_REPORTS = ("RAY_USAGE_STATS_ENABLED", "0")
"""By default, Ray's head sends reports about its use to Ray's developers."""

HEAD_GROUP = "head"
"""Name of the head pod's group where pods are counted by pool. No pool has this name."""
RAY_CONTAINER = "ray"
DRIVER_LOG_CONTAINER = "driver"
"""Container of the head pod that prints the driver's log, so that `kubectl logs` shows it."""
DASHBOARD_PORT = 8265

STACKS_ENTRYPOINT = "python -m rljob_trainer.pod.dump_stacks"
"""The command of the Ray job that writes the stacks of all processes of a trainer to files."""
STACKS_SECONDS = 30
"""Seconds that a stalled trainer gets to write its stacks before it is asked to stop. The operator adds them to the
grace period."""
LOGS_FOLDER = "logs"
"""Folder of the workers' logs in the run folder. It contains the `attempt_logs_folder` of each attempt."""
ATTEMPT_LOGS_PREFIX = "attempt-"
POD_LOGS_FOLDER = f"{POD_RUN_FOLDER}/{LOGS_FOLDER}"


def attempt_logs_folder(attempt: int) -> str:
    """Name of the folder with the logs of an attempt: `attempt-2`."""
    return f"{ATTEMPT_LOGS_PREFIX}{attempt}"


def run_state_file_name(submission_id: str) -> str:
    """Name of the run state file of a submission, in Ray's log folder."""
    return f"rljob-run-state-{submission_id}.json"


def driver_log_file_name(submission_id: str) -> str:
    """Name of the file in Ray's log folder with the output of a submission."""
    return f"job-driver-{submission_id}.log"


class ErrorCause(StrEnum):
    """A cause of failures for which `rljob explain` has special advice. The trainer reports it beside the message, and
    the operator sets it for a pod that ran out of memory. So programs need not parse messages, whose text may
    change."""

    DEVICE_MEMORY = "DeviceMemory"
    """Too little memory on a device, such as a GPU."""
    HOST_MEMORY = "HostMemory"
    """Too little memory of a machine or a container."""


class ExitCode(IntEnum):
    """Exit codes of the trainer. The operator derives the failure class from them."""

    SUCCESS = 0
    APPLICATION = 1
    """The training or user code failed."""
    CONFIGURATION = 2
    """The job cannot work as written."""
    INFRASTRUCTURE = 75
    """The infrastructure failed, and a retry may succeed (EX_TEMPFAIL): a worker, node or GPU was lost, Ray did not
    start, memory, GPUs or the network were unavailable, or the trainer was started again while this start still ran."""
    INTERRUPTED = 130
    """Stopped on request, with a checkpoint. There is none if no step was completed or a second signal was received."""
