"""A cluster's nodes, as Kubernetes describes them, to groups of equal ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from rljob_planner.errors import PlanError
from rljob_planner.gpus import Cluster, Gpu, NodeGroup
from rljob_planner.known_gpus import gpu_named

PRODUCT_LABEL = "nvidia.com/gpu.product"
"""Put on nodes by NVIDIA's GPU feature discovery, which its GPU operator brings."""
AMD_LABELS = ("amd.com/gpu.product-name", "beta.amd.com/gpu.product-name")
"""Of AMD's node labeller."""
DEFAULT_RESOURCE = "nvidia.com/gpu"
_COUNT = re.compile(r"[0-9]{1,5}")
"""Of GPUs; another text is none."""


def cluster_of_nodes(
    nodes: Iterable[Mapping[str, object]], resources: Iterable[str] = (DEFAULT_RESOURCE,), asked: Gpu | None = None
) -> Cluster:
    """Groups of nodes with as many GPUs of a kind, the largest first, from Node objects of the API. Nodes that are
    cordoned are left out. `resources` are names of GPUs among what a node has to give away; `asked` is the kind of
    those nodes whose labels say none, or one that is not known.

    Raises PlanError where there is no GPU, and for nodes with GPUs of a kind that is not known."""
    counts: Counter[tuple[int, Gpu]] = Counter()
    names, num_nodes = tuple(resources), 0
    for node in nodes:
        num_nodes += 1
        if _part(node, "spec").get("unschedulable") is True:
            continue
        num_gpus = _num_gpus(_part(_part(node, "status"), "allocatable"), names)
        if num_gpus:
            counts[num_gpus, _kind(node, asked)] += 1
    if not counts:
        raise PlanError(
            f"--from-cluster: no node has GPUs to give away (seen {num_nodes} nodes; looked for {', '.join(names)});"
            " name the GPUs with --cluster, such as 4x8xH100"
        )
    groups = (NodeGroup(num, gpus, gpu) for (gpus, gpu), num in counts.items())
    return tuple(sorted(groups, key=lambda group: (-group.num_gpus, group.gpu.name, -group.gpus_per_node)))


def products_of_nodes(nodes: Iterable[Mapping[str, object]], asked: Gpu | None = None) -> dict[str, tuple[str, str]]:
    """Label and value by which a pool chooses nodes of a kind, by the kind's name; kinds with several are left out."""
    found: dict[str, set[tuple[str, str]]] = {}
    for node in nodes:
        labels = _part(_part(node, "metadata"), "labels")
        for label in (PRODUCT_LABEL, *AMD_LABELS):
            if label in labels:
                found.setdefault(_kind(node, asked).name, set()).add((label, str(labels[label])))
                break
    return {kind: next(iter(labels)) for kind, labels in found.items() if len(labels) == 1}


def _kind(node: Mapping[str, object], asked: Gpu | None) -> Gpu:
    metadata = _part(node, "metadata")
    name = metadata.get("name")
    labels = _part(metadata, "labels")
    products = [labels[key] for key in (PRODUCT_LABEL, *AMD_LABELS) if key in labels]
    if products:
        try:
            return gpu_named(str(products[0]), f"--from-cluster: node {name}")
        except PlanError:
            if asked is None:
                raise
    if asked is None:
        raise PlanError(
            f"--from-cluster: node {name} has GPUs and no label that says of which kind ({PRODUCT_LABEL});"
            " name it with --gpu NAME"
        )
    return asked


def _num_gpus(allocatable: Mapping[str, object], names: tuple[str, ...]) -> int:
    counts = (allocatable.get(name) for name in names)
    return sum(int(count) for count in counts if isinstance(count, str) and _COUNT.fullmatch(count))


def _part(value: Mapping[str, object], key: str) -> Mapping[str, object]:
    """An object within an object; empty where there is none."""
    found = value.get(key)
    return found if isinstance(found, Mapping) else {}
