"""Names of what belongs to a job. Job names have at most 46 characters and attempts at most 2 digits, so that KubeRay,
which cuts names of more than 50, cuts none of these."""

from __future__ import annotations


def cluster_name(job: str, attempt: int) -> str:
    """The RayCluster of an attempt."""
    return f"{job}-{attempt}"


def companion_name(cluster: str, job_uid: str) -> str:
    """The Secret and the network policy of a cluster. A former job of the same name had others, which the garbage
    collector may still be about to delete."""
    return f"{cluster}-{job_uid[:8]}"


def submission_id(job: str, attempt: int, submission: int) -> str:
    """What Ray's Jobs API knows a trainer by; `submission` counts from 1 within the attempt."""
    return f"{job}-{attempt}-{submission}"


def head_service_name(cluster: str) -> str:
    """The service that KubeRay makes for the head pod."""
    return f"{cluster}-head-svc"
