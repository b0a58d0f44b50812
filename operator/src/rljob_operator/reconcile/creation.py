"""What is made for an attempt: on which nodes, its RayCluster, and the submission of its trainer.

Before that: whether the job can run on this Kubernetes cluster at all. Elastic restart is here, too: an attempt on the
nodes that are there, and back to all of them when they are. With which numbers of nodes a job is valid,
`rljob_api.v1alpha1.elastic` works out.
"""

from __future__ import annotations

from collections import Counter

from rljob_api.conditions import Reason
from rljob_api.errors import HandoverError
from rljob_api.job_checks import STORAGE_RULE, cluster_violations
from rljob_api.v1alpha1.elastic import fitting_nodes, with_nodes
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import Attempt, PoolNodes
from rljob_api.yaml_text import wire_path
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.manifests.environment import spec_document
from rljob_operator.manifests.objects import JobIdentity
from rljob_operator.reconcile.cluster import is_cleared, is_lost, not_ready
from rljob_operator.reconcile.endings import Ending
from rljob_operator.reconcile.observed import EffectKind, Observed, ObservedJob, Reachability
from rljob_operator.reconcile.plan_types import ApplyNetworkPolicy, CreateCluster, Effect, SubmitJob
from rljob_operator.reconcile.status_draft import StatusDraft, seconds_since, timestamp
from rljob_operator.reconcile.trainer import newest_submission, report_submission

WHOLE_SECONDS = 60
"""So long all nodes must have been there before an attempt on fewer is stopped for them."""


def spec_problem(job: ObservedJob, spec: RLJobSpec, defaults: Defaults) -> Ending | None:
    """Why the job cannot run here as it is written; None when it can."""
    found = cluster_violations(spec, has_default_image=defaults.trainer_image is not None)
    if found:
        reason = Reason.STORAGE_MISSING if found[0].rule == STORAGE_RULE else Reason.INVALID_SPEC
        return Ending(reason, "; ".join(f"{wire_path(each.path)}: {each.message}" for each in found))
    try:
        spec_document(JobIdentity(job.namespace, job.name, job.uid), spec)
    except HandoverError as error:
        return Ending(Reason.INVALID_SPEC, str(error))
    return None


def choose_nodes(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> RLJobSpec:
    """The job as the attempt under way runs it. One that has waited long enough for all nodes takes those that are
    ready; that is settled when Ray may have its trainer, but that nodes which are lost before Ray is seen to have it
    are not waited for."""
    attempt = draft.attempt
    if _may_have_trainer(draft, observed):
        _note_room(draft, observed, spec)
        return spec_of_attempt(spec, attempt)
    chosen = _nodes_that_are_there(draft, observed, spec)
    are_lost = not _is_whole(draft, observed, spec_of_attempt(spec, attempt))
    if attempt.submissions == 0 or _was_refused(observed) or (chosen and are_lost):
        draft.change_attempt(nodes=chosen)
    return spec_of_attempt(spec, draft.attempt)


def spec_of_attempt(spec: RLJobSpec, attempt: Attempt) -> RLJobSpec:
    """The job as an attempt that was submitted runs it."""
    return with_nodes(spec, {pool.name: pool.nodes for pool in attempt.nodes}) if attempt.nodes else spec


def should_grow(draft: StatusDraft) -> bool:
    """Whether an attempt on fewer nodes is to be stopped, since all have been there for a while."""
    since = draft.attempt.whole_since
    return since is not None and seconds_since(since, draft.now) >= WHOLE_SECONDS


def seconds_to_choice(draft: StatusDraft, spec: RLJobSpec) -> float | None:
    """Until an attempt that waits for nodes takes fewer, or one on fewer is stopped for all; None where neither is to
    come."""
    attempt, elastic = draft.attempt, spec.run_policy.elastic
    if attempt.whole_since is not None:
        return WHOLE_SECONDS - seconds_since(attempt.whole_since, draft.now)
    if elastic is None or attempt.running_since is not None or attempt.admitted_at is None:
        return None
    return elastic.wait_seconds - seconds_since(attempt.admitted_at, draft.now)


def create_cluster(draft: StatusDraft, observed: Observed) -> tuple[Effect, ...]:
    """Makes the cluster of an attempt that is written down. A pod that was lost when the attempt began may be back."""
    if not observed.kuberay_installed or observed.forbidden is not None or not is_cleared(observed):
        return ()
    lost = tuple(sorted(pod.name for pod in observed.pods if is_lost(pod)))
    return (CreateCluster(draft.attempt.number, draft.attempt.cluster, lost),)


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
    nodes = tuple((pool.name, pool.nodes) for pool in draft.attempt.nodes)
    return SubmitJob(newest_submission(draft, observed.job), draft.attempt.number, draft.counters.start_number, nodes)


def let_us_in(draft: StatusDraft) -> tuple[Effect, ...]:
    """A dashboard that is silent may be behind the network policy of an operator in another namespace."""
    attempt = draft.attempt
    return (ApplyNetworkPolicy(attempt.cluster),) if attempt.silent_since is not None else ()


def _may_have_trainer(draft: StatusDraft, observed: Observed) -> bool:
    attempt, ray = draft.attempt, observed.ray
    if attempt.submissions == 0:
        return False
    return attempt.running_since is not None or ray.reachability is not Reachability.OK or ray.job is not None


def _was_refused(observed: Observed) -> bool:
    """Whether Ray has said that it did not take the trainer. One that does not answer, or does not know it yet, may
    start it all the same."""
    failure = observed.failure
    return failure is not None and failure.kind is EffectKind.SUBMIT_JOB and failure.reason is Reason.SUBMISSION_FAILED


def _is_whole(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> bool:
    """Whether all nodes that the spec asks for are there."""
    return not_ready(spec, observed.pods_of(draft.attempt.cluster), None) is None


def _nodes_that_are_there(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> tuple[PoolNodes, ...]:
    attempt, elastic = draft.attempt, spec.run_policy.elastic
    if elastic is None or attempt.admitted_at is None or _is_whole(draft, observed, spec):
        return ()
    former = draft.attempts[-2] if len(draft.attempts) > 1 else None
    was_small = former is not None and former.cluster_uid == attempt.cluster_uid and former.nodes != ()
    if not was_small and seconds_since(attempt.admitted_at, draft.now) < elastic.wait_seconds:
        return ()
    pods = observed.pods_of(attempt.cluster)
    ready = Counter(pod.group for pod in pods if pod.ready and not (pod.deleting or pod.ended))
    found = fitting_nodes(spec, ready)
    return () if found is None else tuple(PoolNodes(name=name, nodes=nodes) for name, nodes in found.items())


def _note_room(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> None:
    """Notes since when all nodes are there, of an attempt that runs on fewer."""
    attempt = draft.attempt
    if not attempt.nodes or attempt.running_since is None:
        return
    is_whole = spec.run_policy.elastic is not None and _is_whole(draft, observed, spec)
    if is_whole and attempt.whole_since is None:
        draft.change_attempt(whole_since=timestamp(draft.now))
    elif not is_whole and attempt.whole_since is not None:
        draft.change_attempt(whole_since=None)
