"""Clusters as people write them: `4x8xH100`, `2x8xH200,4x8xA100-80`."""

from __future__ import annotations

import re
from collections.abc import Callable

from rljob_planner.errors import PlanError
from rljob_planner.gpus import Cluster, Gpu, NodeGroup
from rljob_planner.known_gpus import gpu_named

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
