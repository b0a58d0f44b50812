"""Starting the trainer through Ray's Jobs API: JobSubmitted, and the decision to submit."""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.status import AttemptState
from rljob_operator.manifests.naming import submission_id
from rljob_operator.reconcile.cluster import Verdict
from rljob_operator.reconcile.observed import EffectKind, Observed, ObservedJob, ObservedRayJob, Reachability
from rljob_operator.reconcile.plan_types import SubmitJob
from rljob_operator.reconcile.status_draft import FALSE, TRUE, StatusDraft
from rljob_operator.reconcile.timestamps import timestamp


def newest_submission(draft: StatusDraft, job: ObservedJob) -> str:
    """Id of the submission of the newest attempt; there must be one."""
    return submission_id(job.name, draft.attempt.number, draft.attempt.submissions)


def ray_job(draft: StatusDraft, observed: Observed) -> ObservedRayJob | None:
    """What Ray says of the newest submission; None where there is none, or Ray does not know or say."""
    job = observed.ray.job
    if draft.attempt.submissions == 0 or observed.ray.reachability is not Reachability.OK or job is None:
        return None
    return job if job.submission_id == newest_submission(draft, observed.job) else None


def report_submission(draft: StatusDraft, observed: Observed) -> Verdict | None:
    """Sets JobSubmitted: True from the moment that Ray knows the job. None where there is nothing new to say."""
    verdict = _verdict(draft, observed)
    if verdict is None:
        return None
    draft.set(ConditionType.JOB_SUBMITTED, verdict.status, verdict.reason, verdict.message)
    if verdict.holds and draft.attempt.running_since is None:
        draft.change_attempt(running_since=timestamp(draft.now), state=AttemptState.STARTING.value)
    return verdict


def submit(draft: StatusDraft, observed: Observed) -> SubmitJob:
    """Submits. The submission and its start number are written down first, so that a second try has the same and finds
    the first."""
    if draft.attempt.submissions == 0:
        # The seconds of its creation put a job that was made again behind the one before it.
        created = int(observed.job.created.timestamp())
        number = max(created, draft.counters.start_number) + 1
        draft.change_counters(start_number=number)
        draft.change_attempt(submissions=1, start_number=number)
        report_submission(draft, observed)
    number = draft.attempt.start_number or draft.counters.start_number
    nodes = tuple((pool.name, pool.nodes) for pool in draft.attempt.nodes)
    return SubmitJob(newest_submission(draft, observed.job), draft.attempt.number, number, nodes)


def _verdict(draft: StatusDraft, observed: Observed) -> Verdict | None:
    if draft.attempt.submissions == 0:
        return None
    name, failure = newest_submission(draft, observed.job), observed.failure
    if ray_job(draft, observed) is not None:
        return Verdict(TRUE, Reason.SUBMITTED, f"Ray job {name}")
    if draft.attempt.running_since is not None:
        if observed.ray.reachability is not Reachability.OK:
            return None
        return Verdict(FALSE, Reason.DRIVER_LOST, f"Ray no longer knows job {name}; its head was restarted")
    if failure is not None and failure.kind is EffectKind.SUBMIT_JOB:
        return Verdict(FALSE, failure.reason, failure.message)
    return Verdict(FALSE, Reason.SUBMITTING, f"Ray job {name} is being submitted")
