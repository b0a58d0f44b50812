"""Where a rank stands in a mesh: which share of the data it gets, and whether it answers for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_trainer.errors import DispatchError


@dataclass(frozen=True)
class MeshPosition:
    """Where one rank stands in a mesh: which share of the data it gets, and whether its result is the share's result.

    Ranks with the same `data_rank` (tensor, pipeline and sequence parallel peers) get the same share."""

    data_rank: int
    num_data_ranks: int
    is_collected: bool


def mesh_position(rank: int, sizes: Mapping[str, int], *, data: str = "dp", answers: Mapping[str, int]) -> MeshPosition:
    """The position of a rank in a mesh of named dimensions, the last one varying fastest.

    `sizes`: name -> size, in order, for example {"pp": 2, "dp": 4, "sp": 1, "tp": 2}. `data` is the dimension that
    data is split over. `answers`: coordinate of the peer that answers in each other dimension, 0 where it is not named;
    with pipeline parallelism it is the last stage, {"pp": 1} here.
    Raises DispatchError for an unknown dimension, a coordinate outside of it, or a rank outside of the mesh."""
    for name in (data, *answers):
        if name not in sizes:
            raise DispatchError(f"mesh: no dimension '{name}' (there are: {', '.join(sizes)})")
    if data in answers:
        raise DispatchError(f"mesh: every rank of '{data}' answers for a share of its own; leave it out of `answers`")
    for name, size in sizes.items():
        if size < 1:
            raise DispatchError(f"mesh: dimension '{name}' must be 1 or more (seen: {size})")
    coordinates: dict[str, int] = {}
    rest = rank
    for name in reversed(list(sizes)):
        rest, coordinates[name] = divmod(rest, sizes[name])
    if rest or rank < 0:
        raise DispatchError(f"mesh: rank {rank} lies outside of {dict(sizes)}")
    for name, coordinate in answers.items():
        if not 0 <= coordinate < sizes[name]:
            raise DispatchError(f"mesh: coordinate {coordinate} lies outside of dimension '{name}' ({sizes[name]})")
    is_collected = all(coordinate == answers.get(name, 0) for name, coordinate in coordinates.items() if name != data)
    return MeshPosition(coordinates[data], sizes[data], is_collected)


def check_positions(where: str, positions: Sequence[MeshPosition]) -> None:
    """Raises DispatchError where the ranks disagree: every share needs a rank, and exactly one that answers for it."""
    if not positions:
        raise DispatchError(f"{where}: there are no ranks")
    num_data_ranks = positions[0].num_data_ranks
    if any(position.num_data_ranks != num_data_ranks for position in positions):
        raise DispatchError(
            f"{where}: the ranks disagree on the number of data ranks "
            f"({[position.num_data_ranks for position in positions]})"
        )
    if lost := [each.data_rank for each in positions if each.data_rank not in range(num_data_ranks)]:
        raise DispatchError(f"{where}: ranks stand at data ranks {lost} (there are: 0 to {num_data_ranks - 1})")
    answering = sorted(position.data_rank for position in positions if position.is_collected)
    if answering != list(range(num_data_ranks)):
        raise DispatchError(
            f"{where}: exactly one rank must answer for each of {num_data_ranks} data ranks (answered for: {answering})"
        )


def positions_of(where: str, positions: Sequence[MeshPosition], ranks: Sequence[int]) -> list[MeshPosition]:
    """The positions of some ranks, as a mesh of its own: data ranks are numbered anew, in their order.

    Raises DispatchError where no rank among them answers for a share."""
    chosen = [positions[rank] for rank in ranks]
    numbers = {old: new for new, old in enumerate(sorted({position.data_rank for position in chosen}))}
    renumbered = [MeshPosition(numbers[each.data_rank], len(numbers), each.is_collected) for each in chosen]
    check_positions(f"{where}, ranks {ranks[0]} to {ranks[-1]}", renumbered)
    return renumbered
