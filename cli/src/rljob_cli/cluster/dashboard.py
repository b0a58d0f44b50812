"""`rljob dashboard`: makes Ray's dashboard of a job available on this machine.

Finds the head pod, and the token of its dashboard. `rljob.port_forwarding` makes the connections. When the job
continues in another pod, the same port leads there.
"""

from __future__ import annotations

import base64
import binascii
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from rljob.cluster import Cluster
from rljob.errors import ClusterError, ClusterUnreachableError, JobNotFoundError
from rljob.job_attempts import is_over, is_to_be_retried, newest_attempt
from rljob.job_conditions import waits_for
from rljob.plain_text import one_line
from rljob.polling import MAX_UNREACHABLE_SECONDS, Clock
from rljob.port_forwarding import PortForwarding
from rljob.stored_job import StoredJob
from rljob_api.constants import DASHBOARD_PORT, HEAD_GROUP, RAY_CONTAINER
from rljob_cli.errors import CliError

POLL_SECONDS = 3.0
_TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
_TOKEN_ENTRY = "auth_token"
"""KubeRay's name of the Secret's entry."""


@dataclass(frozen=True)
class _Head:
    """A running head pod."""

    path: str
    """URL path of the pod."""
    name: str
    uid: str
    secret_prefix: str
    """How the operator begins the name of the Secret with the token."""


def show_dashboard(cluster: Cluster, name: str, port: int | None, console: Console, clock: Clock | None = None) -> int:
    """Forwards a local port until Ctrl-C, or until the job has no head pod any more and will not get one. Returns 0.

    Raises:
        CliError: the job has no running head pod, the local port is in use, or a permission is missing.
    """
    clock = clock or Clock()
    head = _require_head(cluster, cluster.job(name))

    def note(text: str) -> None:
        console.print(Text(text, "dim"), soft_wrap=True)

    try:
        with _listening(port) as listener, PortForwarding(cluster, listener, DASHBOARD_PORT, note) as forwarding:
            local_port = listener.getsockname()[1]
            forwarding.use(head.path)
            _print_address(cluster, head, local_port, console)
            _follow_job(cluster, name, head, forwarding, local_port, console, clock)
    except KeyboardInterrupt:
        console.print(Text("stopped"))
    return 0


def _follow_job(
    cluster: Cluster,
    name: str,
    head: _Head,
    forwarding: PortForwarding,
    local_port: int,
    console: Console,
    clock: Clock,
) -> None:
    """Returns when the job will have no head pod any more."""
    shown: _Head | None = head
    unreachable_since = None
    while True:
        clock.sleep(POLL_SECONDS)
        try:
            job = cluster.job(name)
            found = _head(cluster, job)
            unreachable_since = None
        except JobNotFoundError:
            console.print(Text(f"RLJob {name}: was deleted"), soft_wrap=True)
            return
        except ClusterUnreachableError:
            unreachable_since = unreachable_since or clock.now()
            if (clock.now() - unreachable_since).total_seconds() > MAX_UNREACHABLE_SECONDS:
                raise
            continue
        if found is None and (is_over(job) or job.metadata.deletion_timestamp is not None):
            console.print(Text(f"{job.where}: has ended, and its head pod was deleted"), soft_wrap=True)
            return
        if found == shown:
            continue
        forwarding.use(None if found is None else found.path)
        shown = found
        if found is None:
            console.print(Text("the head pod was deleted; waiting for the next one", "dim"), soft_wrap=True)
        else:
            _print_address(cluster, found, local_port, console)


def _require_head(cluster: Cluster, job: StoredJob) -> _Head:
    head = _head(cluster, job)
    if head is not None:
        return head
    waits = waits_for(job.status)
    if is_to_be_retried(job):
        why = "the requested retry has not begun"
    elif job.ending is not None:
        why = "the job has ended; with runPolicy.cleanup: KeepCluster its head pod is kept for some time"
    elif job.wants_suspend:
        why = "the job is suspended"
    elif waits is not None:
        why = f"{waits.type}={waits.status} {waits.reason}: {one_line(waits.message)}"
    else:
        why = "the job has not started"
    name = job.metadata.name
    raise CliError(f"{job.where}: has no running head pod ({why}); see `rljob explain {name}{cluster.flags}`")


def _head(cluster: Cluster, job: StoredJob) -> _Head | None:
    """The running head pod of the newest attempt; None if there is none. Whoever may create
    pods can give them these labels, so the pod must belong to the attempt's RayCluster."""
    newest = newest_attempt(job)
    if newest is None:
        return None
    for pod in cluster.pods(job):
        status, metadata = pod.container(RAY_CONTAINER), pod.metadata
        is_running = status is not None and status.state.running is not None and metadata.deletion_timestamp is None
        owners = [owner.uid for owner in metadata.owner_references]
        is_of_attempt = pod.cluster == newest.cluster and (newest.cluster_uid is None or newest.cluster_uid in owners)
        if pod.group == HEAD_GROUP and is_of_attempt and is_running:
            path = f"/api/v1/namespaces/{metadata.namespace}/pods/{metadata.name}"
            return _Head(path, metadata.name, metadata.uid, f"{newest.cluster}-{job.metadata.uid[:8]}-")
    return None


def _print_address(cluster: Cluster, head: _Head, local_port: int, console: Console) -> None:
    console.print(Text(f"dashboard of pod {head.name}: http://127.0.0.1:{local_port}"), soft_wrap=True)
    try:
        token = _token(cluster, head)
    except ClusterError as error:
        text = f"cannot read the token ({one_line(error)}); see docs/install.md#permissions"
        console.print(Text(text, "yellow"), soft_wrap=True)
        return
    if token is not None:
        console.print(Text(f"token: {token}"), soft_wrap=True)


def _token(cluster: Cluster, head: _Head) -> str | None:
    """The token that the dashboard asks for; None if it asks for none. It is in the Secret that the pod's variable
    refers to."""
    pod = cluster.request("GET", head.path)
    reference = next(_secret_references(pod), None)
    if reference is None:
        return None
    name, key = reference
    # Whoever may create pods could otherwise make this command print another Secret.
    if not name.startswith(head.secret_prefix) or key != _TOKEN_ENTRY:
        raise ClusterError(f"the pod takes its token from {one_line(name)}, which is not the operator's Secret for it")
    secret = cluster.request("GET", f"{head.path.rpartition('/pods/')[0]}/secrets/{name}")
    data = secret.get("data")
    value = data.get(key) if isinstance(data, dict) else None
    try:
        token = base64.b64decode(str(value), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        token = ""
    # Other characters could be control sequences of the terminal.
    if not re.fullmatch(r"[\w.=+/-]{1,512}", token, re.ASCII):
        raise ClusterError(f"Secret {one_line(name)}: has no valid entry {one_line(key)}")
    return token


def _secret_references(pod: object) -> Iterator[tuple[str, str]]:
    """Name and key of the Secret in the variable with Ray's token."""
    for container in _entries(_at(pod, "spec", "containers")):
        for variable in _entries(_at(container, "env")):
            if _at(variable, "name") == _TOKEN_VARIABLE:
                name, key = (_at(variable, "valueFrom", "secretKeyRef", field) for field in ("name", "key"))
                if isinstance(name, str) and isinstance(key, str):
                    yield name, key


def _entries(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _at(value: object, *names: str) -> object:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


@contextmanager
def _listening(port: int | None) -> Iterator[socket.socket]:
    """A local port that only this machine can connect to. Raises CliError if it is in use."""
    try:
        listener = socket.create_server(("127.0.0.1", port or 0))
    except OSError as error:
        if port is None:
            raise CliError(
                f"no port of this machine can be used ({error.strerror}); free some, or use --port"
            ) from None
        raise CliError(f"--port {port}: cannot be used ({error.strerror}); choose another one, or none") from None
    with listener:
        yield listener
