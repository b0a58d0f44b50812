"""Names of the objects of a job.

Job names have at most 46 characters and cluster names add at most 4 (`-123`), because KubeRay truncates names of more
than 50 characters.
"""

from __future__ import annotations

NUM_NAMES = 1000
"""How many different cluster names a job has."""


def cluster_name(job: str, attempt: int) -> str:
    """Name of the RayCluster that an attempt creates: `NAME-1` for the first. From attempt 1001 on, names repeat; the
    earlier cluster with the same name was deleted long ago."""
    return f"{job}-{attempt if attempt < NUM_NAMES else attempt % NUM_NAMES}"


def attempt_in_name(cluster: str) -> int:
    """The attempt number in the name of an RLJob's RayCluster: the inverse of `cluster_name` below attempt 1000."""
    return int(cluster.rpartition("-")[2])


def companion_name(cluster: str, job_uid: str) -> str:
    """Name of a cluster's network policy. It contains a part of the job's UID, because the garbage collector may not
    yet have deleted the policy of an earlier job with the same name."""
    return f"{cluster}-{job_uid[:8]}"


def secret_name(cluster: str, job_uid: str, key_id: str) -> str:
    """Name of the Secret with a cluster's token. It contains the id of the key from which the token is derived: a later
    cluster with the same name may have a token from another key."""
    return f"{companion_name(cluster, job_uid)}-{key_id}"


def submission_id(job: str, attempt: int, submission: int) -> str:
    """A trainer's id in Ray's Jobs API; `submission` counts from 1 within the attempt."""
    return f"{job}-{attempt}-{submission}"
