"""A job on fewer nodes than it asks for: which numbers of nodes are possible, and the job as it is with them.

When that is done, the operator decides (`reconcile/elastic`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from rljob_api.v1alpha1.rules import violations
from rljob_api.v1alpha1.spec import RLJobSpec

MAX_TRIES = 256
"""Of combinations of pools; each is checked by all rules, which takes a millisecond."""


def with_nodes(spec: RLJobSpec, nodes: Mapping[str, int]) -> RLJobSpec:
    """The job with other numbers of nodes, by names of pools; those of other pools stay."""
    pools = tuple(pool.model_copy(update={"nodes": nodes.get(pool.name, pool.nodes)}) for pool in spec.pools)
    return spec.model_copy(update={"pools": pools})


def fitting_nodes(spec: RLJobSpec, available: Mapping[str, int]) -> dict[str, int] | None:
    """The most nodes, by GPUs, with which the job is valid: of each pool at least `runPolicy.elastic.minNodes` and at
    most those `available`. None where there are none, or the job is not elastic."""
    elastic = spec.run_policy.elastic
    if elastic is None:
        return None
    ranges = [
        range(min(pool.nodes, available.get(pool.name, 0)), min(pool.nodes, elastic.min_nodes) - 1, -1)
        for pool in spec.pools
    ]
    sizes = [pool.gpus_per_node for pool in spec.pools]
    choices = sorted(
        itertools.islice(itertools.product(*ranges), MAX_TRIES),
        key=lambda choice: -sum(count * size for count, size in zip(choice, sizes, strict=True)),
    )
    for choice in choices:
        nodes = {pool.name: count for pool, count in zip(spec.pools, choice, strict=True)}
        if not violations(with_nodes(spec, nodes)):
            return nodes
    return None
