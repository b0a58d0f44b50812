"""Decides how an attempt starts: chooses how many worker pods it uses, creates its RayCluster and submits its trainer.

Before that, `spec_problem` checks whether the job can run on a Kubernetes cluster at all. Elastic restart is here, too:
an attempt may run on fewer worker pods than the job requests. When all worker pods are ready again, the attempt is
stopped, and the next attempt uses all of them. `rljob_api.elastic` finds the numbers with which a job is
valid. It calls a worker pod a node, as the field `nodes` of a pool does; this is not a node of Kubernetes.
"""

from __future__ import annotations

from collections import Counter

from rljob_api.conditions import Reason
from rljob_api.elastic import largest_valid_nodes, with_nodes
from rljob_api.errors import DocumentError
from rljob_api.job_checks import STORAGE_RULE, cluster_violations
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import Attempt, JobPods, PoolNodes
from rljob_api.yaml_text import wire_path
from rljob_operator.manifests.defaults import Defaults
from rljob_operator.manifests.naming import attempt_in_name
from rljob_operator.manifests.pod_environment import spec_document
from rljob_operator.reconcile.attempt_endings import Ending
from rljob_operator.reconcile.cluster import SHORT_SILENCE_SECONDS, are_clusters_deleted, readiness_problem
from rljob_operator.reconcile.decision import ApplyNetworkPolicy, CreateCluster, Effect, SubmitRayJob
from rljob_operator.reconcile.observed import EffectKind, Observed, ObservedJob, Reachability
from rljob_operator.reconcile.status_draft import StatusDraft, seconds_since, timestamp
from rljob_operator.reconcile.trainer import newest_submission, report_submission

MAX_DOUBLINGS = 6
"""How often `growAfterSeconds` is doubled at most."""


def spec_problem(job: ObservedJob, spec: RLJobSpec, defaults: Defaults) -> Ending | None:
    """Why the job cannot run on a Kubernetes cluster; None if its spec has no such problem."""
    found = cluster_violations(
        spec,
        job.labels,
        has_default_image=defaults.trainer_image is not None,
        service_account_names=defaults.service_account_names,
        allowed_label_prefixes=defaults.allowed_label_prefixes,
    )
    if found:
        reason = Reason.STORAGE_MISSING if found[0].rule == STORAGE_RULE else Reason.INVALID_SPEC
        return Ending(reason, "; ".join(f"{wire_path(each.path)}: {each.message}" for each in found))
    try:
        spec_document(job.identity, spec)
    except DocumentError as error:
        return Ending(Reason.INVALID_SPEC, str(error))
    return None


def choose_pod_counts(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> RLJobSpec:
    """Chooses how many worker pods of each pool (`nodes` of the spec) the current attempt uses. Returns the spec with
    these numbers.

    An elastic attempt that has waited long enough for all worker pods uses as many of the ready ones as the job is
    valid with. Once the trainer was submitted, the choice is fixed. One exception: while Ray responds and does not have
    the trainer, the choice is made again if Ray rejected the trainer or a chosen pod is no longer ready.

    If Ray may have the trainer, also records since when all worker pods are ready."""
    attempt = draft.attempt
    if _may_ray_have_trainer(draft, observed):
        _record_all_pods_ready(draft, observed, spec)
        return spec_of_attempt(spec, attempt)
    fewer = _fewer_pods(draft, observed, spec)
    are_chosen_ready = _are_all_pods_ready(draft, observed, spec_of_attempt(spec, attempt))
    if attempt.submissions == 0 or _was_trainer_rejected(observed) or (fewer and not are_chosen_ready):
        draft.change_attempt(nodes=fewer)
    return spec_of_attempt(spec, draft.attempt)


def spec_of_attempt(spec: RLJobSpec, attempt: Attempt) -> RLJobSpec:
    """The spec with the numbers of worker pods (`nodes`) that were chosen for the attempt."""
    return with_nodes(spec, {pool.name: pool.nodes for pool in attempt.nodes}) if attempt.nodes else spec


def should_use_all_pods(draft: StatusDraft, policy: RunPolicy) -> bool:
    """Whether to stop an attempt with fewer worker pods, because all have been ready for long enough."""
    left = _seconds_to_growth(draft, policy)
    return left is not None and left <= 0


def seconds_to_pod_counts(draft: StatusDraft, spec: RLJobSpec) -> float | None:
    """Seconds until an elastic attempt no longer waits for all worker pods, or until an attempt with fewer worker pods
    is stopped to use all of them. Negative if this time has passed; None if there is no such time."""
    attempt, elastic = draft.attempt, spec.run_policy.elastic
    if attempt.all_nodes_since is not None:
        return _seconds_to_growth(draft, spec.run_policy)
    if elastic is None or attempt.running_since is not None or attempt.active_since is None:
        return None
    return elastic.wait_seconds - seconds_since(attempt.active_since, draft.now)


def _seconds_to_growth(draft: StatusDraft, policy: RunPolicy) -> float | None:
    """Seconds until all worker pods have been ready for `runPolicy.elastic.growAfterSeconds`, which is doubled for each
    time in a row that the job did not last on all worker pods. None if an attempt does not run on fewer of them."""
    since, elastic = draft.attempt.all_nodes_since, policy.elastic
    if since is None or elastic is None:
        return None
    doublings = min(draft.counters.short_growths, MAX_DOUBLINGS)
    return elastic.grow_after_seconds * 2.0**doublings - seconds_since(since, draft.now)


def record_pods(draft: StatusDraft, spec: RLJobSpec, defaults: Defaults) -> None:
    """Records image and user of a new attempt's pods, unless it reuses a cluster. `rljob` starts a pod with the same
    image and user, which are otherwise known only from the operator's settings."""
    image = spec.image or defaults.trainer_image
    if image is not None and draft.attempt.cluster_uid is None:
        draft.pods = JobPods(
            image=image, image_pull_policy=defaults.image_pull_policy, run_as_user=defaults.run_as_user
        )


def create_cluster(draft: StatusDraft, observed: Observed) -> tuple[Effect, ...]:
    """Creates the cluster of an attempt that the status already records. Returns no effect while clusters or pods of
    earlier attempts exist: a pod that was lost when this attempt started may have come back."""
    if not observed.kuberay_installed or observed.forbidden is not None or not are_clusters_deleted(observed):
        return ()
    return (CreateCluster(attempt_in_name(draft.attempt.cluster), draft.attempt.cluster),)


def submit(draft: StatusDraft, observed: Observed) -> SubmitRayJob:
    """Submits the trainer. The status records the submission first: after a crash, the operator uses the same
    submission id again, and finds the Ray job if Ray has it. The status also records the start number, which grows with
    each start of a trainer: checkpoints that an older trainer saves later are not used."""
    if draft.attempt.submissions == 0:
        # The job's creation time in seconds is the lower limit. So after a job is deleted and created again, its start
        # numbers are larger than those of the deleted job.
        created = int(observed.job.created.timestamp())
        number = max(created, draft.counters.start_number) + 1
        draft.change_counters(start_number=number)
        draft.change_attempt(submissions=1, start_number=number)
        report_submission(draft, observed)
    nodes = tuple((pool.name, pool.nodes) for pool in draft.attempt.nodes)
    return SubmitRayJob(
        newest_submission(draft, observed.job), draft.attempt.number, draft.counters.start_number, nodes
    )


def reapply_network_policy(draft: StatusDraft, observed: Observed) -> tuple[Effect, ...]:
    """Applies the network policy again while the dashboard is unreachable: it may still be the policy of an operator
    that ran in another namespace."""
    ray = observed.ray
    is_silent = ray.reachability is Reachability.UNREACHABLE and ray.silent_seconds >= SHORT_SILENCE_SECONDS
    return (ApplyNetworkPolicy(draft.attempt.cluster),) if is_silent else ()


def _may_ray_have_trainer(draft: StatusDraft, observed: Observed) -> bool:
    """Whether the trainer was submitted, and Ray has it, had it, or does not respond."""
    attempt, ray = draft.attempt, observed.ray
    if attempt.submissions == 0:
        return False
    return attempt.running_since is not None or ray.reachability is not Reachability.OK or ray.job is not None


def _was_trainer_rejected(observed: Observed) -> bool:
    """Whether Ray rejected the trainer. If Ray only does not respond, or does not list the trainer yet, it may still
    start the trainer."""
    failure = observed.failure
    return failure is not None and failure.kind is EffectKind.SUBMIT_JOB and failure.reason is Reason.SUBMISSION_FAILED


def _are_all_pods_ready(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> bool:
    """Whether the head pod and all worker pods of the spec are ready."""
    return readiness_problem(spec, observed.pods_of(draft.attempt.cluster), None) is None


def _fewer_pods(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> tuple[PoolNodes, ...]:
    """The numbers of worker pods with which an elastic attempt can start if it no longer waits for all of them. Empty
    if all are ready, the attempt still waits, too few are ready, or the job is not elastic. If the previous attempt ran
    on fewer worker pods of the same cluster, the attempt does not wait."""
    attempt, elastic = draft.attempt, spec.run_policy.elastic
    if elastic is None or attempt.active_since is None or _are_all_pods_ready(draft, observed, spec):
        return ()
    previous = draft.attempts[-2] if len(draft.attempts) > 1 else None
    ran_on_fewer = previous is not None and previous.cluster_uid == attempt.cluster_uid and previous.nodes != ()
    if not ran_on_fewer and seconds_since(attempt.active_since, draft.now) < elastic.wait_seconds:
        return ()
    pods = observed.pods_of(attempt.cluster)
    ready = Counter(pod.group for pod in pods if pod.ready and not (pod.deleting or pod.ended))
    found = largest_valid_nodes(spec, ready)
    return () if found is None else tuple(PoolNodes(name=name, nodes=nodes) for name, nodes in found.items())


def _record_all_pods_ready(draft: StatusDraft, observed: Observed, spec: RLJobSpec) -> None:
    """For an attempt whose trainer runs on fewer worker pods: records since when all worker pods are ready, or clears
    this record if they are not."""
    attempt = draft.attempt
    if not attempt.nodes or attempt.running_since is None:
        return
    are_all_ready = spec.run_policy.elastic is not None and _are_all_pods_ready(draft, observed, spec)
    if are_all_ready and attempt.all_nodes_since is None:
        draft.change_attempt(all_nodes_since=timestamp(draft.now))
    elif not are_all_ready and attempt.all_nodes_since is not None:
        draft.change_attempt(all_nodes_since=None)
