"""Reads a cluster from text (`4x8xH100`) or from Kubernetes nodes, and finds the GPU type of each pool on it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from rljob_api.v1alpha1.affinity import NodeOperator
from rljob_api.v1alpha1.pools import Pool
from rljob_planner.errors import PlanError
from rljob_planner.gpus import Cluster, Gpu, NodeGroup, gpu_named

_GROUP = re.compile(r"(?P<nodes>\d{1,9})\s*x\s*(?P<gpus>\d{1,9})\s*x\s*(?P<kind>\S.*)", re.IGNORECASE)


MOST_GPUS = 100_000
"""The largest number of GPUs of a cluster that is accepted; larger numbers are probably typing errors."""


def cluster_of_text(text: str, where: str = "--cluster", named: Callable[[str], Gpu] = gpu_named) -> Cluster:
    """Reads groups of equal nodes, separated by commas: nodes x GPUs per node x GPU type. `8xH100` is one node with
    eight GPUs. `where`: the option that has the text, for messages. `named` finds a GPU type by its name.

    Raises:
        PlanError: the text has another form, a GPU type is unknown, or the cluster has no GPU or too many.
    """
    groups = [_group(part.strip(), where, named) for part in text.split(",") if part.strip()]
    num_gpus = sum(group.num_gpus for group in groups)
    if num_gpus > MOST_GPUS:
        raise PlanError(f"{where}: a cluster may have at most {MOST_GPUS:,} GPUs (seen {text!r}); correct the numbers")
    if not num_gpus:
        raise PlanError(
            f"{where}: the cluster has no GPU (seen {text!r}); write nodes x GPUs per node x GPU type, such as 4x8xH100"
        )
    return tuple(group for group in groups if group.num_gpus)


def cluster_text(cluster: Cluster) -> str:
    """The cluster as text, such as `4x8xH100`, in the form that `cluster_of_text` reads."""
    return ",".join(f"{group.nodes}x{group.gpus_per_node}x{group.gpu.name}" for group in cluster)


def _group(text: str, where: str, named: Callable[[str], Gpu]) -> NodeGroup:
    found = _GROUP.fullmatch(text) or _GROUP.fullmatch(f"1x{text}")
    if found is None:
        raise PlanError(f"{where}: must be nodes x GPUs per node x GPU type, such as 4x8xH100 (seen {text!r})")
    if found["kind"].strip().isdigit():
        raise PlanError(
            f"{where}: must be nodes x GPUs per node x GPU type, such as 4x8xH100 (seen {text!r}); the GPU type is"
            " missing"
        )
    return NodeGroup(int(found["nodes"]), int(found["gpus"]), named(found["kind"].strip()))


PRODUCT_LABEL = "nvidia.com/gpu.product"
"""Node label of NVIDIA's GPU feature discovery, a part of its GPU operator."""
AMD_LABELS = ("amd.com/gpu.product-name", "beta.amd.com/gpu.product-name")
"""Node labels of AMD's node labeller."""
Label = tuple[str, str]
"""Name and value of a node label."""
SELECTORS = (PRODUCT_LABEL, *AMD_LABELS, "cloud.google.com/gke-accelerator", "karpenter.k8s.aws/instance-gpu-name")
"""Node labels that name a GPU type; a pool may select its nodes by one of them."""
DEFAULT_RESOURCE = "nvidia.com/gpu"
_COUNT = re.compile(r"[0-9]{1,5}")
"""A number of GPUs in a node's `allocatable`. Text of another form counts as 0 GPUs."""


def cluster_of_nodes(
    nodes: Iterable[Mapping[str, object]], resources: Iterable[str] = (DEFAULT_RESOURCE,), default: Gpu | None = None
) -> tuple[Cluster, dict[str, Label]]:
    """Groups Kubernetes nodes by GPU type and number of GPUs, the group with the most GPUs first. Cordoned nodes are
    left out. Also returns, by the name of each GPU type, the label that selects its nodes. A type is missing there if
    its nodes do not all have the same label.

    `nodes`: Node objects as the API returns them. `resources`: names of GPU resources in a node's `allocatable`.
    `default`: the GPU type of nodes whose labels name no type or an unknown one.

    Raises:
        PlanError: no node has GPUs, or a GPU type is unknown and there is no `default`.
    """
    counts: Counter[tuple[int, Gpu]] = Counter()
    found: dict[str, set[Label | None]] = {}
    names, nodes = tuple(resources), list(nodes)
    for node in nodes:
        num_gpus = _num_gpus(_part(_part(node, "status"), "allocatable"), names)
        if num_gpus and _part(node, "spec").get("unschedulable") is not True:
            gpu, label = _gpu_type(node, default)
            counts[num_gpus, gpu] += 1
            found.setdefault(gpu.name, set()).add(label)
    if not counts:
        raise PlanError(
            f"--from-cluster: no node has allocatable GPUs (seen {len(nodes)} nodes; looked for"
            f" {', '.join(names)}; cordoned nodes do not count); describe the cluster with --cluster, such as 4x8xH100"
        )
    groups = (NodeGroup(num, gpus, gpu) for (gpus, gpu), num in counts.items())
    cluster = tuple(sorted(groups, key=lambda group: (-group.num_gpus, group.gpu.name, -group.gpus_per_node)))
    return cluster, {name: label for name, (label, *others) in found.items() if label is not None and not others}


def _gpu_type(node: Mapping[str, object], default: Gpu | None) -> tuple[Gpu, Label | None]:
    """The node's GPU type, and the label that names it, if there is one."""
    metadata = _part(node, "metadata")
    where, labels = f"--from-cluster: node {metadata.get('name')}", _part(metadata, "labels")
    label = next(((name, str(labels[name])) for name in (PRODUCT_LABEL, *AMD_LABELS) if name in labels), None)
    try:
        if label is not None:
            return gpu_named(label[1], where), label
    except PlanError:
        if default is None:
            raise
    if default is None:
        raise PlanError(
            f"{where} has GPUs but no label that names their type ({PRODUCT_LABEL}); name the type with --gpu NAME"
        )
    return default, label


def _num_gpus(allocatable: Mapping[str, object], names: tuple[str, ...]) -> int:
    counts = (allocatable.get(name) for name in names)
    return sum(int(count) for count in counts if isinstance(count, str) and _COUNT.fullmatch(count))


def _part(value: Mapping[str, object], key: str) -> Mapping[str, object]:
    """The object under `key`; empty if there is none."""
    found = value.get(key)
    return found if isinstance(found, Mapping) else {}


def allowed_gpus(pool: Pool, named: Callable[[str], Gpu] = gpu_named) -> list[Gpu]:
    """The GPU types that the pool allows by node selector, else by affinity, the largest memory first; empty if it
    requires no type.

    Raises:
        PlanError: the pool requires an unknown type.
    """
    selector = pool.template.node_selector
    products = [selector[label] for label in SELECTORS if label in selector][:1] or _products_of_affinity(pool)
    return sorted(map(named, products), key=lambda kind: -kind.memory_bytes)


def _products_of_affinity(pool: Pool) -> list[str]:
    """The GPU products that the required node affinity names; empty if one of its terms names no product."""
    affinity = pool.template.affinity
    nodes = affinity.node_affinity if affinity is not None else None
    required = nodes.required_during_scheduling_ignored_during_execution if nodes is not None else None
    terms = [
        [
            product
            for each in term.match_expressions
            if each.key in SELECTORS and each.operator is NodeOperator.IN
            for product in each.values
        ]
        for term in (required.node_selector_terms if required is not None else ())
    ]
    return [product for products in terms for product in products] if all(terms) else []


def gpus_of_pools(pools: Iterable[Pool], cluster: Cluster, allowed: Mapping[str, Collection[Gpu]]) -> dict[str, Gpu]:
    """The GPU type of each pool, by the pool's name. One pool after the other takes the first group of nodes that has
    room for it and a type that the pool allows. `allowed`: the allowed types by the pool's name; a pool without an
    entry, or with an empty one, allows all types. Pools with the fewest allowed types come first.

    Raises:
        PlanError: no group has room for a pool.
    """
    free = [(group, [group.gpus_per_node] * group.nodes) for group in cluster]
    found: dict[str, Gpu] = {}
    for pool in sorted(pools, key=lambda each: len(set(allowed.get(each.name, ()))) or math.inf):
        kinds = allowed.get(pool.name, ())
        fitting = ((group, gpus) for group, gpus in free if not kinds or group.gpu in kinds)
        taken = next((group for group, gpus in fitting if _take(pool, gpus)), None)
        if taken is None:
            of_kind = f" of {' or '.join(dict.fromkeys(kind.name for kind in kinds))}" if kinds else ""
            raise PlanError(
                f"spec.pools {pool.name}: {pool.nodes} x {pool.gpus_per_node} GPUs{of_kind} do not fit into the cluster"
                f" (seen {_free_text(free)}{' left' if found else ''}); choose a smaller pool or another cluster"
            )
        found[pool.name] = taken.gpu
    return found


def cluster_of_pools(pools: Iterable[Pool], gpus: Mapping[str, Gpu]) -> Cluster:
    """The cluster that consists of these pools; pools with the same GPU type and GPUs per node are one group."""
    groups: Counter[tuple[int, Gpu]] = Counter()
    for pool in pools:
        groups[pool.gpus_per_node, gpus[pool.name]] += pool.nodes
    return tuple(NodeGroup(nodes, num_gpus, gpu) for (num_gpus, gpu), nodes in groups.items())


def _take(pool: Pool, free: list[int]) -> bool:
    """Takes GPUs for the pool's pods out of `free`, the free GPUs of each node: on nodes with the fewest free GPUs
    first. If the pods do not fit, returns False and takes nothing."""
    left = sorted(free)
    for _ in range(pool.nodes):
        index = next((at for at, num_gpus in enumerate(left) if num_gpus >= pool.gpus_per_node), None)
        if index is None:
            return False
        left[index] -= pool.gpus_per_node
    free[:] = left
    return True


def _free_text(free: Iterable[tuple[NodeGroup, list[int]]]) -> str:
    """The free GPUs of nodes as text, such as `3x8xH100, 1x2xH100`."""
    counts = ((group, sorted(Counter(filter(None, gpus)).items(), reverse=True)) for group, gpus in free)
    texts = (f"{nodes}x{gpus}x{group.gpu.name}" for group, found in counts for gpus, nodes in found)
    return ", ".join(texts) or "nothing"
