"""`rljob delete`: removes a job with its cluster; what it has saved stays."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from rljob_api.constants import ExitCode
from rljob_cli.cluster.client import Cluster
from rljob_cli.cluster.job_state import storage_uri
from rljob_cli.cluster.stored_job import StoredJob
from rljob_cli.cluster.watching import POLL_SECONDS, Clock
from rljob_cli.errors import JobNotFoundError


def delete(cluster: Cluster, name: str, console: Console, *, wait: bool, clock: Clock | None = None) -> int:
    """Deletes the job; with `wait` it returns when none of its pods is left. 0, or 130 for Ctrl-C while waiting.

    Raises:
        JobNotFoundError: there is no such job.
    """
    job = cluster.job(name)
    cluster.delete_job(name)
    console.print(Text(f"{job.where} deleted; its pods stop within their grace period"), soft_wrap=True)
    folder = storage_uri(job)
    if folder is not None:
        console.print(Text(f"checkpoints and results stay in {folder}"), soft_wrap=True)
    if not wait:
        return 0
    try:
        _wait_for_its_end(cluster, job, console, clock or Clock())
    except KeyboardInterrupt:
        console.print("stopped waiting; the job is deleted all the same")
        return ExitCode.INTERRUPTED
    console.print("nothing of it is left")
    return 0


def _wait_for_its_end(cluster: Cluster, job: StoredJob, console: Console, clock: Clock) -> None:
    said = ""
    while True:
        left = [pod.metadata.name for pod in cluster.pods(job)]
        if not left and _is_gone(cluster, job):
            return
        text = f"waiting for {', '.join(left) or 'the job'}"
        if text != said:
            said = text
            console.print(Text(text, "dim"), soft_wrap=True)
        clock.sleep(POLL_SECONDS)


def _is_gone(cluster: Cluster, job: StoredJob) -> bool:
    """Whether the job, or what has its name, is another one or none."""
    try:
        return cluster.job(job.metadata.name).metadata.uid != job.metadata.uid
    except JobNotFoundError:
        return True
