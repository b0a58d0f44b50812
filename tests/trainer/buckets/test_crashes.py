"""Checkpoints in a bucket: a process that is killed at any request that changes something loses nothing that was
committed. Requests that fail, are slow, or whose answers are lost do not harm a start at all.

The scenario is `small_checkpoints.second_start`, against a real S3 server behind a proxy that injects the faults. Then
a third start resumes, saves and removes old checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest

from rljob_testing.buckets.clients import quick_client
from rljob_testing.buckets.fault_proxy import Fault, FaultProxy, Request, fault_proxy
from rljob_testing.buckets.s3_server import BUCKET, S3Server
from rljob_testing.training import gloo_ranks, small_checkpoints
from rljob_trainer.checkpoints.fencing import announce_start
from rljob_trainer.dispatch.worker import WorkerContext

CHANGES = {"PUT if absent": 3, "PUT": 4, "DELETE": 6}
"""Changes of the scenario: the start file and two manifests; four shards; the three files of each of two old
checkpoints."""
REPEATED = (
    Fault.SLOW_DOWN,
    Fault.INTERNAL_ERROR,
    Fault.LOST_REQUEST,
    Fault.LOST_ANSWER,
    Fault.FALSE_ANSWER,
    Fault.CUT_ANSWER,
    Fault.SLOW_ANSWER,
)
"""Faults after which the client repeats the request, or does not notice."""
IN_SHORT_TIER = (Fault.SLOW_DOWN, Fault.LOST_ANSWER, Fault.CUT_ANSWER)
Kill = tuple[int, bool]
"""Number of a change at which a process is killed, and whether the server has carried it out."""


@pytest.fixture(scope="module", autouse=True)
def _first_start(server: S3Server) -> None:
    """The first start, with checkpoints of steps 10 and 20."""
    base = server.path("base")
    announce_start(base, 1)
    small_checkpoints.save_step(base, 10, 1)
    small_checkpoints.save_step(base, 20, 1)


@dataclass(frozen=True)
class CrashResult:
    """What a third start finds after the second was killed."""

    kind: str
    index: int
    is_after: bool
    """Whether the server had carried out the request."""
    was_killed: bool
    committed_step: int
    """The newest step whose commit had returned before the kill (20: none of this start)."""
    resumed_step: int
    tensors_equal: bool
    rejected: list[str]
    left_at_end: list[str]


class Killer:
    """Kills a process when it sends its n-th change, before or after the server carries it out."""

    def __init__(self, index: int, is_after: bool) -> None:
        self.process = 0
        self.kind = ""
        self._index, self._is_after = index, is_after
        self._num_changes = 0

    def choose(self, request: Request) -> Callable[[bool], None] | None:
        """See `FaultProxy.choose`."""
        if request.kind not in CHANGES:
            return None
        self._num_changes += 1
        if self._num_changes - 1 != self._index:
            return None
        self.kind = request.kind
        return self._kill

    def _kill(self, is_after: bool) -> None:
        if is_after == self._is_after:
            os.kill(self.process, signal.SIGKILL)
            raise EOFError("the client was killed")


def in_fork(
    program: Callable[[Callable[[object], None]], None], started: Callable[[int], None]
) -> tuple[int, list[object]]:
    """Runs a program in a fork. It gets a function that reports a JSON value. Returns its exit status, and what it has
    reported. `started` gets the id of the process."""
    reader, writer = os.pipe()
    ready_reader, ready_writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(ready_reader, 1)
            program(lambda value: [os.write(writer, json.dumps(value).encode() + b"\n")].clear())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    started(child)
    os.write(ready_writer, b"x")
    with os.fdopen(reader, "rb") as pipe:
        reported = [json.loads(line) for line in pipe]
    _, status = os.waitpid(child, 0)
    os.close(ready_reader)
    os.close(ready_writer)
    return status, reported


def nobody(_: int) -> None:
    """Ignores the id of the process."""


def sweep(server: S3Server, kills: tuple[Kill, ...], _: WorkerContext) -> list[CrashResult]:
    """Kills the second start at each of `kills`."""
    with fault_proxy(server.port) as proxy, quick_client():
        return [killed_at(server, proxy, *kill) for kill in kills]


def killed_at(server: S3Server, proxy: FaultProxy, index: int, is_after: bool) -> CrashResult:
    case, killer = fresh_case(server), Killer(index, is_after)
    proxy.reset(killer.choose)
    status, committed = in_fork(
        lambda report: small_checkpoints.second_start(server.path(case, proxy.endpoint), report),
        lambda process: setattr(killer, "process", process),
    )
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    steps = [step for step in committed if isinstance(step, int)]
    _, [found] = in_fork(lambda report: report(small_checkpoints.third_start(server.path(case))), nobody)
    assert isinstance(found, list)
    left = sorted({key.partition("/")[0] for key in server.keys(case)})
    return CrashResult(killer.kind, index, is_after, was_killed, max(steps, default=20), *found, left)


def fresh_case(server: S3Server) -> str:
    """A copy of the first start's files, with the attributes in which the server keeps what it knows of an object."""
    folder = server.folder / BUCKET
    shutil.rmtree(folder / "case", ignore_errors=True)
    shutil.copytree(folder / "base", folder / "case")
    return "case"


def run_sweep(server: S3Server, *kills: Kill) -> list[CrashResult]:
    [[results]] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(partial(sweep, server, kills), 1)])
    assert isinstance(results, list)
    for result in results:
        assert result.was_killed, result
        assert result.tensors_equal, result
        assert result.resumed_step in (20, 30, 40), result
        assert result.resumed_step >= result.committed_step, result
        assert result.rejected == [], result
        assert len(result.left_at_end) == 3, result
        assert result.left_at_end[0] == "starts", result
        assert result.left_at_end[-1] == "step-00000050.start-0003", result
    return results


def test_killed_at_the_announcement_at_a_shard_at_a_manifest_and_at_a_removal(server: S3Server) -> None:
    results = run_sweep(server, (0, True), (2, False), (3, False), (3, True), (4, True))
    kinds = ["PUT if absent", "PUT", "PUT if absent", "PUT if absent", "DELETE"]
    assert [result.kind for result in results] == kinds
    assert {result.resumed_step for result in results} == {20, 30}


@pytest.mark.long
def test_killed_at_every_change_resumes_from_the_newest_complete_checkpoint(server: S3Server) -> None:
    results = run_sweep(server, *product(range(sum(CHANGES.values())), (False, True)))
    assert Counter(result.kind for result in results if result.is_after) == CHANGES
    assert {result.resumed_step for result in results} == {20, 30, 40}


@pytest.mark.parametrize(
    ("fault", "offset"),
    [
        pytest.param(fault, offset, marks=[] if offset == 0 and fault in IN_SHORT_TIER else pytest.mark.long)
        for fault in REPEATED
        for offset in range(3)
    ],
)
def test_a_start_survives_a_fault_at_every_third_request(server: S3Server, fault: Fault, offset: int) -> None:
    case = fresh_case(server)
    with fault_proxy(server.port) as proxy:
        proxy.choose = lambda request: fault if request.number % 3 == offset else None
        root, committed = server.path(case, proxy.endpoint), list[int]()
        small_checkpoints.second_start(root, committed.append)
        requests = list(proxy.requests)
        assert small_checkpoints.third_start(root) == (40, True, [])
    assert committed == [30, 40]
    assert sorted({key.partition("/")[0] for key in server.keys(case)}) == [
        "starts",
        "step-00000040.start-0002",
        "step-00000050.start-0003",
    ]
    hit = {request.kind for request in requests if request.number % 3 == offset}
    assert {"GET", "GET list"} < hit
    assert hit & set(CHANGES)
