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
_LISTED = re.compile(r"^GPU \d+: (.+?)(?: \(UUID: .*)?$", re.MULTILINE)


class DeviceType(StrEnum):
    """The type of a worker's device. The values are those of the variable `RLJOB_DEVICE`."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one machine: its GPUs, or its CPU cores if it has no GPU."""

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
    """How many of `num_gpus` GPUs are in the list `visible_cuda`. As in CUDA, entries after the first unknown one do
    not count."""
    count = 0
    for entry in visible_cuda.split(","):
        name = entry.strip()
        known = int(name) < num_gpus if name.isdecimal() else name.startswith(("GPU-", "MIG-"))
        if not known:
            break
        count += 1
    return count


def gpu_names() -> list[str] | None:
    """The types of this machine's GPUs, as nvidia-smi names them. Empty if nvidia-smi reports an error; None if it
    cannot be run or does not respond."""
    try:
        query = ["nvidia-smi", "-L"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _LISTED.findall(answer.stdout) if answer.returncode == 0 else []


def count_cores() -> int:
    """The cores of this machine that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _count_gpus(dev_folder: Path) -> int:
    names = gpu_names()
    # Some images have no nvidia-smi, but the device files of the driver always exist.
    return len(names) if names is not None else sum(1 for _ in dev_folder.glob("nvidia[0-9]*"))
