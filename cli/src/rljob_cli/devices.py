"""Finds this machine's devices. It does not import torch, because that takes seconds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_QUERY_TIMEOUT_SECONDS = 20
_GPU_LINE = re.compile(r"^GPU \d+: (.+?)(?: \(UUID: .*)?$", re.MULTILINE)
"""Matches a line of `nvidia-smi -L`, such as `GPU 0: NVIDIA H100 (UUID: GPU-...)`; the group is the GPU type."""


class DeviceType(StrEnum):
    """The type of a worker's device. The values are those of the variable `RLJOB_DEVICE`."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of this machine that this process may use: GPUs or, if there are none, CPU cores."""

    type: DeviceType
    count: int

    def __str__(self) -> str:
        noun = "GPU" if self.type is DeviceType.CUDA else "CPU core"
        return f"{self.count} {noun}{'' if self.count == 1 else 's'}"


def find_devices(visible_cuda: str | None, dev_folder: Path = Path("/dev")) -> Devices:
    """The GPUs that this process may use; if there are none, its CPU cores.

    `visible_cuda` is the value of `CUDA_VISIBLE_DEVICES`. As in CUDA, an empty list hides all GPUs.
    """
    num_gpus = _count_gpus(dev_folder)
    if num_gpus and visible_cuda is not None:
        num_gpus = count_visible(visible_cuda, num_gpus)
    if num_gpus:
        return Devices(DeviceType.CUDA, num_gpus)
    return Devices(DeviceType.CPU, count_cores())


def count_visible(visible_cuda: str, num_gpus: int) -> int:
    """How many of `num_gpus` GPUs are in the list `visible_cuda`. As in CUDA, entries after the first invalid one do
    not count. An entry that begins with `GPU-` or `MIG-` is assumed to be valid."""
    count = 0
    for entry in visible_cuda.split(","):
        name = entry.strip()
        is_valid = int(name) < num_gpus if name.isdecimal() else name.startswith(("GPU-", "MIG-"))
        if not is_valid:
            break
        count += 1
    return count


def gpu_names() -> list[str] | None:
    """The type of each GPU of this machine, as nvidia-smi names it. Empty if nvidia-smi reports an error; None if
    nvidia-smi cannot be run or does not respond."""
    try:
        query = ["nvidia-smi", "-L"]
        result = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _GPU_LINE.findall(result.stdout) if result.returncode == 0 else []


def count_cores() -> int:
    """The number of CPU cores that this process may use. Outside Linux: all cores of this machine."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _count_gpus(dev_folder: Path) -> int:
    names = gpu_names()
    # Some images have no nvidia-smi; a GPU that a container may use has a device file even then.
    return len(names) if names is not None else sum(1 for _ in dev_folder.glob("nvidia[0-9]*"))
