"""Kinds of GPUs: what they hold and how fast they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One kind. Speeds are what the maker states; what is reached of them is in `constants`."""

    name: str
    memory_bytes: float
    """What the driver reports in all."""
    flops: float
    """Dense multiplications and additions in BFloat16, per second; of a CPU in the dtype of its passes, as measured."""
    bandwidth: float
    """Of its memory, bytes per second."""
    link_bandwidth: float
    """To the other GPUs of its node, bytes per second and direction."""
    network_bandwidth: float = 50e9
    """To other nodes, bytes per second, direction and GPU (a network card of 400 Gb/s each)."""
    host_bandwidth: float = 25e9
    """To the host's memory, bytes per second and direction."""
    is_cpu: bool = False


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of a cluster."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu

    @property
    def num_gpus(self) -> int:
        """Of all its nodes."""
        return self.nodes * self.gpus_per_node


Cluster = tuple[NodeGroup, ...]
