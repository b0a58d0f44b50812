"""The client of Ray's dashboard on a real Ray with token authentication: what the stand-in of other tests imitates."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from rljob_api.constants import run_state_file_name
from rljob_operator.metrics import Metrics
from rljob_operator.ray import client
from rljob_operator.ray.answers import infeasible_groups
from rljob_operator.ray.client import Dashboard, RayClient
from rljob_operator.ray.errors import DashboardUnreachableError, RayRefusedError, TokenRejectedError
from rljob_operator.ray.observe_dashboard import observe_dashboard
from rljob_operator.reconcile.observed import ObservedRay, ObservedRayNode, RayJobStatus, Reachability
from rljob_testing.apiserver import free_ports
from rljob_testing.quiet_http import QuietHandler
from rljob_testing.ray_cluster import pod_cluster
from rljob_testing.ray_dashboard_stand_in import run_state
from rljob_testing.ray_jobs import RayCluster

TOKEN = "a" * 64
ENDED = (RayJobStatus.FAILED, RayJobStatus.STOPPED, RayJobStatus.SUCCEEDED)
PLACEMENT = """
import ray, time
ray.init()
ray.util.placement_group([{"GPU": 8, "CPU": 1}] * 2, strategy="STRICT_SPREAD", name="rollout")
time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A head and two workers with one declared GPU each."""
    with pod_cluster(tmp_path_factory.mktemp("ray"), TOKEN, {}) as cluster:
        yield cluster


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    """In a loop of its own, with a limit."""

    async def limited() -> None:
        async with asyncio.timeout(240):
            await test()

    asyncio.run(limited())


@asynccontextmanager
async def dashboard(port: int, *tokens: str) -> AsyncIterator[Dashboard]:
    async with RayClient(Metrics()) as client:
        yield client.dashboard(f"http://127.0.0.1:{port}", tokens)


async def until(ask: Callable[[], Awaitable[ObservedRay]], wanted: Callable[[ObservedRay], bool]) -> ObservedRay:
    """Looks again and again."""
    while not wanted(seen := await ask()):
        await asyncio.sleep(0.3)
    return seen


def submission(name: str, entrypoint: str, **variables: str) -> dict[str, object]:
    return {"submission_id": name, "entrypoint": entrypoint, "runtime_env": {"env_vars": variables}}


@pytest.mark.ray
def test_nodes_and_tokens(cluster: RayCluster) -> None:
    async def test() -> None:
        async with dashboard(cluster.port, TOKEN) as good:
            seen = await observe_dashboard(good, "nobody-1-1")
            assert (seen.reachability, seen.job, seen.run_state) == (Reachability.OK, None, None)
            assert sorted(seen.nodes, key=lambda node: node.is_head) == [
                ObservedRayNode(is_head=False, num_gpus=1),
                ObservedRayNode(is_head=False, num_gpus=1),
                ObservedRayNode(is_head=True, num_gpus=0),
            ]
            await good.stop("nobody-1-1")
        async with dashboard(cluster.port, "b" * 64, TOKEN) as second_token:
            assert (await observe_dashboard(second_token, None)).reachability is Reachability.OK
        async with dashboard(cluster.port, "b" * 64) as bad:
            seen = await observe_dashboard(bad, None)
            assert seen.reachability is Reachability.REJECTED
            with pytest.raises(TokenRejectedError, match="does not accept"):
                await bad.submit(submission("x", "true"))

    run(test)


@pytest.mark.ray
def test_a_trainer_that_fails_after_telling_its_state(cluster: RayCluster, tmp_path: Path) -> None:
    async def test() -> None:
        state = run_state({"RLJOB_ATTEMPT": "1"}, "Running", 2)
        (tmp_path / "state.json").write_text(json.dumps(state))
        go_on = tmp_path / "go-on"
        there = cluster.log_folder / run_state_file_name("job-1-1")
        entrypoint = (
            f"cp {tmp_path}/state.json {there}; while [ ! -e {go_on} ]; do sleep 0.1; done;"
            " for i in $(seq 200); do echo line $i; done; exit 75"
        )
        async with dashboard(cluster.port, TOKEN) as good:
            await good.submit(submission("job-1-1", entrypoint))
            with pytest.raises(RayRefusedError, match="already exists"):
                await good.submit(submission("job-1-1", entrypoint))
            assert await good.job("job-1-1") is not None
            seen = await until(lambda: observe_dashboard(good, "job-1-1"), lambda seen: seen.run_state is not None)
            assert seen.job is not None
            assert seen.job.status is RayJobStatus.RUNNING
            assert seen.run_state is not None
            assert (seen.run_state.progress.step, seen.log_tail) == (2, "")
            go_on.touch()
            seen = await until(
                lambda: observe_dashboard(good, "job-1-1"),
                lambda seen: seen.job is not None and seen.job.status in ENDED,
            )
            assert seen.job is not None
            assert (seen.job.status, seen.job.exit_code) == (RayJobStatus.FAILED, 75)
            assert seen.job.error_type == "JOB_ENTRYPOINT_COMMAND_ERROR"
            assert seen.log_tail.splitlines()[-2:] == ["line 199", "line 200"]
            assert len(seen.log_tail.splitlines()) == 50
            await good.stop("job-1-1")

    run(test)


@pytest.mark.ray
def test_what_cannot_be_placed_is_named_and_a_stop_is_heard(cluster: RayCluster, tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "place.py").write_text(PLACEMENT)
        async with dashboard(cluster.port, TOKEN) as good:
            entrypoint = f"exec python {tmp_path}/place.py"
            await good.submit(submission("big-1-1", entrypoint, RAY_JOB_STOP_WAIT_TIME_S="5"))
            seen = await until(lambda: observe_dashboard(good, "big-1-1"), lambda seen: seen.infeasible_groups != ())
            assert seen.infeasible_groups == ("rollout: 2 x {CPU: 1, GPU: 8}",)
            await good.stop("big-1-1")
            seen = await until(
                lambda: observe_dashboard(good, "big-1-1"),
                lambda seen: seen.job is not None and seen.job.status in ENDED,
            )
            assert seen.job is not None
            assert seen.job.status is RayJobStatus.STOPPED

    run(test)


def guarded(
    answer: Callable[[bytes, asyncio.StreamWriter], Awaitable[None]],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A server that refuses requests without token, and hangs up after it has answered another one."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while b"authorization:" not in (request := await reader.readuntil(b"\r\n\r\n")).lower():
            writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n")
        await answer(request, writer)
        await writer.drain()
        writer.close()

    return serve


def test_nobody_there() -> None:
    async def test() -> None:
        (port,) = free_ports(1)
        async with dashboard(port, TOKEN) as nobody:
            seen = await observe_dashboard(nobody, None)
            assert seen.reachability is Reachability.UNREACHABLE
            assert seen.error
            with pytest.raises(DashboardUnreachableError):
                await nobody.submit(submission("x", "true"))

    run(test)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<html>...", "its answer is not JSON: <html>..."),
        (b"HTTP/1.1 503 No\r\nContent-Length: 11\r\n\r\nbusy\nat all\n", "HTTP 503: at all"),
        (b"HTTP/1.1 302 No\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "HTTP 302: "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 9_000_000, "larger than 8388608 bytes"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, gzip\r\nConnection: close\r\n\r\n"
            + gzip.compress(gzip.compress(b'{"data": {}}')),
            "its answer is encoded (gzip, gzip)",
        ),
        (b"", "disconnected"),
    ],
)
def test_answers_that_make_no_sense(answer: bytes, error: str) -> None:
    async def test() -> None:
        async def strange(_: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)

        (port,) = free_ports(1)
        server = await asyncio.start_server(guarded(strange), "127.0.0.1", port)
        async with dashboard(port, TOKEN) as odd:
            seen = await observe_dashboard(odd, None)
            assert seen.reachability is Reachability.UNREACHABLE
            assert error in (seen.error or "")
        server.close()

    run(test)


def ok(text: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def node(num_gpus: str) -> bytes:
    found = f'{{"state": "ALIVE", "is_head_node": true, "resources_total": {{"GPU": {num_gpus}}}}}'
    return ok(f'{{"data": {{"result": {{"result": [{found}]}}}}}}')


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (node("Infinity"), "its answer makes no sense: cannot convert float infinity"),
        (node("NaN"), "its answer makes no sense: cannot convert float NaN"),
        (node("1" + 400 * "0"), "its answer makes no sense: int too large"),
        (node(5000 * "1"), "its answer is not JSON"),
        (ok(200_000 * "["), "its answer is not JSON"),
    ],
)
def test_no_number_and_no_depth_is_too_much(answer: bytes, error: str) -> None:
    async def test() -> None:
        async with answering({"": answer}) as odd:
            seen = await observe_dashboard(odd, None)
            assert seen.reachability is Reachability.UNREACHABLE
            assert error in (seen.error or "")

    run(test)


@asynccontextmanager
async def answering(answers: Mapping[str, bytes]) -> AsyncIterator[Dashboard]:
    """A dashboard that answers by how the path begins. The connection stays open."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            if "Authorization" not in self.headers:
                self.wfile.write(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n")
                return
            self.wfile.write(next(found for start, found in answers.items() if self.path.startswith(start)))

    # A thread of its own: asyncio holds a stream only as long as somebody reads from it.
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            async with dashboard(server.server_address[1], TOKEN) as found:
                yield found
        finally:
            server.shutdown()


def test_only_a_file_that_is_not_there_is_none() -> None:
    async def test() -> None:
        def failed(text: str) -> bytes:
            return f"HTTP/1.1 500 Error\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()

        answers = {
            "/api/v0/nodes": node("0"),
            "/api/jobs/job-1-1": ok('{"status": "RUNNING", "driver_node_id": "head"}'),
            "/api/v0/placement_groups": ok("{}"),
            "/api/v0/logs": failed("A file is not found at: /tmp/ray/session_1/logs/x"),
        }
        async with answering(answers) as without_file:
            seen = await observe_dashboard(without_file, "job-1-1")
            assert (seen.reachability, seen.run_state) == (Reachability.OK, None)
        answers["/api/v0/logs"] = failed("Agent for node id: head doesn't exist.")
        async with answering(answers) as without_agent:
            seen = await observe_dashboard(without_agent, "job-1-1")
            assert (seen.reachability, seen.error) == (
                Reachability.UNREACHABLE,
                "HTTP 500: Agent for node id: head doesn't exist.",
            )

    run(test)


def test_an_answer_that_drips_does_not_last_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SUBMIT_TIMEOUT_SECONDS", 0.5)

    async def test() -> None:
        async def drip(_: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _number in range(20):
                writer.write(b" ")
                await asyncio.sleep(0.1)

        (port,) = free_ports(1)
        server = await asyncio.start_server(guarded(drip), "127.0.0.1", port)
        async with dashboard(port, TOKEN) as slow:
            with pytest.raises(DashboardUnreachableError, match=r"no answer within 0\.5 s"):
                await slow.submit(submission("x", "true"))
        server.close()

    run(test)


def test_no_answer_is_asked_for_in_another_encoding() -> None:
    async def test() -> None:
        requests: list[bytes] = []

        async def note(request: bytes, writer: asyncio.StreamWriter) -> None:
            requests.append(request)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        (port,) = free_ports(1)
        server = await asyncio.start_server(guarded(note), "127.0.0.1", port)
        async with dashboard(port, TOKEN) as polite:
            assert (await observe_dashboard(polite, None)).reachability is Reachability.OK
        server.close()
        assert [b"accept-encoding: identity" in request.lower() for request in requests] == [True]

    run(test)


def test_nothing_of_an_answer_goes_along_with_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no proxy of the environment sees a token."""
    (nowhere,) = free_ports(1)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{nowhere}")
    monkeypatch.setenv("no_proxy", "")

    async def test() -> None:
        requests: list[str] = []

        async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.IncompleteReadError):
                while len(requests) < 2:
                    requests.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
                    writer.write(b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nContent-Length: 2\r\n\r\n{}")
            writer.close()

        (port,) = free_ports(1)
        server = await asyncio.start_server(note, "127.0.0.1", port)
        async with dashboard(port, TOKEN) as sticky:
            for _ in range(2):
                assert await sticky.job("job-1-1") == {}
        server.close()
        assert ["cookie" in request for request in requests] == [False, False]

    run(test)


def test_a_connection_that_was_rejected_or_has_ended_is_not_used_again() -> None:
    async def test() -> None:
        connections: list[list[int]] = []
        answers = iter((200, 403, 403, 200, 200, 200, 200))

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append([])
            request = ""
            with suppress(asyncio.IncompleteReadError):
                while "connection: close" not in request and len(connections[-1]) < 3:
                    request = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                    connections[-1].append(status := next(answers))
                    last = "Connection: close\r\n" if "connection: close" in request else ""
                    writer.write(f"HTTP/1.1 {status} X\r\n{last}Content-Length: 2\r\n\r\n{{}}".encode())
            writer.close()

        (port,) = free_ports(1)
        server = await asyncio.start_server(serve, "127.0.0.1", port)
        async with dashboard(port, "b" * 64, TOKEN) as fickle:
            for _ in range(5):
                assert await fickle.job("job-1-1") == {}
        server.close()
        assert connections == [[200, 403, 403], [200, 200, 200], [200]]

    run(test)


def test_bundles_are_counted_by_what_they_ask_for() -> None:
    def group(name: str, state: str, *bundles: dict[str, float]) -> dict[str, object]:
        return {
            "name": name,
            "placement_group_id": f"id-{name}",
            "state": "PENDING",
            "stats": {"scheduling_state": state},
            "bundles": [{"unit_resources": bundle} for bundle in bundles],
        }

    groups = [
        group("fits-later", "NO_RESOURCES", {"GPU": 1}),
        group("mixed", "INFEASIBLE", {"GPU": 8, "CPU": 1}, {"CPU": 0.5}, {"CPU": 1, "GPU": 8}),
        group("", "INFEASIBLE"),
    ]
    assert infeasible_groups(groups) == ("mixed: 2 x {CPU: 1, GPU: 8}, 1 x {CPU: 0.5}", "id-: ")
