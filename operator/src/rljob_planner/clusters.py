"""Clusters: as people write them (`4x8xH100`), as Kubernetes describes their nodes, and a job's pools on them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from rljob_api.v1alpha1.affinity import NodeOperator
from rljob_api.v1alpha1.pools import Pool
from rljob_planner.errors import PlanError
from rljob_planner.gpus import Cluster, Gpu, NodeGroup, gpu_named

_GROUP = re.compile(r"(?P<nodes>\d{1,9})\s*x\s*(?P<gpus>\d{1,9})\s*x\s*(?P<kind>\S.*)", re.IGNORECASE)


MOST_GPUS = 100_000
"""Of a cluster: no job has more, and what has is a slip of the keys."""


def cluster_of_text(text: str, where: str = "--cluster", named: Callable[[str], Gpu] = gpu_named) -> Cluster:
    """Groups of equal nodes, separated by commas: nodes x GPUs of each x kind; `8xH100` is one node of eight.

    `named` gives the kind of a name. Raises PlanError for other text, and for a cluster without GPUs."""
    groups = [_group(part.strip(), where, named) for part in text.split(",") if part.strip()]
    num_gpus = sum(group.num_gpus for group in groups)
    if num_gpus > MOST_GPUS:
        raise PlanError(f"{where}: a cluster has at most {MOST_GPUS:,} GPUs (seen {text!r}); correct the numbers")
    if not num_gpus:
        raise PlanError(f"{where}: a cluster without GPUs (seen {text!r}); write nodes x GPUs x kind, such as 4x8xH100")
    return tuple(group for group in groups if group.num_gpus)


def cluster_text(cluster: Cluster) -> str:
    """`4x8xH100`, as it is read again."""
    return ",".join(f"{group.nodes}x{group.gpus_per_node}x{group.gpu.name}" for group in cluster)


def _group(text: str, where: str, named: Callable[[str], Gpu]) -> NodeGroup:
    found = _GROUP.fullmatch(text) or _GROUP.fullmatch(f"1x{text}")
    if found is None:
        raise PlanError(f"{where}: must be nodes x GPUs of each x kind (seen {text!r}); write such as 4x8xH100")
    return NodeGroup(int(found["nodes"]), int(found["gpus"]), named(found["kind"].strip()))


PRODUCT_LABEL = "nvidia.com/gpu.product"
"""Put on nodes by NVIDIA's GPU feature discovery, which its GPU operator brings."""
AMD_LABELS = ("amd.com/gpu.product-name", "beta.amd.com/gpu.product-name")
"""Of AMD's node labeller."""
Label = tuple[str, str]
"""Its name and its value."""
SELECTORS = (PRODUCT_LABEL, *AMD_LABELS, "cloud.google.com/gke-accelerator", "karpenter.k8s.aws/instance-gpu-name")
"""Labels of nodes that say a kind of GPU, by which a pool may choose its nodes."""
DEFAULT_RESOURCE = "nvidia.com/gpu"
_COUNT = re.compile(r"[0-9]{1,5}")
"""Of GPUs; another text is none."""


def cluster_of_nodes(
    nodes: Iterable[Mapping[str, object]], resources: Iterable[str] = (DEFAULT_RESOURCE,), asked: Gpu | None = None
) -> tuple[Cluster, dict[str, Label]]:
    """Groups of nodes with as many GPUs of a kind, the largest first, from Node objects of the API; and by a kind's
    name the label by which a pool selects its nodes, where all of them have the same. Nodes that are cordoned are left
    out. `resources` are names of GPUs among what a node has to give away; `asked` is the kind of those nodes whose
    labels say none, or one that is not known.

    Raises PlanError where there is no GPU, and for nodes with GPUs of a kind that is not known."""
    counts: Counter[tuple[int, Gpu]] = Counter()
    found: dict[str, set[Label | None]] = {}
    names, nodes = tuple(resources), list(nodes)
    for node in nodes:
        num_gpus = _num_gpus(_part(_part(node, "status"), "allocatable"), names)
        if num_gpus and _part(node, "spec").get("unschedulable") is not True:
            gpu, label = _kind(node, asked)
            counts[num_gpus, gpu] += 1
            found.setdefault(gpu.name, set()).add(label)
    if not counts:
        raise PlanError(
            f"--from-cluster: no node has GPUs to give away (seen {len(nodes)} nodes; looked for {', '.join(names)});"
            " name the GPUs with --cluster, such as 4x8xH100"
        )
    groups = (NodeGroup(num, gpus, gpu) for (gpus, gpu), num in counts.items())
    cluster = tuple(sorted(groups, key=lambda group: (-group.num_gpus, group.gpu.name, -group.gpus_per_node)))
    return cluster, {name: label for name, (label, *others) in found.items() if label is not None and not others}


def _kind(node: Mapping[str, object], asked: Gpu | None) -> tuple[Gpu, Label | None]:
    """With the label that says it, if there is one."""
    metadata = _part(node, "metadata")
    where, labels = f"--from-cluster: node {metadata.get('name')}", _part(metadata, "labels")
    label = next(((name, str(labels[name])) for name in (PRODUCT_LABEL, *AMD_LABELS) if name in labels), None)
    try:
        if label is not None:
            return gpu_named(label[1], where), label
    except PlanError:
        if asked is None:
            raise
    if asked is None:
        raise PlanError(
            f"{where} has GPUs and no label that says of which kind ({PRODUCT_LABEL}); name it with --gpu NAME"
        )
    return asked, label


def _num_gpus(allocatable: Mapping[str, object], names: tuple[str, ...]) -> int:
    counts = (allocatable.get(name) for name in names)
    return sum(int(count) for count in counts if isinstance(count, str) and _COUNT.fullmatch(count))


def _part(value: Mapping[str, object], key: str) -> Mapping[str, object]:
    """An object within an object; empty where there is none."""
    found = value.get(key)
    return found if isinstance(found, Mapping) else {}


def selected_gpu(pool: Pool, named: Callable[[str], Gpu] = gpu_named, among: Iterable[Gpu] = ()) -> Gpu | None:
    """The kind of GPU that the labels say which the pool's nodes must have; of several kinds one of `among`, else the
    one with the largest memory. None where they say no kind. Raises PlanError where they say one that is not known."""
    selector = pool.template.node_selector
    products = [selector[label] for label in SELECTORS if label in selector][:1] or _products_of_affinity(pool)
    kinds = [named(product) for product in products]
    names = {gpu.name for gpu in among}
    there = [kind for kind in kinds if kind.name in names]
    return max(there or kinds, key=lambda kind: kind.memory_bytes, default=None)


def _products_of_affinity(pool: Pool) -> list[str]:
    """Of the required node affinity, if each of its terms names some."""
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


def gpus_of_pools(pools: Iterable[Pool], cluster: Cluster, asked: Mapping[str, Gpu]) -> dict[str, Gpu]:
    """The kind of GPU of each pool: pools in their order take the first group of nodes, in the cluster's order, that
    has room for them. A pool of `asked` goes to that kind only.

    Raises PlanError for a pool that has no room left."""
    free = [(group, [group.gpus_per_node] * group.nodes) for group in cluster]
    found: dict[str, Gpu] = {}
    for pool in pools:
        kind = asked.get(pool.name)
        fitting = ((group, gpus) for group, gpus in free if kind is None or group.gpu == kind)
        taken = next((group for group, gpus in fitting if _take(pool, gpus)), None)
        if taken is None:
            of_kind = "" if kind is None else f" of {kind.name}"
            raise PlanError(
                f"spec.pools {pool.name}: {pool.nodes} x {pool.gpus_per_node} GPUs{of_kind} do not fit into the cluster"
                f" (seen {_left(free)}{' left' if found else ''}); choose a smaller pool, or another cluster"
            )
        found[pool.name] = taken.gpu
    return found


def cluster_of_pools(pools: Iterable[Pool], gpus: Mapping[str, Gpu]) -> Cluster:
    """The cluster that has just these pools; those of the same kind and size of nodes are one group."""
    groups: Counter[tuple[int, Gpu]] = Counter()
    for pool in pools:
        groups[pool.gpus_per_node, gpus[pool.name]] += pool.nodes
    return tuple(NodeGroup(nodes, num_gpus, gpu) for (num_gpus, gpu), nodes in groups.items())


def _take(pool: Pool, free: list[int]) -> bool:
    """The pool's pods, the fullest nodes first; takes nothing where they do not fit. `free`: GPUs of each node."""
    left = sorted(free)
    for _ in range(pool.nodes):
        place = next((at for at, num_gpus in enumerate(left) if num_gpus >= pool.gpus_per_node), None)
        if place is None:
            return False
        left[place] -= pool.gpus_per_node
    free[:] = left
    return True


def _left(free: Iterable[tuple[NodeGroup, list[int]]]) -> str:
    """`3x8xH100, 1x2xH100`."""
    counts = ((group, sorted(Counter(filter(None, gpus)).items(), reverse=True)) for group, gpus in free)
    texts = (f"{nodes}x{gpus}x{group.gpu.name}" for group, found in counts for gpus, nodes in found)
    return ", ".join(texts) or "nothing"
