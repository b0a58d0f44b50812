"""Leader election: a Lease changes hands only when its holder cannot have renewed it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest

from rljob_operator.handlers import leader_election
from rljob_operator.handlers.leader_election import LEASE_SECONDS, Leadership, LeadershipLostError, Lease
from rljob_operator.handlers.relist import RELIST_SECONDS
from rljob_operator.kube.allowed_calls import LEASES, KubeObjects, ResourceType
from rljob_operator.kube.client import TIMEOUT_SECONDS, KubeClient
from rljob_operator.kube.connection import load_connection
from rljob_operator.kube.errors import NotFoundError
from rljob_operator.kube.server_clock import ServerClock
from rljob_operator.metrics import Metrics
from rljob_operator.raw_json import JsonObject, text_at
from rljob_testing.operator import forked_operator, manual_clock
from rljob_testing.operator.testbed import Testbed

CLOCK = ServerClock(time.monotonic, lambda: datetime.now(UTC))


class CountedObjects(KubeObjects):
    """Counts the reads that have ended."""

    num_reads = 0

    async def get(self, kind: ResourceType, namespace: str, name: str) -> JsonObject:
        try:
            return await super().get(kind, namespace, name)
        finally:
            self.num_reads += 1

    async def wait_for_new_poll(self) -> None:
        """Waits until a read that starts after now has ended and was acted upon."""
        before = self.num_reads
        while self.num_reads < before + 3:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def lease_objects(testbed: Testbed) -> AsyncIterator[CountedObjects]:
    """With the operator's permissions."""
    connection = await load_connection(str(testbed.setup.kubeconfig()))
    async with KubeClient(connection, Metrics(), CLOCK) as client:
        yield CountedObjects(client)


@pytest.mark.apiserver
def test_a_lease_that_is_not_renewed_changes_hands(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_election, "RETRY_SECONDS", 0.1)

    async def test() -> None:
        async with lease_objects(testbed) as ours, lease_objects(testbed) as theirs:
            lease = Lease(ours, CLOCK, forked_operator.OPERATOR_NAMESPACE, "hands")
            our_clock, their_clock = manual_clock.synchronized_clock(), manual_clock.synchronized_clock()
            first = Leadership(ours, our_clock.clock, forked_operator.OPERATOR_NAMESPACE, "hands", "first")
            second = Leadership(theirs, their_clock.clock, forked_operator.OPERATOR_NAMESPACE, "hands", "second")
            await first.acquire()
            holding = asyncio.create_task(first.hold())
            taking = asyncio.create_task(second.acquire())
            for _ in range(4):
                our_clock.advance(LEASE_SECONDS / 3)
                their_clock.advance(LEASE_SECONDS / 3)
                await ours.wait_for_new_poll()
                await theirs.wait_for_new_poll()
            assert not holding.done()
            assert not taking.done(), "it is renewed"
            holding.cancel()
            await theirs.wait_for_new_poll()
            their_clock.advance(LEASE_SECONDS - 1)
            await theirs.wait_for_new_poll()
            assert not taking.done(), "it may still be renewed"
            their_clock.advance(2)
            await taking
            record = await lease.read()
            assert record is not None
            assert (record.holder, record.num_transitions) == ("second", 1)
            our_clock.advance(LEASE_SECONDS)
            with pytest.raises(LeadershipLostError, match="could not be renewed for 10 s"):
                await first.hold()
            await first.release()
            record = await lease.read()
            assert record is not None
            assert record.holder == "second", "a Lease of another holder is not released"
            assert await lease.write("third", 2, record)
            with pytest.raises(LeadershipLostError, match="held by third"):
                await second.hold()
            taking = asyncio.create_task(first.acquire())
            await ours.wait_for_new_poll()
            our_clock.advance(LEASE_SECONDS + 1)
            await taking

    asyncio.run(asyncio.wait_for(test(), 240))


@pytest.mark.parametrize("answers", ["refused", "never"])
def test_a_leader_that_cannot_renew_stops_before_another_may_begin(
    answers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leader_election, "RENEW_DEADLINE_SECONDS", 1.0)
    monkeypatch.setattr(leader_election, "RETRY_SECONDS", 0.1)

    async def test() -> None:
        async def hang(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if answers == "refused":
            server.close()
        setup = forked_operator.OperatorSetup(tmp_path, f"http://127.0.0.1:{port}", None, "token", "", [], {})
        connection = await load_connection(str(setup.kubeconfig()))
        clock = asyncio.get_running_loop().time
        async with KubeClient(connection, Metrics(), CLOCK) as client:
            leader = Leadership(KubeObjects(client), CLOCK, forked_operator.OPERATOR_NAMESPACE, "cut-off", "leader")
            started = clock()
            with pytest.raises(LeadershipLostError, match="could not be renewed for 1 s"):
                await leader.hold()
            assert clock() - started >= 1.0
            assert "timed out after" not in caplog.text, "it waits for no response longer than it leads"
        server.close()

    asyncio.run(asyncio.wait_for(test(), 240))


def test_a_paused_leader_does_not_act_before_it_has_checked_its_lease() -> None:
    clock = manual_clock.synchronized_clock()
    leader = Leadership(
        cast(KubeObjects, RenewingObjects()), clock.clock, forked_operator.OPERATOR_NAMESPACE, "paused", "leader"
    )
    asyncio.run(leader.acquire())
    assert leader.is_certain
    clock.advance(9.9)
    assert leader.is_certain
    clock.advance(50.2)
    assert not leader.is_certain


def test_the_times_on_a_cluster_are_those_of_docs_reliability() -> None:
    """Tests of whole processes shorten these times."""
    assert leader_election.LEASE_SECONDS + leader_election.RETRY_SECONDS < 20.0, "another replica leads within 20 s"
    assert leader_election.LEASE_SECONDS - leader_election.RENEW_DEADLINE_SECONDS >= 2 * leader_election.RETRY_SECONDS
    assert RELIST_SECONDS == 60.0, "a listing makes up for lost events within a minute"
    assert TIMEOUT_SECONDS == 10.0, "a request without a response times out after 10 s"


class RenewingObjects:
    """An API server without a Lease, which accepts one."""

    async def get(self, kind: ResourceType, namespace: str, name: str) -> JsonObject:
        raise NotFoundError(f"{kind.plural} {namespace}/{name}")

    async def create(self, kind: ResourceType, namespace: str, manifest: JsonObject) -> bool:
        assert (kind, namespace, text_at(manifest, "spec", "holderIdentity")) == (
            LEASES,
            forked_operator.OPERATOR_NAMESPACE,
            "leader",
        )
        return True
