"""Submits a job: validates it as far as possible without a cluster, then creates it, or updates the existing one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from rljob.cluster import Cluster, ClusterOptions, connect
from rljob.differences import differences
from rljob.errors import JobExistsError, RejectedError
from rljob.job_attempts import attempt_under_way
from rljob.job_source import JobSource
from rljob.stored_job import StoredJob
from rljob_api.contract_documents import TrainerJob, dump_job
from rljob_api.errors import ContractError, Problem
from rljob_api.job_checks import cluster_violations
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.pools import PRIORITY_CLASS_LABEL, QUEUE_LABEL
from rljob_api.v1alpha1.rules import immutable_changes
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import AttemptState
from rljob_api.yaml_text import wire_path

_ANY_UID = "00000000-0000-0000-0000-000000000000"
"""Takes the place of the UID, which the API server has not chosen yet; only its length matters."""
_MAX_DIFFERENCES = 8


class Action(StrEnum):
    """What a submission did."""

    CREATED = "created"
    CHANGED = "changed"
    UNCHANGED = "unchanged"


@dataclass(frozen=True)
class Submission:
    """A submitted job."""

    job: StoredJob
    """The job on the cluster; with a dry run as it would be."""
    action: Action
    differences: tuple[str, ...] = ()
    """The changed values, such as `spec.suspend: true -> false`."""
    note: str = ""
    """When a changed queue or priority takes effect; empty if neither has changed."""


def connect_for(source: JobSource, options: ClusterOptions) -> Cluster:
    """A client for the namespace of the options or of the job. Raises RejectedError if both are given and differ, and
    if the operator would reject the job."""
    in_file = source.job.metadata.namespace
    if options.namespace and in_file and options.namespace != in_file:
        raise RejectedError(
            f"{source.name}: metadata.namespace is {in_file}, but --namespace is {options.namespace}; remove one of"
            " them"
        )
    cluster = connect(replace(options, namespace=options.namespace or in_file))
    _check_for_cluster(source, cluster.namespace)
    return cluster


def submit(cluster: Cluster, source: JobSource, *, dry_run: bool = False) -> Submission:
    """Creates the job, or applies the differences of runPolicy, suspend, queue and priority to the existing job with
    this name. With `dry_run`, the API server only validates the request.

    Raises:
        RejectedError: another part of the spec differs, the job is being deleted, or the API server rejects it.
        JobChangedError: somebody else changes the job meanwhile.
    """
    job = source.job
    body = job.to_wire() | {"metadata": job.metadata.to_wire() | {"namespace": cluster.namespace}}
    try:
        return Submission(cluster.create_job(body, dry_run=dry_run), Action.CREATED)
    except JobExistsError:
        return _update_existing(source, cluster, dry_run=dry_run)


def _check_for_cluster(source: JobSource, namespace: str) -> None:
    """Raises RejectedError, before anything is created, for what the operator would reject. A missing image is no error
    here, because the operator may have a default image."""
    job = source.job
    found = cluster_violations(job.spec, job.metadata.labels, has_default_image=True)
    if found:
        problems = [Problem(wire_path(broken.path), broken.message) for broken in found]
        raise RejectedError("\n".join(f"{source.name}: {problem}" for problem in problems), problems)
    try:
        dump_job(TrainerJob(name=job.metadata.name, namespace=namespace, uid=_ANY_UID, spec=job.spec))
    except ContractError as error:
        raise RejectedError(str(error)) from error


def _update_existing(source: JobSource, cluster: Cluster, *, dry_run: bool) -> Submission:
    job = source.job
    stored = cluster.job(job.metadata.name)
    if stored.metadata.deletion_timestamp is not None:
        raise RejectedError(
            f"{stored.where}: is being deleted; submit again once `rljob list{cluster.flags}` no longer shows it"
        )
    spec = stored.spec()
    changes = _changes(spec, job.spec)
    if immutable_changes(spec, job.spec):
        kept = {"run_policy": spec.run_policy, "suspend": spec.suspend}
        others = differences(spec, job.spec.model_copy(update=kept))
        raise RejectedError(_other_spec_message(source.name, stored, others, cluster.flags))
    labels = _label_changes(stored, job)
    if not changes and not labels:
        return Submission(stored, Action.UNCHANGED)
    changed = cluster.change_spec(stored, changes, labels, dry_run=dry_run)
    lines = (*differences(spec, changed.spec()), *_label_lines(stored, labels))
    note = _when_labels_apply(stored, labels, cluster.flags) if labels else ""
    return Submission(changed, Action.CHANGED, lines, note)


def _label_changes(stored: StoredJob, job: RLJob) -> dict[str, str | None]:
    """The labels for Kueue in the file that differ from those of the job, with their values. None, for an empty value,
    removes the label. A label that the file does not set stays: an administrator may have set it."""
    before, after = stored.metadata.labels, job.metadata.labels
    names = (QUEUE_LABEL, PRIORITY_CLASS_LABEL)
    return {
        name: after.get(name) or None for name in names if name in after and (before.get(name) or "") != after[name]
    }


def _label_lines(stored: StoredJob, labels: Mapping[str, str | None]) -> Iterator[str]:
    for name, value in labels.items():
        before, after = (json.dumps(each) if each else "unset" for each in (stored.metadata.labels.get(name), value))
        yield f"metadata.labels[{name}]: {before} -> {after}"


def _when_labels_apply(stored: StoredJob, labels: Mapping[str, str | None], flags: str) -> str:
    """When changed labels for Kueue take effect: the operator copies them only to new RayClusters. `stored`: the job
    before the change."""
    name, attempt, following = f"{stored.metadata.name}{flags}", attempt_under_way(stored), stored.status.next_attempt
    end, has_queue = stored.ending, QUEUE_LABEL not in labels and bool(stored.metadata.labels.get(QUEUE_LABEL))
    if end is not None and end.is_complete:
        return "the job is Complete, so these labels have no effect"
    if attempt is None and (following is None or not following.same_cluster):
        return "the next attempt uses these labels"
    if attempt is not None and attempt.state == AttemptState.QUEUED and (labels.get(QUEUE_LABEL) or has_queue):
        return "the operator deletes the RayCluster that waits, and a new one waits in the queue with these labels"
    return (
        f"an existing RayCluster keeps its labels, and the next one gets the new ones; `rljob suspend {name}`, then"
        f" `rljob resume {name}` replaces it earlier (a running trainer saves a checkpoint first)"
    )


def _changes(stored: RLJobSpec, wanted: RLJobSpec) -> dict[str, object]:
    """The merge patch that gives the stored job the file's runPolicy and suspend. A file without `suspend` does not
    change it, because `rljob suspend` may have set it."""
    changes: dict[str, object] = {}
    if stored.run_policy != wanted.run_policy:
        changes["runPolicy"] = wanted.run_policy.model_dump(mode="json", by_alias=True)
    if "suspend" in wanted.model_fields_set and stored.suspend != wanted.suspend:
        changes["suspend"] = wanted.suspend
    return changes


def _other_spec_message(source: str, stored: StoredJob, shown: list[str], flags: str) -> str:
    delete = f"rljob delete {stored.metadata.name}{flags}"
    lines = [
        f"{source}: {stored.where} already exists with another spec, and only runPolicy, suspend, queue and"
        f" priority of an existing job can change; use another metadata.name, or delete the job first (`{delete}`)."
        " Differences, stored -> file:",
        *(f"  {line}" for line in shown[:_MAX_DIFFERENCES]),
    ]
    if len(shown) > _MAX_DIFFERENCES:
        lines.append(f"  and {len(shown) - _MAX_DIFFERENCES} more")
    return "\n".join(lines)
