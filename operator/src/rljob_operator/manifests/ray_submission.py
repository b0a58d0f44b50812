"""Builds the requests to Ray's Jobs API that start a trainer, or the program that writes the trainer's stack traces."""

from __future__ import annotations

import json
from collections.abc import Iterable

from rljob_api.constants import (
    ENV_ATTEMPT,
    ENV_POOL_NODES,
    ENV_RUN_STATE_FILE,
    ENV_START_NUMBER,
    LABEL_JOB_UID,
    POD_RAY_LOG_FOLDER,
    STACKS_ENTRYPOINT,
    TRAINER_ENTRYPOINT,
    run_state_file_name,
)
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.manifests.ownership import JobIdentity, Manifest

STOP_MARGIN_SECONDS = 10
"""How much of the grace period is left when Ray kills a trainer that did not exit."""


def stacks_submission_id(submission_id: str) -> str:
    """Id in Ray's Jobs API of the program that writes the stack traces of a trainer. `submission_id`: the trainer's."""
    return f"{submission_id}-stacks"


def stacks_submission(job: JobIdentity, submission_id: str, attempt: int) -> Manifest:
    """Body of `POST /api/jobs/` that starts the program that writes the stack traces of all processes of a trainer."""
    return {
        "entrypoint": STACKS_ENTRYPOINT,
        "submission_id": stacks_submission_id(submission_id),
        "runtime_env": {"env_vars": {ENV_ATTEMPT: str(attempt)}},
        "metadata": {LABEL_JOB_UID: job.uid},
    }


def submission(
    job: JobIdentity,
    spec: RLJobSpec,
    submission_id: str,
    attempt: int,
    start_number: int,
    nodes: Iterable[tuple[str, int]] = (),
) -> Manifest:
    """Body of `POST /api/jobs/` that starts the trainer. The command is constant: user input is only data, passed in
    the head pod's environment. `nodes`: the number of nodes of each pool, if the attempt has fewer than the spec."""
    nodes_by_pool = dict(nodes)
    run_state_file = f"{POD_RAY_LOG_FOLDER}/{run_state_file_name(submission_id)}"
    stop_wait_seconds = max(1, spec.run_policy.grace_period_seconds - STOP_MARGIN_SECONDS)
    return {
        "entrypoint": TRAINER_ENTRYPOINT,
        "submission_id": submission_id,
        "runtime_env": {
            "env_vars": {
                ENV_ATTEMPT: str(attempt),
                ENV_START_NUMBER: str(start_number),
                ENV_RUN_STATE_FILE: run_state_file,
                # Ray's own default is 3 s from SIGTERM to SIGKILL, too short for a checkpoint.
                "RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_seconds),
                **({ENV_POOL_NODES: json.dumps(nodes_by_pool)} if nodes_by_pool else {}),
            }
        },
        "metadata": {LABEL_JOB_UID: job.uid},
    }
