"""Polls Ray dashboards as the operator does: a real one by its port, or a fake one in the event loop of a test."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer

from rljob_operator.metrics import Metrics
from rljob_operator.ray.client import Dashboard, RayClient
from rljob_operator.ray.run_watcher import RunWatcher
from rljob_operator.reconcile.observed import ObservedRay
from rljob_testing import local_servers
from rljob_testing.operator import scripts

SUBMISSION = "job-1-1"
STACKS = "job-1-1-stacks"
NUM_PODS = 2
RUN_STATE = f"rljob-run-state-{SUBMISSION}.json"
HEAD: dict[str, object] = {"node_id": "head", "is_head_node": True, "state": "ALIVE", "resources_total": {"CPU": 1.0}}
WORKER: dict[str, object] = {
    "node_id": "worker",
    "is_head_node": False,
    "state": "ALIVE",
    "resources_total": {"GPU": 8.0},
}
INFEASIBLE: dict[str, object] = {
    "name": "rollout",
    "state": "PENDING",
    "stats": {"scheduling_state": "INFEASIBLE"},
    "bundles": [{"unit_resources": {"GPU": 8.0}}],
}


def state(phase: str, step: int = 1) -> str:
    return json.dumps(scripts.run_state({"RLJOB_ATTEMPT": "1"}, phase, step))


@dataclass
class FakeRay:
    """A dashboard in this event loop. `asked` has the requests since it was last emptied."""

    nodes: list[dict[str, object]] = field(default_factory=lambda: [HEAD, WORKER])
    groups: list[dict[str, object]] = field(default_factory=list)
    status: str | None = "RUNNING"
    """Status of the job; None if Ray does not know the job."""
    exit_code: int | None = None
    has_stacks: bool = False
    """Whether Ray knows the job that dumps stacks."""
    state: str | None = None
    num_empty: int = 0
    """Number of the next responses with the run state that are empty."""
    log: str = ""
    guarded: bool = True
    rejecting: bool = False
    """Rejects the token."""
    failing: set[str] = field(default_factory=set)
    """Requests to which it responds with 503."""
    asked: list[str] = field(default_factory=list)
    num_connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                status, text = self.answer(head.split(" ")[0], head.split(" ")[1], "Authorization:" in head)
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def answer(self, method: str, path: str, has_token: bool) -> tuple[int, str]:
        what, status, text = self.found(method, path) if has_token else ("probe", 401 if self.guarded else 200, "{}")
        self.asked.append(what)
        if self.rejecting and has_token:
            return 403, "Forbidden: Invalid authentication token"
        return (503, "busy") if what in self.failing else (status, text)

    def found(self, method: str, path: str) -> tuple[str, int, str]:
        if path.startswith("/api/v0/logs/file"):
            is_state = f"filename={RUN_STATE}" in path
            name, text = ("state", self.state) if is_state else ("log", None if "run-state" in path else self.log)
            if name == "state" and self.num_empty:
                self.num_empty -= 1
                return name, 200, ""
            return (name, 500, "A file is not found at: x") if text is None else (name, 200, text)
        if path.startswith("/api/v0/"):
            what = path.removeprefix("/api/v0/").partition("?")[0]
            listed = self.nodes if what == "nodes" else self.groups
            return what, 200, json.dumps({"data": {"result": {"result": listed}}})
        if method == "POST":
            return "submit", 200, "{}"
        if path == f"/api/jobs/{STACKS}":
            return ("stacks", 200, '{"status": "SUCCEEDED"}') if self.has_stacks else ("stacks", 404, "no job")
        known = {"status": self.status, "driver_node_id": "head", "driver_exit_code": self.exit_code}
        return ("job", 404, "no job") if self.status is None else ("job", 200, json.dumps(known))

    def take_requests(self) -> list[str]:
        """Returns the recorded requests and clears the record."""
        found, self.asked = self.asked, []
        return found


@dataclass
class WatchedDashboard:
    """A fake dashboard, a watcher of it, and the watcher's clock."""

    ray: FakeRay
    port: int
    http: RayClient
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.watcher = RunWatcher(lambda: self.now)

    def dashboard(self, token: str = "token") -> Dashboard:
        return self.http.dashboard(f"http://127.0.0.1:{self.port}", "namespace", [token])

    async def poll(self, submission: str | None = SUBMISSION, at_once: bool = True) -> ObservedRay:
        return await self.watcher.observe("uid", self.dashboard(), submission, num_pods=NUM_PODS, at_once=at_once)

    async def polled_requests(self, number: int) -> list[list[str]]:
        """Polls this number of times and returns the requests of each poll."""
        self.ray.take_requests()
        return [self.ray.take_requests() for _ in range(number) if await self.poll()]


@asynccontextmanager
async def polled_dashboard(ray: FakeRay) -> AsyncIterator[WatchedDashboard]:
    server = await asyncio.start_server(ray.serve, "127.0.0.1", 0)
    async with asyncio.timeout(60), RayClient(Metrics()) as http:
        yield WatchedDashboard(ray, server.sockets[0].getsockname()[1], http)
    server.close()


def run_with_dashboard(ray: FakeRay, test: Callable[[WatchedDashboard], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        async with polled_dashboard(ray) as place:
            await test(place)

    asyncio.run(run())


TOKEN = "a" * 64


@asynccontextmanager
async def connected(port: int, *tokens: str) -> AsyncIterator[Dashboard]:
    """The client of a dashboard on a port of this machine."""
    async with RayClient(Metrics()) as client:
        yield client.dashboard(f"http://127.0.0.1:{port}", "namespace", tokens)


async def observe_without_memory(found: Dashboard, submission_id: str | None) -> ObservedRay:
    """Observes a dashboard without the memory of earlier polls."""
    return await RunWatcher(time.monotonic).observe("job", found, submission_id, num_pods=NUM_PODS)


def guarded(
    answer: Callable[[bytes, asyncio.StreamWriter], Awaitable[None]],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A server that rejects requests without a token, and closes the connection after it has responded to another
    one."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while b"authorization:" not in (request := await reader.readuntil(b"\r\n\r\n")).lower():
            writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n")
        await answer(request, writer)
        await writer.drain()
        writer.close()

    return serve


def ok(text: str) -> bytes:
    """A response with this body."""
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def node(num_gpus: str) -> bytes:
    """A listing of nodes: a head with GPUs."""
    found = f'{{"state": "ALIVE", "is_head_node": true, "resources_total": {{"GPU": {num_gpus}}}}}'
    return ok(f'{{"data": {{"result": {{"result": [{found}]}}}}}}')


@asynccontextmanager
async def answering(answers: Mapping[str, bytes]) -> AsyncIterator[Dashboard]:
    """A dashboard that responds by the prefix of the path. The connection stays open."""

    class Handler(local_servers.QuietHandler):
        def do_GET(self) -> None:
            if "Authorization" not in self.headers:
                self.wfile.write(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n")
                return
            self.wfile.write(next(found for start, found in answers.items() if self.path.startswith(start)))

    # In a thread of its own: asyncio keeps a stream only as long as a reader exists.
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            async with connected(server.server_address[1], TOKEN) as found:
                yield found
        finally:
            server.shutdown()
