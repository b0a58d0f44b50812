"""Names of what belongs to a job. Job names have at most 46 characters and these add at most 3 digits, so that KubeRay,
which cuts names of more than 50, cuts none of these."""

from __future__ import annotations

NUM_NAMES = 1000


def cluster_name(job: str, attempt: int) -> str:
    """The RayCluster that an attempt makes. After 999 attempts names come again: the cluster that had the name is long
    gone, and what it left would be seen before another one is made."""
    return f"{job}-{attempt if attempt < NUM_NAMES else attempt % NUM_NAMES}"


def companion_name(cluster: str, job_uid: str) -> str:
    """The Secret and the network policy of a cluster. A former job of the same name had others, which the garbage
    collector may still be about to delete."""
    return f"{cluster}-{job_uid[:8]}"


def submission_id(job: str, attempt: int, submission: int) -> str:
    """What Ray's Jobs API knows a trainer by; `submission` counts from 1 within the attempt."""
    return f"{job}-{attempt}-{submission}"
