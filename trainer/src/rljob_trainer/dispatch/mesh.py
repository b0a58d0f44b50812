"""The position of a rank in a mesh: which share of the data it gets, and whether it returns the share's result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_trainer.errors import DispatchError


@dataclass(frozen=True)
class MeshPosition:
    """The position of one rank in a mesh: which share of the data it gets, and whether it returns the share's result.

    Ranks with the same `data_rank` (tensor, pipeline and sequence parallel peers) get the same share."""

    data_rank: int
    """The number of the share that this rank gets, from 0."""
    num_data_ranks: int
    """The number of shares into which the data is split."""
    is_collected: bool
    """Whether this rank returns the result of its share. Exactly one of the ranks with the same share does."""


def mesh_position(
    rank: int, sizes: Mapping[str, int], *, data: str = "dp", collected_at: Mapping[str, int]
) -> MeshPosition:
    """Returns the position of a rank in a mesh of named dimensions. The last dimension varies fastest.

    `sizes`: dimension -> size, in order, for example {"pp": 2, "dp": 4, "sp": 1, "tp": 2}. `data`: the dimension over
    which the data is split. `collected_at`: for other dimensions, the coordinate of the rank that returns the result; 0
    for a dimension that it does not name. With pipeline parallelism this must be the last stage, here {"pp": 1}.

    Raises DispatchError for an unknown dimension, a size below 1, a rank outside of the mesh, and for a `collected_at`
    that names the data dimension or has a coordinate outside of its dimension."""
    for name in (data, *collected_at):
        if name not in sizes:
            raise DispatchError(f"mesh: no dimension '{name}' (there are: {', '.join(sizes)}); use one of these")
    if data in collected_at:
        raise DispatchError(
            f"mesh: every rank of '{data}' returns the result of its own share; remove '{data}' from `collected_at`"
        )
    for name, size in sizes.items():
        if size < 1:
            raise DispatchError(f"mesh: the size of dimension '{name}' must be 1 or more (seen: {size})")
    coordinates: dict[str, int] = {}
    rest = rank
    for name in reversed(list(sizes)):
        rest, coordinates[name] = divmod(rest, sizes[name])
    if rest or rank < 0:
        raise DispatchError(f"mesh: rank {rank} is outside of the mesh {dict(sizes)}")
    for name, coordinate in collected_at.items():
        if not 0 <= coordinate < sizes[name]:
            raise DispatchError(
                f"mesh: coordinate {coordinate} is outside of dimension '{name}' (size {sizes[name]}); set "
                f"`collected_at` to 0 or more and less than {sizes[name]}"
            )
    is_collected = all(
        coordinate == collected_at.get(name, 0) for name, coordinate in coordinates.items() if name != data
    )
    return MeshPosition(coordinates[data], sizes[data], is_collected)


def check_positions(
    where: str, positions: Sequence[MeshPosition], advice: str = "correct `mesh_position` of the worker class"
) -> None:
    """Raises DispatchError unless there are ranks, they agree on the number of shares, each has one of these shares,
    and exactly one rank returns the result of each share. `where` and `advice` begin and end the message."""
    if not positions:
        raise DispatchError(f"{where}: there are no ranks")
    num_data_ranks = positions[0].num_data_ranks
    if any(position.num_data_ranks != num_data_ranks for position in positions):
        raise DispatchError(
            f"{where}: the ranks disagree on the number of data ranks "
            f"({[position.num_data_ranks for position in positions]}); {advice}"
        )
    if unknown := [each.data_rank for each in positions if each.data_rank not in range(num_data_ranks)]:
        raise DispatchError(
            f"{where}: ranks have data ranks {unknown} (there are: 0 to {num_data_ranks - 1}); {advice}"
        )
    collected = sorted(position.data_rank for position in positions if position.is_collected)
    if collected != list(range(num_data_ranks)):
        raise DispatchError(
            f"{where}: exactly one rank must return the result of each of {num_data_ranks} data ranks (data ranks of "
            f"the ranks that return a result: {collected}); {advice}"
        )


def positions_of(where: str, positions: Sequence[MeshPosition], ranks: Sequence[int]) -> list[MeshPosition]:
    """Returns the positions of the chosen `ranks` as a separate mesh: their data ranks are renumbered from 0, in
    ascending order.

    Raises DispatchError unless, for every share of these ranks, one of them returns the result."""
    chosen = [positions[rank] for rank in ranks]
    numbers = {old: new for new, old in enumerate(sorted({position.data_rank for position in chosen}))}
    renumbered = [MeshPosition(numbers[each.data_rank], len(numbers), each.is_collected) for each in chosen]
    advice = "choose ranks that contain, for each data rank, the rank that returns its result"
    check_positions(f"{where}, ranks {ranks[0]} to {ranks[-1]}", renumbered, advice)
    return renumbered
