"""What `@register` does: arguments to ranks, results to the caller. No processes are involved."""

from __future__ import annotations

import pytest
import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.mesh import MeshPosition, check_positions, mesh_position
from rljob_trainer.dispatch.modes import Dispatch, Execute, dispatch_mode, register_dispatch_mode
from rljob_trainer.dispatch.register import register, registration_of, registrations
from rljob_trainer.dispatch.split_gather import SplitCall
from rljob_trainer.errors import DispatchError

DATA_PARALLEL = [MeshPosition(rank, 2, is_collected=True) for rank in range(2)]
TENSOR_PARALLEL = [MeshPosition(rank // 2, 2, is_collected=rank % 2 == 0) for rank in range(4)]
"""Four ranks: 0 and 1 are tensor-parallel peers, and so are 2 and 3."""


def batch(*values: int) -> DataProto:
    return DataProto({"x": torch.tensor(values)})


def values(result: object) -> list[int]:
    assert isinstance(result, DataProto)
    return [int(value) for value in result["x"].tolist()]


def split(dispatch: str, positions: list[MeshPosition], *arguments: object) -> SplitCall:
    return dispatch_mode(dispatch).split(positions, arguments)


def by_rank(call: SplitCall) -> list[tuple[object, ...]]:
    return [call.of_rank(rank) for rank in sorted(call.share_of_rank)]


def rows_by_rank(call: SplitCall) -> list[list[int]]:
    return [values(arguments[0]) for arguments in by_rank(call)]


def gather(dispatch: str, positions: list[MeshPosition], call: SplitCall, *results: object) -> object:
    return dispatch_mode(dispatch).gather(positions, call, results)


def test_one_to_all_gives_everything_to_every_worker() -> None:
    call = split(Dispatch.ONE_TO_ALL, DATA_PARALLEL, 1, "a")
    assert by_rank(call) == [(1, "a"), (1, "a")]
    assert len(call.shares) == 1
    assert gather(Dispatch.ONE_TO_ALL, DATA_PARALLEL, call, "r0", "r1") == ["r0", "r1"]


def test_rank_zero_runs_only_rank_zero() -> None:
    call = split(Dispatch.RANK_ZERO, DATA_PARALLEL, 5)
    assert call.share_of_rank == {0: 0}
    assert gather(Dispatch.RANK_ZERO, DATA_PARALLEL, call, "answer") == "answer"


def test_all_to_all_gives_one_element_to_each_worker() -> None:
    call = split(Dispatch.ALL_TO_ALL, TENSOR_PARALLEL, [*"abcd"], (1, 2, 3, 4))
    assert by_rank(call) == [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
    with pytest.raises(DispatchError, match=r"argument 2 must be a list .* 4 elements, one per worker \(seen: 3 elem"):
        split(Dispatch.ALL_TO_ALL, TENSOR_PARALLEL, [*"abcd"], [1, 2, 3])
    with pytest.raises(DispatchError, match=r"argument 1 must be a list .* \(seen: str\)"):
        split(Dispatch.ALL_TO_ALL, TENSOR_PARALLEL, "abcd")


def test_dp_compute_gives_one_element_to_each_data_rank() -> None:
    call = split(Dispatch.DP_COMPUTE, TENSOR_PARALLEL, ["a", "b"])
    assert by_rank(call) == [("a",), ("a",), ("b",), ("b",)]
    assert gather(Dispatch.DP_COMPUTE, TENSOR_PARALLEL, call, "A", None, "B", None) == ["A", "B"]
    with pytest.raises(DispatchError, match="list or tuple of 2 elements, one per data-parallel rank"):
        split(Dispatch.DP_COMPUTE, TENSOR_PARALLEL, ["a"])


def test_batches_are_split_in_order_and_concatenated_again() -> None:
    call = split(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, batch(1, 2, 3, 4), "both")
    assert rows_by_rank(call) == [[1, 2], [3, 4]]
    assert [arguments[1] for arguments in by_rank(call)] == ["both", "both"]
    result = gather(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, call, batch(10, 20), batch(30, 40))
    assert values(result) == [10, 20, 30, 40]


def test_padding_is_added_for_the_workers_and_removed_from_the_result() -> None:
    caller_batch = batch(1, 2, 3)
    call = split(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, caller_batch)
    assert rows_by_rank(call) == [[1, 2], [3, 3]]
    result = gather(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, call, batch(10, 20), batch(30, 30))
    assert values(result) == [10, 20, 30]
    assert values(caller_batch) == [1, 2, 3]


def test_one_row_can_be_split_across_many_workers() -> None:
    positions = [MeshPosition(rank, 4, is_collected=True) for rank in range(4)]
    call = split(Dispatch.DP_COMPUTE_PROTO, positions, batch(7))
    assert rows_by_rank(call) == [[7], [7], [7], [7]]
    assert values(gather(Dispatch.DP_COMPUTE_PROTO, positions, call, *[batch(rank) for rank in range(4)])) == [0]


def test_a_list_of_batches_is_already_split() -> None:
    call = split(Dispatch.DP_COMPUTE_PROTO, TENSOR_PARALLEL, [batch(1, 2, 3), batch()], "all")
    assert rows_by_rank(call) == [[1, 2, 3], [1, 2, 3], [], []]
    assert [arguments[1] for arguments in by_rank(call)] == ["all"] * 4
    results = (batch(10, 20), None, batch(30), None)
    assert values(gather(Dispatch.DP_COMPUTE_PROTO, TENSOR_PARALLEL, call, *results)) == [10, 20, 30]
    with pytest.raises(DispatchError, match=r"one batch per data-parallel rank \(2; seen: 3\)"):
        split(Dispatch.DP_COMPUTE_PROTO, TENSOR_PARALLEL, [batch(1), batch(2), batch(3)])
    with pytest.raises(DispatchError, match="split all or none"):
        split(Dispatch.DP_COMPUTE_PROTO, TENSOR_PARALLEL, [batch(1), batch(2)], batch(3, 4))


def test_padding_that_cannot_be_removed_is_an_error() -> None:
    call = split(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, batch(1, 2, 3))
    with pytest.raises(DispatchError, match=r"1 padding rows .* \[1, 2\] rows"):
        gather(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, call, batch(1), batch(2, 2))
    even = split(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, batch(1, 2))
    assert values(gather(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, even, batch(1), batch(2, 3))) == [1, 2, 3]


def test_tensor_parallel_peers_share_a_part_and_one_of_them_returns_it() -> None:
    call = split(Dispatch.DP_COMPUTE_PROTO, TENSOR_PARALLEL, batch(1, 2))
    assert rows_by_rank(call) == [[1], [1], [2], [2]]
    assert len(call.shares) == 2
    result = gather(Dispatch.DP_COMPUTE_PROTO, TENSOR_PARALLEL, call, batch(10), None, batch(20), None)
    assert values(result) == [10, 20]


def test_results_are_ordered_by_data_rank_not_by_rank() -> None:
    swapped = [MeshPosition(1, 2, is_collected=True), MeshPosition(0, 2, is_collected=True)]
    call = split(Dispatch.DP_COMPUTE_PROTO, swapped, batch(1, 2))
    assert rows_by_rank(call) == [[2], [1]]
    assert values(gather(Dispatch.DP_COMPUTE_PROTO, swapped, call, batch(20), batch(10))) == [10, 20]


def test_a_function_goes_to_all_workers() -> None:
    call = split(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, DATA_PARALLEL, len, batch(1, 2))
    assert [arguments[0] for arguments in by_rank(call)] == [len, len]
    assert [values(arguments[1]) for arguments in by_rank(call)] == [[1], [2]]
    with pytest.raises(DispatchError, match=r"the first argument must be a function \(seen: DataProto\)"):
        split(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, DATA_PARALLEL, batch(1, 2))


def test_metrics_are_reduced_by_their_names() -> None:
    call = split(Dispatch.DP_COMPUTE_METRIC, DATA_PARALLEL, batch(1, 2))
    metrics = [{"loss": 1.0, "diff_max": 3.0}, {"loss": 2.0, "diff_max": 5.0}]
    assert gather(Dispatch.DP_COMPUTE_METRIC, DATA_PARALLEL, call, *metrics) == {"loss": 1.5, "diff_max": 5.0}


def test_arguments_that_cannot_be_split_are_rejected() -> None:
    with pytest.raises(DispatchError, match=r"same length \(seen: \[1, 2\]\)"):
        split(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, batch(1, 2), batch(1))
    with pytest.raises(DispatchError, match="a batch without rows cannot be split"):
        split(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, batch())
    with pytest.raises(DispatchError, match=r"a batch of 3 rows .* over 2 "):
        split(Dispatch.DP_COMPUTE_METRIC, DATA_PARALLEL, batch(1, 2, 3))


def test_results_of_the_wrong_kind_are_rejected() -> None:
    call = split(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, batch(1, 2))
    with pytest.raises(DispatchError, match=r"must return a DataProto \(got int\)"):
        gather(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, call, 1, 2)
    with pytest.raises(DispatchError, match=r"must return a dictionary of metrics \(got NoneType\)"):
        gather(Dispatch.DP_COMPUTE_METRIC, DATA_PARALLEL, call, None, None)


def test_modes_can_be_added_and_not_replaced() -> None:
    def split_backwards(positions: object, arguments: tuple[object, ...]) -> SplitCall:
        del positions
        return SplitCall((tuple(reversed(arguments)),), {0: 0, 1: 0})

    def first(_positions: object, _call: SplitCall, results: object) -> object:
        assert isinstance(results, tuple)
        return results[0]

    register_dispatch_mode("BACKWARDS", split_backwards, first)
    register_dispatch_mode("BACKWARDS", split_backwards, first)
    assert by_rank(split("BACKWARDS", DATA_PARALLEL, 1, 2)) == [(2, 1), (2, 1)]
    with pytest.raises(DispatchError, match="mode 'BACKWARDS' already exists"):
        register_dispatch_mode("BACKWARDS", split_backwards, dispatch_mode(Dispatch.ONE_TO_ALL).gather)
    with pytest.raises(DispatchError, match="mode 'ONE_TO_ALL' already exists"):
        register_dispatch_mode("ONE_TO_ALL", split_backwards, first)


class Example:
    @register(Dispatch.ONE_TO_ALL, execute=Execute.RANK_ZERO, blocking=False)
    def registered(self, value: int) -> int:
        return value

    def plain(self) -> None:
        """A method that the controller does not call."""


class Derived(Example):
    pass


def test_registrations_are_found_through_inheritance_only() -> None:
    assert registrations(Derived).keys() == {"registered"}
    found = registration_of(Derived, "registered")
    assert (found.dispatch, found.execute, found.blocking, found.mesh) == ("ONE_TO_ALL", "RANK_ZERO", False, "dp")
    with pytest.raises(DispatchError, match=r"Example\.plain: not callable through a group"):
        registration_of(Example, "plain")
    with pytest.raises(DispatchError, match=r"Example\.missing"):
        registration_of(Example, "missing")


def test_a_registered_method_is_still_an_ordinary_method() -> None:
    assert Example().registered(4) == 4


def test_mistakes_are_rejected_where_the_class_is_defined() -> None:
    with pytest.raises(DispatchError, match=r"Wrong\.method: unknown dispatch mode 'DP_COMPUT' \(there are: ONE_T"):

        class Wrong:
            @register("DP_COMPUT")
            def method(self) -> None: ...

    with pytest.raises(DispatchError, match=r"method \(seen: <property"):

        class Property:
            @register()
            @property
            def method(self) -> None: ...

    with pytest.raises(DispatchError, match="the first parameter must be self"):

        @register()
        def function(value: int) -> int:
            return value


def test_a_mesh_of_four_dimensions_has_the_right_positions() -> None:
    sizes = {"pp": 2, "dp": 2, "sp": 1, "tp": 2}
    positions = [mesh_position(rank, sizes, collected_at={"pp": 1}) for rank in range(8)]
    assert [position.data_rank for position in positions] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [rank for rank, position in enumerate(positions) if position.is_collected] == [4, 6]
    check_positions("actor: mesh train", positions)
    with pytest.raises(DispatchError, match=r"no dimension 'ep' \(there are: pp, dp, sp, tp\)"):
        mesh_position(0, sizes, collected_at={"ep": 0})
    with pytest.raises(DispatchError, match="rank 8 is outside"):
        mesh_position(8, sizes, collected_at={})
    with pytest.raises(DispatchError, match="coordinate 2 is outside of dimension 'tp'"):
        mesh_position(0, sizes, collected_at={"tp": 2})


def test_a_mesh_whose_ranks_disagree_is_rejected() -> None:
    with pytest.raises(DispatchError, match=r"actor: the ranks disagree .* \(\[2, 3\]\)"):
        check_positions("actor", [MeshPosition(0, 2, is_collected=True), MeshPosition(1, 3, is_collected=True)])
    with pytest.raises(DispatchError, match=r"one rank .* each of 2 .* return a result: \[0, 0\]\)"):
        check_positions("actor", [MeshPosition(0, 2, is_collected=True)] * 2)
