"""Which nodes take which pools: a small exact search. Pure.

A pool wants some nodes, each of them for itself as far as that pool is concerned; nodes of different pools may be one
node where it has room for both. All that the search has to know of a node is which pools fit on it together, so that a
thousand nodes are a handful of kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

MAX_TRIES = 1_000
"""Places tried before the search gives up, which is after a second or two."""
UNITS = 10_000
"""Ray counts resources in steps of 1/10,000; whole numbers compare exactly."""
GPU = "GPU"

PoolSets = frozenset[int]
"""Sets of pools, each as a bit mask, that a node has room for: with a set also all of its parts."""


class SearchExhausted(Exception):
    """The search gave up: there may be a packing, and there may be none."""


@dataclass(frozen=True)
class NodeNeed:
    """What a pool wants: so many nodes with so much room each."""

    num_nodes: int
    amounts: Mapping[str, float]


@dataclass(frozen=True)
class _Kind:
    """What nodes have in common that are equally good."""

    pools: PoolSets
    has_gpu: bool


_Classes = dict[_Kind, tuple[int, ...]]
"""The nodes of each kind in their order."""


def pack(needs: Sequence[NodeNeed], rooms: Sequence[Mapping[str, float]]) -> list[list[int]] | None:
    """For each need the nodes that take it (indices of `rooms`, ascending); None when there is no way.

    Nodes are equal when the same pools fit on them; of equal nodes the first are taken, of others those that are of the
    least use to the other pools. A pool without GPUs takes nodes without GPUs first. Raises SearchExhausted after
    `MAX_TRIES`."""
    num_fitting = [sum(_fits(need.amounts, room) for room in rooms) for need in needs]
    hardest_first = sorted(range(len(needs)), key=lambda i: (num_fitting[i] - needs[i].num_nodes, i))
    search = _Search([needs[i] for i in hardest_first])
    found = search.place(0, _classes(search.needs, rooms))
    if found is None:
        return None
    places = dict(zip(hardest_first, found, strict=True))
    return [sorted(places[i]) for i in range(len(needs))]


def units(amount: float) -> int:
    """An amount in Ray's smallest steps."""
    return round(amount * UNITS)


@dataclass
class _Search:
    """Depth-first over the pools. The pool at a position is that bit of a set of pools."""

    needs: Sequence[NodeNeed]
    dead_ends: set[tuple[int, frozenset[tuple[PoolSets, int]]]] = field(default_factory=set)
    num_tries: int = 0

    def place(self, position: int, classes: _Classes) -> list[list[int]] | None:
        """The nodes of each need from `position` on, or None."""
        if position == len(self.needs):
            return []
        state = position, frozenset((kind.pools, len(members)) for kind, members in classes.items())
        if state in self.dead_ends or not self._may_fit(position, classes):
            return None
        need, pool = self.needs[position], 1 << position
        avoids_gpus = not need.amounts.get(GPU)
        kinds = sorted(
            (kind for kind in classes if pool in kind.pools),
            key=lambda kind: (avoids_gpus and kind.has_gpu, *_use_to_others(kind.pools, pool), classes[kind][0]),
        )
        for counts in _distributions(need.num_nodes, [len(classes[kind]) for kind in kinds]):
            self.num_tries += 1
            if self.num_tries > MAX_TRIES:
                raise SearchExhausted
            taken = [index for kind, count in zip(kinds, counts, strict=True) for index in classes[kind][:count]]
            rest = self.place(position + 1, _after(classes, dict(zip(kinds, counts, strict=True)), pool))
            if rest is not None:
                return [taken, *rest]
        self.dead_ends.add(state)
        return None

    def _may_fit(self, position: int, classes: _Classes) -> bool:
        """Whether for each set of the pools that are left the nodes have as many places as these pools want. That is
        necessary and not sufficient."""
        for pools in range(1 << position, 1 << len(self.needs), 1 << position):
            wanted = sum(need.num_nodes for bit, need in enumerate(self.needs) if pools >> bit & 1)
            if sum(len(members) * _most_of(kind.pools, pools) for kind, members in classes.items()) < wanted:
                return False
        return True


def _classes(needs: Sequence[NodeNeed], rooms: Sequence[Mapping[str, float]]) -> _Classes:
    if not rooms:
        return {}
    names = sorted({name for need in needs for name in need.amounts})
    there = np.array([[units(room.get(name, 0.0)) for name in names] for room in rooms], dtype=np.int64)
    wanted = np.array([[units(need.amounts.get(name, 0.0)) for name in names] for need in needs], dtype=np.int64)
    members = np.array([[pools >> bit & 1 for bit in range(len(needs))] for pools in range(1 << len(needs))])
    has_room = np.all(members @ wanted <= there[:, None, :], axis=-1)
    classes: dict[_Kind, list[int]] = {}
    kind_of: dict[bytes, PoolSets] = {}
    for index, row in enumerate(has_room):
        pools = kind_of.setdefault(row.tobytes(), frozenset(np.flatnonzero(row).tolist()))
        classes.setdefault(_Kind(pools, rooms[index].get(GPU, 0.0) > 0), []).append(index)
    return {kind: tuple(indices) for kind, indices in classes.items()}


def _after(classes: _Classes, counts: Mapping[_Kind, int], pool: int) -> _Classes:
    """The classes, as far as later pools go, after so many nodes of each kind have taken the pool."""
    members: dict[_Kind, list[int]] = {}
    for kind, indices in classes.items():
        count = counts.get(kind, 0)
        for pools, some in ((_with(kind.pools, pool), indices[:count]), (_without(kind.pools, pool), indices[count:])):
            if some:
                members.setdefault(_Kind(pools, kind.has_gpu), []).extend(some)
    return {kind: tuple(sorted(indices)) for kind, indices in members.items()}


@lru_cache(maxsize=10_000)
def _with(sets: PoolSets, pool: int) -> PoolSets:
    """What else fits when the pool is there."""
    return frozenset(pools ^ pool for pools in sets if pools & pool)


@lru_cache(maxsize=10_000)
def _without(sets: PoolSets, pool: int) -> PoolSets:
    """What fits when it is not."""
    return frozenset(pools for pools in sets if not pools & pool)


@lru_cache(maxsize=10_000)
def _most_of(sets: PoolSets, pools: int) -> int:
    """How many of these pools fit at once."""
    return max((each & pools).bit_count() for each in sets)


def _use_to_others(sets: PoolSets, pool: int) -> tuple[int, int]:
    """How many choices are lost when the pool is there, and how many there are."""
    without = len(_without(sets, pool))
    return without - len(_with(sets, pool)), without


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


def _fits(amounts: Mapping[str, float], room: Mapping[str, float]) -> bool:
    return all(units(room.get(name, 0.0)) >= units(amount) for name, amount in amounts.items())
