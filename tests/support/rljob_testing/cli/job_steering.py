"""A clock that the test controls, and the commands suspend, resume, stop and retry with it."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console

from rljob import steering
from rljob.cluster import ClusterOptions, connect
from rljob.polling import Clock
from rljob_cli.cluster.steering import steer as steer_jobs
from rljob_testing.cli.job_cluster import JobCluster

Step = Callable[[], None]
NOW = datetime(2026, 1, 31, 12, 30, 0, 250_000, tzinfo=UTC)
ASKED = "2026-01-31T12:30:00.250000Z"


class Script:
    """A clock whose sleeps perform the next action of a list; two seconds pass in each."""

    def __init__(self, steps: Sequence[Step], start: datetime = NOW) -> None:
        self._steps = list(steps)
        self._now = start

    def clock(self) -> Clock:
        """The clock."""
        return Clock(now=lambda: self._now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)
        if self._steps:
            self._steps.pop(0)()


def steer(
    cluster: JobCluster, command: str, steps: Sequence[Step] | None = None, kubeconfig: Path | None = None
) -> tuple[int, list[str]]:
    """Runs a command; returns exit code and output lines. With `steps` it waits, and one step runs after each poll."""
    output, left = io.StringIO(), list(steps or ())
    seconds = 0.0

    def sleep(length: float) -> None:
        nonlocal seconds
        seconds += length
        left.pop(0)()

    api = connect(ClusterOptions(kubeconfig=kubeconfig or cluster.kubeconfig))
    api.flags = " --context here"
    console = Console(file=output, highlight=False, width=80)
    clock = Clock(now=lambda: NOW + timedelta(seconds=seconds), sleep=sleep)
    requests = {
        "suspend": steering.suspend,
        "resume": steering.resume,
        "stop": steering.stop,
        "retry": steering.retry,
    }
    code = steer_jobs(requests[command], api, ["small"], console, wait=steps is not None, clock=clock)
    assert left == []
    return code, output.getvalue().splitlines()


def operator_writes(cluster: JobCluster, **status: object) -> Step:
    """Returns a step in which the operator writes these status fields; None removes a field."""
    return lambda: cluster.write_status("small", status)


def suspend(cluster: JobCluster) -> object:
    spec = cluster.job("small")["spec"]
    assert isinstance(spec, Mapping)
    return spec["suspend"]


def annotation(cluster: JobCluster, name: str) -> object:
    metadata = cluster.job("small")["metadata"]
    assert isinstance(metadata, Mapping)
    return metadata.get("annotations", {}).get(name)
