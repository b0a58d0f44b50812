"""A job on fewer nodes than it asks for: which numbers of nodes are possible, and the job as it is with them.

When that is done, the operator decides (`reconcile/creation`)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rljob_api.v1alpha1.pools import Pool
from rljob_api.v1alpha1.rules import RULES, violations
from rljob_api.v1alpha1.spec import RLJobSpec

MAX_CHECKS = 64
"""Of whole jobs, by all rules: about a millisecond each. One is enough while every rule on nodes is about one pool."""
MAX_KEPT = 512
"""Answers that are kept: an attempt that waits is asked about again and again."""

_NODE_RULES = tuple(rule for rule in RULES if rule.on is RLJobSpec and "p.nodes" in rule.cel)
"""Those that read numbers of nodes; each looks at one pool at a time."""


def with_nodes(spec: RLJobSpec, nodes: Mapping[str, int]) -> RLJobSpec:
    """The job with other numbers of nodes, by names of pools; those of other pools stay."""
    pools = tuple(pool.model_copy(update={"nodes": nodes.get(pool.name, pool.nodes)}) for pool in spec.pools)
    return spec.model_copy(update={"pools": pools})


def fitting_nodes(spec: RLJobSpec, available: Mapping[str, int]) -> dict[str, int] | None:
    """The most nodes, by GPUs, with which the job is valid: of each pool at least `runPolicy.elastic.minNodes` and at
    most those `available`. None where there are none, or the job is not elastic."""
    limits = tuple(min(pool.nodes, available.get(pool.name, 0)) for pool in spec.pools)
    found = _most_nodes(_Question(spec, limits))
    return None if found is None else _by_name(spec, found)


@dataclass(frozen=True, eq=False)
class _Question:
    """Jobs are compared as objects: a job's spec is read once and kept, and some cannot be hashed."""

    spec: RLJobSpec
    limits: tuple[int, ...]
    """The most nodes of each pool."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and other.spec is self.spec and other.limits == self.limits

    def __hash__(self) -> int:
        return hash((id(self.spec), self.limits))


@lru_cache(maxsize=MAX_KEPT)
def _most_nodes(question: _Question) -> tuple[int, ...] | None:
    spec, elastic = question.spec, question.spec.run_policy.elastic
    if elastic is None:
        return None
    pools = [
        _PossibleNodes(spec, pool, limit, min(pool.nodes, elastic.min_nodes))
        for pool, limit in zip(spec.pools, question.limits, strict=True)
    ]
    for num_checks, choice in enumerate(_by_gpus(pools)):
        if num_checks == MAX_CHECKS:
            break
        if not violations(with_nodes(spec, _by_name(spec, choice))):
            return choice
    return None


class _PossibleNodes:
    """Numbers of nodes of one pool that no rule forbids while the other pools are whole, the largest first. Each is
    looked for when it is asked for: there may be a thousand, and the first is mostly the one."""

    def __init__(self, spec: RLJobSpec, pool: Pool, most: int, least: int) -> None:
        self.gpus_per_node = pool.gpus_per_node
        self._found: list[int] = []
        self._rest = (nodes for nodes in range(most, least - 1, -1) if _may_be(spec, pool.name, nodes))

    def at(self, place: int) -> int | None:
        """None where there are fewer."""
        while len(self._found) <= place:
            nodes = next(self._rest, None)
            if nodes is None:
                return None
            self._found.append(nodes)
        return self._found[place]


def _may_be(spec: RLJobSpec, pool: str, nodes: int) -> bool:
    tried = with_nodes(spec, {pool: nodes})
    return all(rule.holds(tried) for rule in _NODE_RULES)


def _by_gpus(pools: Sequence[_PossibleNodes]) -> Iterator[tuple[int, ...]]:
    """All choices of one number per pool, those with the most GPUs first."""
    known: set[tuple[int, ...]] = set()
    # By GPUs; of as many, those with more nodes of the first pools.
    queue: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def add(places: tuple[int, ...]) -> None:
        nodes = tuple(found for pool, place in zip(pools, places, strict=True) if (found := pool.at(place)) is not None)
        if len(nodes) == len(pools) and places not in known:
            known.add(places)
            gpus = sum(count * pool.gpus_per_node for count, pool in zip(nodes, pools, strict=True))
            heapq.heappush(queue, (-gpus, places, nodes))

    add((0,) * len(pools))
    while queue:
        _, places, nodes = heapq.heappop(queue)
        yield nodes
        for index in range(len(pools)):
            add((*places[:index], places[index] + 1, *places[index + 1 :]))


def _by_name(spec: RLJobSpec, nodes: Sequence[int]) -> dict[str, int]:
    return {pool.name: count for pool, count in zip(spec.pools, nodes, strict=True)}
