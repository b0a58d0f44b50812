"""What follows from the end of an attempt: the end of the job, or another attempt, and when.

Tries are counted here, and given back: after progress, or when somebody asks for another attempt."""

from __future__ import annotations

import hashlib
from datetime import timedelta

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.status import AttemptOutcome, FailureClass, JobResult, NextAttempt
from rljob_operator.reconcile.attempts import MAX_MESSAGE
from rljob_operator.reconcile.endings import Ending
from rljob_operator.reconcile.failure_classes import FAILURE_CLASSES
from rljob_operator.reconcile.messages import beginning_of, both_ends_of
from rljob_operator.reconcile.status_draft import FALSE, TRUE, StatusDraft
from rljob_operator.reconcile.timestamps import timestamp

FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 600.0
JITTER = 0.2
"""A pause is this much shorter or longer, for each job by itself: jobs that a node has failed together do not come back
together."""

Budget = tuple[str, int, int]
"""Name of the field, tries used, tries allowed."""


def follow_ending(
    draft: StatusDraft, ending: Ending, policy: RunPolicy, job_uid: str, *, cluster_is_well: bool
) -> None:
    """Ends the job, or plans the next attempt. `cluster_is_well`: all pods of the cluster are ready, so that it can be
    used again after a failure that was not its own."""
    found = FAILURE_CLASSES.get(ending.reason)
    if found is FailureClass.FREE:
        if ending.reason is Reason.RESIZED:
            _plan_next(draft, ending, found, 0.0, same_cluster=cluster_is_well)
            draft.set(ConditionType.RETRYING, TRUE, ending.reason, ending.message)
        return
    if found is None or found in (FailureClass.CONFIGURATION, FailureClass.FINAL):
        if found is FailureClass.CONFIGURATION:
            draft.change_counters(failed_attempts=draft.counters.failed_attempts + 1)
        end_job(draft, ending)
        return
    draft.change_counters(failed_attempts=draft.counters.failed_attempts + 1)
    _give_back_after_progress(draft)
    field, used, allowed = _budget(draft, found, policy)
    if used >= allowed:
        after = f"after {used} of {allowed} retries (runPolicy.{field}): " if allowed else ""
        end_job(draft, Ending(ending.reason, after + ending.message))
        return
    counter = "application_retries" if found is FailureClass.APPLICATION else "infrastructure_retries"
    draft.change_counters(**{counter: used + 1})
    seconds = _pause_seconds(draft, job_uid)
    same_cluster = found is FailureClass.APPLICATION and cluster_is_well
    _plan_next(draft, ending, found, seconds, same_cluster=same_cluster)
    text = f"retry {used + 1} of {allowed} (runPolicy.{field}) in {seconds:.0f} s, after: {ending.message}"
    draft.set(ConditionType.RETRYING, TRUE, ending.reason, text)


def wait_for_another_operator(draft: StatusDraft, ending: Ending) -> None:
    """After an attempt that ended because this operator, of another version perhaps, reads too little of the job: the
    next one waits for one that can, holds nothing meanwhile, and costs no try."""
    draft.change_attempt(failure_class=FailureClass.FREE.value)
    _plan_next(draft, ending, FailureClass.FREE, 0.0, same_cluster=False)
    draft.set(ConditionType.RETRYING, TRUE, ending.reason, ending.message)


def _plan_next(
    draft: StatusDraft, ending: Ending, found: FailureClass, pause_seconds: float, *, same_cluster: bool
) -> None:
    draft.next_attempt = NextAttempt(
        reason=ending.reason.value,
        message=both_ends_of(ending.message, MAX_MESSAGE),
        failure_class=found.value,
        not_before=timestamp(draft.now + timedelta(seconds=pause_seconds)),
        same_cluster=same_cluster,
    )


def end_job(draft: StatusDraft, ending: Ending) -> None:
    """Complete or Failed, until somebody asks for another attempt."""
    succeeded = ending.reason is Reason.SUCCEEDED
    outcome = AttemptOutcome.SUCCEEDED if succeeded else AttemptOutcome.FAILED
    draft.next_attempt = None
    draft.suspended_at = None
    draft.result = JobResult(
        outcome=outcome.value,
        reason=ending.reason.value,
        message=beginning_of(ending.message),
        at=timestamp(draft.now),
    )
    draft.set_if_told(ConditionType.SUSPENDED, FALSE, Reason.RESUMED, "the job has ended")
    draft.set_if_told(ConditionType.RETRYING, FALSE, Reason.ENDED, "the job has ended")
    draft.set(ConditionType.FINISHED, TRUE, ending.reason, ending.message)
    draft.set(ConditionType.COMPLETE if succeeded else ConditionType.FAILED, TRUE, ending.reason, ending.message)


def reopen_job(draft: StatusDraft) -> None:
    """Takes the end of a failed job back; all its tries are given back."""
    draft.result = None
    for kind in (ConditionType.FINISHED, ConditionType.FAILED):
        draft.drop(kind)
    give_back_all(draft)


def give_back_all(draft: StatusDraft) -> None:
    """Counts retries anew."""
    draft.change_counters(application_retries=0, infrastructure_retries=0)


def _give_back_after_progress(draft: StatusDraft) -> None:
    """A job that has saved a later checkpoint than when a retry was last counted has got somewhere since."""
    before = draft.counters.checkpoint_step
    step = draft.checkpoint.step if draft.checkpoint is not None else None
    if step is not None and (before is None or step > before):
        give_back_all(draft)
        draft.change_counters(checkpoint_step=step)


def _budget(draft: StatusDraft, found: FailureClass, policy: RunPolicy) -> Budget:
    if found is FailureClass.APPLICATION:
        return "maxAppRetries", draft.counters.application_retries, policy.max_app_retries
    return "maxInfraRetries", draft.counters.infrastructure_retries, policy.max_infra_retries


def _pause_seconds(draft: StatusDraft, job_uid: str) -> float:
    """Twice as long after each failure without progress between."""
    num_failures = draft.counters.application_retries + draft.counters.infrastructure_retries
    # 2**10 first pauses are beyond the longest already.
    seconds = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(num_failures - 1, 10))
    digest = hashlib.sha256(f"{job_uid} {draft.counters.attempts}".encode()).digest()
    return seconds * (1 - JITTER + 2 * JITTER * digest[0] / 255)
