"""What all objects have in common that the operator makes: the job that owns them, and their labels."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import JsonValue

from rljob_api.constants import API_GROUP, API_VERSION, KIND, LABEL_ATTEMPT, LABEL_JOB, LABEL_JOB_UID

Manifest = dict[str, JsonValue]
"""An object, or a part of one, as it goes to the API server."""

MANAGED_BY = "rljob-operator"


@dataclass(frozen=True)
class JobIdentity:
    """The job that an object belongs to."""

    namespace: str
    name: str
    uid: str


def labels(job: JobIdentity, attempt: int | None = None) -> Manifest:
    """On everything that is made for the job, or for one attempt of it."""
    of_attempt: Manifest = {} if attempt is None else {LABEL_ATTEMPT: str(attempt)}
    return {
        "app.kubernetes.io/managed-by": MANAGED_BY,
        LABEL_JOB: job.name,
        LABEL_JOB_UID: job.uid,
        **of_attempt,
    }


def metadata(job: JobIdentity, name: str, attempt: int | None = None) -> Manifest:
    """Metadata of an object that goes away with the job."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": labels(job, attempt),
        "ownerReferences": [_owner_reference(job)],
    }


def _owner_reference(job: JobIdentity) -> Manifest:
    # No blockOwnerDeletion: some clusters let only those set it who may update the finalizers of jobs.
    return {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
    }
