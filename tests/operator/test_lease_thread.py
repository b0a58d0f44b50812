"""The thread that holds the Lease beside a busy event loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from rljob_operator.handlers import leader_election
from rljob_operator.handlers.leader_election import LeadershipLostError, LeaseThread
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.metrics import Metrics
from rljob_operator.settings import Settings, parse_settings
from rljob_operator.workqueue import Slots, WorkQueue, work_through
from rljob_testing import local_servers
from rljob_testing.operator import forked_operator, manual_clock

CLOCK = ServerClock(time.monotonic, lambda: datetime.now(UTC))


class SlowApi:
    """An API server of one Lease, in a thread of its own; it counts how often the Lease was written."""

    def __init__(self) -> None:
        self.lease: dict[str, object] | None = None
        self.num_writes = 0
        self.is_silent = False
        api = self

        class Handler(local_servers.QuietHandler):
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

    @property
    def holder(self) -> object:
        """The holder of the Lease."""
        assert self.lease is not None
        spec = self.lease["spec"]
        assert isinstance(spec, dict)
        return spec["holderIdentity"]


@contextmanager
def slow_api() -> Iterator[SlowApi]:
    api = SlowApi()
    with local_servers.running_http_server(api.server):
        yield api


def settings_for(url: str, folder: Path) -> Settings:
    setup = forked_operator.OperatorSetup(folder, url, None, "token", "http://{namespace}.{cluster}", [], {})
    return parse_settings(
        {
            "KUBECONFIG": str(setup.kubeconfig()),
            "RLJOB_OPERATOR_RAY_VERSION": "2.60.0",
            "RLJOB_OPERATOR_TOKEN_KEYS_FOLDER": str(folder),
            "RLJOB_OPERATOR_POD_NAME": "busy-0",
            "RLJOB_OPERATOR_POD_NAMESPACE": forked_operator.OPERATOR_NAMESPACE,
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
            # The clock stands still: however slow this machine is, the replica leads.
            lease = LeaseThread(settings_for(url, tmp_path), Metrics(), manual_clock.synchronized_clock().clock)
            assert not lease.may_act()
            lease.start()
            await lease.acquired()
            assert lease.may_act()
            queue: WorkQueue[int] = WorkQueue(lambda: 0.5, lambda key: key)
            renewed_after: list[int] = [0]
            """The number of passes after which the Lease was renewed."""

            async def work(key: int) -> None:
                """Two milliseconds of computation that do not yield to the event loop."""
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
            assert longest < 500, "five times as many as with an idle loop"
            await lease.stop()
            assert api.holder == ""

    asyncio.run(asyncio.wait_for(test(), 240))


def test_a_lost_lease_forbids_and_then_ends_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leader_election, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(leader_election, "RENEW_DEADLINE_SECONDS", 1.0)

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

    asyncio.run(asyncio.wait_for(test(), 240))
