"""Random changes of an observed job, its pods and its dashboard, and of what users request.

Each disturbance is a function that changes one thing about a consistent observation; the random generator decides how.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import MappingProxyType

from rljob_api.conditions import Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.run_state import RunError, RunPhase
from rljob_api.v1alpha1.pools import QUEUE_LABEL
from rljob_api.v1alpha1.status import Attempt, AttemptState, StopRequest
from rljob_operator.reconcile.observed import (
    EffectFailure,
    EffectKind,
    Observed,
    ObservedCluster,
    ObservedPod,
    ObservedRay,
    ObservedRayJob,
    ObservedWorkload,
    PodProblem,
    RayJobStatus,
    Reachability,
)
from rljob_operator.reconcile.status_draft import timestamp
from rljob_testing.operator import inputs
from rljob_testing.operator.reasons_of_waiting import QUOTA

TEXTS = ("short", "short", "", "x" * 2000, "\ud800\x1b[31mred\x00" * 100, "line\n" * 300, "é" * 700, "\x00")
REQUESTS = ("first", "second", "", "x" * 300, "a\nb")
"""Values of annotations, which Kubernetes does not validate."""

POD_PROBLEMS = (
    *(Reason.UNSCHEDULABLE, Reason.IMAGE_PULL_FAILED, Reason.CONTAINER_CONFIG_ERROR, Reason.VOLUME_MOUNT_FAILED),
    *(Reason.CONTAINER_CRASHING, Reason.OUT_OF_MEMORY, Reason.INFRASTRUCTURE_ERROR, Reason.DISRUPTED),
)
_FAILURES = MappingProxyType(
    {
        EffectKind.CREATE_CLUSTER: (Reason.CREATION_REJECTED, Reason.NAME_CONFLICT, Reason.KUBERAY_UNAVAILABLE),
        EffectKind.SUBMIT_JOB: (
            *(Reason.SUBMISSION_FAILED, Reason.DASHBOARD_UNREACHABLE, Reason.TOKEN_REJECTED),
            Reason.AUTHENTICATION_MISSING,
        ),
        EffectKind.STOP_JOB: (Reason.DASHBOARD_UNREACHABLE, Reason.TOKEN_REJECTED),
        EffectKind.DUMP_STACKS: (Reason.SUBMISSION_FAILED, Reason.DASHBOARD_UNREACHABLE, Reason.TOKEN_REJECTED),
        EffectKind.APPLY_NETWORK_POLICY: (Reason.CREATION_REJECTED,),
        EffectKind.DELETE_CLUSTER: (Reason.CREATION_REJECTED,),
        EffectKind.DELETE_JOB: (Reason.CREATION_REJECTED,),
    }
)
_ENDS = (
    *(("SUCCEEDED", None, 0), ("SUCCEEDED", None, 0), ("STOPPED", None, None), ("STOPPED", None, None)),
    *(("FAILED", None, 1), ("FAILED", None, 2), ("FAILED", None, 75), ("FAILED", None, 130), ("FAILED", None, -200)),
    *(("FAILED", "RUNTIME_ENV_SETUP_FAILURE", None), ("FAILED", "JOB_SUPERVISOR_ACTOR_START_TIMEOUT", None)),
    *(("FAILED", "JOB_SUPERVISOR_ACTOR_DIED", None), ("RUNNING", "NEW_IN_RAY", 1)),
)
"""Ends of a trainer as Ray reports them: status, error type, exit code."""


def fitting_disturbances(seen: Observed) -> tuple[Disturbance, ...]:
    """The disturbances that change something about this observation. Likely and revealing ones are repeated."""
    newest, ray_answers = _under_way(seen), seen.ray.reachability is Reachability.OK
    suspended = newest is None and seen.job.spec is not None and seen.job.spec.suspend
    return (
        *_OF_ANY_JOB,
        *((_spec_unfit,) * 6 if not seen.job.status.attempts else ()),
        *((_resumed,) * 6 if suspended else ()),
        *(_OF_AN_ATTEMPT if newest is not None else ()),
        *(_OF_A_CLUSTER_TO_COME if newest is not None and not seen.clusters else ()),
        *(_OF_PODS if seen.clusters and seen.pods else ()),
        *(_OF_A_DASHBOARD if newest is not None and ray_answers else ()),
        *(_OF_A_TRAINER if newest is not None and seen.ray.job is not None and ray_answers else ()),
        *((_stopped_as_asked,) * 30 if _is_to_stop(seen) and seen.ray.job is not None and ray_answers else ()),
    )


def coin_flip(pick: Random) -> bool:
    """True or False with equal probability."""
    return pick.random() < 0.5


def _no_kuberay(_: Random, seen: Observed) -> Observed:
    return replace(seen, kuberay_installed=False, clusters=(), pods=(), ray=ObservedRay(Reachability.NOT_ASKED))


def _forbidden(pick: Random, seen: Observed) -> Observed:
    """Kubernetes forbids a request. Earlier observations are kept, or nothing is observed."""
    text = f"pods is forbidden {pick.choice(TEXTS)}"
    seen = replace(seen, forbidden=text, ray=pick.choice([seen.ray, ObservedRay(Reachability.NOT_ASKED)]))
    return replace(seen, clusters=(), pods=()) if coin_flip(pick) else seen


def _effect_failed(pick: Random, seen: Observed) -> Observed:
    """The operator's last action failed; mostly the action that is due."""
    newest = _under_way(seen)
    kind = pick.choice(tuple(_FAILURES))
    if newest is not None and newest.submissions > 0 and newest.running_since is None:
        kind = EffectKind.SUBMIT_JOB
    elif kind is EffectKind.SUBMIT_JOB or (newest is not None and not seen.clusters and coin_flip(pick)):
        kind = EffectKind.CREATE_CLUSTER  # a submission is recorded before it is tried
    reason = pick.choice(_FAILURES[kind])
    return replace(seen, failure=EffectFailure(kind, reason, pick.choice((*TEXTS, QUOTA))))


def _name_taken(pick: Random, seen: Observed) -> Observed:
    """Another owner's cluster has the name, for a short time or for too long."""
    seen = _with_attempt(seen, name_taken_since=timestamp(inputs.at(pick.choice([-59, -60, -90]))))
    return replace(seen, failure=EffectFailure(EffectKind.CREATE_CLUSTER, Reason.NAME_CONFLICT, pick.choice(TEXTS)))


def _lost_pods_left(pick: Random, seen: Observed) -> Observed:
    overdue = replace(inputs.pod("lost-1", cluster="example-990"), deleting=True, overdue=True)
    silent = replace(inputs.pod("lost-2", cluster="example-990"), node_silent_seconds=pick.choice([60.0, 5000.0]))
    return replace(seen, pods=(*seen.pods, overdue, silent))


def _cluster_changed(pick: Random, seen: Observed) -> Observed:
    """Changes the first cluster: removed, replaced under the same name, being deleted, without pods, without
    authentication, or once ready."""
    first, *others = seen.clusters
    changed = pick.choice(
        [
            None,
            replace(first, uid="another"),
            replace(first, deleting=True),
            replace(first, pod_creation_error=pick.choice(TEXTS)),
            replace(first, pod_creation_error=QUOTA),
            *(replace(first, asks_for_token=False),) * 6,
            replace(first, provisioned=True),
            replace(first, queue="team"),
        ]
    )
    pods = seen.pods
    if changed is not None and changed.pod_creation_error is not None:
        pods = pods[:1]
    return replace(seen, clusters=tuple(others) if changed is None else (changed, *others), pods=pods)


def suspended(pick: Random, there: ObservedCluster) -> ObservedCluster:
    """The cluster as Kueue, or somebody else, has suspended it."""
    if pick.random() < 0.2:
        return replace(there, suspended=True)
    workload = pick.choice([None, ObservedWorkload(pick.choice(TEXTS), pick.choice(TEXTS))])
    return replace(there, suspended=True, queue="team", workload=workload)


def _cluster_suspended(pick: Random, seen: Observed) -> Observed:
    """Suspends the first cluster, or resumes it while KubeRay still deletes its pods. Pods are left, or gone."""
    first, *others = seen.clusters
    changed = replace(suspended(pick, first), suspended=pick.random() < 0.8, suspending=coin_flip(pick))
    left = tuple(replace(each, deleting=coin_flip(pick)) for each in seen.pods if each.group != HEAD_GROUP)
    pods = pick.choice([seen.pods, (), left])
    ray = seen.ray if pods is seen.pods else ObservedRay(Reachability.NOT_ASKED)
    return replace(seen, clusters=(changed, *others), pods=pods, ray=ray)


def _job_in_queue(_: Random, seen: Observed) -> Observed:
    return replace(seen, job=replace(seen.job, labels={QUEUE_LABEL: "team"}))


def _pod_disrupted(pick: Random, seen: Observed) -> Observed:
    """Kubernetes takes away the head pod or the last pod."""
    place = pick.choice([0, len(seen.pods) - 1])
    problem = PodProblem(Reason.DISRUPTED, f"EvictionByEvictionAPI: {pick.choice(TEXTS)}")
    found = replace(seen.pods[place], problem=problem)
    changed = pick.choice([found, replace(found, deleting=True), replace(found, ready=False, ended=True)])
    return replace(seen, pods=(*seen.pods[:place], changed, *seen.pods[place + 1 :]))


def _cluster_left(pick: Random, seen: Observed) -> Observed:
    """Adds a cluster, or pods, of an attempt that no record mentions."""
    name = "example-990"
    if any(each.name == name for each in seen.clusters):
        return seen
    there = inputs.cluster(name=name, uid="c990", deleting=coin_flip(pick))
    lost = {"deleting": True, "overdue": True}
    left = replace(inputs.pod("left", cluster=name), **pick.choice([lost, {"node_silent_seconds": 60.0}, {}]))  # type: ignore[arg-type]
    clusters = (*seen.clusters, there) if coin_flip(pick) else seen.clusters
    return replace(seen, clusters=clusters, pods=(*seen.pods, left))


def _pod_changed(pick: Random, seen: Observed) -> Observed:
    """Changes the head pod or the last pod: removed, not ready, ended, being deleted, stuck, or on a silent node."""
    place = pick.choice([0, len(seen.pods) - 1])
    found = seen.pods[place]
    problem = PodProblem(pick.choice(POD_PROBLEMS), pick.choice(TEXTS))
    changed: ObservedPod | None = pick.choice(
        [
            None,
            replace(found, ready=False),
            replace(found, ready=False, problem=problem),
            replace(found, ready=False, problem=problem),
            replace(found, ready=False, ended=True, problem=pick.choice([None, problem])),
            replace(found, deleting=True),
            replace(found, deleting=True, overdue=True),
            replace(found, node_silent_seconds=pick.choice([59.0, 60.0, 5000.0])),
        ]
    )
    pods = (*seen.pods[:place], *(() if changed is None else (changed,)), *seen.pods[place + 1 :])
    seen = replace(seen, pods=pods)
    has_head = any(each.group == HEAD_GROUP and each.ready for each in pods)
    return seen if has_head else replace(seen, ray=ObservedRay(Reachability.NOT_ASKED))


def _node_lost(_: Random, seen: Observed) -> Observed:
    """All pods are on nodes without a heartbeat."""
    silent = tuple(replace(each, node_silent_seconds=61.0) for each in seen.pods)
    return replace(seen, pods=silent, ray=ObservedRay(Reachability.NOT_ASKED))


def _node_lost_of_an_unfit_spec(pick: Random, seen: Observed) -> Observed:
    """All nodes are silent, and the spec is invalid, so that the operator knows only what the cluster itself
    reports."""
    return _node_lost(pick, _spec_unfit(pick, seen))


def _ray_is_silent(pick: Random, seen: Observed) -> Observed:
    how = pick.choice([each for each in Reachability if each is not Reachability.OK])
    seconds = pick.choice([0.0, 19.0, 20.0, 61.0])
    return replace(seen, ray=ObservedRay(how, pick.choice((None, *TEXTS)), silent_seconds=seconds))


def _ray_lacks(pick: Random, seen: Observed) -> Observed:
    """Ray lacks nodes or GPUs, or cannot place a group."""
    lacking = [
        replace(seen.ray, nodes=()),
        replace(seen.ray, nodes=seen.ray.nodes[:1]),
        replace(seen.ray, nodes=inputs.ray(gpus=(1, 2)).nodes),
        replace(seen.ray, infeasible_groups=(f"1 x {pick.choice(TEXTS)}",)),
    ]
    return replace(seen, ray=pick.choice(lacking))


def _driver_lost(_: Random, seen: Observed) -> Observed:
    return replace(seen, ray=replace(seen.ray, job=None, run_state=None))


def _trainer_ended(pick: Random, seen: Observed) -> Observed:
    """Ray reports that the trainer has ended, now or some time ago, with or without a run state."""
    assert seen.ray.job is not None, "needs a trainer that Ray knows"
    status, error_type, exit_code = pick.choice(_ENDS)
    ended = ObservedRayJob(seen.ray.job.submission_id, RayJobStatus(status), pick.choice(TEXTS), error_type, exit_code)
    if coin_flip(pick):
        seen = _with_attempt(seen, end_reported_at=timestamp(inputs.at(pick.choice([-29, -30, -60]))))
    ray_then = replace(seen.ray, job=ended, log_tail=pick.choice(TEXTS))
    if pick.random() < 0.3:
        return replace(seen, ray=replace(ray_then, run_state=None))
    error = RunError(kind="Error", message=pick.choice(TEXTS).replace("\ud800", "")) if coin_flip(pick) else None
    export = pick.choice([None, "file:///rljob/storage/run/export", "hf://" + "x" * 4090])
    phase = pick.choice([RunPhase.COMPLETE, RunPhase.COMPLETE, *RunPhase])
    state = inputs.run_state(phase, step=9, checkpoint_step=9, error=error, export_uri=export)
    return replace(seen, ray=replace(ray_then, run_state=state))


def _stopped_as_asked(_: Random, seen: Observed) -> Observed:
    assert seen.ray.job is not None, "needs a trainer that Ray knows"
    stopped = replace(seen.ray.job, status=RayJobStatus.STOPPED)
    return replace(seen, ray=replace(seen.ray, job=stopped, run_state=inputs.run_state(RunPhase.STOPPED, step=9)))


def _ended_without_words(pick: Random, seen: Observed) -> Observed:
    """Ray reported success some time ago, but the trainer's final run state cannot be read."""
    assert seen.ray.job is not None, "needs a trainer that Ray knows"
    done = replace(seen.ray.job, status=RayJobStatus.SUCCEEDED, exit_code=0)
    seen = _with_attempt(seen, end_reported_at=timestamp(inputs.at(pick.choice([-29, -30, -60]))))
    unread = pick.choice([None, "contract version 9"])
    return replace(seen, ray=replace(seen.ray, job=done, run_state=None, run_state_error=unread))


def _out_of_memory(pick: Random, seen: Observed) -> Observed:
    """A pod runs out of memory, and the trainer fails with it."""
    assert seen.ray.job is not None, "needs a trainer that Ray knows"
    problem = PodProblem(Reason.OUT_OF_MEMORY, "OOMKilled")
    killed = replace(inputs.pod("killed", cluster=seen.job.status.attempts[-1].cluster), ready=False, problem=problem)
    job = pick.choice([replace(seen.ray.job, status=RayJobStatus.FAILED, exit_code=75), None])
    return replace(seen, pods=(*seen.pods, killed), ray=replace(seen.ray, job=job, run_state=None))


def _blind_for_long(pick: Random, seen: Observed) -> Observed:
    """The state of a running trainer has been unknown for about as long as the operator waits at most."""
    seen = _with_attempt(seen, state_unknown_since=timestamp(inputs.at(pick.choice([-601, -600, -599]))))
    if coin_flip(pick):
        return pick.choice([_run_state_unreadable, _forbidden])(pick, seen)
    how = pick.choice([Reachability.UNREACHABLE, Reachability.REJECTED, Reachability.REJECTED, Reachability.NOT_ASKED])
    return replace(seen, ray=ObservedRay(how, pick.choice(TEXTS), silent_seconds=pick.choice([0.0, 19.0, 20.0, 599.0])))


def _run_state_unreadable(pick: Random, seen: Observed) -> Observed:
    return replace(seen, ray=replace(seen.ray, run_state=None, run_state_error=pick.choice(TEXTS)))


def _policy_changed(pick: Random, seen: Observed) -> Observed:
    """Changes a field of the spec that users may change."""
    spec = seen.job.spec
    if spec is None:
        return seen
    changed = pick.choice(["suspend", "suspend", "ttl", "retries"])
    if changed == "suspend":
        return replace(seen, job=replace(seen.job, spec=spec.model_copy(update={"suspend": not spec.suspend})))
    update = {"ttl_seconds_after_finished": 0} if changed == "ttl" else {"max_app_retries": 0, "max_infra_retries": 0}
    return replace(
        seen,
        job=replace(seen.job, spec=spec.model_copy(update={"run_policy": spec.run_policy.model_copy(update=update)})),
    )


def _resumed(_: Random, seen: Observed) -> Observed:
    assert seen.job.spec is not None, "needs a suspended job"
    return replace(seen, job=replace(seen.job, spec=seen.job.spec.model_copy(update={"suspend": False})))


def _spec_unfit(pick: Random, seen: Observed) -> Observed:
    """The spec cannot be read by this operator, or it lacks the storage that a cluster needs."""
    spec = seen.job.spec
    if spec is None or coin_flip(pick):
        policy = spec.run_policy if spec is not None and coin_flip(pick) else seen.job.readable_policy
        return replace(seen, job=replace(seen.job, spec=None, spec_error=pick.choice(TEXTS), readable_policy=policy))
    without = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"storage": None})})
    return replace(seen, job=replace(seen.job, spec=without))


def _stop_requested(pick: Random, seen: Observed) -> Observed:
    return replace(seen, job=replace(seen.job, stop_request=pick.choice(REQUESTS)))


def _retry_requested(pick: Random, seen: Observed) -> Observed:
    return replace(seen, job=replace(seen.job, retry_request=pick.choice(REQUESTS)))


def _too_large(pick: Random, seen: Observed) -> Observed:
    return replace(seen, job=replace(seen.job, memory_shortage=pick.choice(TEXTS)))


def _written_by_another_version(_: Random, seen: Observed) -> Observed:
    """Puts values into the records that this version does not know."""
    status = seen.job.status
    if not status.attempts:
        return replace(seen, job=replace(seen.job, unknown_fields=("spec.queue",)))
    newest = status.attempts[-1]
    if newest.ended is not None:
        return _with_attempt(seen, outcome="Paused", reason="Preempted", failure_class="Free of charge")
    if newest.stop is None:
        return _with_attempt(seen, state="Paused")
    return _with_attempt(seen, state="Paused", stop=newest.stop.model_copy(update={"reason": "Preempted"}))


def _was_to_stop(pick: Random, seen: Observed) -> Observed:
    """An attempt that has not come far was asked to stop some time ago."""
    newest = seen.job.status.attempts[-1]
    reason = pick.choice([Reason.STOPPED_BY_USER, Reason.SUSPENDED, Reason.STALLED])
    stop = StopRequest(reason=reason.value, requested_at=newest.started)
    return _with_attempt(seen, stop=stop, state=AttemptState.STOPPING.value)


def _deleted(_: Random, seen: Observed) -> Observed:
    return replace(seen, job=replace(seen.job, deleting=True))


def _under_way(seen: Observed) -> Attempt | None:
    attempts = seen.job.status.attempts
    return attempts[-1] if attempts and attempts[-1].ended is None else None


def _is_to_stop(seen: Observed) -> bool:
    newest = _under_way(seen)
    return newest is not None and newest.stop is not None


def _with_attempt(seen: Observed, **record: object) -> Observed:
    """Changes fields of the newest attempt."""
    status = seen.job.status
    attempts = (*status.attempts[:-1], status.attempts[-1].model_copy(update=record))
    return replace(seen, job=replace(seen.job, status=status.model_copy(update={"attempts": attempts})))


Disturbance = Callable[[Random, Observed], Observed]

_OF_ANY_JOB: tuple[Disturbance, ...] = (
    *(_no_kuberay, _forbidden, _effect_failed, _cluster_left, _policy_changed, _spec_unfit, _stop_requested),
    *(_retry_requested, _written_by_another_version, _too_large, _deleted, _job_in_queue),
)
_OF_AN_ATTEMPT: tuple[Disturbance, ...] = (_effect_failed, _effect_failed, _was_to_stop)
_OF_A_CLUSTER_TO_COME: tuple[Disturbance, ...] = (*(_name_taken,) * 4, *(_lost_pods_left,) * 4)
_OF_PODS: tuple[Disturbance, ...] = (
    *(*(_cluster_changed,) * 3, *(_cluster_suspended,) * 3, *(_pod_disrupted,) * 3),
    *(_pod_changed,) * 5,
    _node_lost,
    *(_node_lost_of_an_unfit_spec,) * 2,
)
_OF_A_DASHBOARD: tuple[Disturbance, ...] = (*(_ray_is_silent,) * 5, *(_ray_lacks,) * 4)
_OF_A_TRAINER: tuple[Disturbance, ...] = (
    *(*(_trainer_ended,) * 24, *(_ended_without_words,) * 4, *(_blind_for_long,) * 18),
    *(*(_out_of_memory,) * 3, *(_driver_lost,) * 4),
)
