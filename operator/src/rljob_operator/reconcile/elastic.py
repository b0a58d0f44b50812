"""Elastic restart: an attempt on the nodes that are there, and back to all of them when they are. With which numbers of
nodes a job is valid, `rljob_api.v1alpha1.elastic` works out."""

from __future__ import annotations

from collections import Counter

from rljob_api.conditions import Reason
from rljob_api.v1alpha1.elastic import fitting_nodes, with_nodes
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import Attempt, PoolNodes
from rljob_operator.reconcile.observed import EffectKind, Observed, Reachability
from rljob_operator.reconcile.pod_readiness import Pods, not_ready
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.timestamps import seconds_since, timestamp

WHOLE_SECONDS = 60
"""So long all nodes must have been there before an attempt on fewer is stopped for them."""


def spec_of_attempt(spec: RLJobSpec, attempt: Attempt) -> RLJobSpec:
    """The job as an attempt that was submitted runs it."""
    return with_nodes(spec, {pool.name: pool.nodes for pool in attempt.nodes}) if attempt.nodes else spec


def choose_nodes(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> RLJobSpec:
    """The job as the attempt under way runs it. One that has waited long enough for all nodes takes those that are
    ready; that is settled when Ray may have its trainer, but that nodes which are lost before Ray is seen to have it
    are not waited for."""
    attempt = draft.attempt
    if _may_have_trainer(draft, observed):
        _note_room(draft, observed, spec)
        return spec_of_attempt(spec, attempt)
    chosen = _nodes_that_are_there(draft, observed, spec)
    if attempt.submissions == 0 or _was_refused(observed) or (chosen and not _is_ready(draft, observed, spec)):
        draft.change_attempt(nodes=chosen)
    return spec_of_attempt(spec, draft.attempt)


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


def _is_ready(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> bool:
    """Whether the nodes that the attempt was submitted for are there."""
    return not_ready(spec_of_attempt(spec, draft.attempt), _pods(draft, observed), None) is None


def _nodes_that_are_there(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> tuple[PoolNodes, ...]:
    attempt, elastic = draft.attempt, spec.run_policy.elastic
    if elastic is None or attempt.admitted_at is None or not_ready(spec, _pods(draft, observed), None) is None:
        return ()
    former = draft.attempts[-2] if len(draft.attempts) > 1 else None
    was_small = former is not None and former.cluster_uid == attempt.cluster_uid and former.nodes != ()
    if not was_small and seconds_since(attempt.admitted_at, draft.now) < elastic.wait_seconds:
        return ()
    ready = Counter(pod.group for pod in _pods(draft, observed) if pod.ready and not (pod.deleting or pod.ended))
    found = fitting_nodes(spec, ready)
    return () if found is None else tuple(PoolNodes(name=name, nodes=nodes) for name, nodes in found.items())


def _note_room(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> None:
    """Notes since when all nodes are there, of an attempt that runs on fewer."""
    attempt = draft.attempt
    if not attempt.nodes or attempt.running_since is None:
        return
    is_whole = spec.run_policy.elastic is not None and not_ready(spec, _pods(draft, observed), None) is None
    if is_whole and attempt.whole_since is None:
        draft.change_attempt(whole_since=timestamp(draft.now))
    elif not is_whole and attempt.whole_since is not None:
        draft.change_attempt(whole_since=None)


def _pods(draft: StatusDraft, observed: Observed) -> Pods:
    return observed.pods_of(draft.attempt.cluster)
