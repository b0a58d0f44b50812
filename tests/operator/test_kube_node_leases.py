"""A kubelet counts as silent from when its Lease was first seen not to be renewed."""

from __future__ import annotations

import asyncio
import logging
from typing import cast

import pytest

from rljob_operator.kube.allowed_calls import LEASES, KubeObjects, ResourceType
from rljob_operator.kube.errors import ForbiddenError, KubeError, NotFoundError, UnavailableError
from rljob_operator.kube.node_leases import NodeLeases
from rljob_operator.raw_json import JsonObject
from rljob_testing.operator import manual_clock


class Leases:
    """The API server's Leases, of one node."""

    def __init__(self) -> None:
        self.renewed = "2026-01-31T12:00:00.000000Z"
        self.error: KubeError | None = None
        self.num_asked = 0

    async def get(self, kind: ResourceType, namespace: str, name: str) -> JsonObject:
        assert (kind, namespace, name) == (LEASES, "kube-node-lease", "node-1")
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return {"spec": {"renewTime": self.renewed}}


def new_leases() -> tuple[Leases, manual_clock.ManualClock, NodeLeases]:
    leases, clock = Leases(), manual_clock.synchronized_clock()
    return leases, clock, NodeLeases(cast(KubeObjects, leases), clock.clock)


def seconds(node_leases: NodeLeases) -> float:
    return asyncio.run(node_leases.seconds_since_renewal("node-1"))


def test_a_stale_node_lease_gives_its_age() -> None:
    leases, clock, node_leases = new_leases()
    assert seconds(node_leases) == 0.0, "the time before is not known"
    for expected in (4.0, 8.0, 12.0):
        clock.advance(4)
        assert seconds(node_leases) == expected
    leases.renewed = "2026-01-31T12:00:10.000000Z"
    clock.advance(4)
    assert seconds(node_leases) == 0.0


def test_the_age_depends_on_neither_clock() -> None:
    leases, clock, node_leases = new_leases()
    leases.renewed = "2031-01-31T12:00:00.000000Z"
    seconds(node_leases)
    clock.advance(30)
    assert seconds(node_leases) == 30.0
    leases.renewed = "1999-01-31T12:00:00.000000Z"
    clock.advance(30)
    assert seconds(node_leases) == 0.0


def test_jobs_on_one_node_share_a_poll() -> None:
    leases, clock, node_leases = new_leases()
    seconds(node_leases)
    clock.advance(1)
    assert (seconds(node_leases), leases.num_asked) == (1.0, 1)
    clock.advance(1)
    assert (seconds(node_leases), leases.num_asked) == (2.0, 2)


def test_a_node_lease_that_was_not_polled_counts_again_from_zero() -> None:
    _, clock, node_leases = new_leases()
    seconds(node_leases)
    clock.advance(61)
    assert seconds(node_leases) == 0.0


@pytest.mark.parametrize("error", [ForbiddenError("leases is forbidden"), NotFoundError("no such lease")])
def test_an_unreadable_node_lease_is_ignored_and_logged_once(
    error: KubeError, caplog: pytest.LogCaptureFixture
) -> None:
    leases, clock, node_leases = new_leases()
    leases.error = error
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert seconds(node_leases) == 0.0
            clock.advance(100)
    assert len(caplog.records) == 1
    assert str(error) in caplog.text


def test_an_unresponsive_api_server_makes_no_node_silent() -> None:
    leases, clock, node_leases = new_leases()
    seconds(node_leases)
    leases.error = UnavailableError("no answer")
    clock.advance(70)
    assert seconds(node_leases) == 0.0
