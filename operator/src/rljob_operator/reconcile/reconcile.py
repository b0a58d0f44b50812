"""Decides what to write and do for a job, from what was observed. Pure: the current time is passed in."""

from __future__ import annotations

from datetime import datetime

from rljob_api.conditions import ConditionType, Reason
from rljob_api.scalars import MAX_COUNT
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import AttemptState
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.reconcile.attempt_endings import Ending, ending_of_attempt
from rljob_operator.reconcile.between_attempts import (
    apply_retry_request,
    is_cluster_reusable,
    report_suspension,
    seconds_to_start,
    stop_between_attempts,
    wait_or_start,
)
from rljob_operator.reconcile.cleanup import clean_up, delete_unneeded_clusters, seconds_to_cleanup
from rljob_operator.reconcile.cluster import Finding, report_cluster
from rljob_operator.reconcile.creation import (
    choose_pod_counts,
    create_cluster,
    reapply_network_policy,
    record_pods,
    seconds_to_pod_counts,
    spec_problem,
    submit,
)
from rljob_operator.reconcile.decision import Decision, Effect, events_between
from rljob_operator.reconcile.observed import Observed, Reachability
from rljob_operator.reconcile.placement import report_placement
from rljob_operator.reconcile.retries import end_attempt, end_job, follow_ending, wait_for_another_operator
from rljob_operator.reconcile.status_draft import FALSE, TRUE, StatusDraft, seconds_since, timestamp
from rljob_operator.reconcile.stops import (
    ending_by_stop,
    exceeded_deadline,
    request_stop,
    seconds_to_next_limit,
    stop_when_due,
)
from rljob_operator.reconcile.trainer import (
    new_alarms,
    newest_ray_job,
    record_progress,
    record_termination,
    record_unobservable,
    report_run,
    report_submission,
    trainer_may_run,
)

RAY_POLL_SECONDS = 4.0
"""Time between two passes from when the head pod is ready until the attempt ends: Ray sends no notifications, so its
dashboard must be polled."""
POD_POLL_SECONDS = 10.0
"""Time between two passes while pods start or end. The operator watches the pods, but not the events that explain
delays."""
SUBMISSION_SECONDS = 60
"""How much time the submission gets after the operator finds the cluster ready, even if the provisioning deadline has
passed by then."""
# An operator that cannot read a job's spec must not end the job, so the retries of such a job are unlimited.
_UNLIMITED_RETRIES = {"max_app_retries": MAX_COUNT, "max_infra_retries": MAX_COUNT}
_CAUSED_BY_UNREADABLE_SPEC = (Reason.PROVISIONING_DEADLINE_EXCEEDED, Reason.RUN_STATE_UNREADABLE)


def reconcile(observed: Observed, now: datetime, defaults: Defaults) -> Decision:
    """Decides the status, effects and events of a pass. The same input gives the same decision. A pass
    that observes the decided status and nothing else new decides the same status again, until a time limit passes; it
    repeats only the effects whose results it does not observe yet. Repeating an effect does no harm."""
    job = observed.job
    if job.deleting or not job.is_managed:
        return Decision(status=job.status)
    draft = StatusDraft(job, now)
    apply_retry_request(draft, observed)
    effects: tuple[Effect, ...] = ()
    if draft.result is None:
        effects = _advance(draft, observed, defaults)
    if draft.result is not None:
        effects = clean_up(draft, observed)
    status = draft.status()
    events = (*events_between(job.status, status), *new_alarms(draft, observed))
    return Decision(status, effects, events, _requeue_after_seconds(draft, observed))


def _advance(draft: StatusDraft, observed: Observed, defaults: Defaults) -> tuple[Effect, ...]:
    """Moves an unfinished job forward. Between attempts, the job waits or starts the next attempt. An attempt under way
    goes through cluster, placement, submission and training in this order, and may end in each pass."""
    spec = _checked_spec(draft, observed, defaults)
    if draft.result is not None:
        return ()
    if not draft.is_under_way:
        return _between(draft, observed, spec, defaults)
    policy = _run_policy(observed)
    if spec is not None:
        spec = choose_pod_counts(draft, observed, spec)
    cluster_ready = report_cluster(draft, observed, spec)
    is_ready = cluster_ready is not None and cluster_ready.is_true
    placement_problem = report_placement(draft, observed, spec, cluster_ready=is_ready) if spec is not None else None
    submission = report_submission(draft, observed)
    unobservable = _report_trainer(draft, observed, spec, policy)
    report_suspension(draft, observed)
    waits_for = _waits_for(observed, cluster_ready, placement_problem, submission)
    may_submit = (
        spec is not None and is_ready and placement_problem is None and observed.ray.reachability is Reachability.OK
    )
    ending = ending_of_attempt(
        draft, observed, (cluster_ready, submission), policy.grace_period_seconds
    ) or ending_by_stop(draft, observed, policy, waits_for[1])
    if ending is None:
        ending = exceeded_deadline(draft, observed, policy, waits_for, unobservable)
        is_submission_late = ending is not None and may_submit and draft.attempt.running_since is None
        if is_submission_late and _allow_late_submission(draft, observed):
            ending = None
    if ending is not None:
        _end(draft, observed, ending, policy)
        return _between(draft, observed, spec, defaults) if draft.result is None else ()
    unneeded = delete_unneeded_clusters(draft, observed)
    if draft.attempt.running_since is not None:
        return (*unneeded, *stop_when_due(draft, observed, policy), *reapply_network_policy(draft, observed))
    if spec is not None and observed.cluster(draft.attempt.cluster) is None:
        return (*unneeded, *create_cluster(draft, observed))
    if may_submit:
        return (*unneeded, submit(draft, observed))
    return (*unneeded, *reapply_network_policy(draft, observed))


def _allow_late_submission(draft: StatusDraft, observed: Observed) -> bool:
    """Returns whether the trainer may still be submitted after the provisioning deadline: the cluster may have become
    ready while no operator was running. The first pass that allows this records its time in `ready_at`; from then on,
    the submission has `SUBMISSION_SECONDS`."""
    if observed.failure is not None or newest_ray_job(draft, observed) is not None:
        return False
    attempt = draft.attempt
    if attempt.submissions == 0:
        draft.change_attempt(ready_at=timestamp(draft.now))
        return True
    return attempt.ready_at is not None and seconds_since(attempt.ready_at, draft.now) < SUBMISSION_SECONDS


def _between(draft: StatusDraft, observed: Observed, spec: RLJobSpec | None, defaults: Defaults) -> tuple[Effect, ...]:
    """Waits for the next attempt or starts it; ends the job if a user asked to stop it. If the job cannot run with its
    spec (`spec` is None), no attempt starts. The cluster of a new attempt is not created in this pass: the status must
    record the attempt first."""
    if spec is None:
        return () if stop_between_attempts(draft) else delete_unneeded_clusters(draft, observed)
    effects = wait_or_start(draft, observed)
    if draft.is_under_way:
        record_pods(draft, spec, defaults)
        report_cluster(draft, observed, spec)
    return effects


def _report_trainer(
    draft: StatusDraft, observed: Observed, spec: RLJobSpec | None, policy: RunPolicy
) -> tuple[Reason, str] | None:
    """Reports the state of a running trainer, and records whether the attempt should stop. Returns why the trainer
    cannot be observed; None if it can be observed, is not running, or cannot be observed for less than
    `SHORT_SILENCE_SECONDS`."""
    unobservable = None
    if draft.attempt.running_since is not None:
        unobservable = record_unobservable(draft, observed)
        record_progress(draft, observed, policy)
        record_termination(draft, observed)
    request_stop(draft, observed, policy)
    report_run(draft, observed, spec, unobservable)
    return unobservable


def _end(draft: StatusDraft, observed: Observed, ending: Ending, policy: RunPolicy) -> None:
    """Ends the attempt. Then it ends the job, plans the next attempt, or leaves a suspended job until it is resumed."""
    ray_job = newest_ray_job(draft, observed)
    end_attempt(draft, ending)
    if trainer_may_run(draft, observed):
        draft.change_attempt(trainer_may_run=True)
    # If the trainer may still be running, its cluster cannot be reused: deleting the cluster stops the trainer. If
    # Kueue evicted the cluster, the trainer ends with its pods.
    has_trainer_ended = ending.reason is Reason.EVICTED or (ray_job is not None and ray_job.status.has_ended)
    reusable = has_trainer_ended and is_cluster_reusable(draft, observed)
    if ending.reason is Reason.SUCCEEDED:
        end_job(draft, ending)
    elif observed.job.spec is None and ending.reason in _CAUSED_BY_UNREADABLE_SPEC:
        wait_for_another_operator(draft, ending)
    else:
        follow_ending(draft, ending, policy, observed.job.uid, is_cluster_reusable=reusable)


def _checked_spec(draft: StatusDraft, observed: Observed, defaults: Defaults) -> RLJobSpec | None:
    """The spec if the job can run with it, else None. Sets SpecValid.

    If the spec is invalid, a job without any attempt so far fails. A job that has started does not fail because this
    operator, perhaps of another version, cannot read its spec: the running attempt continues until it ends or a
    deadline passes, and the next attempt waits."""
    job = observed.job
    problem: Ending | None = None
    if job.spec is None:
        problem = Ending(Reason.INVALID_SPEC, job.spec_error or "the spec cannot be parsed")
    elif not draft.is_under_way:
        problem = spec_problem(job, job.spec, defaults)
    if problem is None:
        reason = Reason.MEMORY_TOO_SMALL if job.memory_shortage else Reason.VALID
        notes = (_ignored_fields(observed), job.memory_shortage)
        draft.set(ConditionType.SPEC_VALID, TRUE, reason, "; ".join(note for note in notes if note))
        return job.spec
    draft.set(ConditionType.SPEC_VALID, FALSE, problem.reason, problem.message)
    if not draft.attempts:
        end_job(draft, problem)
    return None


def _run_policy(observed: Observed) -> RunPolicy:
    """The job's `runPolicy`. If the spec cannot be parsed: the readable part of it, with unlimited retries."""
    job = observed.job
    return job.spec.run_policy if job.spec is not None else job.readable_policy.model_copy(update=_UNLIMITED_RETRIES)


def _ignored_fields(observed: Observed) -> str:
    unknown = ", ".join(observed.job.unknown_fields)
    if not unknown:
        return ""
    return f"this operator does not know and ignores these fields: {unknown} (upgrade the operator to use them)"


def _waits_for(
    observed: Observed, cluster_ready: Finding | None, placement_problem: str | None, submission: Finding | None
) -> tuple[Reason | None, str]:
    """What an attempt without a running trainer still waits for, for a message, and the reason of ClusterReady if this
    condition is not True."""
    if observed.job.spec is None:
        return None, f"this operator cannot parse the job's spec ({observed.job.spec_error})"
    if cluster_ready is not None and not cluster_ready.is_true:
        return cluster_ready.reason, cluster_ready.message
    return None, placement_problem or (
        submission.message if submission is not None else "the trainer was about to be submitted"
    )


def _requeue_after_seconds(draft: StatusDraft, observed: Observed) -> float | None:
    """Seconds until the next pass; None if only a watch event can change anything."""
    spec = observed.job.spec
    if draft.result is not None:
        left = seconds_to_cleanup(draft, observed)
        return None if left is None else max(0.0, left)
    if not draft.is_under_way:
        if draft.suspended_at is not None:
            return None
        left = seconds_to_start(draft)
        return POD_POLL_SECONDS if left is None else min(left, POD_POLL_SECONDS)
    if observed.job.status.counters is None or draft.counters.attempts > observed.job.status.counters.attempts:
        # This pass has started an attempt. The next one creates the cluster.
        return 0.0
    if draft.attempt.state == AttemptState.QUEUED:
        # Kueue changes the cluster when it admits it.
        return None
    waits_for_ray = draft.attempt.submissions > 0 or draft.attempt.ready_at is not None
    was_polled = observed.ray.reachability is not Reachability.NOT_ASKED
    poll = RAY_POLL_SECONDS if waits_for_ray or was_polled else POD_POLL_SECONDS
    limits = (
        seconds_to_next_limit(draft, observed, _run_policy(observed)),
        seconds_to_pod_counts(draft, spec) if spec is not None else None,
    )
    return min([poll, *(seconds for seconds in limits if seconds is not None and seconds > 0)])
