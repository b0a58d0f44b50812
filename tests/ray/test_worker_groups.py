"""Calls of worker groups on real Ray: every dispatch mode, data by reference, views of fused roles."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Protocol, cast

import pytest
import ray
import torch

from rljob_testing.ray_clusters import echo_workers
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.errors import (
    CallTimeoutError,
    DataError,
    DispatchError,
    FailedWorker,
    WorkerError,
)
from rljob_trainer.groups.calls import Pending
from rljob_trainer.groups.object_store import TRAFFIC
from rljob_trainer.groups.worker_group import WorkerGroup, spawn
from rljob_trainer.groups.worker_processes import (
    WorkerProcesses,
)

pytestmark = [pytest.mark.ray]


@pytest.fixture(scope="module")
def processes(ray_driver: None) -> Iterator[WorkerProcesses]:  # noqa: ARG001 - connects
    with echo_workers.echo_processes(2) as processes:
        yield processes


@pytest.fixture(scope="module")
def group(processes: WorkerProcesses) -> WorkerGroup:
    return spawn(processes)["first"]


def test_every_kind_of_column_comes_back_unchanged(group: WorkerGroup) -> None:
    sent = echo_workers.mixed_batch(6)
    result = echo_workers.call_for_batch(group, "echo", sent)
    # One number per row comes to the controller; everything else stays on the worker.
    assert [name for name in result.column_names() if not result.is_remote(name)] == ["number"]
    assert result["number"].tolist() == [0, 1, 2, 3, 4, 5]
    fetched = result.fetched()
    assert torch.equal(fetched["x"], sent["x"])
    assert fetched.object_column("name") == sent.object_column("name")
    assert fetched.ragged_column("tokens").same_as(sent.ragged_column("tokens"))
    assert fetched.meta == {"step": 3}
    with pytest.raises(DataError, match=r"column 'x' is remote; get it with fetched\(\['x'\]\) first"):
        result["x"]


def test_padding_named_arguments_and_defaults_work(group: WorkerGroup) -> None:
    sent = echo_workers.mixed_batch(5)
    assert echo_workers.call_for_batch(group, "add", sent.only(["number"]))["number"].tolist() == [1, 2, 3, 4, 5]
    assert echo_workers.call_for_batch(group, "add", batch=sent.only(["number"]), number=10)["number"].tolist() == [
        10,
        11,
        12,
        13,
        14,
    ]
    assert len(sent) == 5
    with pytest.raises(TypeError, match="unexpected keyword argument 'amount'"):
        echo_workers.call(group, "add", sent, amount=1)


def test_kept_columns_can_be_sliced_joined_and_passed_on(group: WorkerGroup) -> None:
    kept = echo_workers.call_for_batch(group, "add", echo_workers.mixed_batch(6).only(["x"]))
    order = [5, 0, 3, 1, 4, 2]
    again = echo_workers.call_for_batch(group, "add", kept.rows(order)).fetched()
    assert again["x"][:, 0].tolist() == [row + 2 for row in order]
    longer = DataProto.concat([kept.slice(4, 6), kept.slice(0, 3)])
    assert echo_workers.call_for_batch(group, "add", longer).fetched()["x"][:, 0].tolist() == [6.0, 7.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("width", [3, 200_000])
def test_pending_results_are_passed_on(group: WorkerGroup, width: int) -> None:
    first = echo_workers.call(group, "add_later", echo_workers.mixed_batch(4, width).only(["x"]), seconds=0.5)
    assert isinstance(first, Pending)
    assert not first.done()
    second = echo_workers.call(group, "add_later", first)
    assert isinstance(second, Pending)
    with pytest.raises(CallTimeoutError, match=r"first\.add_later: no result within 0\.05 s"):
        second.result(timeout_seconds=0.05)
    result = second.result()
    assert isinstance(result, DataProto)
    assert result.fetched()["x"][:, 0].tolist() == [2, 3, 4, 5]
    assert first.done()
    # Padded rows cannot be passed on before their number is known: the caller waits.
    padded = echo_workers.call(group, "add_later", echo_workers.mixed_batch(3).only(["number"]))
    last = echo_workers.call(group, "add_later", padded)
    assert isinstance(last, Pending)
    assert cast(DataProto, last.result())["number"].tolist() == [2, 3, 4]


def test_other_dispatch_modes_work(group: WorkerGroup) -> None:
    assert echo_workers.call(group, "only_first", 7) == [7]
    assert echo_workers.call(group, "later", 7) == [7, 8]
    assert echo_workers.call(group, "sums", echo_workers.mixed_batch(4).only(["number"])) == {"number_sum": 6.0}
    doubled = echo_workers.call_for_batch(group, "apply", double, echo_workers.mixed_batch(4).only(["number"]))
    assert doubled["number"].tolist() == [0, 2, 4, 6]


def double(share: DataProto) -> DataProto:
    return DataProto({name: column * 2 for name, column in share.tensors.items()})


def test_errors_name_the_method(group: WorkerGroup) -> None:
    with pytest.raises(DispatchError, match=r"first\.sums: DP_COMPUTE_METRIC: a batch of 3 rows"):
        echo_workers.call(group, "sums", echo_workers.mixed_batch(3))
    with pytest.raises(DispatchError, match=r"first\.change_in_place: changed columns of its batch in place \(x\)"):
        echo_workers.call(group, "change_in_place", echo_workers.mixed_batch(4))
    with pytest.raises(DispatchError, match=r"first\.uneven: DP_COMPUTE_PROTO: 1 padding rows"):
        echo_workers.call(group, "uneven", echo_workers.mixed_batch(3))
    assert echo_workers.call_for_batch(group, "uneven", echo_workers.mixed_batch(4).only(["number"]))[
        "number"
    ].tolist() == [0, 2, 3]


def test_large_data_is_sent_once_and_read_in_place(group: WorkerGroup) -> None:
    sent = DataProto({"x": torch.rand(64, 32_768)})
    TRAFFIC.take()
    kept = echo_workers.call_for_batch(group, "echo", sent)
    there = TRAFFIC.take()
    assert there.sent_bytes == sent.num_bytes() == 64 * 32_768 * 4
    assert there.received_bytes == 64 * 8
    again = echo_workers.call_for_batch(group, "echo", echo_workers.call_for_batch(group, "echo", kept))
    passed_on = TRAFFIC.take()
    # Two calls, each with 8 bytes per row in both directions.
    assert (passed_on.sent_bytes, passed_on.received_bytes) == (2 * 64 * 8, 2 * 64 * 8)
    assert torch.equal(again.fetched()["x"], sent["x"])


def test_released_data_leaves_the_object_store(group: WorkerGroup) -> None:
    def used_bytes() -> float:
        return ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]

    sent = DataProto({"x": torch.rand(64, 32_768)})
    before = used_bytes()
    highest = 0.0
    for _ in range(60):
        echo_workers.call_for_batch(group, "add", echo_workers.call_for_batch(group, "echo", sent))
        highest = max(highest, used_bytes() - before)
    # If one of a step's three batches were not freed, 60 steps would leave 60 x 8 MiB. Data that is being freed may
    # still be counted.
    deadline = time.monotonic() + 30
    while used_bytes() - before > sent.num_bytes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert used_bytes() - before <= sent.num_bytes()
    assert highest < 40 * sent.num_bytes()


def test_views_of_fused_roles_share_processes_and_may_be_called_at_once(processes: WorkerProcesses) -> None:
    views = spawn(processes)
    seen = {
        name: cast(list[tuple[str, int, int, tuple[str, ...]]], echo_workers.call(view, "whoami"))
        for name, view in views.items()
    }
    assert [(name, rank, others) for name, rank, _, others in seen["second"]] == [
        ("second", 0, ("first",)),
        ("second", 1, ("first",)),
    ]
    assert [process for _, _, process, _ in seen["first"]] == [process for _, _, process, _ in seen["second"]]
    wrong: list[object] = []

    def work(view: WorkerGroup, number: int) -> None:
        for step in range(50):
            result = echo_workers.call_for_batch(
                view, "add", echo_workers.mixed_batch(4).only(["number"]), number + step
            )["number"].tolist()
            if result != [row + number + step for row in range(4)]:
                wrong.append(result)

    threads = [threading.Thread(target=work, args=(view, 1000 * index)) for index, view in enumerate(views.values())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_thousand_calls_can_be_in_flight(group: WorkerGroup) -> None:
    sent = echo_workers.mixed_batch(2).only(["number"])
    pending = [cast("Pending[DataProto]", echo_workers.call(group, "add_later", sent)) for _ in range(1000)]
    assert all(each.result()["number"].tolist() == [1, 2] for each in pending)


def test_own_errors_arrive_as_raised_and_others_with_their_traceback(group: WorkerGroup) -> None:
    with pytest.raises(DataError, match=r"^a column is missing$"):
        echo_workers.call(group, "fail", 1, "own")
    with pytest.raises(WorkerError, match=r"first\.fail: worker rank 1: ZeroDivisionError") as raised:
        echo_workers.call(group, "fail", 1, "foreign")
    assert "echo_workers.py" in str(raised.value)
    assert 'raise ZeroDivisionError("somebody divided by nothing")' in str(raised.value)
    assert raised.value.worker == FailedWorker("first", 1)


def test_the_cause_is_reported_before_the_closed_connections_of_peers(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"first\.fail: worker rank 1: ZeroDivisionError\('the cause'\)"):
        echo_workers.call(group, "fail", 1, "peers first")


def test_peers_of_a_mesh_get_one_share_and_the_collecting_rank_returns_the_result(
    four_processes: WorkerProcesses,
) -> None:
    result = echo_workers.call_for_batch(
        spawn(four_processes)["first"], "ranks", echo_workers.mixed_batch(6, 40_000)
    ).fetched()
    assert result["rank"][:, 0].tolist() == [1, 1, 1, 3, 3, 3]
    assert result["x"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]


class Colliding(echo_workers.EchoWorker):
    @register(Dispatch.ONE_TO_ALL)
    def sub_group(self) -> None: ...


class EmptyGroup(Protocol):
    def empty(self) -> list[None]: ...


class MisnamedGroup(Protocol):
    def nothing(self) -> list[None]: ...


def test_a_group_can_be_cast_to_a_protocol_that_fits(group: WorkerGroup) -> None:
    assert group.seen_as(EmptyGroup).empty() == [None, None]
    with pytest.raises(DispatchError, match=r"MisnamedGroup does not match EchoWorker, .*nothing is missing"):
        group.seen_as(MisnamedGroup)
    with pytest.raises(AttributeError, match=r"first: EchoWorker has no registered method 'add_' \(there are: add, "):
        vars(WorkerGroup)["__getattr__"](group, "add_")
    assert not hasattr(group, "mesh_position")
    assert repr(group.sub_group(1, 2)) == "<WorkerGroup first: EchoWorker, ranks 1 of 2>"


def test_names_that_a_group_uses_itself_are_rejected(processes: WorkerProcesses) -> None:
    with pytest.raises(DispatchError, match=r"Colliding\.sub_group: .*rename the method"):
        WorkerGroup(processes, "first", Colliding)


def test_a_range_of_ranks_is_a_group_of_its_own(four_processes: WorkerProcesses) -> None:
    group = spawn(four_processes)["first"]
    upper = group.sub_group(2, 4)
    assert [rank for _, rank, _, _ in echo_workers.describe_ranks(upper)] == [2, 3]
    assert echo_workers.call(upper, "only_first", 0) == [2]
    assert echo_workers.call_for_batch(upper, "echo", echo_workers.mixed_batch(4).only(["number"]))[
        "number"
    ].tolist() == [0, 1, 2, 3]
    assert echo_workers.call_for_batch(upper, "ranks", echo_workers.mixed_batch(2)).fetched()["rank"][
        :, 0
    ].tolist() == [3, 3]
    with pytest.raises(DispatchError, match=r"first: mesh tp, ranks 1 to 2: exactly one rank"):
        echo_workers.call(group.sub_group(1, 3), "ranks", echo_workers.mixed_batch(2))
    with pytest.raises(DispatchError, match=r"first: no ranks 3 to 4 \(there are: 0 to 3\)"):
        group.sub_group(3, 5)
