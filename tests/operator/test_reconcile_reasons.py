"""Every reason that a condition can have, each reached from one observation worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from rljob_api.conditions import ALARMS, FAILURE_CLASSES, RESTARTED_FREELY, ConditionType, Reason
from rljob_api.conditions import REASONS as CONDITION_REASONS
from rljob_api.constants import HEAD_GROUP
from rljob_api.job_checks import cluster_violations
from rljob_api.run_state import RunError, RunPhase
from rljob_api.v1alpha1.status import JobResult, StopRequest
from rljob_operator.reconcile.observed import (
    EffectFailure,
    EffectKind,
    Observed,
    ObservedRay,
    PodProblem,
    RayJobStatus,
    Reachability,
)
from rljob_operator.reconcile.status_draft import timestamp
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs, reasons_of_waiting
from rljob_testing.operator.inputs import condition_of, decide

C, R = ConditionType, Reason
S = inputs

STEPS = Mentions("10 steps")
NO_GPU = reasons_of_waiting.NO_GPU
[_NO_STORAGE] = cluster_violations(S.spec({"checkpoint": {}}), has_default_image=True)
NO_STORAGE = f"spec.checkpoint.storage: {_NO_STORAGE.message}"


UNREACHABLE = S.silent_ray(error="connection refused")
REJECTED = S.silent_ray(Reachability.REJECTED, error="403")
DONE = S.ray_job(RayJobStatus.SUCCEEDED, 0)
STOPPED = {"end_reported_at": timestamp(S.at(-30))}
KEPT = S.spec({"runPolicy.cleanup": "KeepCluster"})
ACTIVE = S.spec({"runPolicy.activeDeadlineSeconds": 600})
SUSPENDED = S.spec({"suspend": True})
NO_RETRY = S.spec({"runPolicy": {"maxAppRetries": 0, "maxInfraRetries": 0}})
COMPLETE = S.running().model_copy(
    update={
        "attempts": (S.completed_attempt(),),
        "result": JobResult(outcome="Succeeded", reason="Succeeded", at=timestamp(S.NOW)),
    }
)
ENDED_BEFORE = COMPLETE.model_copy(update={"attempts": (S.attempt(seen=False),)})
SILENT_LONG = S.running(9000, record={"state_unknown_since": timestamp(S.at(-3600))})


def asked_to_stop(reason: str) -> StopRequest:
    return StopRequest(reason=reason, requested_at=timestamp(S.NOW), sent_at=timestamp(S.NOW))


def starting(problem: PodProblem | None = None, *, num_ready: int = 0, error: str | None = None) -> Observed:
    """A head that is ready and two workers: the first `num_ready` are ready, the others have the problem."""
    workers = [
        S.pod(f"w{number}", ready=number < num_ready, problem=None if number < num_ready else problem)
        for number in range(2)
    ]
    two = S.spec({"pools[0].nodes": 2})
    pods = (S.pod("h", HEAD_GROUP), *(workers if error is None else workers[:num_ready]))
    return S.observed(S.provisioning(), S.cluster(error=error), pods, job_spec=two)


def without_spec(text: str) -> Observed:
    seen = S.observed()
    return replace(seen, job=replace(seen.job, spec=None, spec_error=text))


def failed_effect(seen: Observed, kind: EffectKind, reason: Reason, message: str) -> Observed:
    return replace(seen, failure=EffectFailure(kind, reason, message))


def ended(
    code: int | None, error_type: str | None = None, log_tail: str = "", error: RunError | None = None
) -> Observed:
    state = S.run_state(RunPhase.FAILED, error=error) if error is not None else None
    return S.healthy(S.ray_job(RayJobStatus.FAILED, code, error_type), state, log_tail=log_tail)


def on_ready(seen: ObservedRay, job_spec: Mapping[str, object] | None = None) -> Observed:
    return S.observed(S.provisioning(), S.cluster(), S.ready_pods(), seen, S.spec(job_spec))


def name_conflict(seconds_ago: float) -> Observed:
    seen = S.observed(S.provisioning(seen=False, record={"name_taken_since": timestamp(S.at(-seconds_ago))}))
    return failed_effect(seen, EffectKind.CREATE_CLUSTER, R.NAME_CONFLICT, "it belongs to another")


def lost_node(node_silent_seconds: float, silent_seconds: float) -> Observed:
    head = S.pod("h", HEAD_GROUP, node_silent_seconds=node_silent_seconds)
    return replace(S.healthy(), pods=(head, S.pod("w")), ray=S.silent_ray(seconds=silent_seconds))


def requested(seen: Observed, **requests: str) -> Observed:
    """A job with annotations that request something."""
    return replace(seen, job=replace(seen.job, **requests))  # type: ignore[arg-type]


OOM = PodProblem(R.OUT_OF_MEMORY, "container ray ran out of memory (OOMKilled)")
REASONS: list[tuple[ConditionType, Reason, Observed, str, str | Mentions]] = [
    (C.SPEC_VALID, R.VALID, S.observed(), "True", ""),
    (C.SPEC_VALID, R.INVALID_SPEC, without_spec("spec.pools: wrong"), "False", "spec.pools: wrong"),
    (C.FAILED, R.INVALID_SPEC, without_spec("spec.pools: wrong"), "True", "spec.pools: wrong"),
    (C.SPEC_VALID, R.STORAGE_MISSING, S.observed(job_spec=S.spec({"checkpoint": {}})), "False", NO_STORAGE),
    (C.FAILED, R.STORAGE_MISSING, S.observed(job_spec=S.spec({"checkpoint": {}})), "True", NO_STORAGE),
    (C.CLUSTER_READY, R.CREATING, S.observed(), "False", "RayCluster example-1 is being created"),
    (C.CLUSTER_READY, R.PODS_PENDING, starting(num_ready=1), "False", "2 of 3 pods ready; waiting for 1 of pool main"),
    (C.CLUSTER_READY, R.READY, on_ready(S.ray()), "True", "2 of 2 pods ready and in Ray"),
    (
        C.CLUSTER_READY, R.CREATION_REJECTED,
        failed_effect(
            S.observed(S.provisioning(seen=False)), EffectKind.CREATE_CLUSTER, R.CREATION_REJECTED, "over quota",
        ),
        "False", "over quota",
    ),
    (C.CLUSTER_READY, R.NAME_CONFLICT, name_conflict(59), "False", "it belongs to another"),
    (C.FAILED, R.NAME_CONFLICT, name_conflict(60), "True", "it belongs to another"),
    (
        C.CLUSTER_READY, R.KUBERAY_UNAVAILABLE, replace(S.observed(), kuberay_installed=False),
        "False", Mentions("RayCluster (ray.io/v1)", "install KubeRay"),
    ),
    (
        C.CLUSTER_READY, R.POD_CREATION_FAILED, starting(error="exceeded quota: gpus", num_ready=1),
        "False", "2 of 3 pods ready; 1 cannot be created: exceeded quota: gpus",
    ),
    (
        C.CLUSTER_READY, R.UNSCHEDULABLE, starting(PodProblem(R.UNSCHEDULABLE, NO_GPU)),
        "False", f"1 of 3 pods ready; 2 of 2 pods of pool main: {NO_GPU} (pod w0)",
    ),
    (
        C.CLUSTER_READY, R.IMAGE_PULL_FAILED, starting(PodProblem(R.IMAGE_PULL_FAILED, "not found"), num_ready=1),
        "False", "2 of 3 pods ready; 1 of 2 pods of pool main: not found (pod w1)",
    ),
    (
        C.CLUSTER_READY, R.CONTAINER_CONFIG_ERROR, starting(PodProblem(R.CONTAINER_CONFIG_ERROR, "no secret")),
        "False", "1 of 3 pods ready; 2 of 2 pods of pool main: no secret (pod w0)",
    ),
    (
        C.CLUSTER_READY, R.VOLUME_MOUNT_FAILED, starting(PodProblem(R.VOLUME_MOUNT_FAILED, "no claim")),
        "False", "1 of 3 pods ready; 2 of 2 pods of pool main: no claim (pod w0)",
    ),
    (
        C.CLUSTER_READY, R.CONTAINER_CRASHING,
        S.observed(
            S.provisioning(), S.cluster(),
            (S.pod("h", HEAD_GROUP, problem=PodProblem(R.CONTAINER_CRASHING, "exit code 1")), S.pod("w")),
        ),
        "False", "1 of 2 pods ready; the head pod h: exit code 1",
    ),
    (C.CLUSTER_READY, R.RAY_NODES_MISSING, on_ready(S.ray(gpus=())), "False", Mentions("2 of 2 pods ready, 1 of them")),
    (
        C.CLUSTER_READY, R.DASHBOARD_UNREACHABLE, on_ready(UNREACHABLE),
        "False", Mentions("all pods are ready", "dashboard", "connection refused"),
    ),
    (C.PROGRESSING, R.DASHBOARD_UNREACHABLE, replace(S.healthy(), ray=UNREACHABLE), "Unknown", "connection refused"),
    (C.CLUSTER_READY, R.TOKEN_REJECTED, on_ready(REJECTED), "False", Mentions("all pods are ready", "token: 403")),
    (C.PROGRESSING, R.TOKEN_REJECTED, replace(S.healthy(), ray=REJECTED), "Unknown", "403"),
    (C.FAILED, R.CLUSTER_LOST, S.observed(S.running()), "True",
     Mentions("RayCluster example-1 was deleted")),
    (
        C.FAILED, R.HEAD_LOST, S.observed(S.running(), S.cluster(), (S.pod("w"),)),
        "True", Mentions("the head pod was deleted"),
    ),
    (
        C.CLUSTER_READY, R.DELETING, S.observed(COMPLETE, S.cluster(), S.ready_pods()),
        "False", Mentions("its cluster is being deleted"),
    ),
    (C.CLUSTER_READY, R.REMOVED, S.observed(COMPLETE), "False", Mentions("its cluster was deleted")),
    (C.CLUSTER_READY, R.REMOVED, S.observed(ENDED_BEFORE), "False", Mentions("before its cluster was created")),
    (
        C.CLUSTER_READY, R.KEPT, S.observed(COMPLETE, S.cluster(), S.ready_pods(), job_spec=KEPT),
        "True", Mentions("its cluster is kept"),
    ),
    (C.PLACEMENT_FEASIBLE, R.FEASIBLE, on_ready(S.ray()), "True", "Ray has 2 of 2 GPUs"),
    (
        C.PLACEMENT_FEASIBLE, R.INSUFFICIENT_GPUS, on_ready(S.ray(gpus=(1,))),
        "False", Mentions("Ray has 1 of 2 GPUs", "worker pod"),
    ),
    (
        C.PLACEMENT_FEASIBLE, R.PLACEMENT_GROUP_INFEASIBLE,
        replace(S.healthy(), ray=S.ray(S.ray_job(), infeasible=("2 x {CPU: 9, GPU: 1}",))),
        "False", Mentions("Ray has 2 of 2 GPUs", "2 x {CPU: 9, GPU: 1}"),
    ),
    (C.JOB_SUBMITTED, R.SUBMITTING, on_ready(S.ray()), "False", "Ray job example-1-1 is being submitted"),
    (
        C.JOB_SUBMITTED, R.SUBMISSION_FAILED,
        failed_effect(
            replace(on_ready(S.ray()), job=S.job(status=S.provisioning(record={"submissions": 1}))),
            EffectKind.SUBMIT_JOB, R.SUBMISSION_FAILED, "500: No available agent",
        ),
        "False", "500: No available agent",
    ),
    (
        C.JOB_SUBMITTED, R.AUTHENTICATION_MISSING,
        failed_effect(
            replace(on_ready(S.ray()), job=S.job(status=S.provisioning(record={"submissions": 1}))),
            EffectKind.SUBMIT_JOB, R.AUTHENTICATION_MISSING, "HTTP 200",
        ),
        "False", "HTTP 200",
    ),
    (C.JOB_SUBMITTED, R.SUBMITTED, S.healthy(), "True", "Ray job example-1-1"),
    (C.JOB_SUBMITTED, R.DRIVER_LOST, replace(S.healthy(), ray=S.ray()), "False",
     Mentions("job example-1-1", "head was restarted")),
    (C.FAILED, R.DRIVER_LOST, replace(S.healthy(), ray=S.ray()), "True",
     Mentions("job example-1-1", "head was restarted")),
    (
        C.SPEC_VALID, R.VALID, replace(S.observed(), job=replace(S.job(), unknown_fields=("spec.new",))), "True",
        Mentions("ignores", "spec.new"),
    ),
    (
        C.SPEC_VALID, R.MEMORY_TOO_SMALL, replace(S.observed(), job=replace(S.job(), memory_shortage="91 of 78 GiB")),
        "True", "91 of 78 GiB",
    ),
    (
        C.FAILED, R.KUBERAY_TOO_OLD, S.observed(S.provisioning(), S.cluster(asks_for_token=False)), "True",
        Mentions("RayCluster example-1", "authOptions", "KubeRay 1.6"),
    ),
    (
        C.FAILED, R.AUTHENTICATION_MISSING, on_ready(S.silent_ray(Reachability.OPEN, error="HTTP 200")), "True",
        Mentions("all pods are ready", "token authentication is off", "HTTP 200"),
    ),
    (
        C.CLUSTER_READY, R.READ_FORBIDDEN, replace(S.healthy(), clusters=(), pods=(), forbidden="pods is forbidden"),
        "Unknown", "pods is forbidden",
    ),
    (
        C.FAILED, R.HEAD_LOST, lost_node(60, 20), "True",
        Mentions("pod h on node node-of-h", "60 s", "node seems to be lost"),
    ),
    (
        C.PROGRESSING, R.RUN_STATE_UNREADABLE,
        replace(S.healthy(), ray=replace(S.ray(S.ray_job()), run_state_error="contract version 9")),
        "Unknown", "contract version 9",
    ),
    (
        C.FAILED, R.RUN_STATE_UNREADABLE,
        replace(S.healthy(status=SILENT_LONG), ray=replace(S.ray(S.ray_job()), run_state_error="contract version 9")),
        "True", Mentions("3600 s: contract version 9"),
    ),
    (
        C.FAILED, R.DASHBOARD_UNREACHABLE, replace(S.healthy(status=SILENT_LONG), ray=UNREACHABLE), "True",
        Mentions("3600 s: connection refused"),
    ),
    (C.FAILED, R.TOKEN_REJECTED, replace(S.healthy(status=SILENT_LONG), ray=REJECTED), "True", Mentions("3600 s: 403")),
    (
        C.FAILED, R.READ_FORBIDDEN,
        replace(S.observed(SILENT_LONG, S.cluster()), forbidden="pods is forbidden"), "True",
        Mentions("3600 s: pods is forbidden"),
    ),
    (
        C.FAILED, R.STALLED,
        S.healthy(
            S.ray_job(RayJobStatus.STOPPED),
            status=S.running(9000, record={"stop": asked_to_stop("Stalled")}),
        ),
        "True", Mentions("stopped as requested", "no checkpoint"),
    ),
    (
        C.FAILED, R.TRAINER_IMAGE_INCOMPATIBLE,
        replace(
            S.healthy(status=S.running(90, record={"end_reported_at": timestamp(S.at(-30))})),
            ray=replace(S.ray(DONE), run_state_error="contract version 9"),
        ),
        "True", Mentions("code 0", "run state: contract version 9"),
    ),
    (
        C.FAILED, R.STOPPED_BY_USER, requested(S.observed(S.provisioning(), S.cluster()), stop_request="1"), "True",
        Mentions("stopped before", "0 of 2 pods ready; waiting for the head pod and 1 of pool main"),
    ),
    (C.SUSPENDED, R.SUSPENDING, S.healthy(job_spec=SUSPENDED), "False", Mentions("save a checkpoint")),
    (
        C.SUSPENDED, R.SUSPENDED, S.observed(job_spec=SUSPENDED), "True",
        Mentions("has no pods", "no checkpoint", "step 0"),
    ),
    (
        C.CLUSTER_READY, R.SUSPENDED, S.observed(S.waiting_for_retry(), job_spec=SUSPENDED), "False",
        Mentions("the job is suspended", "cluster was deleted"),
    ),
    (C.SUSPENDED, R.RESUMED, S.observed(decide(S.observed(job_spec=SUSPENDED)).status), "False", Mentions("attempt 1")),
    (
        C.RETRYING, R.RESIZED,
        replace(
            S.healthy(
                S.ray_job(RayJobStatus.STOPPED), S.run_state(RunPhase.STOPPED, checkpoint_step=4),
                S.running(60, record={"stop": asked_to_stop("Resized")}),
            ),
            pods=(),
        ),
        "True", Mentions("stopped as requested", "checkpoint", "step 4"),
    ),
    (
        C.CLUSTER_READY, R.WAITING_FOR_NEXT_ATTEMPT,
        S.observed(S.waiting_for_retry(), S.cluster(), S.ready_pods()), "False",
        Mentions("waiting for the next attempt", "RayClusters: 1", "pods: 2"),
    ),
    (
        C.JOB_SUBMITTED, R.NEXT_ATTEMPT_STARTED,
        S.observed(S.waiting_for_retry(0).model_copy(update={"conditions": S.running().conditions})), "False",
        Mentions("next attempt"),
    ),
    (C.PROGRESSING, R.STARTING, S.healthy(), "True", Mentions("loading the model")),
    (C.PROGRESSING, R.TRAINING, S.healthy(state=S.run_state()), "True", STEPS),
    (C.PROGRESSING, R.STOPPING, S.healthy(state=S.run_state(RunPhase.STOPPING)), "False",
     Mentions("asked to stop", without=["could not"])),
    (C.PROGRESSING, R.ENDED, S.healthy(DONE, S.run_state(RunPhase.COMPLETE), S.running(60, S.condition(C.PROGRESSING))),
     "False", ""),
    (C.CHECKPOINTED, R.NO_CHECKPOINT_YET, S.healthy(state=S.run_state()), "False", ""),
    (C.CHECKPOINTED, R.SAVED, S.healthy(state=S.run_state(checkpoint_step=4)), "True", "checkpoint of step 4"),
    (C.COMPLETE, R.SUCCEEDED, S.healthy(DONE, S.run_state(RunPhase.COMPLETE, step=10)), "True",
     Mentions("10 of 10 steps")),
    (
        C.FAILED, R.PROVISIONING_DEADLINE_EXCEEDED,
        replace(starting(PodProblem(R.IMAGE_PULL_FAILED, "not found")),
                job=replace(starting().job, status=S.provisioning(seconds_ago=1800))),
        "True", Mentions("1800 s: 1 of 3 pods ready; 2 of 2 pods of pool main:", "not found", "(pod w0)"),
    ),
    (
        C.FAILED, R.ACTIVE_DEADLINE_EXCEEDED, S.observed(S.provisioning(seconds_ago=600), S.cluster(), job_spec=ACTIVE),
        "True", Mentions("stopped before", "0 of 2 pods ready; waiting for the head pod and 1 of pool main"),
    ),
    (
        C.FAILED, R.CONFIGURATION_ERROR, ended(2, error=RunError(kind="ConfigurationError", message="no such model")),
        "True", Mentions("code 2: ConfigurationError: no such model"),
    ),
    (
        C.FAILED, R.APPLICATION_ERROR, ended(1, "JOB_ENTRYPOINT_COMMAND_ERROR", "Traceback\nValueError: bad reward"),
        "True", Mentions("code 1: Traceback\nValueError: bad reward"),
    ),
    (C.FAILED, R.INFRASTRUCTURE_ERROR, ended(75), "True", Mentions("code 75: Ray's message")),
    (
        C.FAILED, R.OUT_OF_MEMORY,
        replace(ended(-9), pods=(*S.ready_pods(), S.pod("h", HEAD_GROUP, problem=OOM))),
        "True", Mentions(f"pod h: {OOM.message}", "SIGKILL: Ray's message"),
    ),
    (
        C.FAILED, R.STOPPED_THROUGH_RAY, S.healthy(S.ray_job(RayJobStatus.STOPPED), None, S.running(record=STOPPED)),
        "True", Mentions("not by the operator", "through Ray"),
    ),
    (
        C.FAILED, R.EXITED_WITHOUT_RESULT, S.healthy(DONE, S.run_state()),
        "True", Mentions("code 0", "run state", "Running"),
    ),
    (
        C.FAILED, R.SUBMISSION_FAILED, ended(None, "RUNTIME_ENV_SETUP_FAILURE"),
        "True", "RUNTIME_ENV_SETUP_FAILURE: Ray's message",
    ),
    *reasons_of_waiting.ROWS,
    (C.TRAINING_HEALTHY, R.STARTING, S.healthy(), "Unknown", "the trainer has not completed a step"),
    (C.TRAINING_HEALTHY, R.NO_ALARMS, S.healthy(state=S.run_state()), "True", ""),
    (
        C.TRAINING_HEALTHY, R.NOT_REPORTED, S.healthy(state=S.run_state(alarms=None)),
        "Unknown", "the trainer does not report whether there are alarms",
    ),
    *(
        (C.TRAINING_HEALTHY, reason, S.healthy(state=S.run_state(alarms=(S.alarm(reason, "0.7"),))),
         "False", "0.7 (since step 3, last in step 4)")
        for reason in ALARMS
    ),
    (
        C.TRAINING_HEALTHY, R.OTHER_ALARM, S.healthy(state=S.run_state(alarms=(S.alarm("EntropyCollapse", "0.1"),))),
        "False", "EntropyCollapse: 0.1 (since step 3, last in step 4)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "reason", "seen", "status", "message"), REASONS, ids=[f"{row[0]}-{row[1]}" for row in REASONS]
)
def test_the_reason_is_reported(
    kind: ConditionType, reason: Reason, seen: Observed, status: str, message: str | Mentions
) -> None:
    allowed = S.without_retries(seen) if kind is C.FAILED else seen
    assert condition_of(decide(allowed).status, kind) == (status, reason, message)


def test_every_reason_is_reached_and_only_in_its_own_conditions() -> None:
    assert {row[1] for row in REASONS} == set(Reason)
    assert all(row[1] in CONDITION_REASONS[row[0]] for row in REASONS)


def test_every_result_has_a_failure_class_and_can_be_reached() -> None:
    endings = set(CONDITION_REASONS[C.FAILED])
    assert set(FAILURE_CLASSES) == endings | {R.SUSPENDED, *RESTARTED_FREELY}
    assert {row[1] for row in REASONS if row[0] is C.FAILED} == endings
