"""A job's pools on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rljob_api.v1alpha1.pools import Pool
from rljob_planner.errors import PlanError
from rljob_planner.gpus import Cluster, Gpu, NodeGroup


@dataclass
class _Free:
    """What is left of a group: the free GPUs of each of its nodes."""

    group: NodeGroup
    gpus: list[int]

    def take(self, pool: Pool) -> bool:
        """The pool's pods, the fullest nodes first; takes nothing where they do not fit."""
        left = sorted(self.gpus)
        for _ in range(pool.nodes):
            place = next((at for at, free in enumerate(left) if free >= pool.gpus_per_node), None)
            if place is None:
                return False
            left[place] -= pool.gpus_per_node
        self.gpus = left
        return True


def gpus_of_pools(pools: Iterable[Pool], cluster: Cluster, asked: Mapping[str, Gpu]) -> dict[str, Gpu]:
    """The kind of GPU of each pool: pools in their order take the first group of nodes, in the cluster's order, that
    has room for them. A pool of `asked` goes to that kind only.

    Raises PlanError for a pool that has no room left."""
    free = [_Free(group, [group.gpus_per_node] * group.nodes) for group in cluster]
    found: dict[str, Gpu] = {}
    for pool in pools:
        kind = asked.get(pool.name)
        fitting = (each for each in free if kind is None or each.group.gpu == kind)
        taken = next((each for each in fitting if each.take(pool)), None)
        if taken is None:
            of_kind = "" if kind is None else f" of {kind.name}"
            raise PlanError(
                f"spec.pools {pool.name}: {pool.nodes} x {pool.gpus_per_node} GPUs{of_kind} do not fit into the cluster"
                f" (seen {_left(free)}{' left' if found else ''}); choose a smaller pool, or another cluster"
            )
        found[pool.name] = taken.group.gpu
    return found


def cluster_of_pools(pools: Iterable[Pool], gpus: Mapping[str, Gpu]) -> Cluster:
    """The cluster that has just these pools; those of the same kind and size of nodes are one group."""
    groups: dict[tuple[int, Gpu], int] = {}
    for pool in pools:
        key = (pool.gpus_per_node, gpus[pool.name])
        groups[key] = groups.get(key, 0) + pool.nodes
    return tuple(NodeGroup(nodes, num_gpus, gpu) for (num_gpus, gpu), nodes in groups.items())


def _left(free: Iterable[_Free]) -> str:
    """`3x8xH100, 1x2xH100`."""
    texts = []
    for each in free:
        counts: dict[int, int] = {}
        for gpus in each.gpus:
            if gpus:
                counts[gpus] = counts.get(gpus, 0) + 1
        texts += [f"{nodes}x{gpus}x{each.group.gpu.name}" for gpus, nodes in sorted(counts.items(), reverse=True)]
    return ", ".join(texts) or "nothing"
