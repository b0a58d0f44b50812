"""Leadership, probes and news: the parts of the service that need no process to be tried."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from rljob_operator.controller.loop import JobKey
from rljob_operator.handlers import leadership
from rljob_operator.handlers.health import Parts, health_pages
from rljob_operator.handlers.http_pages import Reply, serving
from rljob_operator.handlers.leadership import Leadership, LeadershipLostError
from rljob_operator.handlers.news import JobVersions
from rljob_operator.kube.client import KubeClient
from rljob_operator.kube.connection import load_connection
from rljob_operator.kube.lease import read_lease
from rljob_operator.kube.objects import KubeObjects
from rljob_operator.log import LineFormatter, about
from rljob_operator.metrics import Metrics
from rljob_testing.apiserver import free_ports
from rljob_testing.operator_process import OPERATOR_NAMESPACE, OperatorSetup
from rljob_testing.operator_process_jobs import JobPlace

KEY = JobKey("team", "job")


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    """In a loop of its own, with a limit."""

    async def limited() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(limited())


def job(uid: str, generation: int, deleted: bool = False) -> dict[str, object]:
    metadata: dict[str, object] = {"uid": uid, "generation": generation, "resourceVersion": "1"}
    return {"metadata": metadata | ({"deletionTimestamp": "2026-01-31T12:00:00Z"} if deleted else {})}


def test_a_change_of_the_status_alone_is_no_news() -> None:
    versions = JobVersions()
    assert versions.is_news(KEY, "", job("a", 1))
    assert not versions.is_news(KEY, "MODIFIED", job("a", 1))
    assert not versions.is_news(KEY, "", job("a", 1)), "listed again after a gap"
    assert versions.is_news(KEY, "MODIFIED", job("a", 2))
    assert versions.is_news(KEY, "MODIFIED", job("a", 2, deleted=True))
    assert versions.is_news(KEY, "ADDED", job("b", 1)), "made again while nobody watched"
    assert versions.is_news(KEY, "DELETED", job("b", 1))
    assert versions.is_news(KEY, "ADDED", job("b", 1))


def test_probes_name_what_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        parts = Parts()
        pages = health_pages(parts)
        (port,) = free_ports(1)
        fail = asyncio.Event()

        async def mortal() -> None:
            await fail.wait()
            raise ValueError("worn out")

        async def for_ever() -> None:
            await asyncio.Event().wait()

        async with (
            serving(port, pages),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http,
        ):
            assert (await http.get("/healthz")).status_code == 200
            parts.start("workers", mortal())
            parts.start("relist", for_ever())
            assert (await http.get("/readyz?verbose")).status_code == 200
            fail.set()
            await asyncio.sleep(0.05)
            answer = await http.get("/healthz")
            assert (answer.status_code, answer.text) == (503, "ended: workers\n")
            assert (await http.get("/metrics")).status_code == 404
            assert (await http.post("/healthz")).status_code == 404
            await parts.stop("relist")
        assert "workers ended, but must not" in caplog.text
        assert "worn out" in caplog.text
        assert "relist ended" not in caplog.text

    run(test)


def test_a_client_that_says_nothing_keeps_no_other_from_the_probes() -> None:
    async def test() -> None:
        (port,) = free_ports(1)
        async with serving(port, {"/healthz": lambda: Reply(200, b"ok\n")}):
            _, silent = await asyncio.open_connection("127.0.0.1", port)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.read()).endswith(b"\r\n\r\nok\n")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"nonsense\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
            silent.close()

    run(test)


def test_a_log_line_is_one_line() -> None:
    record = logging.LogRecord("rljob_operator.x", logging.WARNING, "f", 1, "said %s", ('a "b"\nc',), None)
    record.__dict__.update(about("team/job"))
    record.created = 0.0
    assert LineFormatter().format(record) == (
        'time=1970-01-01T00:00:00.000Z level=warning logger=rljob_operator.x job=team/job msg="said a \\"b\\"\\nc"'
    )
    try:
        raise ValueError("bad")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    assert "\n" not in LineFormatter().format(record)
    assert "ValueError: bad" in LineFormatter().format(record)


@asynccontextmanager
async def lease_objects(place: JobPlace) -> AsyncIterator[KubeObjects]:
    """With the operator's rights."""
    connection = await load_connection(str(place.setup.kubeconfig()))
    async with KubeClient(connection, Metrics()) as client:
        yield KubeObjects(client)


@pytest.mark.apiserver
def test_a_lease_that_is_not_renewed_changes_hands(place: JobPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "LEASE_SECONDS", 2)
    monkeypatch.setattr(leadership, "RENEW_SECONDS", 1.5)
    monkeypatch.setattr(leadership, "RETRY_SECONDS", 0.2)

    async def test() -> None:
        async with lease_objects(place) as objects:
            first = Leadership(objects, OPERATOR_NAMESPACE, "hands", "first")
            second = Leadership(objects, OPERATOR_NAMESPACE, "hands", "second")
            clock = asyncio.get_running_loop().time
            await first.acquire()
            holding = asyncio.create_task(first.hold())
            taking = asyncio.create_task(second.acquire())
            await asyncio.sleep(3)
            assert not taking.done(), "it is renewed"
            holding.cancel()
            stopped = clock()
            await taking
            assert 1.0 < clock() - stopped < 20.0
            record = await read_lease(objects, OPERATOR_NAMESPACE, "hands")
            assert record is not None
            assert (record.holder, record.num_transitions) == ("second", 1)
            with pytest.raises(LeadershipLostError, match="second holds it"):
                await first.hold()
            await first.release()
            record = await read_lease(objects, OPERATOR_NAMESPACE, "hands")
            assert record is not None
            assert record.holder == "second", "what is not ours is not given back"
            await second.release()
            await first.acquire()

    run(test)


@pytest.mark.parametrize("answers", ["refused", "never"])
def test_a_leader_that_cannot_renew_stops_before_another_may_begin(
    answers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(leadership, "RENEW_SECONDS", 1.0)
    monkeypatch.setattr(leadership, "RETRY_SECONDS", 0.1)

    async def test() -> None:
        (port,) = free_ports(1)
        setup = OperatorSetup(tmp_path, f"http://127.0.0.1:{port}", None, "token", "", [], {})

        async def hang(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        server = await asyncio.start_server(hang, "127.0.0.1", port) if answers == "never" else None
        connection = await load_connection(str(setup.kubeconfig()))
        clock = asyncio.get_running_loop().time
        async with KubeClient(connection, Metrics()) as client:
            leader = Leadership(KubeObjects(client), OPERATOR_NAMESPACE, "cut-off", "leader")
            started = clock()
            with pytest.raises(LeadershipLostError, match="could not be renewed for 1 s"):
                await leader.hold()
            assert 1.0 <= clock() - started < 5.0
        if server is not None:
            server.close()

    run(test)
