"""What each built-in mode does: arguments of the caller -> shares, results of the ranks -> result of the caller.

Nothing here knows Ray, and nothing here changes what the caller gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat, cast

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.errors import DispatchError
from rljob_trainer.observability.metrics import Metrics, reduce_metrics

Arguments = tuple[object, ...]


@dataclass(frozen=True)
class SplitCall:
    """What every rank gets. Rank r runs with `shares[share_of_rank[r]]`: peers have one share, which is sent once.

    Ranks that are missing in `share_of_rank` do not run. `num_padded_rows` is what gathering must undo."""

    shares: tuple[Arguments, ...]
    share_of_rank: dict[int, int]
    num_padded_rows: int = 0

    def of_rank(self, rank: int) -> Arguments:
        """The arguments of one rank."""
        return self.shares[self.share_of_rank[rank]]

    def only_rank_zero(self) -> SplitCall:
        """The same for rank 0 alone, whose share has only a part of the added rows, or none."""
        share = self.share_of_rank[0]
        num_rows = next((len(each) for each in self.shares[share] if isinstance(each, DataProto)), 0)
        num_after = num_rows * (len(self.shares) - 1 - share)
        num_padded_rows = min(num_rows, max(0, self.num_padded_rows - num_after))
        return SplitCall(self.shares, {0: share}, num_padded_rows)

    def check(self, num_ranks: int) -> None:
        """Raises DispatchError unless some ranks of that many run, each with a share that is there."""
        wrong = [rank for rank in self.share_of_rank if rank not in range(num_ranks)]
        if wrong or not self.share_of_rank:
            raise DispatchError(
                f"the split names ranks {wrong or 'none'} to run (there are: 0 to {num_ranks - 1}); fix its function"
            )
        if lost := [share for share in self.share_of_rank.values() if share not in range(len(self.shares))]:
            raise DispatchError(
                f"the split names shares {lost} (there are: {len(self.shares)}, from 0); fix its function"
            )


def split_one_to_all(positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """The same for every rank."""
    return SplitCall((arguments,), dict.fromkeys(range(len(positions)), 0))


def split_rank_zero(_positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """Everything for rank 0."""
    return SplitCall((arguments,), {0: 0})


def split_all_to_all(positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """Element r of every argument for rank r. Raises DispatchError for an argument that is no such list."""
    shares = _elements(arguments, len(positions), "one per worker")
    return SplitCall(shares, {rank: rank for rank in range(len(positions))})


def split_lists(positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """Element d of every argument for data rank d. Raises DispatchError for an argument that is no such list."""
    shares = _elements(arguments, positions[0].num_data_ranks, "one per data-parallel rank")
    return SplitCall(shares, _by_data_rank(positions))


def split_batches(positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """Equal consecutive parts of every DataProto, padded where its rows do not spread evenly; all else for everybody.

    Raises DispatchError for batches of different lengths, and for a batch without rows."""
    num_data_ranks = positions[0].num_data_ranks
    check_lengths("arguments", arguments)
    num_padded_rows = 0
    columns: list[list[object]] = []
    for argument in arguments:
        if isinstance(argument, DataProto):
            padded, num_padded_rows = argument.padded_to_multiple(num_data_ranks)
            columns.append(list(padded.chunk(num_data_ranks)))
        else:
            columns.append([argument] * num_data_ranks)
    shares = tuple(tuple(column[part] for column in columns) for part in range(num_data_ranks))
    return SplitCall(shares, _by_data_rank(positions), num_padded_rows)


def check_lengths(where: str, arguments: Sequence[object]) -> None:
    """Raises DispatchError, starting with `where`, for batches of different lengths, and for batches without rows."""
    lengths = {len(argument) for argument in arguments if isinstance(argument, DataProto)}
    if len(lengths) > 1:
        raise DispatchError(f"{where}: batches of different lengths in one call ({sorted(lengths)})")
    if lengths == {0}:
        raise DispatchError(f"{where}: a batch without rows cannot be split; leave the call out")


def split_batches_for_function(positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """As `split_batches`, after a function. Raises DispatchError where the first argument cannot be called."""
    if not arguments or not callable(arguments[0]):
        seen = type(arguments[0]).__name__ if arguments else "nothing"
        raise DispatchError(f"the first argument must be a function (seen: {seen})")
    return split_batches(positions, arguments)


def split_batches_evenly(positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """As `split_batches`, without padding. Raises DispatchError where rows do not spread evenly."""
    call = split_batches(positions, arguments)
    if call.num_padded_rows:
        length = next(len(argument) for argument in arguments if isinstance(argument, DataProto))
        raise DispatchError(
            f"a batch of {length} rows does not spread evenly over {positions[0].num_data_ranks} workers, and rows "
            "that were added would be counted"
        )
    return call


def gather_list(_positions: Sequence[MeshPosition], call: SplitCall, results: Sequence[object]) -> object:
    """A list with the result of every rank that ran."""
    return [results[place] for place, _ in enumerate(sorted(call.share_of_rank))]


def gather_only(_positions: Sequence[MeshPosition], _call: SplitCall, results: Sequence[object]) -> object:
    """The result of the only rank that ran."""
    return results[0]


def gather_data_ranks(positions: Sequence[MeshPosition], call: SplitCall, results: Sequence[object]) -> object:
    """A list with one result per data rank, from the rank that answers for it."""
    return _answers(positions, call, results)


def gather_batches(positions: Sequence[MeshPosition], call: SplitCall, results: Sequence[object]) -> object:
    """One batch, rows in the order of the data ranks, without the rows that were added.

    Raises DispatchError for results that are no batches, and for a number of rows that padding cannot be taken off."""
    batches = [_batch(result) for result in _answers(positions, call, results)]
    batch = DataProto.concat(batches)
    if not call.num_padded_rows:
        return batch
    num_rows_given = next(len(argument) for argument in call.shares[0] if isinstance(argument, DataProto))
    if any(len(each) != num_rows_given for each in batches):
        raise DispatchError(
            f"{call.num_padded_rows} rows were added to spread the batch evenly, and the workers' results have "
            f"{[len(each) for each in batches]} rows: which ones to take off is not known; return a row per row, or "
            "pass a batch whose rows spread evenly"
        )
    return batch.slice(0, len(batch) - call.num_padded_rows)


def gather_metrics(positions: Sequence[MeshPosition], call: SplitCall, results: Sequence[object]) -> object:
    """The metrics of all data ranks, reduced. Raises DispatchError for results that are no metrics."""
    return reduce_metrics([_metrics(result) for result in _answers(positions, call, results)])


def _answers(positions: Sequence[MeshPosition], call: SplitCall, results: Sequence[object]) -> list[object]:
    ran = sorted(call.share_of_rank)
    if len(ran) == 1:
        # Whether or not it would answer for the others: nobody else did.
        return list(results)
    places = enumerate(ran)
    answering = sorted((positions[rank].data_rank, place) for place, rank in places if positions[rank].is_collected)
    return [results[place] for _, place in answering]


def _by_data_rank(positions: Sequence[MeshPosition]) -> dict[int, int]:
    return {rank: position.data_rank for rank, position in enumerate(positions)}


def _elements(arguments: Arguments, num_elements: int, what: str) -> tuple[Arguments, ...]:
    for place, argument in enumerate(arguments):
        if not isinstance(argument, list | tuple) or len(argument) != num_elements:
            seen = f"{len(argument)} elements" if isinstance(argument, list | tuple) else type(argument).__name__
            raise DispatchError(
                f"argument {place + 1} must be a list of {num_elements} elements, {what} (seen: {seen})"
            )
    columns = [argument for argument in arguments if isinstance(argument, list | tuple)]
    return tuple(tuple(column[part] for column in columns) for part in range(num_elements))


def _batch(result: object) -> DataProto:
    if not isinstance(result, DataProto):
        raise DispatchError(f"the method must return a DataProto (got {type(result).__name__})")
    return result


def _metrics(result: object) -> Metrics:
    if not isinstance(result, Mapping):
        raise DispatchError(f"the method must return metrics (got {type(result).__name__})")
    return {name: _number(name, value) for name, value in result.items()}


def _number(name: object, value: object) -> float:
    try:
        return float(cast("SupportsFloat", value))
    except (TypeError, ValueError, RuntimeError):
        raise DispatchError(
            f"the method must return one number for each metric (metric {name!r} is {value!r:.80}); give its mean, or "
            "several metrics"
        ) from None
