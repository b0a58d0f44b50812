"""Parses responses of Ray dashboards into the types of `reconcile.observed`. Pure.

The responses come from a user's pod, so they are not trusted: every text and list that gets from them into
`ObservedRay` has a size limit. A response that cannot be parsed raises an error, except for a run state file: there the
result contains the error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rljob_api.contract_documents import load_run_state
from rljob_api.errors import DocumentError
from rljob_api.run_state import RunPhase, RunState
from rljob_operator.raw_json import JsonObject, flag_at, integer_at, number_at, object_at, objects_at, text_at
from rljob_operator.ray.client import DashboardUnreachableError
from rljob_operator.reconcile.observed import ObservedRayJob, ObservedRayNode, RayJobStatus

MAX_LOG_CHARACTERS = 16_000
MAX_INFEASIBLE_GROUPS = 16
MAX_GROUP_CHARACTERS = 1000
MAX_RUN_STATE_CHARACTERS = 64 * 1024
MAX_ERROR_CHARACTERS = 1000


@dataclass(frozen=True)
class RunStateFile:
    """The run state file of a submission. Both `state` and `error` are None if the file does not exist yet."""

    digest: bytes
    """Hash of the file's content, so that the same content is parsed only once."""
    state: RunState | None
    error: str | None
    """Why the content cannot be parsed; None if it can."""


NO_RUN_STATE = RunStateFile(b"", None, None)


def observed_ray_node(node: JsonObject) -> ObservedRayNode:
    """Parses a node of the state API. Raises ValueError or OverflowError for an invalid number."""
    return ObservedRayNode(flag_at(node, "is_head_node"), int(number_at(node, "resources_total", "GPU")))


def head_id(nodes: Iterable[JsonObject]) -> str:
    """Id of the head node, on which Ray starts the drivers; empty if `nodes` has no head node."""
    return next((text_at(node, "node_id") for node in nodes if flag_at(node, "is_head_node")), "")


def observed_ray_job(submission_id: str, found: JsonObject) -> ObservedRayJob:
    """Parses a Ray job of the Jobs API. Raises DashboardUnreachableError for an unknown status, because a later poll
    may get a valid one."""
    status = text_at(found, "status")
    if status not in RayJobStatus.__members__:
        raise DashboardUnreachableError(
            f"the status of the Ray job in the response is not valid (seen: {status[:100]!r})"
        )
    return ObservedRayJob(
        submission_id=submission_id,
        status=RayJobStatus(status),
        message=text_at(found, "message")[-MAX_LOG_CHARACTERS:],
        error_type=text_at(found, "error_type")[:MAX_ERROR_CHARACTERS] or None,
        exit_code=integer_at(found, "driver_exit_code"),
    )


def run_state_file(text: str | None, former: RunStateFile) -> RunStateFile:
    """Parses a run state file. `text`: the content of the file, None if it does not exist; `former`: the previous
    result for the same file."""
    if text is None:
        return NO_RUN_STATE
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    if digest == former.digest:
        return former
    if len(text) > MAX_RUN_STATE_CHARACTERS:
        return too_long_run_state(f"{len(text)} characters, at most {MAX_RUN_STATE_CHARACTERS}", digest)
    try:
        return RunStateFile(digest, load_run_state(text), None)
    except DocumentError as error:
        return RunStateFile(digest, None, str(error)[:MAX_ERROR_CHARACTERS])


def too_long_run_state(seen: str, digest: bytes) -> RunStateFile:
    """The result for a file that is too long to be a run state. `seen`: its length and the limit."""
    text = (
        f"run state: too long ({seen}); trainers write shorter run states, so check which other program wrote this file"
    )
    return RunStateFile(digest, None, text)


def infeasible_groups(groups: Iterable[JsonObject]) -> tuple[str, ...]:
    """The placement groups that Ray reports as infeasible, such as `actor: 2 x {CPU: 1, GPU: 8}`; at most
    `MAX_INFEASIBLE_GROUPS`."""
    found = tuple(
        f"{text_at(group, 'name') or text_at(group, 'placement_group_id')}: {_bundles(group)}"[:MAX_GROUP_CHARACTERS]
        for group in groups
        if text_at(group, "state") == "PENDING" and text_at(group, "stats", "scheduling_state") == "INFEASIBLE"
    )
    return found[:MAX_INFEASIBLE_GROUPS]


def has_failed(ray_job: ObservedRayJob, state: RunState | None) -> bool:
    """Whether the Ray job has ended without success: it failed, it was stopped, or Ray reports success, but the
    trainer's run state (`state`) does not."""
    if ray_job.status is RayJobStatus.SUCCEEDED:
        return state is None or state.phase is not RunPhase.COMPLETE
    return ray_job.status.has_ended


def _bundles(group: JsonObject) -> str:
    """The resources that a placement group requests, with the number of equal bundles, such as
    `2 x {CPU: 1, GPU: 8}`."""
    counts: dict[str, int] = {}
    for bundle in objects_at(group, "bundles"):
        resources = _resources(object_at(bundle, "unit_resources"))
        counts[resources] = counts.get(resources, 0) + 1
    return ", ".join(f"{count} x {resources}" for resources, count in counts.items())


def _resources(resources: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{name}: {number_at(resources, name):g}" for name in sorted(resources)) + "}"
