"""Starts and ends attempts, and decides what follows an attempt: the next one or the end of the job.

This module also counts retries, and resets the retry budgets after progress or when a user asks for a retry.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta

from rljob_api.conditions import FAILURE_CLASSES, NO_ROOM, RESTARTED_FREELY, ConditionType, Reason
from rljob_api.scalars import MAX_COUNT
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.status import Attempt, AttemptOutcome, AttemptState, FailureClass, JobResult, NextAttempt
from rljob_operator.manifests.naming import cluster_name
from rljob_operator.reconcile.attempt_endings import Ending
from rljob_operator.reconcile.observed import ObservedJob
from rljob_operator.reconcile.status_draft import (
    FALSE,
    MAX_ATTEMPT_MESSAGE,
    TRUE,
    StatusDraft,
    beginning_of,
    both_ends_of,
    seconds_since,
    timestamp,
)

FIRST_PAUSE_SECONDS = 10.0
"""The pause before the first retry, without jitter."""
LONGEST_PAUSE_SECONDS = 600.0
"""The longest pause before a retry, without jitter."""
JITTER = 0.2
"""Each pause is shorter or longer by up to this fraction, which depends on the job and the attempt: jobs that failed
together on one Kubernetes node do not restart together."""

Budget = tuple[str, int, int]
"""Name of the field in runPolicy, retries used, retries allowed."""

_CONDITIONS_OF_AN_ATTEMPT = (ConditionType.PLACEMENT_FEASIBLE, ConditionType.JOB_SUBMITTED, ConditionType.PROGRESSING)
"""Conditions that become False when the next attempt starts."""
_REASONS_OF_STOPPED_ATTEMPTS = (
    *(Reason.SUSPENDED, Reason.ACTIVE_DEADLINE_EXCEEDED, Reason.STOPPED_BY_USER, Reason.STOPPED_THROUGH_RAY),
    *RESTARTED_FREELY,
)
"""An attempt that ends with one of these reasons has the outcome Stopped."""


def start_attempt(
    draft: StatusDraft,
    job: ObservedJob,
    *,
    on_same_cluster: bool = False,
    with_same_name: bool = False,
    is_suspended: bool = False,
) -> None:
    """Records that the next attempt starts. The effects of the new attempt follow in a later pass, once the status is
    written.

    Args:
        on_same_cluster: Whether the previous attempt's cluster is used again.
        with_same_name: Whether a new cluster gets the name of the previous attempt's cluster, and so its Secret and
            network policy.
        is_suspended: Whether the same cluster is in a queue again.
    """
    number = draft.counters.attempts + 1
    previous = draft.attempt if on_same_cluster else None
    draft.add_attempt(
        Attempt(
            number=number,
            cluster=draft.attempt.cluster if on_same_cluster or with_same_name else cluster_name(job.name, number),
            cluster_uid=previous.cluster_uid if previous is not None else None,
            # Deadlines count from this time, so for a reused cluster it is the start of the attempt.
            active_since=timestamp(draft.now) if previous is not None and not is_suspended else None,
            state=(AttemptState.QUEUED if is_suspended else AttemptState.PROVISIONING).value,
            started=timestamp(draft.now),
        )
    )
    draft.change_counters(attempts=number)
    draft.next_attempt = None
    draft.suspended_at = None
    if not on_same_cluster:
        draft.drop(ConditionType.QUOTA_RESERVED)
    if number > 1:
        for kind in _CONDITIONS_OF_AN_ATTEMPT:
            draft.set_if_present(kind, FALSE, Reason.NEXT_ATTEMPT_STARTED, "the next attempt has started")
    draft.set_if_present(ConditionType.RETRYING, FALSE, Reason.NEXT_ATTEMPT_STARTED, f"attempt {number} has started")
    draft.set_if_present(ConditionType.SUSPENDED, FALSE, Reason.RESUMED, f"attempt {number} has started")


def end_attempt(draft: StatusDraft, ending: Ending) -> None:
    """Records how the newest attempt ended, and adds the time since `counts_since` to the job's active seconds."""
    attempt, since = draft.attempt, draft.counts_since
    active = max(0, round(seconds_since(since, draft.now))) if since is not None else 0
    is_evicted_early = ending.reason is Reason.EVICTED and attempt.running_since is None
    draft.change_counters(
        active_seconds=min(draft.counters.active_seconds + active, MAX_COUNT),
        evicted_seconds=min(draft.counters.evicted_seconds + active, MAX_COUNT) if is_evicted_early else 0,
    )
    failure_class = FAILURE_CLASSES.get(ending.reason)
    draft.change_attempt(
        state=AttemptState.ENDED.value,
        ended=timestamp(draft.now),
        outcome=_outcome(ending.reason),
        reason=ending.reason.value,
        message=both_ends_of(ending.message, MAX_ATTEMPT_MESSAGE),
        failure_class=failure_class.value if failure_class is not None else None,
        failure_cause=ending.cause,
        failed_pod=ending.pod,
        state_unknown_since=None,
    )
    if attempt.running_since is not None:
        draft.set(ConditionType.PROGRESSING, FALSE, Reason.ENDED, "")


def follow_ending(
    draft: StatusDraft, ending: Ending, policy: RunPolicy, job_uid: str, *, is_cluster_reusable: bool
) -> None:
    """Decides what follows an attempt without success: ends the job or plans the next attempt. After a suspension it
    does neither: the job waits until it is resumed.

    Args:
        is_cluster_reusable: Whether the next attempt may use the same cluster.
    """
    failure_class = FAILURE_CLASSES[ending.reason]
    _count_growth(draft, ending)
    if ending.reason in RESTARTED_FREELY:
        _restart_freely(draft, ending, job_uid, is_cluster_reusable)
        return
    if failure_class is FailureClass.RESUMABLE:
        return
    if draft.attempt.outcome == AttemptOutcome.FAILED:
        draft.change_counters(failed_attempts=draft.counters.failed_attempts + 1)
    if failure_class in (FailureClass.CONFIGURATION, FailureClass.FINAL):
        end_job(draft, ending)
        return
    _reset_budgets_after_progress(draft)
    field, used, allowed = _budget(draft, failure_class, policy)
    if used >= allowed:
        after = f"after {used} of {allowed} retries (runPolicy.{field}): " if allowed else ""
        end_job(draft, Ending(ending.reason, after + ending.message))
        return
    counter = "application_retries" if failure_class is FailureClass.APPLICATION else "infrastructure_retries"
    draft.change_counters(**{counter: used + 1})
    num_failures = draft.counters.application_retries + draft.counters.infrastructure_retries
    seconds = _pause_seconds(draft, job_uid, num_failures)
    _plan_next_attempt(draft, ending, failure_class, seconds, same_cluster=is_cluster_reusable)
    start = timestamp(draft.now + timedelta(seconds=seconds))
    text = f"retry {used + 1} of {allowed} (runPolicy.{field}) at {start}, after: {ending.message}"
    draft.set(ConditionType.RETRYING, TRUE, ending.reason, text)


def _restart_freely(draft: StatusDraft, ending: Ending, job_uid: str, is_cluster_reusable: bool) -> None:
    """Plans the next attempt after one that ended for no fault of the job. It uses no retry. Each disruption and each
    time without room makes the next pause longer, until the job makes progress."""
    if ending.reason in (Reason.RESIZED, Reason.EVICTED):
        seconds = 0.0
    else:
        _reset_budgets_after_progress(draft)
        num_restarts = draft.counters.uncounted_restarts + 1
        draft.change_counters(uncounted_restarts=num_restarts)
        # A cluster that is kept holds its GPUs during the pause.
        seconds = _pause_seconds(draft, job_uid, 1 if is_cluster_reusable else num_restarts)
    _plan_next_attempt(draft, ending, FailureClass.RESUMABLE, seconds, same_cluster=is_cluster_reusable)
    text = ending.message
    if seconds:
        text = f"next attempt at {timestamp(draft.now + timedelta(seconds=seconds))}, uses no retry, after: {text}"
    draft.set(ConditionType.RETRYING, TRUE, ending.reason, text)


def _count_growth(draft: StatusDraft, ending: Ending) -> None:
    """After an elastic job has resumed on all worker pods: counts an attempt that failed or was disrupted before its
    first checkpoint, so that the job waits longer the next time."""
    if len(draft.attempts) < 2 or draft.attempts[-2].reason != Reason.RESIZED:
        return
    did_last = draft.attempt.checkpoint_step is not None
    is_by_user = ending.reason in (Reason.SUSPENDED, Reason.STOPPED_BY_USER)
    if did_last or not is_by_user:
        draft.change_counters(short_growths=0 if did_last else draft.counters.short_growths + 1)


def wait_for_another_operator(draft: StatusDraft, ending: Ending) -> None:
    """Plans the next attempt after an attempt that ended because this operator cannot read the job's spec. The next
    attempt starts when an operator of another version can read the spec, and uses no retry. Until then the job has no
    pods."""
    draft.change_attempt(failure_class=FailureClass.RESUMABLE.value)
    _plan_next_attempt(draft, ending, FailureClass.RESUMABLE, 0.0, same_cluster=False)
    draft.set(ConditionType.RETRYING, TRUE, ending.reason, ending.message)


def end_job(draft: StatusDraft, ending: Ending) -> None:
    """Ends the job as Complete or Failed. A failed job stays Failed until a user asks for a retry."""
    succeeded = ending.reason is Reason.SUCCEEDED
    outcome = AttemptOutcome.SUCCEEDED if succeeded else AttemptOutcome.FAILED
    draft.next_attempt = None
    draft.waiting_since = None
    draft.drop(ConditionType.QUOTA_RESERVED)
    draft.suspended_at = None
    draft.result = JobResult(
        outcome=outcome.value,
        reason=ending.reason.value,
        message=beginning_of(ending.message),
        at=timestamp(draft.now),
    )
    draft.set_if_present(ConditionType.SUSPENDED, FALSE, Reason.RESUMED, "the job has finished")
    draft.set_if_present(ConditionType.RETRYING, FALSE, Reason.ENDED, "the job has finished")
    draft.set(ConditionType.FINISHED, TRUE, ending.reason, ending.message)
    draft.set(ConditionType.COMPLETE if succeeded else ConditionType.FAILED, TRUE, ending.reason, ending.message)


def reopen_job(draft: StatusDraft) -> None:
    """Reopens a failed job and resets its retry budgets."""
    draft.result = None
    for kind in (ConditionType.FINISHED, ConditionType.FAILED):
        draft.drop(kind)
    reset_retry_budgets(draft)


def reset_retry_budgets(draft: StatusDraft) -> None:
    """Resets both retry budgets, and the pauses that grow with each restart."""
    draft.change_counters(application_retries=0, infrastructure_retries=0, uncounted_restarts=0, short_growths=0)


def _outcome(reason: Reason) -> str:
    if reason is Reason.SUCCEEDED:
        return AttemptOutcome.SUCCEEDED.value
    return (AttemptOutcome.STOPPED if reason in _REASONS_OF_STOPPED_ATTEMPTS else AttemptOutcome.FAILED).value


def _plan_next_attempt(
    draft: StatusDraft, ending: Ending, failure_class: FailureClass, pause_seconds: float, *, same_cluster: bool
) -> None:
    if ending.reason in (Reason.EVICTED, Reason.QUEUE_CHANGED, *NO_ROOM):
        draft.begin_waiting()
    else:
        draft.waiting_since = None
    draft.next_attempt = NextAttempt(
        reason=ending.reason.value,
        message=both_ends_of(ending.message, MAX_ATTEMPT_MESSAGE),
        failure_class=failure_class.value,
        not_before=timestamp(draft.now + timedelta(seconds=pause_seconds)),
        same_cluster=same_cluster,
    )


def _reset_budgets_after_progress(draft: StatusDraft) -> None:
    """Resets the retry budgets if the newest checkpoint is later than at every earlier failure: the job makes
    progress."""
    previous_step = draft.counters.checkpoint_step
    step = draft.checkpoint.step if draft.checkpoint is not None else None
    if step is not None and (previous_step is None or step > previous_step):
        reset_retry_budgets(draft)
        draft.change_counters(checkpoint_step=step)


def _budget(draft: StatusDraft, failure_class: FailureClass, policy: RunPolicy) -> Budget:
    """The retry budget for failures of the class Application or Infrastructure."""
    if failure_class is FailureClass.APPLICATION:
        return "maxAppRetries", draft.counters.application_retries, policy.max_app_retries
    return "maxInfraRetries", draft.counters.infrastructure_retries, policy.max_infra_retries


def _pause_seconds(draft: StatusDraft, job_uid: str, num_failures: int) -> float:
    """The pause before the next attempt (exponential backoff): it doubles with each further failure or restart without
    progress, up to `LONGEST_PAUSE_SECONDS`; then the jitter is applied."""
    # The exponent is limited to avoid an overflow: 2**10 times the first pause is longer than the longest pause anyway.
    seconds = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(num_failures - 1, 10))
    digest = hashlib.sha256(f"{job_uid} {draft.counters.attempts}".encode()).digest()
    return seconds * (1 - JITTER + 2 * JITTER * digest[0] / 255)
