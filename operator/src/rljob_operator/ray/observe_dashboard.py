"""What a dashboard says about a job, as `reconcile` wants to know it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from rljob_api.constants import driver_log_file_name, run_state_file_name
from rljob_api.errors import HandoverError
from rljob_api.handover import load_run_state
from rljob_api.run_state import RunPhase, RunState
from rljob_operator.raw_json import JsonObject, flag_at, integer_at, number_at, object_at, objects_at, text_at
from rljob_operator.ray.client import Dashboard
from rljob_operator.ray.errors import DashboardUnreachableError, TokenRejectedError
from rljob_operator.reconcile.observed import ObservedRay, ObservedRayJob, ObservedRayNode, RayJobStatus, Reachability

OBSERVE_SECONDS = 10.0
"""For all requests of one observation."""
NUM_LOG_LINES = 50
MAX_LOG_CHARACTERS = 16_000
ENDED = (RayJobStatus.STOPPED, RayJobStatus.SUCCEEDED, RayJobStatus.FAILED)

logger = logging.getLogger(__name__)


async def observe_dashboard(dashboard: Dashboard, submission_id: str | None) -> ObservedRay:
    """The nodes, and the submission where there is one. Never raises: what went wrong is in what is returned."""
    try:
        async with asyncio.timeout(OBSERVE_SECONDS):
            return await _observe(dashboard, submission_id)
    except TimeoutError:
        return ObservedRay(Reachability.UNREACHABLE, error=f"not all answers within {OBSERVE_SECONDS:g} s")
    except DashboardUnreachableError as error:
        return ObservedRay(Reachability.UNREACHABLE, error=str(error))
    except TokenRejectedError as error:
        return ObservedRay(Reachability.REJECTED, error=str(error))
    except (ValueError, OverflowError, RecursionError) as error:
        return ObservedRay(Reachability.UNREACHABLE, error=f"its answer makes no sense: {error}")


async def _observe(dashboard: Dashboard, submission_id: str | None) -> ObservedRay:
    nodes = [node for node in await dashboard.nodes() if text_at(node, "state") == "ALIVE"]
    alive = tuple(ObservedRayNode(flag_at(node, "is_head_node"), int(_num_gpus(node))) for node in nodes)
    found = await dashboard.job(submission_id) if submission_id is not None else None
    if found is None or submission_id is None:
        return ObservedRay(Reachability.OK, nodes=alive)
    job = observed_ray_job(submission_id, found)
    driver_node = text_at(found, "driver_node_id") or _head_id(nodes)
    state = await _run_state(dashboard, driver_node, submission_id)
    starting = job.status not in ENDED and (state is None or state.phase is RunPhase.STARTING)
    return ObservedRay(
        Reachability.OK,
        nodes=alive,
        job=job,
        run_state=state,
        infeasible_groups=infeasible_groups(await dashboard.placement_groups()) if starting else (),
        log_tail=await _log_tail(dashboard, driver_node, submission_id) if _went_wrong(job, state) else "",
    )


def observed_ray_job(submission_id: str, found: JsonObject) -> ObservedRayJob:
    """A job as the Jobs API describes it. Raises DashboardUnreachableError for a status that Ray does not have."""
    status = text_at(found, "status")
    if status not in RayJobStatus.__members__:
        raise DashboardUnreachableError(f"its answer holds no status of a job (seen: {status!r})")
    return ObservedRayJob(
        submission_id=submission_id,
        status=RayJobStatus(status),
        message=text_at(found, "message")[-MAX_LOG_CHARACTERS:],
        error_type=text_at(found, "error_type") or None,
        exit_code=integer_at(found, "driver_exit_code"),
    )


def infeasible_groups(groups: Iterable[JsonObject]) -> tuple[str, ...]:
    """Those that Ray says no set of nodes can hold, each with its name and what it asks for."""
    return tuple(
        f"{text_at(group, 'name') or text_at(group, 'placement_group_id')}: {_bundles(group)}"
        for group in groups
        if text_at(group, "state") == "PENDING" and text_at(group, "stats", "scheduling_state") == "INFEASIBLE"
    )


def _bundles(group: JsonObject) -> str:
    """Equal bundles together, such as `2 x {CPU: 1, GPU: 8}`."""
    numbers: dict[str, int] = {}
    for bundle in objects_at(group, "bundles"):
        wanted = _resources(object_at(bundle, "unit_resources"))
        numbers[wanted] = numbers.get(wanted, 0) + 1
    return ", ".join(f"{number} x {wanted}" for wanted, number in numbers.items())


def _resources(resources: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{name}: {number_at(resources, name):g}" for name in sorted(resources)) + "}"


def _num_gpus(node: JsonObject) -> float:
    return number_at(node, "resources_total", "GPU")


def _head_id(nodes: Iterable[JsonObject]) -> str:
    """The node that the drivers run on."""
    return next((text_at(node, "node_id") for node in nodes if flag_at(node, "is_head_node")), "")


async def _run_state(dashboard: Dashboard, node_id: str, submission_id: str) -> RunState | None:
    text = await dashboard.log_file(node_id, run_state_file_name(submission_id), -1) if node_id else None
    if text is None:
        return None
    try:
        return load_run_state(text)
    except HandoverError as error:
        logger.warning("run state of %s cannot be read: %s", submission_id, error)
        return None


async def _log_tail(dashboard: Dashboard, node_id: str, submission_id: str) -> str:
    text = await dashboard.log_file(node_id, driver_log_file_name(submission_id), NUM_LOG_LINES) if node_id else None
    return (text or "")[-MAX_LOG_CHARACTERS:]


def _went_wrong(job: ObservedRayJob, state: RunState | None) -> bool:
    if job.status is RayJobStatus.SUCCEEDED:
        return state is None or state.phase is not RunPhase.COMPLETE
    return job.status in ENDED
