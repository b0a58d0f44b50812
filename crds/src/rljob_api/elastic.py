"""Elastic jobs: the numbers of nodes (worker pods) with which a job is valid, and the job with such numbers.

The operator decides when to run on fewer nodes (`rljob_operator.reconcile.creation`)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rljob_api.v1alpha1.pools import Pool
from rljob_api.v1alpha1.rules import RULES, violations
from rljob_api.v1alpha1.spec import RLJobSpec

MAX_CHECKS = 64
"""Largest number of evaluations of all rules in one search. An evaluation takes about a millisecond. One evaluation is
enough as long as every rule on nodes concerns a single pool."""
CACHE_SIZE = 512
"""Number of cached results. While an attempt waits, every reconcile pass needs the same result."""

_NODE_RULES = tuple(rule for rule in RULES if rule.on is RLJobSpec and "p.nodes" in rule.cel)
"""Rules that read numbers of nodes. Each of them checks one pool at a time."""


def with_nodes(spec: RLJobSpec, nodes: Mapping[str, int]) -> RLJobSpec:
    """The job with these numbers of nodes, by pool name. Pools that are not in `nodes` keep their number."""
    pools = tuple(pool.model_copy(update={"nodes": nodes.get(pool.name, pool.nodes)}) for pool in spec.pools)
    return spec.model_copy(update={"pools": pools})


def largest_valid_nodes(spec: RLJobSpec, available: Mapping[str, int]) -> dict[str, int] | None:
    """The numbers of nodes, by pool name, with which the job is valid and has the most GPUs.

    Each pool has at most its number in `available` (0 if it is not there), and at least `runPolicy.elastic.minNodes`. A
    pool for which the job requests fewer nodes than that has all of them. None if no such numbers are found, or if the
    job is not elastic."""
    limits = tuple(min(pool.nodes, available.get(pool.name, 0)) for pool in spec.pools)
    found = _most_nodes(_CacheKey(spec, limits))
    return None if found is None else _by_name(spec, found)


def can_use_fewer_nodes(spec: RLJobSpec) -> bool:
    """Whether a job is elastic and can run with fewer nodes of at least one pool: at least
    `runPolicy.elastic.minNodes`, and no rule on nodes is broken."""
    elastic = spec.run_policy.elastic
    return elastic is not None and any(
        _PossibleNodes(spec, pool, pool.nodes - 1, elastic.min_nodes).at(0) is not None for pool in spec.pools
    )


@dataclass(frozen=True, eq=False)
class _CacheKey:
    """A cache key. It compares specs by identity, because a spec is parsed once and reused, and some specs have no
    hash."""

    spec: RLJobSpec
    limits: tuple[int, ...]
    """Largest number of nodes of each pool."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CacheKey) and other.spec is self.spec and other.limits == self.limits

    def __hash__(self) -> int:
        return hash((id(self.spec), self.limits))


@lru_cache(maxsize=CACHE_SIZE)
def _most_nodes(key: _CacheKey) -> tuple[int, ...] | None:
    spec, elastic = key.spec, key.spec.run_policy.elastic
    if elastic is None:
        return None
    pools = [
        _PossibleNodes(spec, pool, limit, min(pool.nodes, elastic.min_nodes))
        for pool, limit in zip(spec.pools, key.limits, strict=True)
    ]
    for num_checks, choice in enumerate(_by_gpus(pools)):
        if num_checks == MAX_CHECKS:
            break
        if not violations(with_nodes(spec, _by_name(spec, choice))):
            return choice
    return None


class _PossibleNodes:
    """Numbers of nodes of one pool that are valid while the other pools have all of their nodes, in descending order.
    They are computed lazily: there may be a thousand, and usually only the first is needed."""

    def __init__(self, spec: RLJobSpec, pool: Pool, most: int, least: int) -> None:
        self.gpus_per_node = pool.gpus_per_node
        self._found: list[int] = []
        self._rest = (nodes for nodes in range(most, least - 1, -1) if _is_possible(spec, pool.name, nodes))

    def at(self, index: int) -> int | None:
        """The number of nodes at this index, from 0; None if there are fewer numbers."""
        while len(self._found) <= index:
            nodes = next(self._rest, None)
            if nodes is None:
                return None
            self._found.append(nodes)
        return self._found[index]


def _is_possible(spec: RLJobSpec, pool: str, nodes: int) -> bool:
    """Whether the job obeys the rules on nodes with this number of nodes of this pool."""
    changed = with_nodes(spec, {pool: nodes})
    return all(rule.holds(changed) for rule in _NODE_RULES)


def _by_gpus(pools: Sequence[_PossibleNodes]) -> Iterator[tuple[int, ...]]:
    """All combinations of one possible number of nodes per pool, in descending order of their GPUs."""
    seen: set[tuple[int, ...]] = set()
    # Negative number of GPUs, the arguments of `at` for each pool, and the number of nodes of each pool. The heap
    # returns the combination with the most GPUs first; of equal ones, the one with more nodes in the first pools.
    queue: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def add(indices: tuple[int, ...]) -> None:
        found = [pool.at(index) for pool, index in zip(pools, indices, strict=True)]
        nodes = tuple(count for count in found if count is not None)
        if len(nodes) == len(pools) and indices not in seen:
            seen.add(indices)
            gpus = sum(count * pool.gpus_per_node for count, pool in zip(nodes, pools, strict=True))
            heapq.heappush(queue, (-gpus, indices, nodes))

    add((0,) * len(pools))
    while queue:
        _, indices, nodes = heapq.heappop(queue)
        yield nodes
        for which in range(len(pools)):
            add((*indices[:which], indices[which] + 1, *indices[which + 1 :]))


def _by_name(spec: RLJobSpec, nodes: Sequence[int]) -> dict[str, int]:
    return {pool.name: count for pool, count in zip(spec.pools, nodes, strict=True)}
