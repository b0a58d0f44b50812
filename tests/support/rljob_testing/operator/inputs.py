"""Builders of the inputs of `reconcile`: jobs, and what the operator observes of a job at one moment.

Example: `inputs.decide(inputs.observed(inputs.running(), inputs.cluster(), inputs.ready_pods()))`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.run_state import Alarm, RunError, RunPhase, RunState
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import (
    Attempt,
    AttemptOutcome,
    AttemptState,
    CheckpointStatus,
    Condition,
    ConditionStatus,
    Counters,
    FailureClass,
    NextAttempt,
    Progress,
    RLJobStatus,
)
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.manifests.ownership import JobIdentity
from rljob_operator.reconcile.decision import Decision
from rljob_operator.reconcile.observed import (
    Observed,
    ObservedCluster,
    ObservedJob,
    ObservedPod,
    ObservedRay,
    ObservedRayJob,
    ObservedRayNode,
    ObservedWorkload,
    PodProblem,
    RayJobStatus,
    Reachability,
)
from rljob_operator.reconcile.reconcile import reconcile
from rljob_operator.reconcile.status_draft import timestamp
from rljob_testing.jobs.valid_job import valid_job

IDENTITY = JobIdentity(namespace="team-a", name="example", uid="0f8fad5b-d9cb-469f-a165-70867728950e")

DEFAULTS = Defaults(
    trainer_image="example/trainer:1",
    ray_version="2.60.0",
    image_pull_policy="IfNotPresent",
    operator_namespace="rljob-system",
    operator_pod_labels={"app.kubernetes.io/name": "rljob-operator"},
)


def spec(edits: Mapping[str, object] | None = None) -> RLJobSpec:
    """The small valid job (one node with two GPUs) with storage, changed at wire paths below `spec`."""
    storage = {"spec.checkpoint.storage": {"persistentVolumeClaim": "ckpt"}}
    more = {f"spec.{path}": value for path, value in (edits or {}).items()}
    return RLJob.from_wire(valid_job(storage | more)).spec


NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
CREATED = NOW - timedelta(seconds=100)
CLUSTER_UID = "c1"
SUBMISSION = "example-1-1"
NOTHING: Mapping[str, object] = MappingProxyType({})
START_NUMBER = int(CREATED.timestamp()) + 1


def at(seconds: float) -> datetime:
    """The time `seconds` after `NOW`."""
    return NOW + timedelta(seconds=seconds)


def job(job_spec: RLJobSpec | None = None, status: RLJobStatus | None = None) -> ObservedJob:
    """The job `example`; by default the small job with an empty status."""
    return ObservedJob(
        namespace=IDENTITY.namespace,
        name=IDENTITY.name,
        uid=IDENTITY.uid,
        generation=3,
        created=CREATED,
        deleting=False,
        spec=job_spec or spec(),
        spec_error=None,
        status=status or RLJobStatus(),
    )


def attempt(
    *,
    seconds_ago: float = 60,
    seen: bool = True,
    submissions: int = 0,
    number: int = 1,
    record: Mapping[str, object] = NOTHING,
) -> Attempt:
    """An attempt, by default the first, begun `seconds_ago`.

    `seen`: its cluster was observed. An attempt with `submissions` has been running since then. `record`: other fields.
    """
    since = timestamp(at(-seconds_ago))
    found = Attempt(
        number=number,
        cluster=f"example-{number}",
        cluster_uid=f"c{number}" if seen else None,
        state=AttemptState.RUNNING if submissions else AttemptState.PROVISIONING,
        submissions=submissions,
        start_number=START_NUMBER if submissions else None,
        started=since,
        active_since=since if seen else None,
        ready_at=since if submissions else None,
        running_since=since if submissions else None,
        progressed_at=timestamp(NOW) if submissions else None,
    )
    return found.model_copy(update=record)


def condition(
    kind: ConditionType,
    status: ConditionStatus = ConditionStatus.TRUE,
    reason: Reason = Reason.READY,
    seconds_ago: float = 30,
) -> Condition:
    """A condition as an earlier pass has written it."""
    since = timestamp(at(-seconds_ago))
    return Condition(type=kind.value, status=status, reason=reason.value, last_transition_time=since)


def provisioning(*, seconds_ago: float = 60, seen: bool = True, record: Mapping[str, object] = NOTHING) -> RLJobStatus:
    """The status of a job whose first attempt has not been submitted yet."""
    return RLJobStatus(
        attempts=(attempt(seconds_ago=seconds_ago, seen=seen, record=record),), counters=Counters(attempts=1)
    )


def running(seconds_ago: float = 60, *conditions: Condition, record: Mapping[str, object] = NOTHING) -> RLJobStatus:
    """The status of a job whose trainer was submitted; `record`: other fields of the attempt."""
    return RLJobStatus(
        attempts=(attempt(seconds_ago=seconds_ago, submissions=1, record=record),),
        counters=Counters(attempts=1, start_number=START_NUMBER),
        conditions=(
            condition(ConditionType.CLUSTER_READY),
            condition(ConditionType.PLACEMENT_FEASIBLE, reason=Reason.FEASIBLE),
            condition(ConditionType.JOB_SUBMITTED, reason=Reason.SUBMITTED),
            *conditions,
        ),
    )


def ended_attempt(
    reason: Reason = Reason.APPLICATION_ERROR, found: FailureClass = FailureClass.APPLICATION, *, number: int = 1
) -> Attempt:
    """An attempt that has just ended."""
    record = {
        "state": AttemptState.ENDED.value,
        "ended": timestamp(NOW),
        "outcome": AttemptOutcome.FAILED.value,
        "reason": reason.value,
        "failure_class": found.value,
    }
    return attempt(submissions=1, number=number, record=record)


def completed_attempt() -> Attempt:
    """The first attempt, which completed the job."""
    record = {
        "state": AttemptState.ENDED.value,
        "ended": timestamp(NOW),
        "outcome": AttemptOutcome.SUCCEEDED.value,
        "reason": Reason.SUCCEEDED.value,
    }
    return attempt(submissions=1, record=record)


def waiting_for_retry(
    seconds: float = 10, *, same_cluster: bool = False, attempts: tuple[Attempt, ...] = ()
) -> RLJobStatus:
    """The status of a job between two attempts; the next one may begin in `seconds`."""
    return RLJobStatus(
        attempts=attempts or (ended_attempt(),),
        counters=Counters(attempts=1, start_number=START_NUMBER, application_retries=1, failed_attempts=1),
        next_attempt=NextAttempt(
            reason=Reason.APPLICATION_ERROR,
            message="it failed",
            failure_class=FailureClass.APPLICATION,
            not_before=timestamp(at(seconds)),
            same_cluster=same_cluster,
        ),
    )


def cluster(
    *,
    uid: str = CLUSTER_UID,
    name: str = "example-1",
    deleting: bool = False,
    error: str | None = None,
    provisioned: bool | None = None,
    asks_for_token: bool = True,
    suspended: bool = False,
    suspending: bool = False,
    queue: str = "",
    workload: ObservedWorkload | None = None,
) -> ObservedCluster:
    """A cluster of the job, by default that of the first attempt."""
    return ObservedCluster(
        name, uid, deleting, error, provisioned, asks_for_token, suspended, suspending, queue, workload
    )


def pod(
    name: str,
    group: str = "main",
    *,
    cluster: str = "example-1",
    ready: bool = True,
    deleting: bool = False,
    ended: bool = False,
    problem: PodProblem | None = None,
    overdue: bool = False,
    node_silent_seconds: float = 0.0,
    uid: str = "",
) -> ObservedPod:
    """A pod; ready by default."""
    well = ready and not ended and problem is None
    return ObservedPod(
        name, cluster, group, well, deleting, ended, problem, overdue, f"node-of-{name}", node_silent_seconds, uid
    )


def ready_pods(num_workers: int = 1) -> tuple[ObservedPod, ...]:
    """The head pod and ready worker pods of the pool `main`."""
    return (pod("head", HEAD_GROUP), *(pod(f"worker-{number}") for number in range(num_workers)))


def ray(
    run: ObservedRayJob | None = None,
    state: RunState | None = None,
    *,
    gpus: Sequence[int] = (2,),
    infeasible: tuple[str, ...] = (),
    log_tail: str = "",
) -> ObservedRay:
    """A dashboard that responds: one head node, and a worker node for each number in `gpus`."""
    nodes = (ObservedRayNode(True, 0), *(ObservedRayNode(False, number) for number in gpus))
    return ObservedRay(
        Reachability.OK, nodes=nodes, job=run, run_state=state, infeasible_groups=infeasible, log_tail=log_tail
    )


def silent_ray(
    reachability: Reachability = Reachability.UNREACHABLE, seconds: float = 60, error: str = "timeout"
) -> ObservedRay:
    """A dashboard that has not responded for this number of seconds."""
    return ObservedRay(reachability, error=error, silent_seconds=seconds)


def ray_job(
    status: RayJobStatus = RayJobStatus.RUNNING, exit_code: int | None = None, error_type: str | None = None
) -> ObservedRayJob:
    """The first submission of the trainer."""
    return ObservedRayJob(SUBMISSION, status, "Ray's message", error_type, exit_code)


def run_state(
    phase: RunPhase = RunPhase.RUNNING,
    *,
    step: int = 4,
    seconds_ago: float = 1,
    checkpoint_step: int | None = None,
    error: RunError | None = None,
    export_uri: str | None = None,
    alarms: tuple[Alarm, ...] | None = (),
) -> RunState:
    """A run state as the trainer writes it."""
    saved = None
    if checkpoint_step is not None:
        uri = f"file:///rljob/storage/checkpoints/step_{checkpoint_step:08d}"
        saved = CheckpointStatus(step=checkpoint_step, uri=uri, digest="sha256:1", saved_at=timestamp(at(-seconds_ago)))
    return RunState(
        job_name="example",
        attempt=1,
        phase=phase,
        progress=Progress(step=step, total_steps=10, updated_at=timestamp(at(-seconds_ago))),
        checkpoint=saved,
        export_uri=export_uri,
        alarms=alarms,
        error=error,
        written_at=timestamp(at(-seconds_ago)),
    )


def alarm(reason: str = "ResponsesCutOff", message: str = "75 % were truncated", *, step: int = 4) -> Alarm:
    """An alarm that was raised in step 3."""
    return Alarm(reason=reason, value=0.75, message=message, since_step=3, step=step)


def observed(
    status: RLJobStatus | None = None,
    there: ObservedCluster | None = None,
    pods: tuple[ObservedPod, ...] = (),
    seen: ObservedRay | None = None,
    job_spec: RLJobSpec | None = None,
) -> Observed:
    """What the operator observes at one moment; without arguments, of a job that was just created."""
    return Observed(
        job=job(job_spec, status),
        kuberay_installed=True,
        clusters=() if there is None else (there,),
        pods=pods,
        ray=seen or ObservedRay(Reachability.NOT_ASKED),
    )


def healthy(
    run: ObservedRayJob | None = None,
    state: RunState | None = None,
    status: RLJobStatus | None = None,
    *,
    job_spec: RLJobSpec | None = None,
    log_tail: str = "",
) -> Observed:
    """A submitted job on a healthy cluster."""
    seen = ray(run or ray_job(), state, log_tail=log_tail)
    return observed(status or running(), cluster(), ready_pods(), seen, job_spec)


def without_retries(seen: Observed) -> Observed:
    """The same observation of a job without retries: every failure is final."""
    spec_seen = seen.job.spec
    if spec_seen is None:
        return seen
    policy = spec_seen.run_policy.model_copy(update={"max_app_retries": 0, "max_infra_retries": 0})
    return replace(seen, job=replace(seen.job, spec=spec_seen.model_copy(update={"run_policy": policy})))


def decide(seen: Observed, now: datetime = NOW) -> Decision:
    """What the operator decides. Checks that the new status can be stored and read again."""
    decision = reconcile(seen, now, DEFAULTS)
    assert RLJobStatus.from_wire(decision.status.to_wire()) == decision.status
    return decision


def with_status_written(seen: Observed, decision: Decision) -> Observed:
    """The same observation with the decision's status written."""
    return replace(seen, job=replace(seen.job, status=decision.status))


def condition_of(status: RLJobStatus, kind: ConditionType) -> tuple[str, str, str] | None:
    """Status, reason and message of a condition; None if the status does not have it."""
    for each in status.conditions:
        if each.type == kind:
            return each.status.value, each.reason, each.message
    return None
