"""The decision: what is to be written and done about a job, from what was observed. Pure; the clock is passed in."""

from __future__ import annotations

from datetime import datetime

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.reconcile.attempts import end_attempt, start_attempt
from rljob_operator.reconcile.cleanup import clean_up
from rljob_operator.reconcile.cluster import report_cluster
from rljob_operator.reconcile.deadline import exceeded_deadline, seconds_to_deadline, stop_when_due
from rljob_operator.reconcile.endings import Ending, ending_of_attempt
from rljob_operator.reconcile.events import events_between
from rljob_operator.reconcile.observed import Observed
from rljob_operator.reconcile.placement import report_placement
from rljob_operator.reconcile.plan_types import CreateCluster, Effect, Plan
from rljob_operator.reconcile.progress import report_run
from rljob_operator.reconcile.specification import spec_problem
from rljob_operator.reconcile.status_draft import FALSE, TRUE, StatusDraft
from rljob_operator.reconcile.submission import report_submission, submit_when_ready

RAY_POLL_SECONDS = 4.0
"""Ray tells nothing of its own accord: it is asked from when all pods are ready until the job has ended."""

POD_POLL_SECONDS = 10.0
"""While pods start. Their own changes are watched, the events that say what keeps them are not."""


def reconcile(observed: Observed, now: datetime, defaults: Defaults) -> Plan:
    """Given the same, it answers the same; given its own status back, it changes nothing and repeats the effects that
    have not shown yet, all of which may be repeated."""
    job = observed.job
    if job.deleting:
        return Plan(status=job.status)
    draft = StatusDraft(job, now)
    effects: tuple[Effect, ...] = ()
    if not draft.ended:
        effects = _advance(draft, observed, defaults)
    if draft.ended:
        effects = clean_up(draft, observed)
    status = draft.status()
    return Plan(status, effects, events_between(job.status, status), _requeue_after_seconds(draft, observed))


def _advance(draft: StatusDraft, observed: Observed, defaults: Defaults) -> tuple[Effect, ...]:
    """One look at everything, in the order in which a job gets there; ends the job where it cannot go on."""
    spec = _checked_spec(draft, observed, defaults)
    if draft.ended:
        return ()
    if not draft.attempts:
        start_attempt(draft, observed.job)
    report_cluster(draft, observed, spec)
    if spec is not None:
        report_placement(draft, observed, spec)
    report_submission(draft, observed)
    report_run(draft, observed, spec)
    policy = RunPolicy() if spec is None else spec.run_policy
    submitted = draft.is_true(ConditionType.JOB_SUBMITTED)
    ending = ending_of_attempt(draft, observed, policy.grace_period_seconds)
    if ending is None and (submitted or spec is not None):
        ending = exceeded_deadline(draft, observed, policy)
    if ending is not None:
        end_attempt(draft, ending)
        return ()
    if submitted:
        return stop_when_due(draft, observed, policy)
    if spec is None:
        return ()
    return _create_when_free(draft, observed) if observed.cluster is None else submit_when_ready(draft, observed)


def _checked_spec(draft: StatusDraft, observed: Observed, defaults: Defaults) -> RLJobSpec | None:
    """The spec, if the job can run by it. A job that runs already is not ended because this operator, of another
    version perhaps, cannot read it: it goes on, and only its end is looked for."""
    job = observed.job
    problem: Ending | None = None
    if job.spec is None:
        problem = Ending(Reason.INVALID_SPEC, job.spec_error or "the spec cannot be read")
    elif not draft.attempts:
        problem = spec_problem(job, job.spec, defaults)
    if problem is None:
        draft.set(ConditionType.SPEC_VALID, TRUE, Reason.VALID, "")
        return job.spec
    draft.set(ConditionType.SPEC_VALID, FALSE, problem.reason, problem.message)
    if not draft.attempts:
        end_attempt(draft, problem)
    return None


def _create_when_free(draft: StatusDraft, observed: Observed) -> tuple[Effect, ...]:
    """Makes the cluster of an attempt that is written down, but not beside the pods of a former cluster of its name,
    which KubeRay would take for its own."""
    is_written = len(observed.job.status.attempts) == len(draft.attempts)
    if not is_written or not observed.kuberay_installed or observed.pods:
        return ()
    return (CreateCluster(draft.attempt.number),)


def _requeue_after_seconds(draft: StatusDraft, observed: Observed) -> float | None:
    spec = observed.job.spec
    if draft.ended:
        return None
    if len(draft.attempts) > len(observed.job.status.attempts):
        return 0.0
    waits_for_ray = draft.attempt.submissions > 0 or draft.has_reason(
        ConditionType.CLUSTER_READY, Reason.READY, Reason.RAY_NODES_MISSING, Reason.DASHBOARD_UNREACHABLE
    )
    poll = RAY_POLL_SECONDS if waits_for_ray else POD_POLL_SECONDS
    deadline = seconds_to_deadline(draft, observed, spec.run_policy) if spec is not None else None
    return poll if deadline is None else min(poll, deadline)
