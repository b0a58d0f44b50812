"""Which sizes a pool may have, and which layouts a role may have on it.

What is left out, although it might be the best: pools above one node that are no whole nodes, pools within a node whose
size is not one of a chain of halves, tensor and sequence parallelism over nodes, sets on two kinds of nodes. A chain of
sizes in which each divides the next packs into nodes without gaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rljob_planner.gpus import NodeGroup
from rljob_planner.placement import RolloutLayout, TrainLayout
from rljob_planner.workload import EngineKind, Role, Workload

PARALLEL = (1, 2, 4, 8)
"""Sizes of tensor and of sequence parallelism that are tried."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Equal nodes, or a part of one."""

    kind: int
    """The number of its group of nodes in the cluster."""
    nodes: int
    gpus_per_node: int

    @property
    def num_gpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.gpus_per_node


def pool_sizes(kind: int, group: NodeGroup) -> Iterator[PoolSize]:
    """Of a group of nodes, smallest first."""
    if group.nodes == 0:
        return
    size = 1
    while size < group.gpus_per_node and group.gpus_per_node % size == 0:
        yield PoolSize(kind, 1, size)
        size *= 2
    for nodes in range(1, group.nodes + 1):
        yield PoolSize(kind, nodes, group.gpus_per_node)


def train_layouts(role: Role, workload: Workload, size: PoolSize) -> Iterator[TrainLayout]:
    """Those that the job's rules allow (rljob_api, placement_rules and batch_size_rules): a longest row fits into a
    micro-batch, and of what is trained, batches and updates spread evenly over the ranks."""
    num_gpus, shape = size.num_gpus, workload.models[role].shape
    for shares in PARALLEL:
        fits_node = size.gpus_per_node % shares == 0
        fits_heads = shape.num_heads % shares == 0 and _divides_either_way(shares, shape.num_kv_heads)
        holds_row = workload.max_tokens_per_micro_batch * shares >= workload.lengths.longest_row
        if not (fits_node and fits_heads and holds_row and _is_even(role, workload, num_gpus, shares)):
            continue
        for shards in shard_sizes(size):
            # Gradients of replicas cannot be offloaded (rljob_api, placement_rules).
            if shards == num_gpus or not workload.models[role].offload.gradients:
                yield TrainLayout(num_gpus, shards, shares)


def rollout_layouts(workload: Workload, size: PoolSize) -> Iterator[RolloutLayout]:
    """Tensor parallelism stays within a node, and only vLLM has any."""
    shape = workload.rollout.shape
    for parallel in PARALLEL if workload.rollout.engine is EngineKind.VLLM else (1,):
        fits_heads = shape.num_heads % parallel == 0 and _divides_either_way(parallel, shape.num_kv_heads)
        if size.gpus_per_node % parallel == 0 and fits_heads:
            yield RolloutLayout(size.num_gpus, parallel)


def shard_sizes(size: PoolSize) -> list[int]:
    """GPUs that may hold a copy of a model together: a part of a node, or whole nodes."""
    within = [shards for shards in range(1, size.gpus_per_node + 1) if size.gpus_per_node % shards == 0]
    over = [size.gpus_per_node * nodes for nodes in range(2, size.nodes + 1) if size.nodes % nodes == 0]
    return [*within, *over]


def _divides_either_way(ranks: int, heads: int) -> bool:
    return ranks % heads == 0 or heads % ranks == 0


def _is_even(role: Role, workload: Workload, num_gpus: int, shares: int) -> bool:
    if not workload.models[role].is_trained:
        return True
    sizes = {workload.mini_batch_size, workload.batch_size} if role is Role.ACTOR else {workload.mini_batch_size}
    return all(prompts * workload.group_size * shares % num_gpus == 0 for prompts in sizes)
