"""A hypothesis strategy for everything that the operator may observe of a job.

An example begins with a stage of a job's life in which records and observations agree. The stages alone cover a job
without failures; up to three disturbances cover the rest. A test counts what the examples cover.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import cache
from random import Random

from hypothesis import strategies as st

from rljob_api.conditions import ALARMS, FAILURE_CLASSES, REASONS, RESTARTED_FREELY, ConditionType, Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.run_state import RunPhase, RunState
from rljob_api.v1alpha1.run_policy import Cleanup, Elastic, RunPolicy
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import (
    Attempt,
    AttemptOutcome,
    AttemptState,
    Condition,
    ConditionStatus,
    Counters,
    FailureClass,
    HandledRequests,
    JobResult,
    NextAttempt,
    PoolNodes,
    RLJobStatus,
    StopRequest,
)
from rljob_operator.reconcile.observed import (
    Observed,
    ObservedJob,
    ObservedPod,
    ObservedRay,
    ObservedRayJob,
    PodProblem,
    RayJobStatus,
    Reachability,
)
from rljob_operator.reconcile.status_draft import timestamp
from rljob_testing.operator import inputs
from rljob_testing.operator.disturbances import POD_PROBLEMS, TEXTS, coin_flip, fitting_disturbances, suspended
from rljob_testing.operator.inputs import decide
from rljob_testing.operator.reasons_of_waiting import QUOTA

PROVISIONING_SECONDS, ACTIVE_SECONDS, STALL_SECONDS, GRACE_SECONDS, TTL_SECONDS = 300, 1000, 600, 30, 400
ELASTIC_WAIT_SECONDS, GROW_AFTER_SECONDS = 59, 60

AGES = (0, 1, 5, 9, 10, 20, 29, 30, 31, 59, 60, 61, 100, 299, 300, 301, 599, 600, 601, 1000, 50_000)
"""Ages in seconds, at and around the time limits of the operator."""


class Stage(StrEnum):
    """How far a job has come. The stages from `WRITTEN` to `ENDING` have an attempt that has not ended."""

    NEW = "new"
    WRITTEN = "attempt written"
    QUEUED = "cluster in a queue"
    PROVISIONING = "pods start"
    READY = "pods ready"
    SUBMITTED = "submitted"
    STARTING = "trainer starts"
    RUNNING = "trainer runs"
    STOPPING = "trainer is to stop"
    ENDING = "trainer has reported its end"
    WAITING = "between attempts"
    WAITING_ON_CLUSTER = "between attempts on the same cluster"
    SUSPENDING = "suspended, with a cluster that is left"
    SUSPENDED = "suspended"
    ENDED = "ended"
    KEPT = "ended, with its cluster kept"


_ORDER = tuple(Stage)
_OFTEN = (
    *(
        Stage.WRITTEN,
        Stage.QUEUED,
        *(Stage.PROVISIONING,) * 4,
        *(Stage.READY,) * 2,
        *(Stage.SUBMITTED,) * 3,
        *(Stage.RUNNING,) * 6,
    ),
    *(Stage.STOPPING, Stage.STOPPING),
    *(Stage.WAITING, Stage.WAITING, Stage.WAITING_ON_CLUSTER),
)
"""Stages that are drawn more often, because most can happen in them."""

_RETRIED = (FailureClass.APPLICATION, FailureClass.INFRASTRUCTURE)
_HOLDS_A_CLUSTER = (Stage.QUEUED, Stage.PROVISIONING, *_ORDER[_ORDER.index(Stage.READY) : _ORDER.index(Stage.WAITING)])
_SUSPENDED = (Stage.SUSPENDING, Stage.SUSPENDED)
_STOPS = (
    *(Reason.STOPPED_BY_USER, Reason.SUSPENDED, Reason.ACTIVE_DEADLINE_EXCEEDED, Reason.STALLED),
    *(*(Reason.RESIZED,) * 2, Reason.EVICTED, Reason.DISRUPTED),
)


@st.composite
def observations(draw: st.DrawFn) -> Observed:
    """A job as the operator may observe it, including cases that cannot occur.

    One seed decides everything except the number of disturbances. So an example is cheap, and the cases keep the
    frequencies that are given here.
    """
    num_disturbances = draw(st.sampled_from([0, 1, 1, 1, 2, 2, 3]))
    pick = draw(st.randoms(use_true_random=True))
    seen = observation(pick, pick.choice((*Stage, *_OFTEN)))
    # In some examples the disturbances come after the operator's decision.
    if pick.random() < 0.3:
        seen = inputs.with_status_written(seen, decide(seen))
    for _ in range(num_disturbances):
        seen = pick.choice(fitting_disturbances(seen))(pick, seen)
    return seen


def observation(pick: Random, stage: Stage) -> Observed:
    """A job at one of the stages, with matching clusters, pods and Ray."""
    job_spec = _spec(pick)
    if stage in _SUSPENDED:
        job_spec = job_spec.model_copy(update={"suspend": True})
    if stage is Stage.KEPT:
        policy = job_spec.run_policy.model_copy(update={"cleanup": Cleanup.KEEP_CLUSTER})
        job_spec = job_spec.model_copy(update={"run_policy": policy})
    num_former = 0 if stage is Stage.NEW else pick.choice([0, 0, 0, 1, 2, 9, 12])
    status = RLJobStatus() if stage is Stage.NEW else _status(pick, stage, num_former, job_spec)
    if coin_flip(pick):
        status = status.model_copy(update={"conditions": _conditions_of_unfinished_job(pick)})
    return _outside(pick, stage, inputs.job(job_spec, status))


def any_conditions(pick: Random) -> tuple[Condition, ...]:
    """Conditions that earlier passes, of this version or of another one, may have written."""
    return tuple(
        inputs.condition(kind, pick.choice(tuple(ConditionStatus)), pick.choice(reasons), an_age(pick))
        for kind, reasons in REASONS.items()
        if coin_flip(pick)
    )


def _conditions_of_unfinished_job(pick: Random) -> tuple[Condition, ...]:
    """Any conditions except those of a finished job, which are written only once, at the end."""
    ends = (ConditionType.FINISHED, ConditionType.COMPLETE, ConditionType.FAILED)
    return tuple(each for each in any_conditions(pick) if each.type not in ends)


def an_age(pick: Random) -> int:
    """An age in seconds, small in most cases."""
    return pick.choice(AGES if coin_flip(pick) else AGES[:8])


def ago(seconds: float) -> str:
    """The time `seconds` before `NOW`, as in a status."""
    return timestamp(inputs.at(-seconds))


@cache
def _bare_specs() -> tuple[RLJobSpec, ...]:
    """Specs to vary. They are built once, because the validation of a job takes milliseconds."""
    return inputs.spec(), inputs.spec({"pools[0].nodes": 2})


def _spec(pick: Random) -> RLJobSpec:
    bare = pick.choice(_bare_specs())
    may_shrink = bare.pools[0].nodes > 1 and pick.random() < 0.8
    elastic = Elastic(min_nodes=1, wait_seconds=ELASTIC_WAIT_SECONDS, grow_after_seconds=GROW_AFTER_SECONDS)
    policy = RunPolicy(
        max_app_retries=pick.choice([0, 2]),
        max_infra_retries=pick.choice([0, 10]),
        provisioning_deadline_seconds=PROVISIONING_SECONDS,
        active_deadline_seconds=pick.choice([None, None, ACTIVE_SECONDS]),
        stall_deadline_seconds=STALL_SECONDS,
        elastic=elastic if may_shrink else None,
        ttl_seconds_after_finished=pick.choice([None, None, 0, TTL_SECONDS]),
        cleanup=pick.choice(tuple(Cleanup)),
        grace_period_seconds=GRACE_SECONDS,
    )
    return bare.model_copy(update={"run_policy": policy})


def _status(pick: Random, stage: Stage, num_former: int, job_spec: RLJobSpec) -> RLJobStatus:
    """A status of the stage: attempts and other records, without conditions."""
    number = num_former + 1
    is_under_way = stage in _ORDER[: _ORDER.index(Stage.WAITING)]
    newest = _under_way(pick, stage, number) if is_under_way else _ended(pick, number, stage)
    if is_under_way and newest.submissions > 0 and job_spec.run_policy.elastic is not None and coin_flip(pick):
        newest = _on_fewer_nodes(pick, newest)
    former = tuple(_ended(pick, each, Stage.WAITING) for each in range(max(1, number - 9), number))
    saved = pick.choice([None, None, 3, 7])
    state = inputs.run_state(step=saved or 1, checkpoint_step=saved, seconds_ago=an_age(pick))
    counters = Counters(
        attempts=number,
        start_number=newest.start_number or inputs.START_NUMBER + number - 2,
        application_retries=pick.choice([0, 0, 1, 2]),
        infrastructure_retries=pick.choice([0, 0, 3, 10]),
        failed_attempts=num_former,
        active_seconds=pick.choice([0, 0, 0, 400, 1000]),
        checkpoint_step=pick.choice([None, 3]) if num_former else None,
        uncounted_restarts=pick.choice([0, 0, 1, 9]),
        short_growths=pick.choice([0, 0, 1, 9]),
    )
    status = RLJobStatus(
        attempts=(*former, newest),
        counters=counters,
        progress=state.progress if newest.running_since is not None else None,
        checkpoint=state.checkpoint,
        handled_requests=pick.choice([None, None, HandledRequests(stop="first", retry="first")]),
        waiting_since=pick.choice([None, ago(an_age(pick)), *(ago(86_400),) * 6]),
    )
    return status.model_copy(update=_between_or_after(pick, stage, newest))


def _between_or_after(pick: Random, stage: Stage, newest: Attempt) -> dict[str, object]:
    """Status fields of a job without a running attempt."""
    reason = newest.reason or Reason.SUCCEEDED.value
    if stage in (Stage.WAITING, Stage.WAITING_ON_CLUSTER):
        waits = NextAttempt(
            reason=reason,
            message="it failed",
            failure_class=newest.failure_class or FailureClass.APPLICATION,
            not_before=ago(pick.choice([-600, -10, -1, 0, 1, 60])),
            same_cluster=stage is Stage.WAITING_ON_CLUSTER,
        )
        return {"next_attempt": waits}
    if stage is Stage.SUSPENDED:
        return {"suspended_at": ago(an_age(pick))}
    if stage not in (Stage.ENDED, Stage.KEPT):
        return {}
    outcome = AttemptOutcome.SUCCEEDED if reason == Reason.SUCCEEDED else AttemptOutcome.FAILED
    cleaned = ago(0) if coin_flip(pick) else None
    return {"result": JobResult(outcome=outcome.value, reason=reason, at=ago(an_age(pick)), cleaned_up_at=cleaned)}


def _ended(pick: Random, number: int, stage: Stage) -> Attempt:
    """The record of an ended attempt; its reason fits the stage that follows."""
    if stage in (Stage.ENDED, Stage.KEPT) and coin_flip(pick):
        made = inputs.ended_attempt(Reason.SUCCEEDED, number=number)
        record: dict[str, object] = {"outcome": AttemptOutcome.SUCCEEDED.value, "failure_class": None}
    else:
        is_retried = stage in (Stage.WAITING, Stage.WAITING_ON_CLUSTER)
        fitting = [
            reason
            for reason, found in FAILURE_CLASSES.items()
            if found in _RETRIED or reason in RESTARTED_FREELY or not is_retried
        ]
        reason = Reason.SUSPENDED if stage in _SUSPENDED else pick.choice(fitting)
        made, record = inputs.ended_attempt(reason, FAILURE_CLASSES[reason], number=number), {}
    record |= {"start_number": inputs.START_NUMBER + number - 1, "ended": ago(an_age(pick))}
    record |= {"trainer_may_run": stage in (Stage.ENDED, Stage.KEPT) and pick.randint(0, 3) == 0}
    return made.model_copy(update=record)


def _under_way(pick: Random, stage: Stage, number: int) -> Attempt:
    """The record of an attempt that has reached the stage."""
    started, admitted, ready, running = sorted((an_age(pick) for _ in range(4)), reverse=True)
    reached = _ORDER.index(stage)
    record: dict[str, object] = {"started": ago(started)}
    if reached >= _ORDER.index(Stage.PROVISIONING):
        record |= {"active_since": ago(admitted)}
    if stage is Stage.QUEUED:
        record |= {"active_since": None, "state": AttemptState.QUEUED.value}
    if reached >= _ORDER.index(Stage.READY):
        record |= {"ready_at": ago(ready)}
    if reached >= _ORDER.index(Stage.SUBMITTED):
        record |= {"submissions": 1, "start_number": inputs.START_NUMBER + number - 1}
    if reached >= _ORDER.index(Stage.STARTING):
        record |= {"running_since": ago(running), "progressed_at": ago(min(running, an_age(pick)))}
        record |= {"run_state_at": ago(an_age(pick)) if coin_flip(pick) else None}
        record |= {"state_unknown_since": ago(min(running, an_age(pick))) if pick.randint(0, 3) == 0 else None}
        record |= {"state": AttemptState.STARTING.value if stage is Stage.STARTING else AttemptState.RUNNING.value}
    if stage is Stage.STOPPING or (stage is Stage.ENDING and coin_flip(pick)):
        sent = ago(an_age(pick)) if coin_flip(pick) else None
        stop = StopRequest(reason=pick.choice(_STOPS).value, requested_at=ago(an_age(pick)), sent_at=sent)
        record |= {"stop": stop, "state": AttemptState.STOPPING.value}
    if stage is Stage.ENDING:
        record |= {"end_reported_at": ago(min(running, an_age(pick)))}
    return inputs.attempt(number=number, seen=stage is not Stage.WRITTEN, record=record)


def _on_fewer_nodes(pick: Random, attempt: Attempt) -> Attempt:
    """Changes the attempt to one that started on fewer nodes after waiting for all. The missing nodes may have come
    back since."""
    waited = {"started": ago(100), "active_since": ago(ELASTIC_WAIT_SECONDS + 1)}
    whole = ago(pick.choice([1, 59, 60, 61])) if attempt.running_since is not None and coin_flip(pick) else None
    return attempt.model_copy(update=waited | {"nodes": (PoolNodes(name="main", nodes=1),), "all_nodes_since": whole})


def _outside(pick: Random, stage: Stage, about: ObservedJob) -> Observed:
    """Clusters, pods and Ray as they are at the stage."""
    nothing = Observed(about, True, (), (), ObservedRay(Reachability.NOT_ASKED))
    if stage in (Stage.NEW, Stage.WRITTEN, Stage.SUSPENDED):
        return nothing
    holds = stage in (*_HOLDS_A_CLUSTER, Stage.WAITING_ON_CLUSTER, Stage.KEPT)
    if not holds and coin_flip(pick):
        return nothing
    newest = about.status.attempts[-1]
    there = inputs.cluster(name=newest.cluster, uid=newest.cluster_uid or "c", deleting=not holds and coin_flip(pick))
    if stage is Stage.QUEUED:
        return replace(nothing, clusters=(suspended(pick, there),))
    pods = _pods(about, newest.cluster)
    if stage is Stage.PROVISIONING and pick.random() < 0.2:
        there, pods = replace(there, pod_creation_error=QUOTA), pods[:1]
    elif stage is Stage.PROVISIONING and pick.random() < 0.4:
        no_node = PodProblem(Reason.UNSCHEDULABLE, pick.choice(TEXTS))
        pods = tuple(replace(each, ready=False, problem=no_node) for each in pods)
    elif stage is Stage.PROVISIONING and pick.random() < 0.8:
        problem = PodProblem(pick.choice(POD_PROBLEMS), pick.choice(TEXTS)) if coin_flip(pick) else None
        pods = tuple(replace(each, ready=False, problem=problem) for each in pods[: pick.randint(0, len(pods))])
    elif not holds and coin_flip(pick):
        pods = tuple(replace(each, deleting=True, overdue=coin_flip(pick)) for each in pods[1:])
    seen = replace(nothing, clusters=(there,), pods=pods)
    has_head = any(each.group == HEAD_GROUP and each.ready for each in pods)
    return replace(seen, ray=_ray(pick, stage, about)) if has_head and stage in _HOLDS_A_CLUSTER else seen


def _pods(about: ObservedJob, name: str) -> tuple[ObservedPod, ...]:
    """All pods that the job requests, ready."""
    assert about.spec is not None, "only a later disturbance removes the spec"
    groups = [HEAD_GROUP, *(pool.name for pool in about.spec.pools for _ in range(pool.nodes))]
    return tuple(inputs.pod(f"{name}-{place}", group, cluster=name) for place, group in enumerate(groups))


def _ray(pick: Random, stage: Stage, about: ObservedJob) -> ObservedRay:
    """The dashboard's state at the stage."""
    assert about.spec is not None, "only a later disturbance removes the spec"
    gpus = tuple(pool.gpus_per_node for pool in about.spec.pools for _ in range(pool.nodes))
    newest = about.status.attempts[-1]
    trainer = ObservedRayJob(f"{about.name}-{newest.number}-1", RayJobStatus.RUNNING, "Ray's message", None, None)
    if stage in (Stage.PROVISIONING, Stage.READY) or (stage is Stage.SUBMITTED and coin_flip(pick)):
        return inputs.ray(gpus=gpus)
    phases = {
        Stage.SUBMITTED: [RunPhase.STARTING],
        Stage.STARTING: [RunPhase.STARTING, RunPhase.RUNNING],
        Stage.STOPPING: [RunPhase.RUNNING, RunPhase.STOPPING],
        Stage.ENDING: [RunPhase.COMPLETE, RunPhase.FAILED, RunPhase.STOPPED],
    }
    state = _state(pick, pick.choice(phases.get(stage, [RunPhase.RUNNING])), newest)
    if stage is Stage.STARTING and coin_flip(pick):
        return inputs.ray(trainer, gpus=gpus)
    seen = inputs.ray(trainer, state, gpus=gpus)
    stop = newest.stop
    return replace(seen, stacks_missing=coin_flip(pick)) if stop is not None and stop.reason == "Stalled" else seen


def _state(pick: Random, phase: RunPhase, newest: Attempt) -> RunState:
    """The trainer's run state: a new one, or the one that the previous pass has already recorded."""
    steps = pick.choice([None, None, 3, 8])
    made = inputs.run_state(phase, step=pick.randint(0, 10), seconds_ago=an_age(pick), checkpoint_step=steps)
    if newest.run_state_at is not None and coin_flip(pick):
        made = made.model_copy(update={"written_at": newest.run_state_at})
    names = pick.sample([*ALARMS, "FromANewerTrainer"], pick.randint(0, 2))
    alarms = pick.choice([None, *[tuple(inputs.alarm(name) for name in names)] * 3])
    return made.model_copy(update={"resumed_from_step": pick.choice([None, 3]), "alarms": alarms})
