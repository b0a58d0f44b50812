"""Which nodes take which pools: a small exact search. Pure.

A pool wants some nodes, each of them for itself as far as that pool is concerned; nodes of different pools may be one
node where it has room for both. The search knows no names, only amounts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

MAX_TRIES = 20_000
"""Places tried before the search gives up; eight pools on some hundred nodes need a few hundred."""
UNITS = 10_000
"""Ray counts resources in steps of 1/10,000; whole numbers compare exactly."""
GPU = "GPU"

Amounts = tuple[int, ...]
_Classes = dict[Amounts, tuple[int, ...]]
"""Nodes with the same room, by that room; the nodes of a class in their order."""


class SearchExhausted(Exception):
    """The search gave up: there may be a packing, and there may be none."""


@dataclass(frozen=True)
class NodeNeed:
    """What a pool wants: so many nodes with so much room each."""

    num_nodes: int
    amounts: Mapping[str, float]


def pack(needs: Sequence[NodeNeed], rooms: Sequence[Mapping[str, float]]) -> list[list[int]] | None:
    """For each need the nodes that take it (indices of `rooms`, ascending); None when there is no way.

    Nodes are equal when all pools together could not use what one has more than the other. Of equal nodes the first are
    taken, of others the smaller, so that large ones stay free for the pools that need them; nodes without GPUs count as
    smaller. Raises SearchExhausted after `MAX_TRIES`."""
    names = sorted({GPU, *(name for need in needs for name in need.amounts)})
    wanted = [tuple(units(need.amounts.get(name, 0)) for name in names) for need in needs]
    # No node takes more than one node of every pool: room beyond that makes no difference between nodes.
    most = tuple(max(1, sum(amounts[i] for amounts in wanted)) for i in range(len(names)))
    classes: dict[Amounts, list[int]] = {}
    for index, room in enumerate(rooms):
        key = tuple(min(units(room.get(name, 0)), limit) for name, limit in zip(names, most, strict=True))
        classes.setdefault(key, []).append(index)
    start = {key: tuple(members) for key, members in classes.items()}
    order = sorted(
        range(len(needs)), key=lambda i: (_num_fitting(start, wanted[i]) - needs[i].num_nodes, -sum(wanted[i]), i)
    )
    search = _Search([(needs[i].num_nodes, wanted[i]) for i in order], most)
    found = search.place(0, start)
    if found is None:
        return None
    by_need = dict(zip(order, found, strict=True))
    return [sorted(by_need[i]) for i in range(len(needs))]


def units(amount: float) -> int:
    """An amount in Ray's smallest steps."""
    return round(amount * UNITS)


@dataclass
class _Search:
    """Depth-first over the pools, the hardest first. Nodes with equal room are tried only once."""

    needs: Sequence[tuple[int, Amounts]]
    most: Amounts
    dead_ends: set[tuple[int, frozenset[tuple[Amounts, int]]]] = field(default_factory=set)
    num_tries: int = 0

    def place(self, position: int, classes: _Classes) -> list[list[int]] | None:
        """The nodes of each need from `position` on, or None."""
        if position == len(self.needs):
            return []
        if any(_num_fitting(classes, wanted) < number for number, wanted in self.needs[position:]):
            return None
        state = position, frozenset((room, len(members)) for room, members in classes.items())
        if state in self.dead_ends:
            return None
        number, wanted = self.needs[position]
        rooms = sorted((room for room in classes if _fits(room, wanted)), key=lambda room: self._left(room, classes))
        for counts in _distributions(number, [len(classes[room]) for room in rooms]):
            self.num_tries += 1
            if self.num_tries > MAX_TRIES:
                raise SearchExhausted
            taken = [index for room, count in zip(rooms, counts, strict=True) for index in classes[room][:count]]
            rest = self.place(position + 1, _without(classes, dict(zip(rooms, counts, strict=True)), wanted))
            if rest is not None:
                return [taken, *rest]
        self.dead_ends.add(state)
        return None

    def _left(self, room: Amounts, classes: _Classes) -> tuple[float, int]:
        """Room that is of use to any pool, so that the smallest suitable node comes first; then the first node."""
        return sum(amount / limit for amount, limit in zip(room, self.most, strict=True)), classes[room][0]


def _without(classes: _Classes, counts: Mapping[Amounts, int], wanted: Amounts) -> _Classes:
    """The classes after so many nodes of each have given so much."""
    members: dict[Amounts, list[int]] = {}
    for room, indices in classes.items():
        count = counts.get(room, 0)
        smaller = tuple(amount - used for amount, used in zip(room, wanted, strict=True))
        if count:
            members.setdefault(smaller, []).extend(indices[:count])
        if count < len(indices):
            members.setdefault(room, []).extend(indices[count:])
    return {room: tuple(sorted(indices)) for room, indices in members.items()}


def _distributions(total: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to take `total` from places with so many each, as many as possible from the first places first."""
    if not limits:
        if total == 0:
            yield ()
        return
    for first in range(min(total, limits[0]), -1, -1):
        if total - first <= sum(limits[1:]):
            for rest in _distributions(total - first, limits[1:]):
                yield (first, *rest)


def _num_fitting(classes: _Classes, wanted: Amounts) -> int:
    return sum(len(members) for room, members in classes.items() if _fits(room, wanted))


def _fits(room: Amounts, wanted: Amounts) -> bool:
    return all(amount >= needed for amount, needed in zip(room, wanted, strict=True))
