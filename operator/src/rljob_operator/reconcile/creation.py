"""Creates what an attempt needs: chooses its nodes, creates its RayCluster and submits its trainer.

Before that it checks whether the job can run on this Kubernetes cluster at all. Elastic restart is here, too: an
attempt may run on the nodes that are ready. When all nodes are ready again, it is stopped, and the next attempt uses
them all. `rljob_api.v1alpha1.elastic` finds the node counts with which a job is valid.
"""

from __future__ import annotations

from collections import Counter

from rljob_api.conditions import Reason
from rljob_api.errors import DocumentError
from rljob_api.job_checks import STORAGE_RULE, cluster_violations
from rljob_api.v1alpha1.elastic import largest_valid_nodes, with_nodes
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import Attempt, PoolNodes
from rljob_api.yaml_text import wire_path
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.manifests.pod_environment import spec_document
from rljob_operator.reconcile.attempt_endings import Ending
from rljob_operator.reconcile.cluster import SHORT_SILENCE_SECONDS, are_clusters_deleted, readiness_problem
from rljob_operator.reconcile.decision import ApplyNetworkPolicy, CreateCluster, Effect, SubmitJob
from rljob_operator.reconcile.observed import EffectKind, Observed, ObservedJob, Reachability
from rljob_operator.reconcile.status_draft import StatusDraft, seconds_since, timestamp
from rljob_operator.reconcile.trainer import newest_submission, report_submission

ALL_NODES_SECONDS = 60
"""How long all nodes must have been ready before an attempt on fewer nodes is stopped to use them all."""


def spec_problem(job: ObservedJob, spec: RLJobSpec, defaults: Defaults) -> Ending | None:
    """Why the job cannot run on this Kubernetes cluster; None when it can."""
    found = cluster_violations(spec, has_default_image=defaults.trainer_image is not None)
    if found:
        reason = Reason.STORAGE_MISSING if found[0].rule == STORAGE_RULE else Reason.INVALID_SPEC
        return Ending(reason, "; ".join(f"{wire_path(each.path)}: {each.message}" for each in found))
    try:
        spec_document(job.identity, spec)
    except DocumentError as error:
        return Ending(Reason.INVALID_SPEC, str(error))
    return None


def choose_nodes(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> RLJobSpec:
    """The spec with the node counts that the running attempt uses.

    An elastic attempt that has waited long enough for all nodes takes the ready ones. Once the trainer was submitted,
    the choice is fixed. One exception: while Ray responds and does not have the trainer, the choice is made again if
    Ray rejected the trainer or a chosen node is lost."""
    attempt = draft.attempt
    if _may_have_trainer(draft, observed):
        _record_all_nodes_ready(draft, observed, spec)
        return spec_of_attempt(spec, attempt)
    chosen = _fewer_nodes(draft, observed, spec)
    are_lost = not _are_all_nodes_ready(draft, observed, spec_of_attempt(spec, attempt))
    if attempt.submissions == 0 or _was_refused(observed) or (chosen and are_lost):
        draft.change_attempt(nodes=chosen)
    return spec_of_attempt(spec, draft.attempt)


def spec_of_attempt(spec: RLJobSpec, attempt: Attempt) -> RLJobSpec:
    """The spec with the node counts that an attempt was submitted with."""
    return with_nodes(spec, {pool.name: pool.nodes for pool in attempt.nodes}) if attempt.nodes else spec


def should_use_all_nodes(draft: StatusDraft) -> bool:
    """Whether to stop an attempt on fewer nodes, because all nodes have been ready for `ALL_NODES_SECONDS`."""
    since = draft.attempt.all_nodes_since
    return since is not None and seconds_since(since, draft.now) >= ALL_NODES_SECONDS


def seconds_to_choice(draft: StatusDraft, spec: RLJobSpec) -> float | None:
    """Seconds until an attempt that waits for nodes starts on fewer, or until an attempt on fewer nodes is stopped to
    use them all; None if neither will happen."""
    attempt, elastic = draft.attempt, spec.run_policy.elastic
    if attempt.all_nodes_since is not None:
        return ALL_NODES_SECONDS - seconds_since(attempt.all_nodes_since, draft.now)
    if elastic is None or attempt.running_since is not None or attempt.cluster_created_at is None:
        return None
    return elastic.wait_seconds - seconds_since(attempt.cluster_created_at, draft.now)


def create_cluster(draft: StatusDraft, observed: Observed) -> tuple[Effect, ...]:
    """Creates the cluster of an attempt that the status already records. It waits while pods of earlier attempts are
    running: a pod that was lost when this attempt started may have come back."""
    if not observed.kuberay_installed or observed.forbidden is not None or not are_clusters_deleted(observed):
        return ()
    return (CreateCluster(draft.attempt.number, draft.attempt.cluster),)


def submit(draft: StatusDraft, observed: Observed) -> SubmitJob:
    """Submits the trainer. The status records the submission and its start number first: after a crash, the operator
    uses the same id again, and finds the Ray job if there is one."""
    if draft.attempt.submissions == 0:
        # The creation time in seconds makes the number of a recreated job higher than any number of the deleted one.
        created = int(observed.job.created.timestamp())
        number = max(created, draft.counters.start_number) + 1
        draft.change_counters(start_number=number)
        draft.change_attempt(submissions=1, start_number=number)
        report_submission(draft, observed)
    nodes = tuple((pool.name, pool.nodes) for pool in draft.attempt.nodes)
    return SubmitJob(newest_submission(draft, observed.job), draft.attempt.number, draft.counters.start_number, nodes)


def reapply_network_policy(draft: StatusDraft, observed: Observed) -> tuple[Effect, ...]:
    """Applies the network policy again while the dashboard is unreachable: it may still be the policy of an operator
    that ran in another namespace."""
    ray = observed.ray
    is_silent = ray.reachability is Reachability.UNREACHABLE and ray.silent_seconds >= SHORT_SILENCE_SECONDS
    return (ApplyNetworkPolicy(draft.attempt.cluster),) if is_silent else ()


def _may_have_trainer(draft: StatusDraft, observed: Observed) -> bool:
    attempt, ray = draft.attempt, observed.ray
    if attempt.submissions == 0:
        return False
    return attempt.running_since is not None or ray.reachability is not Reachability.OK or ray.job is not None


def _was_refused(observed: Observed) -> bool:
    """Whether Ray rejected the trainer. A Ray that does not answer, or does not list the trainer yet, may still start
    it."""
    failure = observed.failure
    return failure is not None and failure.kind is EffectKind.SUBMIT_JOB and failure.reason is Reason.SUBMISSION_FAILED


def _are_all_nodes_ready(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> bool:
    """Whether all nodes of the spec are ready."""
    return readiness_problem(spec, observed.pods_of(draft.attempt.cluster), None) is None


def _fewer_nodes(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> tuple[PoolNodes, ...]:
    """The node counts of an elastic attempt that does not wait longer for all nodes; empty if it waits or all are
    ready. If the previous attempt ran on fewer nodes of the same cluster, there is no wait."""
    attempt, elastic = draft.attempt, spec.run_policy.elastic
    if elastic is None or attempt.cluster_created_at is None or _are_all_nodes_ready(draft, observed, spec):
        return ()
    former = draft.attempts[-2] if len(draft.attempts) > 1 else None
    ran_on_fewer = former is not None and former.cluster_uid == attempt.cluster_uid and former.nodes != ()
    if not ran_on_fewer and seconds_since(attempt.cluster_created_at, draft.now) < elastic.wait_seconds:
        return ()
    pods = observed.pods_of(attempt.cluster)
    ready = Counter(pod.group for pod in pods if pod.ready and not (pod.deleting or pod.ended))
    found = largest_valid_nodes(spec, ready)
    return () if found is None else tuple(PoolNodes(name=name, nodes=nodes) for name, nodes in found.items())


def _record_all_nodes_ready(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> None:
    """Records since when all nodes are ready, for an attempt that runs on fewer."""
    attempt = draft.attempt
    if not attempt.nodes or attempt.running_since is None:
        return
    are_all_ready = spec.run_policy.elastic is not None and _are_all_nodes_ready(draft, observed, spec)
    if are_all_ready and attempt.all_nodes_since is None:
        draft.change_attempt(all_nodes_since=timestamp(draft.now))
    elif not are_all_ready and attempt.all_nodes_since is not None:
        draft.change_attempt(all_nodes_since=None)
