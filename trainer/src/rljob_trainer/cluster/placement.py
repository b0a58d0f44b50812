"""Whether a pool can ever fit on the cluster that is there, answered before anything waits for it."""

from __future__ import annotations

from collections.abc import Mapping

import ray

from rljob_trainer.errors import ResourceError


def check_feasible(pool: str, bundle: Mapping[str, float], num_nodes: int, num_bundles_per_node: int) -> None:
    """Raises ResourceError naming what is missing when fewer than `num_nodes` nodes have room for
    `num_bundles_per_node` bundles each, counting all of their resources, used or not."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [node for node in nodes if missing_on_node(node, bundle, num_bundles_per_node) == ""]
    if len(fitting) < num_nodes:
        gaps = sorted({missing_on_node(node, bundle, num_bundles_per_node) for node in nodes if node not in fitting})
        raise ResourceError(
            f"pool {pool}: needs {num_nodes} nodes with {num_bundles_per_node} x {dict(bundle)} each, the cluster has "
            f"{len(fitting)} such of {len(nodes)} nodes (missing on the others: {'; '.join(gaps) or 'more nodes'})"
        )


def missing_on_node(available: Mapping[str, float], bundle: Mapping[str, float], num_bundles: int) -> str:
    """What a node lacks for so many bundles, as text; empty when it fits."""
    gaps = []
    for name, amount in bundle.items():
        needed, there = amount * num_bundles, available.get(name, 0.0)
        if there < needed:
            gaps.append(f"{name} {needed:g} needed, {there:g} there")
    return ", ".join(gaps)
