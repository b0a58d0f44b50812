"""Finds out how an attempt ended and why. `conditions.FAILURE_CLASSES` says what each reason means for retries."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from rljob_api.conditions import Reason
from rljob_api.constants import HEAD_GROUP, ErrorCause, ExitCode
from rljob_api.run_state import RunPhase
from rljob_api.v1alpha1.status import StopRequest
from rljob_operator.reconcile.cluster import Finding, Pods, disrupted_pod, head_pod, is_lost, were_pods_deleted
from rljob_operator.reconcile.observed import Observed, ObservedRay, ObservedRayJob, RayJobStatus
from rljob_operator.reconcile.status_draft import MAX_CONDITION_MESSAGE, StatusDraft, beginning_of, end_of
from rljob_operator.reconcile.trainer import newest_ray_job, seconds_since_termination

RUN_STATE_SECONDS = 30
"""How long to wait for the final run state of a trainer that exited with code 0."""
STOP_CAUSE_SECONDS = 30
"""How long to wait for the cause of a stop that the operator did not request. When a kubelet ends the head pod (node
shutdown, eviction), it stops the trainer first, and reports the end of the pod only after the pod has terminated."""

_CANNOT_START = ("RUNTIME_ENV_SETUP_FAILURE", "JOB_ENTRYPOINT_COMMAND_START_ERROR")
"""Ray's error types for a trainer that cannot be started from its image."""

_NOT_STARTED = (
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT",
    "JOB_SUPERVISOR_ACTOR_START_FAILURE",
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE",
)
"""Ray's error types for a trainer whose supervisor process Ray could not place or start on the head node."""

_EXIT_REASONS = {
    ExitCode.CONFIGURATION: Reason.CONFIGURATION_ERROR,
    ExitCode.INFRASTRUCTURE: Reason.INFRASTRUCTURE_ERROR,
    ExitCode.INTERRUPTED: Reason.STOPPED_THROUGH_RAY,
    # No process of the job sends these signals: they come from the kernel, the kubelet or Ray.
    -signal.SIGKILL: Reason.INFRASTRUCTURE_ERROR,
    -signal.SIGTERM: Reason.INFRASTRUCTURE_ERROR,
    # The same signals, as a shell reports them.
    128 + signal.SIGKILL: Reason.INFRASTRUCTURE_ERROR,
    128 + signal.SIGTERM: Reason.INFRASTRUCTURE_ERROR,
}
"""Reasons by exit code; negative codes are signals. Every other exit code is an application error."""

_LOST = (Reason.CLUSTER_LOST, Reason.HEAD_LOST, Reason.DRIVER_LOST)
"""Reasons of ClusterReady or JobSubmitted with which the trainer's process is lost."""
_FATAL = (*_LOST, Reason.INVALID_SPEC, Reason.KUBERAY_TOO_OLD, Reason.AUTHENTICATION_MISSING)
"""Reasons of ClusterReady or JobSubmitted that end the attempt immediately, because they are permanent."""

_PODS_MAY_BE_THE_CAUSE = (Reason.INFRASTRUCTURE_ERROR, Reason.HEAD_LOST, Reason.DRIVER_LOST)
"""If an attempt ends with one of these reasons and a pod ran out of memory, the reason becomes OutOfMemory. If
Kubernetes removes a pod, the reason becomes Disrupted."""


@dataclass(frozen=True)
class Ending:
    """How an attempt or a job ended or should end, and why. `Reason.SUCCEEDED` is the only success."""

    reason: Reason
    message: str
    cause: str | None = None
    """The cause that the trainer reported, or HostMemory for a pod that ran out of memory (see `ErrorCause`); None if
    unknown."""
    pod: str | None = None
    """Name of the pod in which the failure began; None if unknown."""


def ending_of_attempt(
    draft: StatusDraft, observed: Observed, findings: Sequence[Finding | None], grace_seconds: int
) -> Ending | None:
    """How the attempt ended; None while it continues. `findings`: ClusterReady and JobSubmitted in this pass.
    `grace_seconds`: `runPolicy.gracePeriodSeconds`."""
    ray_job = newest_ray_job(draft, observed)
    ending = _ending_of_ray_job(draft, observed, ray_job, grace_seconds) if ray_job is not None else None
    for finding in findings:
        if ending is None and finding is not None and finding.reason in _FATAL:
            ending = _ending_by_finding(draft, observed, finding)
    ending = ending or _ending_by_lost_worker(draft, observed)
    if ending is None or ending.reason not in _PODS_MAY_BE_THE_CAUSE:
        return ending
    is_complete = any(finding is not None and finding.is_true for finding in findings[:1])
    return _with_cause_in_pods(ending, observed.pods_of(draft.attempt.cluster), is_complete=is_complete)


def _ending_by_lost_worker(draft: StatusDraft, observed: Observed) -> Ending | None:
    """The ending of an attempt whose trainer was not started yet, if a worker pod is on a Kubernetes node that no
    longer responds: KubeRay replaces the pod late. The next attempt gets a new cluster. None if no pod was lost."""
    if draft.attempt.submissions > 0:
        return None
    for pod in sorted(observed.pods_of(draft.attempt.cluster), key=lambda pod: pod.name):
        if pod.group != HEAD_GROUP and is_lost(pod):
            return Ending(
                Reason.INFRASTRUCTURE_ERROR, f"pod {pod.name}: node {pod.node} does not respond", None, pod.name
            )
    return None


def reason_of_stop(stop: StopRequest) -> Reason:
    """Why the attempt should stop. An unknown reason, written by a newer operator, counts as a suspension: after
    a rollback of the operator the job then resumes, unless its spec suspends it."""
    return Reason(stop.reason) if stop.reason in set(Reason) else Reason.SUSPENDED


def _ending_by_finding(draft: StatusDraft, observed: Observed, finding: Finding) -> Ending:
    """The ending by a finding whose reason is in `_FATAL`. If the trainer was lost while the attempt was stopping, the
    attempt ends with the reason for the stop; if it was lost by an eviction that no operator saw, as Evicted."""
    stop, cluster = draft.attempt.stop, observed.cluster(draft.attempt.cluster)
    is_lost_with_pods = stop is None and finding.reason in (Reason.HEAD_LOST, Reason.DRIVER_LOST)
    pods = observed.pods_of(draft.attempt.cluster)
    if is_lost_with_pods and cluster is not None and were_pods_deleted(draft.attempt, cluster, pods):
        return Ending(Reason.EVICTED, f"the cluster was suspended and admitted again meanwhile: {finding.message}")
    if stop is not None and finding.reason in _LOST:
        was_asked = "was asked to stop and was lost before it exited"
        lost = was_asked if stop.sent_at is not None else "was lost before it was asked to stop"
        why = f"{stop.message}; " if stop.message is not None else ""
        return Ending(reason_of_stop(stop), f"{why}the trainer {lost}: {finding.message}")
    return Ending(finding.reason, finding.message)


def _ending_of_ray_job(
    draft: StatusDraft, observed: Observed, ray_job: ObservedRayJob, grace_seconds: int
) -> Ending | None:
    """The ending as Ray reports it; None while the trainer is running, or while the operator waits for the final run
    state or the cause of a stop. If the trainer's process does not exit after the trainer has reported its end, the
    operator waits for twice the grace period."""
    if ray_job.status is RayJobStatus.SUCCEEDED:
        return _ending_of_success(draft, observed.ray)
    if ray_job.status is RayJobStatus.FAILED:
        return _ending_of_failure(draft, observed.ray, ray_job)
    if ray_job.status is RayJobStatus.STOPPED:
        return _ending_of_stop(draft, observed, ray_job)
    waited_seconds = seconds_since_termination(draft)
    if waited_seconds is None or waited_seconds < 2 * grace_seconds:
        return None
    return _ending_by_run_state(draft, observed.ray, ray_job)


def _ending_of_success(draft: StatusDraft, ray: ObservedRay) -> Ending | None:
    """The ending of a trainer that exited with code 0; None while its final run state is still expected."""
    state, complete = ray.run_state, _ending_when_complete(ray)
    if complete is not None:
        return complete
    if state is not None:
        text = f"the trainer exited with code 0 before the job was complete (phase in its run state: {state.phase})"
        return Ending(Reason.EXITED_WITHOUT_RESULT, text)
    waited_seconds = seconds_since_termination(draft)
    if waited_seconds is None or waited_seconds < RUN_STATE_SECONDS:
        return None
    if ray.run_state_error is not None:
        text = f"the trainer exited with code 0, but this operator cannot read its run state: {ray.run_state_error}"
        return Ending(Reason.TRAINER_IMAGE_INCOMPATIBLE, text)
    return Ending(Reason.EXITED_WITHOUT_RESULT, "the trainer exited with code 0, but wrote no run state")


def _ending_of_failure(draft: StatusDraft, ray: ObservedRay, ray_job: ObservedRayJob) -> Ending:
    """The ending of a trainer that Ray reports as failed: it exited with another code than 0, or was lost, or could not
    be started."""
    exited = "was lost by Ray" if ray_job.exit_code is None else _exit_text(ray_job.exit_code)
    on_request = _ending_on_request(draft, None if ray_job.exit_code == ExitCode.INTERRUPTED else exited)
    if on_request is not None:
        return on_request
    if ray_job.error_type in _CANNOT_START:
        return Ending(Reason.SUBMISSION_FAILED, f"{ray_job.error_type}: {ray_job.message}")
    if ray_job.error_type in _NOT_STARTED:
        return Ending(Reason.INFRASTRUCTURE_ERROR, f"{ray_job.error_type}: {ray_job.message}")
    if ray_job.exit_code is None:
        return _ending_by_error(
            Reason.INFRASTRUCTURE_ERROR, f"Ray lost the trainer ({ray_job.error_type})", ray, ray_job
        )
    reason = _EXIT_REASONS.get(ray_job.exit_code, Reason.APPLICATION_ERROR)
    return _ending_by_error(reason, f"the trainer {_exit_text(ray_job.exit_code)}", ray, ray_job)


def _ending_of_stop(draft: StatusDraft, observed: Observed, ray_job: ObservedRayJob) -> Ending | None:
    """The ending of a trainer that Ray reports as stopped; None while the operator waits for the cause of the stop. If
    the trainer had reported its result before, and only its process did not exit, the ending is this result."""
    known = _ending_when_complete(observed.ray) or _ending_on_request(draft)
    if known is not None:
        return known
    head = head_pod(observed.pods_of(draft.attempt.cluster))
    if head is not None and head.deleting:
        return Ending(Reason.HEAD_LOST, f"the head pod {head.name} was deleted while the trainer was running")
    waited_seconds = seconds_since_termination(draft)
    if waited_seconds is None or waited_seconds < STOP_CAUSE_SECONDS:
        return None
    return _ending_by_run_state(draft, observed.ray, ray_job)


def _ending_by_run_state(draft: StatusDraft, ray: ObservedRay, ray_job: ObservedRayJob) -> Ending:
    """The ending of a trainer without an exit code: from its last run state, else from the stop request."""
    known = _ending_when_complete(ray) or _ending_on_request(draft)
    if known is not None:
        return known
    if ray.run_state is not None and ray.run_state.phase is RunPhase.FAILED:
        what = "the trainer failed, and its process did not exit"
        return _ending_by_error(Reason.APPLICATION_ERROR, what, ray, ray_job)
    return Ending(Reason.STOPPED_THROUGH_RAY, "the trainer was stopped through Ray's API, not by the operator")


def _ending_on_request(draft: StatusDraft, how: str | None = None) -> Ending | None:
    """The ending of a trainer that the operator decided to stop; None if it did not. `how`: how the trainer ended, for
    the message, such as `exited with code 1`; None if it ended as after a stop."""
    stop, checkpoint = draft.attempt.stop, draft.checkpoint
    if stop is None:
        return None
    if stop.sent_at is None:
        what = f"the trainer {how or 'ended'} before it was asked to stop"
    else:
        what = f"the trainer was asked to stop, and it {how}" if how is not None else "the trainer stopped as requested"
    saved = "no checkpoint was saved" if checkpoint is None else f"the newest checkpoint is from step {checkpoint.step}"
    why = f"{stop.message}; " if stop.message is not None else ""
    return Ending(reason_of_stop(stop), f"{why}{what}; {saved}")


def _ending_when_complete(ray: ObservedRay) -> Ending | None:
    """The ending of a trainer that reports completion; None if the trainer does not report this."""
    state = ray.run_state
    if state is None or state.phase is not RunPhase.COMPLETE:
        return None
    return Ending(Reason.SUCCEEDED, f"{state.progress.step} of {state.progress.total_steps} steps are done")


def _with_cause_in_pods(ending: Ending, pods: Pods, *, is_complete: bool) -> Ending:
    """The ending, with the reason OutOfMemory if a pod of the cluster ran out of memory, or Disrupted if Kubernetes
    took a pod away before the operator could stop the trainer. The message keeps the trainer's own error.
    `is_complete`: whether all needed pods are ready."""
    for pod in sorted(pods, key=lambda pod: pod.name):
        if pod.problem is not None and pod.problem.reason is Reason.OUT_OF_MEMORY:
            message = f"pod {pod.name}: {pod.problem.message}; {ending.message}"
            return Ending(Reason.OUT_OF_MEMORY, message, ErrorCause.HOST_MEMORY, pod.name)
    disruption = disrupted_pod(pods, is_complete=is_complete)
    return ending if disruption is None else Ending(Reason.DISRUPTED, f"{disruption}; {ending.message}")


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _ending_by_error(reason: Reason, what: str, ray: ObservedRay, ray_job: ObservedRayJob) -> Ending:
    """The ending with a message from `what`, which says how the trainer ended, and the best explanation: the error that
    the trainer reported, else the last lines of its log, else Ray's message."""
    start = f"{what}: "
    error = ray.run_state.error if ray.run_state is not None else None
    if error is not None:
        return Ending(reason, f"{start}{error.kind}: {error.message}", error.cause, error.pod)
    limit = MAX_CONDITION_MESSAGE - len(start)
    text = end_of(ray.log_tail, limit) or beginning_of(ray_job.message, limit) or "cause unknown"
    return Ending(reason, start + text)
