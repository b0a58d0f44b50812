"""GPU types that the planner knows, with their memory and speeds.

Sources. FLOP/s (dense BFloat16) and memory bandwidth: torch 2.13 (`_inductor/analysis/device_info.py`), torchtitan
(`tools/utils.py`), verl (`utils/flops_counter.py`) and data sheets; H100 and L4 without sparsity. Links: NVLink,
Infinity Fabric or PCIe of one GPU, per direction. Memory is the total that torch reports. It is less than the data
sheet says: messages in public issues show 79.1 GiB for an H100 (pytorch/torchtitan issue 1789), 44.4 for an L40S, 22.0
for an A10 and 191.9 for an MI300X. For A100, H100 NVL, H200, H20, B200, GB200 and L4 no such message was found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rljob_planner.errors import PlanError


@dataclass(frozen=True)
class Gpu:
    """One GPU type, or the CPU cores of a worker. Speeds are those that the vendor states; `constants` has the share of
    each speed that is reached."""

    name: str
    memory_bytes: float
    """Total memory, as the driver reports it; of a CPU worker: the memory of its node, which it shares with others."""
    flops: float
    """FLOP/s of dense BFloat16 matrix products; of a CPU: in the dtype of its passes."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    link_bandwidth: float = 32e9
    """Bytes per second and direction to the other GPUs of the node; the default is PCIe 4."""
    network_bandwidth: float = 50e9
    """Bytes per second, direction and GPU to other nodes; the default is one 400 Gb/s network card per GPU."""
    host_bandwidth: float = 25e9
    """Bytes per second and direction to the host's memory."""
    is_cpu: bool = False
    is_mig_device: bool = field(default=False, compare=False)
    """Whether it is a part of a GPU. A process can use only one, so there is no tensor parallelism."""


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of a cluster."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes of the group."""
        return self.nodes * self.gpus_per_node


Cluster = tuple[NodeGroup, ...]


_CORE_FLOPS = 192e9
"""Upper bound of float32 FLOP/s per core: two vector units with 16 numbers each, multiply and add, at 3 GHz.
`Constants` has the share of this speed that is reached."""
_CORE_BANDWIDTH = 15e9
"""Memory bandwidth in bytes per second and core. A guess; `Constants` has the share of it that is reached."""


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
"""Per type: name, TFLOP/s, GiB of memory, memory bandwidth in TB/s, link bandwidth in GB/s, and other names of the type
in lower case, without punctuation; most of them without the vendor, too."""
_ROWS = [row.split() for row in _TABLE.strip().splitlines()]


def _gpu(name: str, teraflops: str, memory_gib: str, bandwidth_tb: str, link_gb: str) -> Gpu:
    flops, bandwidth, link = float(teraflops) * 1e12, float(bandwidth_tb) * 1e12, float(link_gb) * 1e9
    return Gpu(name, float(memory_gib) * 2.0**30, flops, bandwidth, link)


KNOWN_GPUS: tuple[Gpu, ...] = tuple(_gpu(*row[:5]) for row in _ROWS)
CPU_NAME = "cpu"
"""The GPU type of a job on CPUs."""
_ALIASES = {alias: row[0] for row in _ROWS for alias in row[5:]}
_VENDORS = ("nvidia", "amd", "tesla")


def gpu_named(name: str, where: str = "--gpu") -> Gpu:
    """The GPU type with this name: `H100`, `h100-80gb`, or a product name as in node labels and nvidia-smi
    (`NVIDIA-H100-80GB-HBM3`). `where`: the option or the node that has the name, for the message.

    Raises:
        PlanError: the name is not known; the message lists the known ones.
    """
    plain, exact = _plain(name), re.sub(r"[^a-z0-9]", "", name.lower())
    known = {_plain(gpu.name): gpu for gpu in KNOWN_GPUS}
    found = known.get(_plain(_ALIASES.get(exact) or _ALIASES.get(plain, plain)))
    if found is not None:
        return found
    names = ", ".join(gpu.name for gpu in KNOWN_GPUS)
    raise PlanError(
        f"{where}: unknown GPU type (seen {name!r}); use one of {names}, or describe another GPU, or a MIG slice, with"
        " --gpu-memory, --gpu-tflops and --gpu-bandwidth"
    )


def _plain(name: str) -> str:
    """The name in lower case, without vendor and punctuation."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for vendor in _VENDORS:
        plain = plain.removeprefix(vendor)
    return plain


def cpu_worker(memory_bytes: float, cores_per_worker: float) -> Gpu:
    """A worker on CPU cores. `memory_bytes`: the memory of the node, which all its workers share. Speeds are
    guesses."""
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
