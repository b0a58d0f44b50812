"""`rljob logs`: what the training prints, from the head pod while it is there, else where to find it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import BinaryIO

from rich.console import Console
from rich.text import Text

from rljob_api.constants import DRIVER_LOG_CONTAINER, HEAD_GROUP, RAY_CONTAINER, ExitCode
from rljob_api.printable import printable
from rljob_cli.cluster import Cluster
from rljob_cli.errors import CliError
from rljob_cli.job_state import ending, storage_uri, waits_for
from rljob_cli.kube_objects import Pod, StoredJob
from rljob_cli.plain_text import one_line
from rljob_cli.watching import POLL_SECONDS, Clock


class Container(StrEnum):
    """Whose log."""

    DRIVER = DRIVER_LOG_CONTAINER
    """The training, in the head pod."""
    RAY = RAY_CONTAINER
    """Ray itself."""


@dataclass(frozen=True)
class LogOptions:
    """Which log, and how much of it."""

    pool: str | None = None
    """A worker of this pool instead of the head pod."""
    index: int = 0
    """Which worker, in the order of the pods' names."""
    container: Container | None = None
    """The head's driver, or the worker's Ray, when unset."""
    follow: bool = False
    num_lines: int | None = None
    """From the end; all when unset."""

    @property
    def group(self) -> str:
        """The pool, or the head."""
        return self.pool or HEAD_GROUP

    @property
    def container_name(self) -> str:
        """The container to read."""
        return self.container or (Container.RAY if self.pool else Container.DRIVER)


@dataclass(frozen=True)
class _Source:
    """A container that has a log, or the reason why there is none (yet)."""

    pod: Pod | None = None
    missing: str = ""
    is_gone: bool = False
    """There was one and there will be none again."""


def show_logs(cluster: Cluster, name: str, options: LogOptions, console: Console, clock: Clock | None = None) -> int:
    """Copies the log to standard output as it is; everything else goes to `console`. 0 if there was a log, else 1; 130
    for Ctrl-C.

    Raises:
        CliError: there is no log yet, or no such pod.
    """
    try:
        return _show(cluster, name, options, console, clock or Clock())
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _show(cluster: Cluster, name: str, options: LogOptions, console: Console, clock: Clock) -> int:
    said = ""
    while True:
        job = cluster.job(name)
        source = _find(job, cluster.pods(job), options)
        if source.pod is not None:
            _copy(
                cluster.pod_log(source.pod, options.container_name, follow=options.follow, num_lines=options.num_lines)
            )
            return 0
        if source.is_gone:
            _tell_what_is_left(job, console)
            return 1
        if not options.follow:
            raise CliError(f"{job.where}: {source.missing}; --follow waits for it, `rljob explain {name}` says more")
        if source.missing != said:
            said = source.missing
            console.print(Text(f"waiting: {said}", "dim"), soft_wrap=True)
        clock.sleep(POLL_SECONDS)


def _find(job: StoredJob, pods: list[Pod], options: LogOptions) -> _Source:
    _refuse_unknown(job, options)
    newest = str(job.status.attempts[-1].number) if job.status.attempts else ""
    mine = [pod for pod in pods if pod.group == options.group and pod.attempt == newest]
    if len(mine) > options.index:
        pod = mine[options.index]
        status = pod.container(options.container_name)
        if status is not None and status.has_started:
            return _Source(pod)
        waiting = status.state.waiting if status else None
        why = f" ({waiting.reason})" if waiting else ""
        return _Source(missing=f"container {options.container_name} of pod {pod.metadata.name} has not started{why}")
    if ending(job.status) is not None or job.metadata.deletion_timestamp is not None:
        return _Source(is_gone=True)
    waits = waits_for(job.status)
    why = f" ({waits.type}={waits.status} {waits.reason}: {one_line(waits.message)})" if waits else ""
    which = "head pod" if options.pool is None else f"pod {options.index} of pool {options.pool}"
    return _Source(missing=f"the {which} is not there yet{why}")


def _refuse_unknown(job: StoredJob, options: LogOptions) -> None:
    """A pool or index that the job will never have."""
    if options.pool is None:
        return
    pools = {pool.name: pool.nodes for pool in job.spec().pools}
    if options.pool not in pools:
        raise CliError(f"{job.where}: has no pool {options.pool}; it has {', '.join(pools)}")
    if options.index >= pools[options.pool]:
        raise CliError(
            f"{job.where}: pool {options.pool} has {pools[options.pool]} pods (seen: --index {options.index});"
            " the first is --index 0"
        )
    if options.container is Container.DRIVER:
        raise CliError("--container driver: only the head pod has it; leave out --pool, or name --container ray")


def _standard_output() -> BinaryIO:
    return sys.stdout.buffer


def _copy(pieces: Iterator[bytes]) -> None:
    output = _standard_output()
    for piece in pieces:
        output.write(piece)
        output.flush()


def _tell_what_is_left(job: StoredJob, console: Console) -> None:
    """Where the log is when the pods are gone, and the last lines of it that the job itself holds."""
    attempt = job.status.attempts[-1] if job.status.attempts else None
    if attempt is None or attempt.submissions == 0:
        console.print(Text(f"{job.where}: ended before its training was started: there is no log"), soft_wrap=True)
    else:
        console.print(Text(f"{job.where}: its pods are gone, and their logs with them"), soft_wrap=True)
        copy = f"run/logs/driver-{job.metadata.name}-{attempt.number}-{attempt.submissions}.log"
        console.print(Text(f"a copy of the driver's log is {storage_uri(job)}/{copy}"), soft_wrap=True)
    end = ending(job.status)
    if end is not None:
        console.print(Text(f"{end.type}, {end.reason}:"), soft_wrap=True)
        console.print(Text(printable(end.message)), soft_wrap=True)
