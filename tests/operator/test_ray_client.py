"""How the client of Ray dashboards handles responses that no Ray gives, and missing ones."""

from __future__ import annotations

import asyncio
import gzip
from contextlib import suppress

import pytest

from rljob_operator.ray import client
from rljob_operator.ray.client import DashboardUnreachableError
from rljob_operator.ray.dashboard_responses import infeasible_groups
from rljob_operator.reconcile.observed import Reachability
from rljob_testing import local_servers
from rljob_testing.operator import ray_polling


def test_an_unreachable_dashboard_is_reported() -> None:
    async def test() -> None:
        port = local_servers.free_port()
        async with ray_polling.connected(port, ray_polling.TOKEN) as nobody:
            seen = await ray_polling.observe_without_memory(nobody, None)
            assert seen.reachability is Reachability.UNREACHABLE
            assert (seen.error or "").endswith(f"Connect call failed ('127.0.0.1', {port})")
            with pytest.raises(DashboardUnreachableError):
                await nobody.submit({"submission_id": "x"})

    asyncio.run(asyncio.wait_for(test(), 240))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<html>...", "not JSON: <html>..."),
        (b"HTTP/1.1 503 No\r\nContent-Length: 11\r\n\r\nbusy\nat all\n", "HTTP 503: at all"),
        (b"HTTP/1.1 302 No\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "HTTP 302: "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 69633\r\n\r\n", "`nodes` is too large (69633 bytes, at most 69632)"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"x" * 9_000_000, "bytes, at most 69632)"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 2, "more than one response"),
        (b"HTTP/1.1 200 OK\r\nX: 123456\r\n" + b"X: 123456\r\n" * 50 + b"\r\n", "Too many headers"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 3000 + b"\r\n\r\n", "more than 2048 bytes"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, gzip\r\nConnection: close\r\n\r\n"
            + gzip.compress(gzip.compress(b'{"data": {}}')),
            "Content-Encoding: gzip, gzip",
        ),
        (b"", "disconnected"),
    ],
)
def test_responses_that_cannot_be_parsed_are_reported(answer: bytes, error: str) -> None:
    async def test() -> None:
        async def strange(_: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)

        port = local_servers.free_port()
        server = await asyncio.start_server(ray_polling.guarded(strange), "127.0.0.1", port)
        async with ray_polling.connected(port, ray_polling.TOKEN) as odd:
            seen = await ray_polling.observe_without_memory(odd, None)
            assert seen.reachability is Reachability.UNREACHABLE
            assert error in (seen.error or "")
        server.close()

    asyncio.run(asyncio.wait_for(test(), 240))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (ray_polling.node("Infinity"), "cannot convert float infinity"),
        (ray_polling.node("NaN"), "cannot convert float NaN"),
        (ray_polling.node("1" + 400 * "0"), "infinity"),
        (ray_polling.node(5000 * "1"), "not JSON"),
        (ray_polling.ok(3_000 * "["), "not JSON"),
    ],
)
def test_any_number_and_any_depth_is_handled(answer: bytes, error: str) -> None:
    async def test() -> None:
        async with ray_polling.answering({"": answer}) as odd:
            seen = await ray_polling.observe_without_memory(odd, None)
            assert seen.reachability is Reachability.UNREACHABLE
            assert error in (seen.error or "")

    asyncio.run(asyncio.wait_for(test(), 240))


def test_only_a_missing_file_is_none() -> None:
    async def test() -> None:
        def failed(text: str) -> bytes:
            return f"HTTP/1.1 500 Error\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()

        answers = {
            "/api/v0/nodes": ray_polling.node("0"),
            "/api/jobs/job-1-1": ray_polling.ok('{"status": "RUNNING", "driver_node_id": "head"}'),
            "/api/v0/placement_groups": ray_polling.ok("{}"),
            "/api/v0/logs": failed("A file is not found at: /tmp/ray/session_1/logs/x"),
        }
        async with ray_polling.answering(answers) as without_file:
            seen = await ray_polling.observe_without_memory(without_file, "job-1-1")
            assert (seen.reachability, seen.run_state) == (Reachability.OK, None)
        answers["/api/v0/logs"] = failed("Agent for node id: head doesn't exist.")
        async with ray_polling.answering(answers) as without_agent:
            seen = await ray_polling.observe_without_memory(without_agent, "job-1-1")
            assert (seen.reachability, seen.error) == (
                Reachability.UNREACHABLE,
                "HTTP 500: Agent for node id: head doesn't exist.",
            )

    asyncio.run(asyncio.wait_for(test(), 240))


def test_a_dripping_response_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SUBMIT_TIMEOUT_SECONDS", 0.5)

    async def test() -> None:
        async def drip(_: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _number in range(20):
                writer.write(b" ")
                await asyncio.sleep(0.1)

        port = local_servers.free_port()
        server = await asyncio.start_server(ray_polling.guarded(drip), "127.0.0.1", port)
        async with ray_polling.connected(port, ray_polling.TOKEN) as slow:
            with pytest.raises(DashboardUnreachableError, match=r"after 0\.5 s"):
                await slow.submit({"submission_id": "x"})
        server.close()

    asyncio.run(asyncio.wait_for(test(), 240))


def test_no_response_in_another_encoding_is_requested() -> None:
    async def test() -> None:
        requests: list[bytes] = []

        async def note(request: bytes, writer: asyncio.StreamWriter) -> None:
            requests.append(request)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        port = local_servers.free_port()
        server = await asyncio.start_server(ray_polling.guarded(note), "127.0.0.1", port)
        async with ray_polling.connected(port, ray_polling.TOKEN) as polite:
            assert (await ray_polling.observe_without_memory(polite, None)).reachability is Reachability.OK
        server.close()
        assert [b"accept-encoding: identity" in request.lower() for request in requests] == [True]

    asyncio.run(asyncio.wait_for(test(), 240))


def test_cookies_of_a_response_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also, no proxy of the environment sees a token."""
    nowhere = local_servers.free_port()
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

        port = local_servers.free_port()
        server = await asyncio.start_server(note, "127.0.0.1", port)
        async with ray_polling.connected(port, ray_polling.TOKEN) as sticky:
            for _ in range(2):
                assert await sticky.job("job-1-1") == {}
        server.close()
        assert ["cookie" in request for request in requests] == [False, False]

    asyncio.run(asyncio.wait_for(test(), 240))


def test_a_rejected_or_closed_connection_is_not_reused() -> None:
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

        port = local_servers.free_port()
        server = await asyncio.start_server(serve, "127.0.0.1", port)
        async with ray_polling.connected(port, "b" * 64, ray_polling.TOKEN) as fickle:
            for _ in range(5):
                assert await fickle.job("job-1-1") == {}
        server.close()
        assert connections == [[200, 403, 403], [200, 200, 200], [200]]

    asyncio.run(asyncio.wait_for(test(), 240))


def test_bundles_are_counted_by_the_resources_they_request() -> None:
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
        group("huge", "INFEASIBLE", {"GPU": 10**400}),
    ]
    assert infeasible_groups(groups) == (
        "mixed: 2 x {CPU: 1, GPU: 8}, 1 x {CPU: 0.5}",
        "id-: ",
        "huge: 1 x {GPU: inf}",
    )
