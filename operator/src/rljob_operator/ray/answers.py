"""What the answers of a Ray dashboard mean, as `reconcile` wants to know it; pure.

They come from a pod of a user: whatever is kept of one has a bound, and what makes no sense raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rljob_api.errors import HandoverError
from rljob_api.handover import load_run_state
from rljob_api.run_state import RunPhase, RunState
from rljob_operator.raw_json import JsonObject, flag_at, integer_at, number_at, object_at, objects_at, text_at
from rljob_operator.ray.client import DashboardUnreachableError
from rljob_operator.reconcile.observed import ObservedRayJob, ObservedRayNode, RayJobStatus

MAX_LOG_CHARACTERS = 16_000
MAX_NODES = 10_000
MAX_INFEASIBLE_GROUPS = 16
MAX_GROUP_CHARACTERS = 1000
MAX_RUN_STATE_CHARACTERS = 64 * 1024
MAX_ERROR_CHARACTERS = 1000


@dataclass(frozen=True)
class RunStateFile:
    """The run state of a submission as it was read. Both `state` and `error` are None where there is none yet."""

    digest: bytes
    """Of its text, so that the same text need not be read twice."""
    state: RunState | None
    error: str | None
    """Why it cannot be read."""


NO_RUN_STATE = RunStateFile(b"", None, None)


def alive(nodes: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
    """Those that Ray counts as alive, of so many as one cluster may have."""
    return tuple(node for node in nodes[:MAX_NODES] if text_at(node, "state") == "ALIVE")


def observed_ray_node(node: JsonObject) -> ObservedRayNode:
    """A node as the state API describes it. Raises ValueError or OverflowError for a number that is none."""
    return ObservedRayNode(flag_at(node, "is_head_node"), int(number_at(node, "resources_total", "GPU")))


def head_id(nodes: Iterable[JsonObject]) -> str:
    """The node that the drivers run on; empty where there is none."""
    return next((text_at(node, "node_id") for node in nodes if flag_at(node, "is_head_node")), "")


def observed_ray_job(submission_id: str, found: JsonObject) -> ObservedRayJob:
    """A job as the Jobs API describes it. Raises DashboardUnreachableError for a status that Ray does not have."""
    status = text_at(found, "status")
    if status not in RayJobStatus.__members__:
        raise DashboardUnreachableError(f"its answer holds no status of a job (seen: {status[:100]!r})")
    return ObservedRayJob(
        submission_id=submission_id,
        status=RayJobStatus(status),
        message=text_at(found, "message")[-MAX_LOG_CHARACTERS:],
        error_type=text_at(found, "error_type")[:MAX_ERROR_CHARACTERS] or None,
        exit_code=integer_at(found, "driver_exit_code"),
    )


def run_state_file(text: str | None, former: RunStateFile) -> RunStateFile:
    """What stands in the file, None where it is not there. `former`: what was found the last time."""
    if text is None:
        return NO_RUN_STATE
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    if digest == former.digest:
        return former
    if len(text) > MAX_RUN_STATE_CHARACTERS:
        error = f"run state: it has {len(text)} characters, more than {MAX_RUN_STATE_CHARACTERS}; check what wrote it"
        return RunStateFile(digest, None, error)
    try:
        return RunStateFile(digest, load_run_state(text), None)
    except HandoverError as error:
        return RunStateFile(digest, None, str(error)[:MAX_ERROR_CHARACTERS])


def infeasible_groups(groups: Iterable[JsonObject]) -> tuple[str, ...]:
    """Those that Ray says no set of nodes can hold, each with its name and what it asks for."""
    found = tuple(
        f"{text_at(group, 'name') or text_at(group, 'placement_group_id')}: {_bundles(group)}"[:MAX_GROUP_CHARACTERS]
        for group in groups
        if text_at(group, "state") == "PENDING" and text_at(group, "stats", "scheduling_state") == "INFEASIBLE"
    )
    return found[:MAX_INFEASIBLE_GROUPS]


def went_wrong(job: ObservedRayJob, state: RunState | None) -> bool:
    """Whether the job has ended, and not with a trainer that says it is complete."""
    if job.status is RayJobStatus.SUCCEEDED:
        return state is None or state.phase is not RunPhase.COMPLETE
    return job.status.has_ended


def _bundles(group: JsonObject) -> str:
    """Equal bundles together, such as `2 x {CPU: 1, GPU: 8}`."""
    numbers: dict[str, int] = {}
    for bundle in objects_at(group, "bundles"):
        wanted = _resources(object_at(bundle, "unit_resources"))
        numbers[wanted] = numbers.get(wanted, 0) + 1
    return ", ".join(f"{number} x {wanted}" for wanted, number in numbers.items())


def _resources(resources: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{name}: {number_at(resources, name):g}" for name in sorted(resources)) + "}"
