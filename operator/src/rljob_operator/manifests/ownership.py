"""Metadata of all objects that the operator creates for a job: labels, and the job as owner."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import JsonValue

from rljob_api.constants import API_GROUP, API_VERSION, KIND, LABEL_ATTEMPT, LABEL_JOB, LABEL_JOB_UID

Manifest = dict[str, JsonValue]
"""An API object, or a part of one, as JSON."""

MANAGED_BY = "rljob-operator"


@dataclass(frozen=True)
class JobIdentity:
    """The job that an object belongs to."""

    namespace: str
    name: str
    uid: str


def labels(job: JobIdentity, attempt: int | None = None) -> Manifest:
    """Labels of an object of the job; with the label of an attempt if a number is given."""
    of_attempt: Manifest = {} if attempt is None else {LABEL_ATTEMPT: str(attempt)}
    return {
        "app.kubernetes.io/managed-by": MANAGED_BY,
        LABEL_JOB: job.name,
        LABEL_JOB_UID: job.uid,
        **of_attempt,
    }


def metadata(job: JobIdentity, name: str, attempt: int | None = None) -> Manifest:
    """Metadata of an object that the job owns: Kubernetes deletes the object after the job."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": labels(job, attempt),
        "ownerReferences": [_owner_reference(job)],
    }


def _owner_reference(job: JobIdentity) -> Manifest:
    # No blockOwnerDeletion: some clusters allow it only with permission to update the finalizers of jobs.
    return {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
    }
