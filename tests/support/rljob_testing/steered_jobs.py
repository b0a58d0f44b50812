"""The commands that steer a job, with a clock of the test's own, and the states of a job that they meet."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console

from rljob_cli.cluster.client import ClusterOptions, connect
from rljob_cli.cluster.steering import Steering
from rljob_cli.cluster.watching import Clock
from rljob_testing.job_cluster import JobCluster, full_status

Step = Callable[[], None]
NOW = datetime(2026, 1, 31, 12, 30, 0, 250_000, tzinfo=UTC)
SINCE = "2026-01-31T12:20:00Z"
ASKED = "2026-01-31T12:30:00.250000Z"
ATTEMPT = {"number": 1, "cluster": "small-1", "started": SINCE, "state": "Running"}
ENDED = ATTEMPT | {"state": "Ended", "ended": SINCE, "outcome": "Failed", "reason": "HeadLost"}
COUNTERS = {"attempts": 1}
RUNNING = full_status() | {"attempts": [ATTEMPT], "counters": COUNTERS}
FAILED = {"outcome": "Failed", "reason": "OutOfMemory", "message": "head: 8Gi", "at": SINCE}
COMPLETE = FAILED | {"outcome": "Succeeded", "reason": "Succeeded"}
BETWEEN = {"reason": "HeadLost", "failureClass": "Infrastructure", "notBefore": "2026-01-31T12:31:00Z"}


def steer(
    cluster: JobCluster, command: str, steps: Sequence[Step] | None = None, kubeconfig: Path | None = None
) -> tuple[int, list[str]]:
    """Exit code and lines of a command; with `steps` it waits, and each look is followed by the next of them."""
    output, left = io.StringIO(), list(steps or ())
    seconds = 0.0

    def sleep(length: float) -> None:
        nonlocal seconds
        seconds += length
        left.pop(0)()

    api = connect(ClusterOptions(kubeconfig=kubeconfig or cluster.kubeconfig))
    console = Console(file=output, highlight=False, width=80)
    clock = Clock(now=lambda: NOW + timedelta(seconds=seconds), sleep=sleep)
    steering = Steering(api, "small", " --context here", console, wait=steps is not None, clock=clock)
    code = {
        "suspend": steering.suspend,
        "resume": steering.resume,
        "stop": steering.stop,
        "retry": steering.retry,
    }[command]()
    assert left == []
    return code, output.getvalue().splitlines()


def says(cluster: JobCluster, **status: object) -> Step:
    """The operator writes a status; None takes a field away."""
    return lambda: cluster.write_status("small", status)


def suspend(cluster: JobCluster) -> object:
    spec = cluster.job("small")["spec"]
    assert isinstance(spec, Mapping)
    return spec["suspend"]


def annotation(cluster: JobCluster, name: str) -> object:
    metadata = cluster.job("small")["metadata"]
    assert isinstance(metadata, Mapping)
    return metadata.get("annotations", {}).get(name)
