"""The split and gather functions of the built-in modes: caller's arguments -> shares, ranks' results -> caller's
result.

They do not use Ray and do not modify the caller's arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat, TypeGuard, cast

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.mesh import MeshPosition
from rljob_trainer.errors import DispatchError
from rljob_trainer.observability.metrics import Metrics, reduce_metrics

Arguments = tuple[object, ...]


@dataclass(frozen=True)
class SplitCall:
    """The arguments of every rank: rank r runs with `shares[share_of_rank[r]]`. Several ranks may have the same share,
    which is then stored only once. Ranks that are not in `share_of_rank` do not run."""

    shares: tuple[Arguments, ...]
    share_of_rank: dict[int, int]
    """Rank -> index of its arguments in `shares`."""
    num_padded_rows: int = 0
    """The number of padding rows at the end of the batch; the gather function must remove them from the result."""

    def of_rank(self, rank: int) -> Arguments:
        """Returns the arguments of one rank."""
        return self.shares[self.share_of_rank[rank]]

    def only_rank_zero(self) -> SplitCall:
        """Returns the call for rank 0 alone. Its share may contain some of the padding rows, which are at the end of
        the last shares; `num_padded_rows` of the returned call counts only these. Raises DispatchError if rank 0 does
        not run."""
        if 0 not in self.share_of_rank:
            raise DispatchError("the split function returned no arguments for rank 0, the only rank that runs")
        share = self.share_of_rank[0]
        num_rows = next((len(each) for each in self.shares[share] if isinstance(each, DataProto)), 0)
        num_rows_after = num_rows * (len(self.shares) - 1 - share)
        num_padded_rows = min(num_rows, max(0, self.num_padded_rows - num_rows_after))
        return SplitCall(self.shares, {0: share}, num_padded_rows)

    def check(self, num_ranks: int) -> None:
        """Raises DispatchError unless at least one rank runs, all ranks exist, and each has an existing share."""
        wrong = [rank for rank in self.share_of_rank if rank not in range(num_ranks)]
        if wrong or not self.share_of_rank:
            raise DispatchError(
                f"the split function returned ranks {wrong or 'none'} (there are: 0 to {num_ranks - 1}); correct this "
                "function of the mode"
            )
        if unknown := [share for share in self.share_of_rank.values() if share not in range(len(self.shares))]:
            raise DispatchError(
                f"the split function returned share indices {unknown} (there are {len(self.shares)} shares, numbered "
                "from 0); correct this function of the mode"
            )


def split_one_to_all(positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """Gives all arguments to every rank."""
    return SplitCall((arguments,), dict.fromkeys(range(len(positions)), 0))


def split_rank_zero(_positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """Gives all arguments to rank 0; the others do not run."""
    return SplitCall((arguments,), {0: 0})


def split_all_to_all(positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """Gives element r of every argument to rank r. Raises DispatchError unless every argument is a list or tuple with
    one element per rank."""
    shares = _elements(arguments, len(positions), "one per worker")
    return SplitCall(shares, {rank: rank for rank in range(len(positions))})


def split_lists(positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """Gives element d of every argument to data rank d. Raises DispatchError unless every argument is a list or tuple
    with one element per data rank."""
    shares = _elements(arguments, positions[0].num_data_ranks, "one per data-parallel rank")
    return SplitCall(shares, _by_data_rank(positions))


def split_batches(positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """Splits every DataProto into equal consecutive parts, one per data rank; every rank gets all other arguments. If
    the number of rows is not divisible by the number of data ranks, padding rows are added at the end. A list of
    DataProto is already split: it has one part per data rank, of any length.

    Raises DispatchError for batches of different lengths, for a batch without rows, for a list with another number of
    parts, and if only some of the batches are lists."""
    num_data_ranks = positions[0].num_data_ranks
    check_lengths("arguments", arguments)
    if any(map(_is_split, arguments)) and any(isinstance(argument, DataProto) for argument in arguments):
        raise DispatchError("some batches are lists with one part per rank, and others are not; split all or none")
    num_padded_rows = 0
    columns: list[list[object]] = []
    for argument in arguments:
        if isinstance(argument, DataProto):
            padded, num_padded_rows = argument.padded_to_multiple(num_data_ranks)
            columns.append(list(padded.chunk(num_data_ranks)))
        elif _is_split(argument):
            if len(argument) != num_data_ranks:
                raise DispatchError(
                    f"a list of batches must have one batch per data-parallel rank ({num_data_ranks}; seen: "
                    f"{len(argument)})"
                )
            columns.append(list(argument))
        else:
            columns.append([argument] * num_data_ranks)
    shares = tuple(tuple(column[part] for column in columns) for part in range(num_data_ranks))
    return SplitCall(shares, _by_data_rank(positions), num_padded_rows)


def _is_split(argument: object) -> TypeGuard[list[DataProto]]:
    return isinstance(argument, list) and bool(argument) and all(isinstance(each, DataProto) for each in argument)


def check_lengths(where: str, arguments: Sequence[object]) -> None:
    """Raises DispatchError for batches of different lengths, and for batches without rows. `where` begins the
    message."""
    lengths = {len(argument) for argument in arguments if isinstance(argument, DataProto)}
    if len(lengths) > 1:
        raise DispatchError(f"{where}: all batches of a call must have the same length (seen: {sorted(lengths)})")
    if lengths == {0}:
        raise DispatchError(f"{where}: a batch without rows cannot be split; skip the call")


def split_batches_for_function(positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """Like `split_batches`; the first argument is a function. Raises DispatchError if it is not callable."""
    if not arguments or not callable(arguments[0]):
        seen = type(arguments[0]).__name__ if arguments else "nothing"
        raise DispatchError(f"the first argument must be a function (seen: {seen})")
    return split_batches(positions, arguments)


def split_batches_evenly(positions: Sequence[MeshPosition], arguments: Arguments) -> SplitCall:
    """Like `split_batches`, without padding. Also raises DispatchError if the number of rows is not divisible by the
    number of data ranks."""
    call = split_batches(positions, arguments)
    if call.num_padded_rows:
        length = next(len(argument) for argument in arguments if isinstance(argument, DataProto))
        raise DispatchError(
            f"a batch of {length} rows cannot be split evenly over {positions[0].num_data_ranks} data-parallel ranks, "
            f"and padding rows would distort the metrics; pass a multiple of {positions[0].num_data_ranks} rows"
        )
    return call


def gather_list(_positions: Sequence[MeshPosition], _call: SplitCall, results: Sequence[object]) -> object:
    """Returns a list with the result of every rank that ran, in the order of the ranks."""
    return list(results)


def gather_only(_positions: Sequence[MeshPosition], _call: SplitCall, results: Sequence[object]) -> object:
    """Returns the result of the first rank that ran; with `split_rank_zero`, only rank 0 runs."""
    return results[0]


def gather_data_ranks(positions: Sequence[MeshPosition], call: SplitCall, results: Sequence[object]) -> object:
    """Returns a list with one result per data rank, in the order of the data ranks. If only one rank ran, the list has
    only its result."""
    return _collected_results(positions, call, results)


def gather_batches(positions: Sequence[MeshPosition], call: SplitCall, results: Sequence[object]) -> object:
    """Concatenates the batches in the order of the data ranks and removes the padding rows.

    Raises DispatchError if a result is not a batch. If there are padding rows, also raises it if a result has another
    number of rows than the rank's arguments, because the padding rows cannot be found then."""
    batches = [_batch(result) for result in _collected_results(positions, call, results)]
    batch = DataProto.concat(batches)
    if not call.num_padded_rows:
        return batch
    num_rows_given = next(len(argument) for argument in call.shares[0] if isinstance(argument, DataProto))
    if any(len(each) != num_rows_given for each in batches):
        raise DispatchError(
            f"{call.num_padded_rows} padding rows were added to split the batch evenly, but the workers' results have "
            f"{[len(each) for each in batches]} rows instead of {num_rows_given} each, so the padding cannot be "
            "removed; let the method return one row per input row, or pass a batch whose number of rows is divisible "
            f"by {len(call.shares)}"
        )
    return batch.slice(0, len(batch) - call.num_padded_rows)


def gather_metrics(positions: Sequence[MeshPosition], call: SplitCall, results: Sequence[object]) -> object:
    """Reduces the metrics of all data ranks. Raises DispatchError if a result is not a dictionary of numbers."""
    return reduce_metrics([_metrics(result) for result in _collected_results(positions, call, results)])


def _collected_results(positions: Sequence[MeshPosition], call: SplitCall, results: Sequence[object]) -> list[object]:
    ran = sorted(call.share_of_rank)
    if len(ran) == 1:
        # Only one rank ran, so its result is used, even if another rank normally returns the result of its share.
        return list(results)
    collected = sorted((positions[rank].data_rank, i) for i, rank in enumerate(ran) if positions[rank].is_collected)
    return [results[index] for _, index in collected]


def _by_data_rank(positions: Sequence[MeshPosition]) -> dict[int, int]:
    return {rank: position.data_rank for rank, position in enumerate(positions)}


def _elements(arguments: Arguments, num_elements: int, what: str) -> tuple[Arguments, ...]:
    for index, argument in enumerate(arguments):
        if not isinstance(argument, list | tuple) or len(argument) != num_elements:
            seen = f"{len(argument)} elements" if isinstance(argument, list | tuple) else type(argument).__name__
            raise DispatchError(
                f"argument {index + 1} must be a list or tuple of {num_elements} elements, {what} (seen: {seen})"
            )
    columns = [argument for argument in arguments if isinstance(argument, list | tuple)]
    return tuple(tuple(column[part] for column in columns) for part in range(num_elements))


def _batch(result: object) -> DataProto:
    if not isinstance(result, DataProto):
        raise DispatchError(f"the method must return a DataProto (got {type(result).__name__})")
    return result


def _metrics(result: object) -> Metrics:
    if not isinstance(result, Mapping):
        raise DispatchError(f"the method must return a dictionary of metrics (got {type(result).__name__})")
    return {name: _number(name, value) for name, value in result.items()}


def _number(name: object, value: object) -> float:
    try:
        return float(cast("SupportsFloat", value))
    except (TypeError, ValueError, RuntimeError):
        raise DispatchError(
            f"the method must return one number for each metric (metric {name!r} is {value!r:.80}); return its mean, "
            "or several metrics"
        ) from None
