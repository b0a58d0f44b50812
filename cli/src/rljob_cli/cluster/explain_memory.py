"""The part of `rljob explain` about memory.

If a job has run out of memory, or may do so, the planner estimates from the job's spec what uses the memory and which
field to change. There is no estimate if the planner does not know the model or the GPU type."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from rljob.errors import ClusterError
from rljob.job_attempts import newest_attempt
from rljob.job_conditions import condition
from rljob.stored_job import StoredJob
from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import ErrorCause
from rljob_api.standard_streams import printable
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import Attempt
from rljob_planner.errors import PlanError
from rljob_planner.job_memory import host_memory_advice, phase_text, plan_from_spec, proposal_text
from rljob_planner.plan_types import Verdict

_MAX_PROPOSALS = 4
_USUAL_FIELDS = ("spec.training.maxTokensPerMicroBatch", "spec.training.rollout.gpuMemoryUtilization")
"""Fields that reduce GPU memory in most jobs."""


def memory_text(job: StoredJob) -> Iterator[Text]:
    """The planner's explanation if the job has run out of memory; else the operator's warning about memory, if any."""
    failed = _failed_attempt(job)
    if failed is not None and failed.failure_cause == ErrorCause.HOST_MEMORY:
        yield from _host_text(job, failed.failed_pod)
    elif failed is not None and failed.failure_cause == ErrorCause.DEVICE_MEMORY:
        yield from _device_text(job)
    else:
        yield from _memory_warning(job)


def _failed_attempt(job: StoredJob) -> Attempt | None:
    """The newest attempt, if it has ended. None if the job's result or the next attempt has another reason: then
    something else caused it."""
    newest, effect = newest_attempt(job), job.ending or job.status.next_attempt
    if newest is None or newest.ended is None:
        return None
    return newest if effect is None or effect.reason == newest.reason else None


def _host_text(job: StoredJob, pod: str | None) -> Iterator[Text]:
    """The planner's estimate of host memory of the failed pod's pool; of all pools if the pod is unknown."""
    spec = _spec(job)
    try:
        found = {} if spec is None else host_memory_advice(spec)
    except PlanError:
        found = {}
    pools = list(found)
    if pod is not None:
        # Pods are called CLUSTER-POOL-worker-SUFFIX. The name of one pool may be the end of another's.
        named = [pool for pool in found if f"-{pool}-worker-" in pod]
        pools = [max(named, key=len)] if named else []
    for pool in pools:
        yield Text(f"  {found[pool]}")


def _device_text(job: StoredJob) -> Iterator[Text]:
    spec = _spec(job)
    try:
        plan = None if spec is None else plan_from_spec(spec)
    except PlanError:
        plan = None
    if plan is None:
        yield Text("  `rljob plan FILE --gpu TYPE` shows what uses memory and which field to change")
        return
    worst = plan.fullest_phase
    yield Text(f"  by the planner's estimate, pool {worst.pool} uses the most memory: {phase_text(worst)}")
    for proposal in plan.proposals[:_MAX_PROPOSALS]:
        yield Text(f"  this would be enough: {proposal_text(proposal)}")
    if plan.verdict is Verdict.FITS:
        yield Text(
            f"  by this estimate the job fits, but it has run out of memory; reduce {' or '.join(_USUAL_FIELDS)}"
        )


def _memory_warning(job: StoredJob) -> Iterator[Text]:
    """The operator's warning about GPU memory, which is the message of SpecValid; nothing for a Complete job."""
    valid, end = condition(job.status, ConditionType.SPEC_VALID), job.ending
    warns = valid is not None and valid.reason == Reason.MEMORY_TOO_SMALL
    if valid is not None and warns and not (end is not None and end.is_complete):
        yield Text(f"  {printable(valid.message)}", "yellow")


def _spec(job: StoredJob) -> RLJobSpec | None:
    try:
        return job.spec()
    except ClusterError:
        return None
