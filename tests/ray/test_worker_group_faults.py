"""Faults around worker groups on real Ray: errors that cannot be pickled, concurrent calls, results that are kept
wrongly."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import ray
import torch

from rljob_api.constants import ErrorCause
from rljob_testing.ray_clusters import echo_workers
from rljob_testing.ray_clusters.faulty_worker import FaultyWorker, make_faulty
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.errors import (
    AlgorithmFunctionError,
    CallTimeoutError,
    DataError,
    DispatchError,
    ResourceError,
    TrainerError,
    WorkerError,
)
from rljob_trainer.groups.calls import Pending
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.worker_group import WorkerGroup, spawn
from rljob_trainer.groups.worker_processes import BuildSettings, WorkerProcesses, attach_processes, start_processes
from rljob_trainer.pools.resource_pool import PoolSettings, ResourcePool, reserve_pools

pytestmark = [pytest.mark.ray]

ROLES = [RoleSpec(name, FaultyWorker, make_faulty) for name in ("first", "second")]
ENVIRONMENT = {"PYTHONPATH": echo_workers.PYTHON_PATH, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def processes(ray_driver: None) -> Iterator[WorkerProcesses]:  # noqa: ARG001 - connects
    with echo_workers.echo_processes(2, "odd", ROLES) as processes:
        yield processes


@pytest.fixture(scope="module")
def group(processes: WorkerProcesses) -> WorkerGroup:
    return spawn(processes)["first"]


@pytest.fixture(scope="module")
def elsewhere(group: WorkerGroup) -> Iterator[WorkerGroup]:  # noqa: ARG001 - first
    """Other processes of the same class."""
    with echo_workers.echo_processes(2, roles=ROLES) as processes:
        yield spawn(processes)["first"]


def rows(number: int = 4) -> DataProto:
    return echo_workers.mixed_batch(number).only(["number"])


def later(group: WorkerGroup, method: str, *arguments: object) -> Pending[DataProto]:
    pending = echo_workers.call(group, method, *arguments)
    assert isinstance(pending, Pending)
    return pending


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("timeout", WorkerError, r"first\.fail_with: worker rank 0: .*somebody else's"),
        ("two arguments", WorkerError, r"first\.fail_with: worker rank 0: (?s:.*)TwoArgumentsError: this and that"),
        ("ours with two arguments", WorkerError, r"worker rank 0: (?s:.*)TwoArgumentsTrainerError: this and that"),
        ("lock", WorkerError, r"worker rank 0: (?s:.*)ValueError: holds a lock"),
        ("long", WorkerError, r"worker rank 0: (?s:.*)ValueError: xxx"),
        ("result", WorkerError, r"first\.fail_with: worker rank 0: its result cannot be unpickled"),
        ("generator", DispatchError, r"first\.fail_with: .*generator"),
    ],
)
def test_an_unpicklable_error_of_a_worker_is_not_reported_as_its_death(
    group: WorkerGroup, how: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text) as raised:
        echo_workers.call(group, "fail_with", how)
    assert len(str(raised.value)) < 100_000
    assert echo_workers.call(group, "rank") == [0, 1]


@pytest.mark.parametrize(
    ("how", "kind", "cause"),
    [
        ("device memory", WorkerError, ErrorCause.DEVICE_MEMORY),
        ("device memory in a library", WorkerError, ErrorCause.DEVICE_MEMORY),
        ("device memory in a function", AlgorithmFunctionError, ErrorCause.DEVICE_MEMORY),
        ("host memory", WorkerError, ErrorCause.HOST_MEMORY),
        ("lock", WorkerError, None),
    ],
)
def test_the_controller_learns_whose_memory_was_too_small(
    group: WorkerGroup, how: str, kind: type[TrainerError], cause: ErrorCause | None
) -> None:
    with pytest.raises(kind) as raised:
        echo_workers.call(group, "fail_with", how)
    assert raised.value.known_cause == cause
    if "device" in how and kind is WorkerError:
        assert "OutOfMemoryError" in str(raised.value)


def test_an_unpicklable_argument_is_rejected_before_any_rank_is_called(group: WorkerGroup) -> None:
    with pytest.raises(DispatchError, match=r"first\.barrier: .*argument 1 \(lock\) .*pickle"):
        echo_workers.call(group, "barrier", [1, threading.Lock()])
    with pytest.raises(DispatchError, match=r"argument 1 \(Pending\) .*its result\(\)"):
        echo_workers.call(group, "barrier", [1, later(group, "make", rows())])
    assert echo_workers.call(group, "barrier", [1, 2]) == [1, 2]
    huge = 10**5000
    assert echo_workers.call(group, "barrier", [huge, huge]) == [huge, huge]


def test_calls_from_several_threads_do_not_mix_collectives(processes: WorkerProcesses) -> None:
    views = spawn(processes)
    sums: list[float] = []

    def work(view: WorkerGroup, value: int) -> None:
        sums.extend(cast(float, echo_workers.call(view, "sum_over_ranks", value)[0]) - 2 * value for _ in range(200))  # type: ignore[index]

    threads = [threading.Thread(target=work, args=each) for each in zip([*views.values()] * 2, (1, 10, 100, 1000))]  # noqa: B905
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [0.0] * 800


def test_two_controllers_get_only_their_own_results(group: WorkerGroup) -> None:
    other = ray.remote(_call_as_another_controller).options(num_cpus=0, runtime_env={"env_vars": ENVIRONMENT})
    mine = later(group, "make", rows())
    mine.result()
    ray.get(other.remote("odd"))
    assert echo_workers.call_for_batch(group, "read", mine)["light"].tolist() == [0, 0, 1, 1]
    assert echo_workers.call_for_batch(group, "read", later(group, "make", rows()))["light"].tolist() == [0, 0, 1, 1]


def _call_as_another_controller(name: str) -> None:
    group = spawn(attach_processes(name))["first"]
    failed = [later(group, "fail", rows()) for _ in range(20)]
    for each in failed:
        with pytest.raises(DataError, match=r"failed on [01] with 2 rows"):
            each.result()


def test_kept_results_are_the_same_on_all_ranks_and_do_not_change(group: WorkerGroup, elsewhere: WorkerGroup) -> None:
    unfinished = later(group, "make", rows())
    for method in ("append", "add_to_light"):
        try:
            echo_workers.call(group, method, unfinished)
        except DispatchError as error:
            assert "changed columns of its batch in place (light)" in str(error)  # noqa: PT017 - one of two does
    for reader in (group, elsewhere):
        read = echo_workers.call_for_batch(reader, "read", unfinished)
        assert read["light"].tolist() == [0, 0, 1, 1]
        assert read["length"].tolist() == [1, 1, 1, 1]
        assert not read["needs_gradient"].any()


def test_a_custom_split_also_applies_to_pending_batches(group: WorkerGroup) -> None:
    unfinished = later(group, "make", rows())
    expected = echo_workers.call_for_batch(group, "backwards", unfinished.result())["light"].tolist()
    assert expected == [1, 1, 0, 0]
    assert echo_workers.call_for_batch(group, "backwards", unfinished)["light"].tolist() == expected


def test_row_counts_are_compared_where_they_are_known(group: WorkerGroup) -> None:
    with pytest.raises(DispatchError, match=r"first\.both: .*same length \(seen: \[1, 2\]\)"):
        echo_workers.call(group, "both", later(group, "make", rows(4)), later(group, "make", rows(2)))
    some = later(group, "make_some", rows())
    with pytest.raises(DispatchError, match=r"first\.both: a batch without rows cannot be split"):
        echo_workers.call(group, "both", some, some)


def test_the_reason_for_a_missing_result_is_always_reported(group: WorkerGroup, elsewhere: WorkerGroup) -> None:
    failed = later(group, "fail", rows())
    for reader in (group, elsewhere):
        with pytest.raises(DataError, match=r"failed on [01] with 2 rows"):
            echo_workers.call(reader, "read", failed)


def test_rank_zero_alone_keeps_its_rows(group: WorkerGroup) -> None:
    assert echo_workers.call_for_batch(group, "first_share", rows(3))["number"].tolist() == [0, 1]


def test_an_unknown_mesh_is_an_error_of_its_methods_only(group: WorkerGroup) -> None:
    with pytest.raises(DataError, match="there is no such mesh"):
        echo_workers.call(group, "nowhere", rows())


def test_the_first_call_of_a_view_waits_for_no_other_call(
    group: WorkerGroup, processes: WorkerProcesses, tmp_path: Path
) -> None:
    begun, end = tmp_path / "begun", tmp_path / "end"
    busy = threading.Thread(target=echo_workers.call, args=(group, "wait", str(begun), str(end)))
    busy.start()
    while not begun.exists():
        time.sleep(0.01)
    pending = later(spawn(processes)["second"].sub_group(0, 2), "make", rows())
    with pytest.raises(ResourceError, match=r"workers odd: .*busy .*0\.5 s"):
        attach_processes("odd", timeout_seconds=0.5)
    end.touch()
    pending.result()
    busy.join()


def test_processes_without_free_resources_are_not_waited_for(group: WorkerGroup) -> None:  # noqa: ARG001 - first
    pool = ResourcePool(PoolSettings("full", 1, 1, False, 0.1, 60))
    try:
        first = start_processes(pool, ENVIRONMENT)
        first.build(pool.slots(), BuildSettings("cpu", 1, None), ROLES)
        second = start_processes(pool, ENVIRONMENT)
        second.start_seconds = 1.0
        with pytest.raises(ResourceError, match=r"1 of 1 processes have not started within 1 s"):
            second.build(pool.slots(), BuildSettings("cpu", 1, None), ROLES)
        second.close()
        first.close()
    finally:
        pool.release()
    with pytest.raises(ResourceError, match=r"pool full: .*released; reserve it again"):
        start_processes(pool, ENVIRONMENT)


def test_a_duplicate_name_is_rejected_and_leaves_nothing(group: WorkerGroup) -> None:  # noqa: ARG001 - first
    pool = ResourcePool(PoolSettings("again", 1, 1, False, 0.1, 60, is_detached=True))
    try:
        with pytest.raises(ResourceError, match=r"workers odd: cannot be started .*attach to them, or choose another"):
            start_processes(pool, ENVIRONMENT, "odd")
    finally:
        pool.release()


def test_two_pools_of_one_name_are_rejected(group: WorkerGroup) -> None:  # noqa: ARG001 - first
    settings = PoolSettings("twin", 1, 1, False, 0.1, 60)
    with pytest.raises(ResourceError, match="pools: duplicate names twin"):
        reserve_pools([settings, settings])
    assert reserve_pools([]) == []
    with_no_time = ResourcePool(PoolSettings("now", 1, 1, False, 0.1, 0))
    with_no_time.release()


def test_a_call_without_waiting_has_a_time_limit(group: WorkerGroup, tmp_path: Path) -> None:
    with pytest.raises(CallTimeoutError):
        later(group, "make_when_file_exists", rows(), str(tmp_path / "end")).result(0.1)
    (tmp_path / "end").touch()
    assert torch.equal(
        echo_workers.call_for_batch(group, "read", later(group, "make", rows(2)))["light"],
        torch.tensor([0.0, 1.0]).double(),
    )
