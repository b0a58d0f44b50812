"""What each dispatch mode does: arguments of the caller -> arguments per rank, results per rank -> result.

Nothing here knows Ray: a group calls `split_arguments`, runs the method on every rank and calls `gather_results`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rljob_trainer.data.proto import DataProto
from rljob_trainer.dispatch.register import Dispatch
from rljob_trainer.errors import DispatchError
from rljob_trainer.observability.metrics import Metrics, reduce_metrics


@dataclass(frozen=True)
class MeshPosition:
    """Where one rank stands in a mesh: which share of the data it gets, and whether its result is the share's result.

    Ranks with the same `data_rank` (tensor-parallel peers) get the same share."""

    data_rank: int
    num_data_ranks: int
    is_collected: bool


@dataclass(frozen=True)
class SplitCall:
    """Arguments per rank (index = rank; ranks that are left out do not run) and what gathering must undo."""

    arguments: tuple[tuple[object, ...], ...]
    ranks: tuple[int, ...]
    num_padded_rows: int = 0


def split_arguments(dispatch: Dispatch, positions: Sequence[MeshPosition], arguments: tuple[object, ...]) -> SplitCall:
    """Arguments for every rank that runs. `positions` has one entry per rank of the group.

    Raises DispatchError when an argument cannot be split as the mode asks."""
    all_ranks = tuple(range(len(positions)))
    if dispatch is Dispatch.RANK_ZERO:
        return SplitCall((arguments,), (0,))
    if dispatch is Dispatch.ONE_TO_ALL:
        return SplitCall(tuple(arguments for _ in all_ranks), all_ranks)
    if dispatch is Dispatch.ALL_TO_ALL:
        return SplitCall(_one_element_per_rank(arguments, len(positions)), all_ranks)
    num_data_ranks = positions[0].num_data_ranks
    shares, num_padded_rows = _shares(arguments, num_data_ranks)
    if num_padded_rows and dispatch is Dispatch.DP_COMPUTE_METRIC:
        raise DispatchError(
            f"DP_COMPUTE_METRIC: a batch of {sum(len(a) for a in arguments if isinstance(a, DataProto))} rows does not "
            f"spread evenly over {num_data_ranks} workers, and rows that were added would be counted"
        )
    return SplitCall(tuple(shares[position.data_rank] for position in positions), all_ranks, num_padded_rows)


def gather_results(
    dispatch: Dispatch, positions: Sequence[MeshPosition], call: SplitCall, results: Sequence[object]
) -> object:
    """What the caller gets. `results` has one entry per rank in `call.ranks`."""
    if dispatch is Dispatch.RANK_ZERO:
        return results[0]
    if dispatch in (Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL):
        return list(results)
    collected = sorted((position.data_rank, rank) for rank, position in enumerate(positions) if position.is_collected)
    ordered = [results[rank] for _, rank in collected]
    if dispatch is Dispatch.DP_COMPUTE_METRIC:
        return reduce_metrics([_metrics(result) for result in ordered])
    batch = DataProto.concat([_batch(result) for result in ordered])
    return batch.slice(0, len(batch) - call.num_padded_rows)


def _one_element_per_rank(arguments: tuple[object, ...], num_ranks: int) -> tuple[tuple[object, ...], ...]:
    columns: list[list[object]] = []
    for argument in arguments:
        if not isinstance(argument, list) or len(argument) != num_ranks:
            raise DispatchError(f"ALL_TO_ALL: every argument must be a list of {num_ranks} elements, one per worker")
        columns.append(argument)
    return tuple(tuple(column[rank] for column in columns) for rank in range(num_ranks))


def _shares(arguments: tuple[object, ...], num_data_ranks: int) -> tuple[list[tuple[object, ...]], int]:
    """Arguments per data rank; all DataProto arguments must have the same number of rows."""
    lengths = {len(argument) for argument in arguments if isinstance(argument, DataProto)}
    if len(lengths) > 1:
        raise DispatchError(f"DP_COMPUTE: batches of different lengths in one call ({sorted(lengths)})")
    num_padded_rows = 0
    columns: list[list[object]] = []
    for argument in arguments:
        if isinstance(argument, DataProto):
            padded, num_padded_rows = argument.padded_to_multiple(num_data_ranks)
            columns.append(list(padded.chunk(num_data_ranks)))
        else:
            columns.append([argument] * num_data_ranks)
    return [tuple(column[rank] for column in columns) for rank in range(num_data_ranks)], num_padded_rows


def _batch(result: object) -> DataProto:
    if not isinstance(result, DataProto):
        raise DispatchError(f"DP_COMPUTE_PROTO: the method must return a DataProto (got {type(result).__name__})")
    return result


def _metrics(result: object) -> Metrics:
    if not isinstance(result, dict):
        raise DispatchError(f"DP_COMPUTE_METRIC: the method must return metrics (got {type(result).__name__})")
    return result
