"""What an operator does, seen from outside: its requests in the API server's audit log, how old the progress in its
jobs becomes, and how late it renews its Lease."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from rljob_testing.cluster.api_server import ApiServer
from rljob_testing.local_servers import shut_down
from rljob_testing.operator.forked_operator import ACCOUNT, LEASE_PATH, OPERATOR_NAMESPACE

JOBS = "/apis/rljob.dev/v1alpha1/rljobs"
WRITES = ("create", "update", "patch", "delete", "deletecollection")
USER = f"system:serviceaccount:{OPERATOR_NAMESPACE}:{ACCOUNT}"
STATE_FIELDS = {"phase", "reason", "counters", "result", "nextAttempt", "gpus", "pools"}
"""Fields of a status that new progress does not change. It changes the messages of conditions."""


@dataclass(frozen=True)
class Request:
    """A request of the operator, as the API server logged it."""

    verb: str
    resource: str
    """Plural name, with a subresource such as `rljobs/status`."""
    namespace: str
    name: str
    at: float
    """When the server received it: seconds since 1970."""
    code: int
    status: Mapping[str, Any]
    """For a patch of a job's status the changed fields; else empty."""

    @property
    def is_write(self) -> bool:
        """Whether it can change an object. Renewals of the Lease do not count."""
        return self.verb in WRITES and self.resource != "leases"

    @property
    def is_progress(self) -> bool:
        """Whether it is a patch of a status that changes nothing but the progress."""
        return self.resource == "rljobs/status" and "progress" in self.status and not STATE_FIELDS & set(self.status)

    def label(self) -> str:
        """Verb, resource and the changed fields, for example `patch rljobs/status (phase, conditions)`."""
        return f"{self.verb} {self.resource}" + (f" ({', '.join(sorted(self.status))})" if self.status else "")


class AuditLog:
    """The requests of the operator's service account. `arguments` are for the API server."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "audit.log"
        rules = [
            {
                "level": "Request",
                "users": [USER],
                "resources": [{"group": "rljob.dev", "resources": ["rljobs/status"]}],
            },
            {"level": "Metadata", "users": [USER]},
            {"level": "None"},
        ]
        stages = ["RequestReceived", "ResponseStarted"]
        policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": stages, "rules": rules}
        (folder / "audit-policy.json").write_text(json.dumps(policy))
        self.arguments = (f"--audit-policy-file={folder / 'audit-policy.json'}", f"--audit-log-path={self._path}")

    def position(self) -> int:
        """The current end of the log."""
        return self._path.stat().st_size if self._path.exists() else 0

    def since(self, position: int) -> list[Request]:
        """The requests that were logged after a position."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(position)
            return [_request(json.loads(line)) for line in file if line.endswith(b"\n")]


def _request(line: Mapping[str, Any]) -> Request:
    reference = line.get("objectRef", {})
    resource = "/".join(filter(None, (reference.get("resource", ""), reference.get("subresource", ""))))
    return Request(
        line["verb"],
        resource,
        reference.get("namespace", ""),
        reference.get("name", ""),
        datetime.fromisoformat(line["requestReceivedTimestamp"]).timestamp(),
        line.get("responseStatus", {}).get("code", 0),
        line.get("requestObject", {}).get("status") or {},
    )


def counted(requests: Iterable[Request]) -> dict[str, int]:
    """The number of requests by label, the most frequent first."""
    return dict(Counter(each.label() for each in requests).most_common())


def most_patches_per_25_seconds(requests: Iterable[Request]) -> float:
    """The number of progress patches in 25 seconds of the job with the most of them, from the time between its first
    and its last one. 0 if no job has two."""
    times: dict[tuple[str, str], list[float]] = {}
    for each in requests:
        if each.is_progress:
            times.setdefault((each.namespace, each.name), []).append(each.at)
    rates = [25 * (len(found) - 1) / (found[-1] - found[0]) for found in times.values() if len(found) > 1]
    return max(rates, default=0.0)


class ProgressAges:
    """The age that the progress in the status of each unfinished job reaches before it is replaced."""

    def __init__(self) -> None:
        self._updated: dict[str, float] = {}
        self._oldest: dict[str, float] = {}

    def on_job(self, job: Mapping[str, Any]) -> None:
        """Handles a state of a job that the API server has just sent."""
        status, uid = job.get("status", {}), job["metadata"]["uid"]
        updated = status.get("progress", {}).get("updatedAt")
        if updated is None or "result" in status:
            self._updated.pop(uid, None)
            return
        at, now = datetime.fromisoformat(updated).timestamp(), time.time()
        if (before := self._updated.get(uid)) is not None and at != before:
            self._oldest[uid] = max(self._oldest.get(uid, 0.0), now - before)
        self._updated[uid] = at

    def oldest(self) -> tuple[float, float]:
        """The oldest progress of any job, and the mean over the jobs of their oldest, in seconds."""
        now = time.time()
        ages = [max(self._oldest.get(uid, 0.0), now - at) for uid, at in self._updated.items()]
        return max(ages, default=0.0), sum(ages) / max(1, len(ages))


@contextmanager
def progress_ages(server: ApiServer) -> Iterator[ProgressAges]:
    """Watches all jobs from a thread until the end of the context."""
    ages, open_streams = ProgressAges(), []
    listed = server.http.get(JOBS, params={"resourceVersion": "0"}).raise_for_status().json()
    for job in listed["items"]:
        ages.on_job(job)

    def follow() -> None:
        query = {"watch": "1", "resourceVersion": listed["metadata"]["resourceVersion"]}
        with (
            suppress(httpx.HTTPError),
            server.http.stream("GET", JOBS, params=query, timeout=httpx.Timeout(30.0, read=None)) as answer,
        ):
            open_streams.append(answer.extensions["network_stream"].get_extra_info("socket"))
            for line in answer.iter_lines():
                ages.on_job(json.loads(line)["object"])

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield ages
    finally:
        for each in open_streams:
            shut_down(each)
        thread.join(10)


def oldest_lease(server: ApiServer, seconds: float) -> tuple[float, float]:
    """Looks at the Lease once a second for some time. Returns the longest time since its last renewal, and after which
    time it would be late."""
    oldest, limit, end = 0.0, 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        spec = server.http.get(LEASE_PATH).raise_for_status().json()["spec"]
        age = datetime.now(UTC) - datetime.fromisoformat(spec["renewTime"])
        oldest, limit = max(oldest, age.total_seconds()), float(spec["leaseDurationSeconds"])
        time.sleep(min(1.0, max(0.0, end - time.monotonic())))
    return oldest, limit
