"""The pages that Kubernetes' probes read, and the format of the operator's log."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from rljob_operator.handlers.health import BackgroundTasks, Reply, health_pages, serving
from rljob_operator.log import LineFormatter, about
from rljob_testing.local_servers import free_port


def test_probes_name_the_task_that_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        tasks = BackgroundTasks()
        pages = health_pages(tasks)
        port = free_port()
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
            tasks.start("workers", mortal())
            tasks.start("relist", for_ever())
            assert (await http.get("/readyz?verbose")).status_code == 200
            fail.set()
            await asyncio.sleep(0.05)
            answer = await http.get("/healthz")
            assert (answer.status_code, answer.text) == (503, "ended: workers\n")
            assert (await http.get("/metrics")).status_code == 404
            assert (await http.post("/healthz")).status_code == 404
            await tasks.stop("relist")
        assert "workers ended unexpectedly" in caplog.text
        assert "worn out" in caplog.text
        assert "relist ended" not in caplog.text

    asyncio.run(asyncio.wait_for(test(), 240))


def test_a_silent_client_does_not_block_the_probes() -> None:
    async def test() -> None:
        port = free_port()
        async with serving(port, {"/healthz": lambda: Reply(200, b"ok\n")}):
            _, silent = await asyncio.open_connection("127.0.0.1", port)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.read()).endswith(b"\r\n\r\nok\n")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"nonsense\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
            silent.close()

    asyncio.run(asyncio.wait_for(test(), 240))


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
