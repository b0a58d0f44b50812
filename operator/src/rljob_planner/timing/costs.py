"""What a part of a step takes, and over which links GPUs talk."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_planner.constants import Constants
from rljob_planner.gpus import Gpu

COMPUTE = "compute"
MEMORY_BANDWIDTH = "memory bandwidth"
LINK = "the link between GPUs"
NETWORK = "the network"
HOST = "the link to the host"
FIXED = "launches and scheduling"
LONGEST_RESPONSE = "the longest response"


@dataclass(frozen=True)
class Cost:
    """Of one role and stage."""

    seconds: float
    bound_by: str
    """What most of it is waited for."""
    formula: str
    """With numbers put in."""


NO_COST = Cost(0.0, FIXED, "")


def longest(*parts: tuple[str, float]) -> str:
    """The name of what takes most seconds."""
    return max(parts, key=lambda part: part[1])[0]


@dataclass(frozen=True)
class Site:
    """GPUs of one kind on equal nodes."""

    gpu: Gpu
    gpus_per_node: int

    def spans_nodes(self, num_gpus: int) -> bool:
        """Whether so many neighbours are on more than one node."""
        return num_gpus > self.gpus_per_node

    def bandwidth(self, num_gpus: int, constants: Constants) -> float:
        """Bytes per second that each GPU receives when so many neighbours gather or reduce together. Across nodes every
        byte comes once into each node, by the network of all of its GPUs, and goes on over their link."""
        link = self.gpu.link_bandwidth * constants.link_efficiency
        if not self.spans_nodes(num_gpus):
            return link
        return min(link, self.gpus_per_node * self.gpu.network_bandwidth * constants.network_efficiency)

    def bandwidth_apart(self, num_gpus: int, distance: int, constants: Constants) -> float:
        """The same among every `distance`-th of so many GPUs: of a node fewer take part, or one."""
        link = self.gpu.link_bandwidth * constants.link_efficiency
        if not self.spans_nodes(num_gpus):
            return link
        in_a_node = max(1, self.gpus_per_node // distance)
        return min(link, in_a_node * self.gpu.network_bandwidth * constants.network_efficiency)

    def link_name(self, num_gpus: int) -> str:
        """For people."""
        return NETWORK if self.spans_nodes(num_gpus) else LINK
