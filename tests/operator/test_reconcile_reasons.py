"""Every reason that a condition can give, each reached from one observation worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.run_state import RunError, RunPhase
from rljob_api.v1alpha1.status import ConditionStatus, RLJobStatus
from rljob_operator.reconcile.observed import (
    EffectFailure,
    EffectKind,
    Observed,
    ObservedRay,
    PodProblem,
    RayJobStatus,
    Reachability,
)
from rljob_testing.operator_jobs import spec
from rljob_testing.operator_observed import (
    at_work,
    attempt,
    cluster,
    condition,
    decide,
    found,
    job,
    observed,
    pod,
    provisioning,
    ray,
    ray_job,
    ready_pods,
    run_state,
    running,
)

C, R = ConditionType, Reason

STEPS = "10 steps in all"
NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
DEADLINE = "the trainer did not run within 1800 s: "
UNREACHABLE = ObservedRay(Reachability.UNREACHABLE, error="connection refused")
REJECTED = ObservedRay(Reachability.REJECTED, error="403")
DONE = ray_job(RayJobStatus.SUCCEEDED, 0)
KEPT = spec({"runPolicy.cleanup": "KeepCluster"})
ACTIVE = spec({"runPolicy.activeDeadlineSeconds": 600})
COMPLETE = running(60, condition(C.COMPLETE, reason=R.SUCCEEDED))
ENDED_BEFORE = RLJobStatus(
    attempts=(attempt(seen=False),),
    conditions=(
        condition(C.CLUSTER_READY, ConditionStatus.FALSE, R.CREATING),
        condition(C.FAILED, reason=R.ACTIVE_DEADLINE_EXCEEDED),
    ),
)


def starting(problem: PodProblem | None = None, *, num_ready: int = 0, error: str | None = None) -> Observed:
    """A head that is ready and two workers: the first `num_ready` are ready, the others have the problem."""
    workers = [
        pod(f"w{number}", ready=number < num_ready, problem=None if number < num_ready else problem)
        for number in range(2)
    ]
    two = spec({"pools[0].nodes": 2})
    pods = (pod("h", HEAD_GROUP), *(workers if error is None else workers[:num_ready]))
    return observed(provisioning(), cluster(error=error), pods, job_spec=two)


def without_spec(text: str) -> Observed:
    seen = observed()
    return replace(seen, job=replace(seen.job, spec=None, spec_error=text))


def failed_effect(seen: Observed, kind: EffectKind, reason: Reason, message: str) -> Observed:
    return replace(seen, failure=EffectFailure(kind, reason, message))


def ended(
    code: int | None, error_type: str | None = None, log_tail: str = "", error: RunError | None = None
) -> Observed:
    state = run_state(RunPhase.FAILED, error=error) if error is not None else None
    return at_work(ray_job(RayJobStatus.FAILED, code, error_type), state, log_tail=log_tail)


def on_ready(seen: ObservedRay, job_spec: Mapping[str, object] | None = None) -> Observed:
    return observed(provisioning(), cluster(), ready_pods(), seen, spec(job_spec))


OOM = PodProblem(R.OUT_OF_MEMORY, "container ray was killed for want of memory (OOMKilled)")
REASONS: list[tuple[ConditionType, Reason, Observed, str, str]] = [
    (C.SPEC_VALID, R.VALID, observed(), "True", ""),
    (C.SPEC_VALID, R.INVALID_SPEC, without_spec("spec.pools: wrong"), "False", "spec.pools: wrong"),
    (C.FAILED, R.INVALID_SPEC, without_spec("spec.pools: wrong"), "True", "spec.pools: wrong"),
    (
        C.SPEC_VALID, R.STORAGE_MISSING, observed(job_spec=spec({"checkpoint": {}})), "False",
        "spec.checkpoint.storage: is not set, and on a cluster the pods have no other folder in common;"
        " name a ReadWriteMany PersistentVolumeClaim: storage: {persistentVolumeClaim: <name>}",
    ),
    (C.CLUSTER_READY, R.CREATING, observed(), "False", "RayCluster example-1 is being created"),
    (C.CLUSTER_READY, R.PODS_PENDING, starting(num_ready=1), "False", "2 of 3 pods ready; waiting for 1 of pool main"),
    (C.CLUSTER_READY, R.READY, on_ready(ray()), "True", "2 of 2 pods ready and in Ray"),
    (
        C.CLUSTER_READY, R.CREATION_REFUSED,
        failed_effect(observed(provisioning(seen=False)), EffectKind.CREATE_CLUSTER, R.CREATION_REFUSED, "over quota"),
        "False", "over quota",
    ),
    (
        C.CLUSTER_READY, R.NAME_CONFLICT, observed(provisioning(seen=False, seconds_ago=5), cluster(owner_uid=None)),
        "False", "there is a RayCluster example-1 already that does not belong to this job",
    ),
    (
        C.FAILED, R.NAME_CONFLICT, observed(provisioning(seen=False), cluster(owner_uid="another")),
        "True", "there is a RayCluster example-1 already that does not belong to this job",
    ),
    (
        C.CLUSTER_READY, R.KUBERAY_UNAVAILABLE, replace(observed(), kuberay_installed=False),
        "False", "this Kubernetes cluster has no resource RayCluster (ray.io/v1)",
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
        observed(
            provisioning(), cluster(),
            (pod("h", HEAD_GROUP, problem=PodProblem(R.CONTAINER_CRASHING, "exit code 1")), pod("w")),
        ),
        "False", "1 of 2 pods ready; the head pod h: exit code 1",
    ),
    (
        C.CLUSTER_READY, R.RAY_NODES_MISSING, on_ready(ray(gpus=())),
        "False", "2 of 2 pods ready, 1 of them in Ray",
    ),
    (
        C.CLUSTER_READY, R.DASHBOARD_UNREACHABLE, on_ready(UNREACHABLE),
        "False", "all pods are ready, but Ray's dashboard does not answer: connection refused",
    ),
    (C.PROGRESSING, R.DASHBOARD_UNREACHABLE, replace(at_work(), ray=UNREACHABLE), "Unknown", "connection refused"),
    (
        C.CLUSTER_READY, R.TOKEN_REJECTED, on_ready(REJECTED),
        "False", "all pods are ready, but Ray refuses the operator's token: 403",
    ),
    (C.PROGRESSING, R.TOKEN_REJECTED, replace(at_work(), ray=REJECTED), "Unknown", "403"),
    (C.FAILED, R.CLUSTER_LOST, observed(running()), "True", "RayCluster example-1 was deleted while the job needed it"),
    (
        C.FAILED, R.HEAD_LOST, observed(running(), cluster(), (pod("w"),)),
        "True", "the head pod is gone, and the trainer with it",
    ),
    (
        C.CLUSTER_READY, R.REMOVED, observed(COMPLETE),
        "False", "the job has ended; its cluster was removed",
    ),
    (
        C.CLUSTER_READY, R.REMOVED, observed(ENDED_BEFORE),
        "False", "the job has ended before its cluster was made",
    ),
    (
        C.CLUSTER_READY, R.KEPT, observed(COMPLETE, cluster(), ready_pods(), job_spec=KEPT),
        "True", "the job has ended; its cluster is kept",
    ),
    (C.PLACEMENT_FEASIBLE, R.FEASIBLE, on_ready(ray()), "True", "Ray has 2 of 2 GPUs"),
    (
        C.PLACEMENT_FEASIBLE, R.INSUFFICIENT_GPUS, on_ready(ray(gpus=(1,))),
        "False", "Ray has 1 of 2 GPUs, 1 on the node with the fewest",
    ),
    (
        C.PLACEMENT_FEASIBLE, R.PLACEMENT_GROUP_INFEASIBLE,
        replace(at_work(), ray=ray(ray_job(), infeasible=("2 x {CPU: 9, GPU: 1}",))),
        "False", "Ray has 2 of 2 GPUs; no node can hold 2 x {CPU: 9, GPU: 1}",
    ),
    (C.JOB_SUBMITTED, R.SUBMITTING, on_ready(ray()), "False", "Ray job example-1-1 is being submitted"),
    (
        C.JOB_SUBMITTED, R.SUBMISSION_FAILED,
        failed_effect(
            replace(on_ready(ray()), job=job(status=RLJobStatus(attempts=(attempt(submissions=1),)))),
            EffectKind.SUBMIT_JOB, R.SUBMISSION_FAILED, "500: No available agent",
        ),
        "False", "500: No available agent",
    ),
    (C.JOB_SUBMITTED, R.SUBMITTED, at_work(), "True", "Ray job example-1-1"),
    (C.JOB_SUBMITTED, R.DRIVER_LOST, replace(at_work(), ray=ray()), "False",
     "Ray no longer knows job example-1-1; its head was restarted"),
    (C.FAILED, R.DRIVER_LOST, replace(at_work(), ray=ray()), "True",
     "Ray no longer knows job example-1-1; its head was restarted"),
    (C.PROGRESSING, R.STARTING, at_work(), "True", "the trainer loads the model and builds its workers"),
    (C.PROGRESSING, R.TRAINING, at_work(state=run_state()), "True", STEPS),
    (C.PROGRESSING, R.STOPPING, at_work(state=run_state(RunPhase.STOPPING)), "False", "the trainer was asked to stop"),
    (C.PROGRESSING, R.ENDED, at_work(DONE, run_state(RunPhase.COMPLETE), running(60, condition(C.PROGRESSING))),
     "False", ""),
    (C.CHECKPOINTED, R.NO_CHECKPOINT_YET, at_work(state=run_state()), "False", ""),
    (C.CHECKPOINTED, R.SAVED, at_work(state=run_state(checkpoint_step=4)), "True", "checkpoint of step 4"),
    (C.COMPLETE, R.SUCCEEDED, at_work(DONE, run_state(RunPhase.COMPLETE, step=10)), "True", "10 of 10 steps are done"),
    (
        C.FAILED, R.PROVISIONING_DEADLINE_EXCEEDED,
        replace(starting(PodProblem(R.UNSCHEDULABLE, NO_GPU)),
                job=replace(starting().job, status=provisioning(seconds_ago=1800))),
        "True", f"{DEADLINE}1 of 3 pods ready; 2 of 2 pods of pool main: {NO_GPU} (pod w0)",
    ),
    (
        C.FAILED, R.ACTIVE_DEADLINE_EXCEEDED, observed(provisioning(seconds_ago=600), cluster(), job_spec=ACTIVE),
        "True", "the trainer did not run within the job's 600 s: 0 of 2 pods ready; waiting for the head pod and 1 of"
        " pool main",
    ),
    (
        C.FAILED, R.CONFIGURATION_ERROR, ended(2, error=RunError(kind="ConfigurationError", message="no such model")),
        "True", "the trainer ended with exit code 2: ConfigurationError: no such model",
    ),
    (
        C.FAILED, R.APPLICATION_ERROR, ended(1, "JOB_ENTRYPOINT_COMMAND_ERROR", "Traceback\nValueError: bad reward"),
        "True", "the trainer ended with exit code 1: Traceback\nValueError: bad reward",
    ),
    (C.FAILED, R.INFRASTRUCTURE_ERROR, ended(75), "True", "the trainer ended with exit code 75: Ray's message"),
    (
        C.FAILED, R.OUT_OF_MEMORY,
        replace(ended(-9), pods=(*ready_pods(), pod("h", HEAD_GROUP, problem=OOM))),
        "True", "pod h: container ray was killed for want of memory (OOMKilled); the trainer ended with signal SIGKILL:"
        " Ray's message",
    ),
    (
        C.FAILED, R.STOPPED_OUTSIDE, at_work(ray_job(RayJobStatus.STOPPED)),
        "True", "the trainer was stopped through Ray, and not by the operator",
    ),
    (
        C.FAILED, R.ENDED_WITHOUT_RESULT, at_work(DONE, run_state()),
        "True", "the trainer ended with exit code 0, but was Running by its run state",
    ),
    (
        C.FAILED, R.SUBMISSION_FAILED, ended(None, "RUNTIME_ENV_SETUP_FAILURE"),
        "True", "RUNTIME_ENV_SETUP_FAILURE: Ray's message",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "reason", "seen", "status", "message"), REASONS, ids=[f"{row[0]}-{row[1]}" for row in REASONS]
)
def test_the_reason_is_given(kind: ConditionType, reason: Reason, seen: Observed, status: str, message: str) -> None:
    assert found(decide(seen).status, kind) == (status, reason, message)


def test_every_reason_is_reached() -> None:
    assert {row[1] for row in REASONS} == set(Reason)
