"""What `@register` means: arguments to ranks, results to the caller. No processes are involved."""

from __future__ import annotations

import pytest
import torch

from rljob_trainer.data.proto import DataProto
from rljob_trainer.dispatch.modes import MeshPosition, gather_results, split_arguments
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register, registration_of, registrations
from rljob_trainer.errors import DispatchError

DATA_PARALLEL = [MeshPosition(rank, 2, is_collected=True) for rank in range(2)]
TENSOR_PARALLEL = [MeshPosition(rank // 2, 2, is_collected=rank % 2 == 0) for rank in range(4)]
"""Four ranks: 0 and 1 are tensor-parallel peers, 2 and 3 too."""


def batch(*values: int) -> DataProto:
    return DataProto({"x": torch.tensor(values)})


def values(result: object) -> list[int]:
    assert isinstance(result, DataProto)
    return [int(value) for value in result["x"].tolist()]


def shares(call_arguments: tuple[tuple[object, ...], ...]) -> list[list[int]]:
    return [values(arguments[0]) for arguments in call_arguments]


def test_every_worker_gets_everything_in_one_to_all() -> None:
    call = split_arguments(Dispatch.ONE_TO_ALL, DATA_PARALLEL, (1, "a"))
    assert call.arguments == ((1, "a"), (1, "a"))
    assert gather_results(Dispatch.ONE_TO_ALL, DATA_PARALLEL, call, ["r0", "r1"]) == ["r0", "r1"]


def test_only_rank_zero_runs_in_rank_zero() -> None:
    call = split_arguments(Dispatch.RANK_ZERO, DATA_PARALLEL, (5,))
    assert call.ranks == (0,)
    assert gather_results(Dispatch.RANK_ZERO, DATA_PARALLEL, call, ["answer"]) == "answer"


def test_all_to_all_takes_one_element_per_worker() -> None:
    call = split_arguments(Dispatch.ALL_TO_ALL, DATA_PARALLEL, (["a", "b"],))
    assert call.arguments == (("a",), ("b",))
    with pytest.raises(DispatchError, match="list of 2 elements"):
        split_arguments(Dispatch.ALL_TO_ALL, DATA_PARALLEL, (["a"],))


def test_batches_are_split_in_order_and_put_together_again() -> None:
    call = split_arguments(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, (batch(1, 2, 3, 4), "both"))
    assert shares(call.arguments) == [[1, 2], [3, 4]]
    assert [arguments[1] for arguments in call.arguments] == ["both", "both"]
    results = [batch(10, 20), batch(30, 40)]
    assert values(gather_results(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, call, results)) == [10, 20, 30, 40]


def test_padding_is_added_for_the_workers_and_taken_off_the_result() -> None:
    caller_batch = batch(1, 2, 3)
    call = split_arguments(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, (caller_batch,))
    assert shares(call.arguments) == [[1, 2], [3, 3]]
    result = gather_results(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, call, [batch(10, 20), batch(30, 30)])
    assert values(result) == [10, 20, 30]
    assert values(caller_batch) == [1, 2, 3]


def test_tensor_parallel_peers_share_a_part_and_one_of_them_answers() -> None:
    call = split_arguments(Dispatch.DP_COMPUTE_PROTO, TENSOR_PARALLEL, (batch(1, 2),))
    assert shares(call.arguments) == [[1], [1], [2], [2]]
    results = [batch(10), batch(-1), batch(20), batch(-1)]
    assert values(gather_results(Dispatch.DP_COMPUTE_PROTO, TENSOR_PARALLEL, call, results)) == [10, 20]


def test_results_are_ordered_by_data_rank_not_by_rank() -> None:
    swapped = [MeshPosition(1, 2, is_collected=True), MeshPosition(0, 2, is_collected=True)]
    call = split_arguments(Dispatch.DP_COMPUTE_PROTO, swapped, (batch(1, 2),))
    assert shares(call.arguments) == [[2], [1]]
    assert values(gather_results(Dispatch.DP_COMPUTE_PROTO, swapped, call, [batch(20), batch(10)])) == [10, 20]


def test_metrics_are_reduced_by_their_names() -> None:
    call = split_arguments(Dispatch.DP_COMPUTE_METRIC, DATA_PARALLEL, (batch(1, 2),))
    metrics = [{"loss": 1.0, "diff_max": 3.0}, {"loss": 2.0, "diff_max": 5.0}]
    assert gather_results(Dispatch.DP_COMPUTE_METRIC, DATA_PARALLEL, call, metrics) == {"loss": 1.5, "diff_max": 5.0}


def test_batches_of_two_lengths_in_one_call_are_refused() -> None:
    with pytest.raises(DispatchError, match=r"different lengths in one call \(\[1, 2\]\)"):
        split_arguments(Dispatch.DP_COMPUTE_PROTO, DATA_PARALLEL, (batch(1, 2), batch(1)))


class Example:
    @register(Dispatch.ONE_TO_ALL)
    def registered(self, value: int) -> int:
        return value

    def plain(self) -> None:
        """Not for the controller."""


class Derived(Example):
    pass


def test_registrations_are_found_through_inheritance_and_only_where_made() -> None:
    assert registrations(Derived).keys() == {"registered"}
    assert registration_of(Derived, "registered").dispatch is Dispatch.ONE_TO_ALL
    with pytest.raises(DispatchError, match=r"Example\.plain: not callable through a group"):
        registration_of(Example, "plain")
    with pytest.raises(DispatchError, match=r"Example\.missing"):
        registration_of(Example, "missing")


def test_a_registered_method_is_still_an_ordinary_method() -> None:
    assert Example().registered(4) == 4


def test_metrics_of_a_batch_that_would_need_padding_are_refused() -> None:
    with pytest.raises(DispatchError, match="a batch of 3 rows does not spread evenly over 2 workers"):
        split_arguments(Dispatch.DP_COMPUTE_METRIC, DATA_PARALLEL, (batch(1, 2, 3),))
