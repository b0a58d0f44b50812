"""Stands in for the dashboards of Ray clusters: real HTTP, real tokens, and jobs whose course a script decides.

One server is the dashboard of every cluster, at `/<namespace>/<cluster>`. Its responses have the form of Ray 2.60,
errors included: 404 for an unknown job, 500 for an id in use or a missing log file, 401 without a token, 403 for a
wrong one.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

from rljob_testing.cluster.api_server import ApiServer
from rljob_testing.local_servers import QuietHandler, running_http_server
from rljob_testing.operator import scripts

HEAD_NODE = "head-node"


@dataclass
class ClusterDashboard:
    """How the dashboard of one cluster behaves, and the requests that it received."""

    life: scripts.TrainerScript = field(default_factory=scripts.succeeding)
    delay_seconds: float = 0.0
    """Delay before each response."""
    down: bool = False
    """Closes connections without a response."""
    open: bool = False
    """Requires no token."""
    submit_error: str | None = None
    """The error with which it rejects submissions."""
    repeats_headers: bool = False
    """Fails to answer requests with a token, and repeats their headers in its error."""
    lose_answer: bool = False
    """Starts the job and then closes the connection without a response."""
    stops_late: bool = False
    """While this is set, jobs that were asked to stop continue to run."""
    forgets_jobs: bool = False
    """Knows no jobs, as after a restart of the head."""
    answers_itself: Callable[[BaseHTTPRequestHandler], bool] = lambda _: False
    """Called for each request with a token. If it returns True, it has written the response, or closes the
    connection."""
    num_gpus_missing: int = 0
    infeasible: Sequence[Mapping[str, object]] = ()
    posts: list[str] = field(default_factory=list)
    """Submission ids of all requests to start a job."""
    posted_at: list[float] = field(default_factory=list)
    """Times of these requests (time.monotonic)."""
    started: dict[str, tuple[float, scripts.Json]] = field(default_factory=dict)
    """Start time and environment of each job, by id."""
    stopped: dict[str, float] = field(default_factory=dict)
    num_requests: int = 0
    """Number of requests of any kind."""

    def train_forever(self, step: int = 1) -> None:
        """From now on the trainer runs without progress."""
        self.life = lambda _, environment: scripts.RunMoment(run_state=scripts.run_state(environment, "Running", step))

    def complete_after(self, seconds: float) -> None:
        """From now on the trainer completes this number of seconds after its submission."""
        self.life = scripts.succeeding(seconds)


class RayDashboardStandIn:
    """The dashboards of all clusters."""

    def __init__(self, server: ApiServer) -> None:
        self._api = server.http
        self._clusters: dict[tuple[str, str], ClusterDashboard] = {}
        self._lock = threading.Lock()
        self._tokens: dict[str, str] = {}
        """Tokens by the UID of a cluster: pods read their Secret when they start."""
        self.stopped = threading.Event()
        self.around: dict[str, Callable[[str, str], None]] = {}
        """Hooks by namespace, called with `before` or `after` and the label of each request. If the call before a
        request raises ConnectionAbortedError, the request has no effect."""
        stand_in = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                stand_in.answer(self)

            def do_POST(self) -> None:
                stand_in.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url_template(self) -> str:
        """URL of the dashboards for the operator's settings."""
        return f"http://127.0.0.1:{self.server.server_address[1]}/{{namespace}}/{{cluster}}"

    def cluster(self, namespace: str, name: str) -> ClusterDashboard:
        """The dashboard of a cluster, which need not exist yet."""
        with self._lock:
            return self._clusters.setdefault((namespace, name), ClusterDashboard())

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Responds to one request."""
        url = urlsplit(request.path)
        _, namespace, name, *rest = url.path.split("/")
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        cluster = self.cluster(namespace, name)
        cluster.num_requests += 1
        if self.stopped.wait(cluster.delay_seconds) or cluster.down:
            request.close_connection = True
            return
        around = self.around.get(namespace, _nothing)
        what = _asked_for(request, rest)
        try:
            around("before", what)
            status, text = (200, "") if cluster.open else self._authorized(request, namespace, name)
            if status == 200 and cluster.answers_itself(request):
                return
            if status == 200 and cluster.repeats_headers:
                status, text = 500, f"RuntimeError: cannot handle a request with {dict(request.headers)}"
            elif status == 200:
                status, text = self._route(request, cluster, (namespace, name), rest, parse_qs(url.query), body)
            around("after", what)
        except (ConnectionAbortedError, httpx.TransportError):
            # TransportError: the API server, which has the tokens and nodes, is down.
            request.close_connection = True
            return
        data = text.encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _authorized(self, request: BaseHTTPRequestHandler, namespace: str, name: str) -> tuple[int, str]:
        sent = request.headers.get("Authorization")
        if sent is None:
            return 401, "Unauthorized: Missing authentication token"
        token = self._token(namespace, name)
        if sent != f"Bearer {token}":
            return 403, "Forbidden: Invalid authentication token"
        return 200, ""

    def _token(self, namespace: str, name: str) -> str | None:
        cluster = self._cluster(namespace, name)
        uid = str(cluster.get("metadata", {}).get("uid", ""))
        if uid and uid not in self._tokens:
            secret_name = cluster.get("spec", {}).get("authOptions", {}).get("secretName", name)
            secret = self._api.get(f"/api/v1/namespaces/{namespace}/secrets/{secret_name}")
            if secret.status_code != 200:
                return None
            self._tokens[uid] = base64.b64decode(secret.json()["data"]["auth_token"]).decode()
        return self._tokens.get(uid)

    def _route(
        self,
        request: BaseHTTPRequestHandler,
        cluster: ClusterDashboard,
        where: tuple[str, str],
        path: list[str],
        query: Mapping[str, list[str]],
        body: bytes,
    ) -> tuple[int, str]:
        match path:
            case ["api", "v0", "nodes"]:
                return 200, _listing(self._nodes(where, cluster))
            case ["api", "v0", "placement_groups"]:
                return 200, _listing(cluster.infeasible)
            case ["api", "v0", "logs", "file"]:
                return self._log_file(cluster, query["filename"][0])
            case ["api", "jobs", ""] if request.command == "POST":
                return self._submit(cluster, json.loads(body))
            case ["api", "jobs", ""]:
                return 200, "[]"
            case ["api", "jobs", job]:
                return self._job(cluster, job)
            case ["api", "jobs", job, "stop"] if request.command == "POST":
                if job not in cluster.started:
                    return 404, f"Job {job} does not exist"
                cluster.stopped.setdefault(job, time.monotonic())
                return 200, json.dumps({"stopped": True})
        return 404, "404: Not Found"

    def _submit(self, cluster: ClusterDashboard, body: scripts.Json) -> tuple[int, str]:
        job = str(body["submission_id"])
        with self._lock:
            cluster.posts.append(job)
            cluster.posted_at.append(time.monotonic())
            if cluster.submit_error is not None:
                return 500, f"Traceback (most recent call last):\nRuntimeError: {cluster.submit_error}\n.\n"
            if job in cluster.started:
                return 500, f"Traceback:\nValueError: Job with submission_id {job} already exists.\n.\n"
            environment = body["runtime_env"]
            assert isinstance(environment, dict)
            cluster.started[job] = (time.monotonic(), environment["env_vars"])
        if cluster.lose_answer:
            raise ConnectionAbortedError
        return 200, json.dumps({"job_id": job, "submission_id": job})

    def _job(self, cluster: ClusterDashboard, job: str) -> tuple[int, str]:
        moment = _moment(cluster, job)
        if moment is None:
            return 404, f"Job {job} does not exist"
        return 200, json.dumps(
            {
                "type": "SUBMISSION",
                "submission_id": job,
                "status": moment.status,
                "message": moment.message,
                "error_type": moment.error_type,
                "driver_exit_code": moment.exit_code,
                "driver_node_id": HEAD_NODE,
            }
        )

    def _log_file(self, cluster: ClusterDashboard, name: str) -> tuple[int, str]:
        for job in cluster.started:
            moment = _moment(cluster, job)
            if moment is not None and name == f"job-driver-{job}.log":
                return 200, moment.log
            if moment is not None and name == f"rljob-run-state-{job}.json" and moment.run_state is not None:
                return 200, json.dumps(moment.run_state) + "\n"
        return 500, f"A file is not found at: /tmp/ray/session/logs/{name}"

    def _nodes(self, where: tuple[str, str], cluster: ClusterDashboard) -> list[scripts.Json]:
        """The head node, and a node for each worker that the RayCluster requests."""
        spec = self._spec(*where)
        nodes: list[scripts.Json] = [_node(HEAD_NODE, True, 0)]
        missing = cluster.num_gpus_missing
        for group in spec.get("workerGroupSpecs", []):
            for number in range(group["replicas"]):
                num_gpus = int(group["rayStartParams"]["num-gpus"])
                taken = min(missing, num_gpus)
                missing -= taken
                nodes.append(_node(f"{group['groupName']}-{number}", False, num_gpus - taken))
        return nodes

    def _spec(self, namespace: str, name: str) -> dict[str, Any]:
        spec: dict[str, Any] = self._cluster(namespace, name).get("spec", {})
        return spec

    def _cluster(self, namespace: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._api.get(f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters/{name}").json()
        return found


@contextmanager
def ray_dashboard_stand_in(server: ApiServer) -> Iterator[RayDashboardStandIn]:
    """Runs a stand-in until the end of the context."""
    stand_in = RayDashboardStandIn(server)
    with running_http_server(stand_in.server):
        try:
            yield stand_in
        finally:
            stand_in.stopped.set()


def _moment(cluster: ClusterDashboard, job: str) -> scripts.RunMoment | None:
    found = cluster.started.get(job)
    if found is None or cluster.forgets_jobs:
        return None
    started, environment = found
    moment = cluster.life(time.monotonic() - started, environment)
    stopped = cluster.stopped.get(job)
    if stopped is not None and moment.status == "RUNNING" and not cluster.stops_late:
        state = scripts.run_state(environment, "Stopped", 2)
        return scripts.RunMoment("STOPPED", "Job was intentionally stopped.", run_state=state)
    return moment


def _nothing(_: str, __: str) -> None:
    """The hook for namespaces without one."""


def _asked_for(request: BaseHTTPRequestHandler, path: Sequence[str]) -> str:
    """Label of a request: `ray submit`, `ray job`, `ray probe` (without a token), or the last part of the path."""
    match path:
        case _ if request.headers.get("Authorization") is None:
            what = "probe"
        case ["api", "jobs", ""]:
            what = "submit"
        case ["api", "jobs", _]:
            what = "job"
        case _:
            what = path[-1]
    return f"ray {what}"


def _node(node_id: str, is_head: bool, num_gpus: int) -> scripts.Json:
    resources = {"CPU": 4.0} | ({"GPU": float(num_gpus)} if num_gpus else {})
    return {"node_id": node_id, "is_head_node": is_head, "state": "ALIVE", "resources_total": resources}


def _listing(items: Sequence[Mapping[str, object]]) -> str:
    return json.dumps({"result": True, "msg": "", "data": {"result": {"total": len(items), "result": list(items)}}})
