"""Kinds of GPUs that need no numbers of their own.

Dense BFloat16 and memory bandwidth: torch 2.13 (`_inductor/analysis/device_info.py`), torchtitan (`tools/utils.py`),
verl (`utils/flops_counter.py`) and data sheets; H100 and L4 without sparsity. Links: NVLink, Infinity Fabric or PCIe of
one GPU, per direction. Memory is what torch reports as total, which is less than the data sheet's: 79.1 GiB of an H100
(pytorch/torchtitan issue 1789), 44.4 of an L40S, 22.0 of an A10 and 191.9 of an MI300X stand in messages of public
issues. Those of A100, H100 NVL, H200, H20, B200, GB200 and L4 are from memory and unchecked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rljob_planner.errors import PlanError


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
    link_bandwidth: float = 32e9
    """To the other GPUs of its node, bytes per second and direction; that of PCIe 4 where nothing is known."""
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


_CORE_FLOPS = 192e9
"""Of a core, in 32 bits, at most: two vector units that multiply and add 16 numbers, at 3 GHz. What is reached of it
says a profile."""
_CORE_BANDWIDTH = 15e9
"""Likewise."""


_TABLE = """
A100-40       312  39.4   1.555  300  nvidiateslaa100 a10040gb a100sxm440gb a100sxm40gb a100pcie40gb
A100-80       312  79.1   2.039  300  a100 a10080gb a100sxm480gb a100sxm80gb a100sxm64gb
A100-80-PCIe  312  79.1   1.935  32   a100pcie80gb a10080gbpcie
H100          989  79.1   3.35   450  h100mega80gb h100sxm h10080 h10080gb h10080gbhbm3 h100sxm580gb h100sxm5
H100-PCIe     756  79.1   2.0    64   h100pcie h10080gbpcie
H100-NVL      835  93.1   3.9    64   h100nvl
H200          989  139.7  4.8    450  h200sxm h200141gb
H20           148  95.1   4.0    450  h2096gb
B200          2250 178.3  7.7    900  b200192gb b200180gb
GB200         2500 184.0  8.0    900
L40S          362  44.4   0.864  32
L4            121  22.0   0.3    32
A10G          70   22.0   0.6    32   a10
MI300X        1307 191.9  5.3    448  mi300 instinctmi300x instinctmi300xoam
"""
"""Of each kind its name, TFLOP/s, GiB of memory, TB/s of it, GB/s of its link, and other names without marks."""
_ROWS = [row.split() for row in _TABLE.strip().splitlines()]


def _gpu(name: str, teraflops: str, memory_gib: str, bandwidth_tb: str, link_gb: str) -> Gpu:
    flops, bandwidth, link = float(teraflops) * 1e12, float(bandwidth_tb) * 1e12, float(link_gb) * 1e9
    return Gpu(name, float(memory_gib) * 2.0**30, flops, bandwidth, link)


KNOWN_GPUS: tuple[Gpu, ...] = tuple(_gpu(*row[:5]) for row in _ROWS)
CPU_NAME = "cpu"
"""The kind of a job without GPUs."""
_ALIASES = {alias: row[0] for row in _ROWS for alias in row[5:]}
_MAKERS = ("nvidia", "amd", "tesla")


def gpu_named(name: str, where: str = "--gpu") -> Gpu:
    """The kind of a name: `H100`, `h100-80gb`, or the product that NVIDIA's labels of nodes and its tools say
    (`NVIDIA-H100-80GB-HBM3`). Raises PlanError, which lists those that are known."""
    asked, exact = _plain(name), re.sub(r"[^a-z0-9]", "", name.lower())
    known = {_plain(gpu.name): gpu for gpu in KNOWN_GPUS}
    found = known.get(_plain(_ALIASES.get(exact) or _ALIASES.get(asked, asked)))
    if found is not None:
        return found
    names = ", ".join(gpu.name for gpu in KNOWN_GPUS)
    raise PlanError(
        f"{where}: no GPU of this name is known (seen {name!r}); known are {names}. Name one of"
        " them with --gpu, or describe another GPU, or a slice, with --gpu-memory, --gpu-tflops and --gpu-bandwidth"
    )


def _plain(name: str) -> str:
    """Without the maker, marks and capitals."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for maker in _MAKERS:
        plain = plain.removeprefix(maker)
    return plain


def cpu_kind(memory_bytes: float, cores_per_worker: float) -> Gpu:
    """A worker on CPU cores. The memory is that of the whole node, which its workers share; speeds are guesses."""
    return Gpu(
        name=CPU_NAME,
        memory_bytes=memory_bytes,
        flops=_CORE_FLOPS * cores_per_worker,
        bandwidth=_CORE_BANDWIDTH * cores_per_worker,
        link_bandwidth=2e9,
        network_bandwidth=1e9,
        host_bandwidth=_CORE_BANDWIDTH,
        is_cpu=True,
    )
