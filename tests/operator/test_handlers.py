"""Leadership, probes and news: the parts of the service that need no process to be tried."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import cast

import httpx
import pytest

from rljob_operator.handlers import leader_election
from rljob_operator.handlers.health import Parts, Reply, health_pages, serving
from rljob_operator.handlers.leader_election import LEASE_SECONDS, Leadership, LeadershipLostError, Lease, LeaseThread
from rljob_operator.handlers.relist import RELIST_SECONDS
from rljob_operator.kube.client import TIMEOUT_SECONDS, KubeClient
from rljob_operator.kube.connection import load_connection
from rljob_operator.kube.errors import NotFoundError
from rljob_operator.kube.objects import LEASES, KubeObjects, ResourceType
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.log import LineFormatter, about
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, text_at
from rljob_operator.settings import Settings, parse_settings
from rljob_operator.workqueue import Slots, WorkQueue, work_through
from rljob_testing.network import QuietHandler, free_port
from rljob_testing.operator import manual_clock, operator_process
from rljob_testing.operator.testbed import Testbed

CLOCK = ServerClock(time.monotonic, lambda: datetime.now(UTC))


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    """In a loop of its own, with a limit."""

    async def limited() -> None:
        async with asyncio.timeout(240):
            await test()

    asyncio.run(limited())


def test_probes_name_what_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        parts = Parts()
        pages = health_pages(parts)
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
        assert "workers ended unexpectedly" in caplog.text
        assert "worn out" in caplog.text
        assert "relist ended" not in caplog.text

    run(test)


def test_a_client_that_says_nothing_keeps_no_other_from_the_probes() -> None:
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


class CountedObjects(KubeObjects):
    """With a number of the reads that have ended."""

    num_reads = 0

    async def get(self, kind: ResourceType, namespace: str, name: str) -> JsonObject:
        try:
            return await super().get(kind, namespace, name)
        finally:
            self.num_reads += 1

    async def new_look(self) -> None:
        """Until something was read that was asked for after now, and acted upon."""
        before = self.num_reads
        while self.num_reads < before + 3:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def lease_objects(testbed: Testbed) -> AsyncIterator[CountedObjects]:
    """With the operator's rights."""
    connection = await load_connection(str(testbed.setup.kubeconfig()))
    async with KubeClient(connection, Metrics(), CLOCK) as client:
        yield CountedObjects(client)


@pytest.mark.apiserver
def test_a_lease_that_is_not_renewed_changes_hands(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_election, "RETRY_SECONDS", 0.1)

    async def test() -> None:
        async with lease_objects(testbed) as ours, lease_objects(testbed) as theirs:
            lease = Lease(ours, CLOCK, operator_process.OPERATOR_NAMESPACE, "hands")
            our_clock, their_clock = manual_clock.synchronized_clock(), manual_clock.synchronized_clock()
            first = Leadership(ours, our_clock.clock, operator_process.OPERATOR_NAMESPACE, "hands", "first")
            second = Leadership(theirs, their_clock.clock, operator_process.OPERATOR_NAMESPACE, "hands", "second")
            await first.acquire()
            holding = asyncio.create_task(first.hold())
            taking = asyncio.create_task(second.acquire())
            for _ in range(4):
                our_clock.pass_by(LEASE_SECONDS / 3)
                their_clock.pass_by(LEASE_SECONDS / 3)
                await ours.new_look()
                await theirs.new_look()
            assert not holding.done()
            assert not taking.done(), "it is renewed"
            holding.cancel()
            await theirs.new_look()
            their_clock.pass_by(LEASE_SECONDS - 1)
            await theirs.new_look()
            assert not taking.done(), "it may be renewed yet"
            their_clock.pass_by(2)
            await taking
            record = await lease.read()
            assert record is not None
            assert (record.holder, record.num_transitions) == ("second", 1)
            our_clock.pass_by(LEASE_SECONDS)
            with pytest.raises(LeadershipLostError, match="could not be renewed for 10 s"):
                await first.hold()
            await first.release()
            record = await lease.read()
            assert record is not None
            assert record.holder == "second", "what is not ours is not given back"
            assert await lease.write("third", 2, record)
            with pytest.raises(LeadershipLostError, match="held by third"):
                await second.hold()
            taking = asyncio.create_task(first.acquire())
            await ours.new_look()
            our_clock.pass_by(LEASE_SECONDS + 1)
            await taking

    run(test)


@pytest.mark.parametrize("answers", ["refused", "never"])
def test_a_leader_that_cannot_renew_stops_before_another_may_begin(
    answers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leader_election, "RENEW_SECONDS", 1.0)
    monkeypatch.setattr(leader_election, "RETRY_SECONDS", 0.1)

    async def test() -> None:
        port = free_port()
        setup = operator_process.OperatorSetup(tmp_path, f"http://127.0.0.1:{port}", None, "token", "", [], {})

        async def hang(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        server = await asyncio.start_server(hang, "127.0.0.1", port) if answers == "never" else None
        connection = await load_connection(str(setup.kubeconfig()))
        clock = asyncio.get_running_loop().time
        async with KubeClient(connection, Metrics(), CLOCK) as client:
            leader = Leadership(KubeObjects(client), CLOCK, operator_process.OPERATOR_NAMESPACE, "cut-off", "leader")
            started = clock()
            with pytest.raises(LeadershipLostError, match="could not be renewed for 1 s"):
                await leader.hold()
            assert clock() - started >= 1.0
            assert "timed out" not in caplog.text, "it waits for no answer longer than it leads"
        if server is not None:
            server.close()

    run(test)


class SlowApi:
    """An API server of one Lease, in a thread of its own; it counts how often the Lease was written."""

    def __init__(self) -> None:
        self.lease: dict[str, object] | None = None
        self.num_writes = 0
        self.is_silent = False
        api = self

        class Handler(QuietHandler):
            def handle_one_request(self) -> None:
                super().handle_one_request()
                self.close_connection |= api.is_silent

            def do_GET(self) -> None:
                missing = {"reason": "NotFound", "details": {"name": "busy"}}
                self.answer(404 if api.lease is None else 200, missing if api.lease is None else api.lease)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body["metadata"]["resourceVersion"] = str(api.num_writes)
                api.lease = body
                api.num_writes += 1
                self.answer(201 if self.command == "POST" else 200, body)

            do_PUT = do_POST

            def answer(self, status: int, body: Mapping[str, object]) -> None:
                data = json.dumps(body).encode()
                if api.is_silent:
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    @property
    def holder(self) -> object:
        """Who holds the Lease."""
        assert self.lease is not None
        spec = self.lease["spec"]
        assert isinstance(spec, dict)
        return spec["holderIdentity"]


@contextmanager
def slow_api() -> Iterator[SlowApi]:
    api = SlowApi()
    threading.Thread(target=api.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield api
    finally:
        api.server.shutdown()
        api.server.server_close()


def settings_for(url: str, folder: Path) -> Settings:
    setup = operator_process.OperatorSetup(folder, url, None, "token", "http://{namespace}.{cluster}", [], {})
    return parse_settings(
        {
            "KUBECONFIG": str(setup.kubeconfig()),
            "RLJOB_OPERATOR_RAY_VERSION": "2.60.0",
            "RLJOB_OPERATOR_TOKEN_KEYS_FOLDER": str(folder),
            "RLJOB_OPERATOR_POD_NAME": "busy-0",
            "RLJOB_OPERATOR_POD_NAMESPACE": operator_process.OPERATOR_NAMESPACE,
            "RLJOB_OPERATOR_LEASE_NAME": "busy",
        }
    )


def test_a_thousand_passes_do_not_delay_the_renewal_of_the_lease(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(leader_election, "RETRY_SECONDS", 0.1)

    async def test() -> None:
        with slow_api() as api:
            url = f"http://127.0.0.1:{api.server.server_address[1]}"
            # No time passes: however slow this machine is, it leads.
            lease = LeaseThread(settings_for(url, tmp_path), Metrics(), manual_clock.synchronized_clock().clock)
            assert not lease.may_act()
            lease.start()
            await lease.acquired()
            assert lease.may_act()
            queue: WorkQueue[int] = WorkQueue(lambda: 0.5, lambda key: key)
            renewed_after: list[int] = [0]
            """So many passes."""

            async def work(key: int) -> None:
                """Two milliseconds of the processor, without a word to the loop."""
                until = time.monotonic() + 0.002
                while time.monotonic() < until:
                    pass
                if api.num_writes >= len(renewed_after):
                    renewed_after.append(key)
                if key == 999:
                    queue.close()

            api.num_writes = 0
            for key in range(1000):
                queue.add(key)
            await work_through(queue, Slots(8), work)
            longest = max(after - before for before, after in itertools.pairwise([*renewed_after, 1000]))
            assert longest < 500, "five times as many as where the loop has nothing else to do"
            await lease.stop()
            assert api.holder == ""

    run(test)


def test_a_lease_that_is_lost_ends_the_work_and_forbids_it_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(leader_election, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(leader_election, "RENEW_SECONDS", 1.0)

    async def test() -> None:
        with slow_api() as api:
            url = f"http://127.0.0.1:{api.server.server_address[1]}"
            lease = LeaseThread(settings_for(url, tmp_path), Metrics(), CLOCK)
            lease.start()
            await lease.acquired()
            api.is_silent = True
            with pytest.raises(LeadershipLostError, match="could not be renewed for 1 s"):
                await lease.lost()
            assert not lease.may_act()
            await lease.stop()

    run(test)


def test_a_leader_that_was_paused_does_nothing_before_it_has_looked() -> None:
    clock = manual_clock.synchronized_clock()
    leader = Leadership(
        cast(KubeObjects, RenewingObjects()), clock.clock, operator_process.OPERATOR_NAMESPACE, "paused", "leader"
    )
    asyncio.run(leader.acquire())
    assert leader.is_certain
    clock.pass_by(9.9)
    assert leader.is_certain
    clock.pass_by(50.2)
    assert not leader.is_certain


def test_the_times_on_a_cluster_are_those_of_docs_reliability() -> None:
    """Tests of whole processes shorten them."""
    assert leader_election.LEASE_SECONDS + leader_election.RETRY_SECONDS < 20.0, "another replica leads within 20 s"
    assert leader_election.LEASE_SECONDS - leader_election.RENEW_SECONDS >= 2 * leader_election.RETRY_SECONDS
    assert RELIST_SECONDS == 60.0, "a listing makes up for lost events within a minute"
    assert TIMEOUT_SECONDS == 10.0, "a request without an answer is given up after 10 s"


class RenewingObjects:
    """An API server that has no Lease, and takes one."""

    async def get(self, kind: ResourceType, namespace: str, name: str) -> JsonObject:
        raise NotFoundError(f"{kind.plural} {namespace}/{name}")

    async def create(self, kind: ResourceType, namespace: str, manifest: JsonObject) -> bool:
        assert (kind, namespace, text_at(manifest, "spec", "holderIdentity")) == (
            LEASES,
            operator_process.OPERATOR_NAMESPACE,
            "leader",
        )
        return True
