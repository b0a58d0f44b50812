"""Starting the trainer through Ray's Jobs API: JobSubmitted, and the decision to submit."""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_operator.manifests.naming import submission_id
from rljob_operator.reconcile.observed import EffectKind, Observed, ObservedJob, ObservedRayJob, Reachability
from rljob_operator.reconcile.plan_types import Effect, SubmitJob
from rljob_operator.reconcile.status_draft import FALSE, TRUE, StatusDraft


def newest_submission(draft: StatusDraft, job: ObservedJob) -> str:
    """Id of the newest submission of the newest attempt; there must be one."""
    return submission_id(job.name, draft.attempt.number, draft.attempt.submissions)


def ray_job(draft: StatusDraft, observed: Observed) -> ObservedRayJob | None:
    """What Ray says of the newest submission; None where there is none, or Ray does not know or say."""
    job = observed.ray.job
    if draft.attempt.submissions == 0 or observed.ray.reachability is not Reachability.OK or job is None:
        return None
    return job if job.submission_id == newest_submission(draft, observed.job) else None


def report_submission(draft: StatusDraft, observed: Observed) -> None:
    """Sets JobSubmitted: True from the moment that Ray knows the job."""
    if draft.attempt.submissions == 0:
        return
    kind, name = ConditionType.JOB_SUBMITTED, newest_submission(draft, observed.job)
    failure = observed.failure
    if ray_job(draft, observed) is not None:
        draft.set(kind, TRUE, Reason.SUBMITTED, f"Ray job {name}")
    elif draft.is_true(kind):
        if observed.ray.reachability is Reachability.OK:
            draft.set(kind, FALSE, Reason.DRIVER_LOST, f"Ray no longer knows job {name}; its head was restarted")
    elif failure is not None and failure.kind is EffectKind.SUBMIT_JOB:
        draft.set(kind, FALSE, failure.reason, failure.message)
    elif draft.condition(kind) is None:
        draft.set(kind, FALSE, Reason.SUBMITTING, f"Ray job {name} is being submitted")


def submit_when_ready(draft: StatusDraft, observed: Observed) -> tuple[Effect, ...]:
    """Submits once nothing is missing. The number of the submission is raised first, in the status, so that a second
    try has the same id and finds the first."""
    conditions = (ConditionType.CLUSTER_READY, ConditionType.PLACEMENT_FEASIBLE)
    if not all(draft.is_true(kind) for kind in conditions) or observed.ray.reachability is not Reachability.OK:
        return ()
    if draft.attempt.submissions == 0:
        draft.change_attempt(draft.attempt.model_copy(update={"submissions": 1}))
        report_submission(draft, observed)
    # The seconds of its creation put a job that was made again behind the one before it.
    num_starts = sum(attempt.submissions for attempt in draft.attempts)
    start_number = int(observed.job.created.timestamp()) + num_starts
    return (SubmitJob(newest_submission(draft, observed.job), draft.attempt.number, start_number),)
