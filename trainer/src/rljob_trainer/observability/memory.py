"""Memory use of this process: bytes by owner at the boundaries of a step, and the peaks between them.

On GPUs the total and the peaks come from torch's allocator, minus sleeping tensors, which the allocator still counts.
CPUs have no such counter: there the total is the sum of the owners' live storages, and the peak is the largest sampled
total (also sampled after each pass). A boundary is named after what has just been done (`generate`, `sleep`, ...). The
worker of each role counts the memory of its owners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakMethod

import torch

from rljob_trainer.observability.metrics import MEMORY_PREFIX
from rljob_trainer.observability.spans import SPANS, SpanRecorder
from rljob_trainer.observability.timeline import MEMORY_PEAK_TRACK, MEMORY_TRACK, PROCESS_MEMORY_TRACK


class Owner(StrEnum):
    """What memory is used for."""

    PARAMETERS = "parameters"
    """The actor's parameter shards."""
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ROLLOUT_WEIGHTS = "rollout_weights"
    KV_CACHE = "kv_cache"
    REFERENCE = "reference"
    CRITIC = "critic"
    """The critic's shards, gradients and optimizer states."""
    REWARD_MODEL = "reward_model"
    OTHER = "other"
    """Gathered parameters; on GPUs also activations and communication buckets."""


class Boundary(StrEnum):
    """A point in a step, named after what has just been done."""

    STEP_BEFORE = "step_before"
    """The first boundary of a rollout: what came before is done."""
    WAKE_WEIGHTS = "wake_weights"
    SYNC_WEIGHTS = "sync_weights"
    WAKE_KV_CACHE = "wake_kv_cache"
    GENERATE = "generate"
    SLEEP = "sleep"
    OLD_LOGPROBS = "old_logprobs"
    REF_LOGPROBS = "ref_logprobs"
    VALUES = "values"
    REWARD_MODEL = "reward_model"
    """The reward model has scored the responses, before the passes for log-probabilities or at the same time."""
    UPDATE_CRITIC = "update_critic"
    FORWARD_BACKWARD = "forward_backward"
    OPTIMIZER_STEP = "optimizer_step"
    """The optimizer states are still on the device."""
    UPDATE = "update"
    SAVE = "save"


Bytes = Mapping[Owner, int]
"""Bytes on the device, by owner."""
MEBIBYTE = 1 << 20
_PAGE_BYTES = 4096
T = TypeVar("T")


class DeviceCounter(Protocol):
    """The allocator's own count of the device's memory."""

    @property
    def is_used(self) -> bool:
        """Whether this process uses such a device."""
        ...

    def allocated(self) -> int:
        """Bytes of all tensors now."""
        ...

    def take_peak(self) -> int:
        """The largest number of bytes since the last call."""
        ...


class TorchCounter:
    """The count of torch's allocator for the current GPU."""

    @property
    def is_used(self) -> bool:
        """See DeviceCounter.is_used. A process that has not used a GPU yet has no memory there."""
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def allocated(self) -> int:
        """See DeviceCounter.allocated."""
        return torch.cuda.memory_allocated()

    def take_peak(self) -> int:
        """See DeviceCounter.take_peak."""
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak


class MemoryRecorder:
    """Records memory at boundaries. One instance per process, used from the thread that runs the workers' methods."""

    def __init__(self, spans: SpanRecorder, device: DeviceCounter | None = None) -> None:
        """`device`: None for torch's allocator."""
        self._spans = spans
        self._device = device or TorchCounter()
        self._counts: list[WeakMethod[Callable[[], Bytes]]] = []
        self._unmapped: list[WeakMethod[Callable[[], int]]] = []
        self._metrics: dict[str, float] = {}
        self._peak = 0
        self._last_unmapped = 0
        """The bytes that were unmapped at the last boundary."""

    def watch(self, count: Callable[[], Bytes]) -> None:
        """Adds a bound method that returns the bytes of some owners on the device. It is used as long as its object
        lives."""
        self._counts.append(WeakMethod(count))

    def watch_unmapped(self, count: Callable[[], int]) -> None:
        """Adds a bound method that returns bytes that torch's allocator counts, but that are not on the device: their
        tensors sleep. Between two boundaries, tensors must not wake up and fall asleep again: the peak would be too low
        (see `mark`). It is used as long as its object lives."""
        self._unmapped.append(WeakMethod(count))

    def by_owner(self) -> dict[Owner, int]:
        """Returns the current bytes on the device by owner; 0 for owners without memory."""
        found = dict.fromkeys(Owner, 0)
        for count in _living(self._counts):
            for owner, num_bytes in count().items():
                found[owner] += num_bytes
        if self._device.is_used:
            found[Owner.OTHER] = 0
            # OTHER is what the allocator counts beside the named owners. Gathered parameters are a part of it.
            mapped = self._device.allocated() - self._num_unmapped()
            found[Owner.OTHER] = max(0, mapped - sum(found.values()))
        return found

    def sample(self) -> None:
        """Samples the memory between two boundaries, because it may be the peak. Does nothing on GPUs."""
        if not self._device.is_used:
            self._peak = max(self._peak, sum(self.by_owner().values()))

    def mark(self, boundary: Boundary) -> None:
        """Records the memory at a boundary, and the peak since the last boundary."""
        found = self.by_owner()
        total = sum(found.values())
        peak = max(self._peak, total)
        if self._device.is_used:
            unmapped = self._num_unmapped()
            peak = max(peak, self._device.take_peak() - min(unmapped, self._last_unmapped))
            self._last_unmapped = unmapped
        self._peak = total
        process = process_bytes()
        self._spans.count(
            MEMORY_TRACK, str(boundary), {owner: num_bytes / MEBIBYTE for owner, num_bytes in found.items()}
        )
        self._spans.count(MEMORY_PEAK_TRACK, str(boundary), {"since the last boundary": peak / MEBIBYTE})
        self._spans.count(PROCESS_MEMORY_TRACK, str(boundary), {"resident": process / MEBIBYTE})
        for name, value in {
            **{
                str(owner): num_bytes
                for owner, num_bytes in found.items()
                if owner is not Owner.OTHER or self._device.is_used
            },
            f"after_{boundary}": total,
            f"during_{boundary}": peak,
            "process": process,
        }.items():
            name = f"{MEMORY_PREFIX}{name}_bytes_max"
            self._metrics[name] = max(self._metrics.get(name, 0.0), float(value))

    def take_metrics(self) -> dict[str, float]:
        """Returns the largest values since the last call: the bytes of each owner, the total after each boundary
        (`after_`), the peak before each boundary (`during_`), and the resident memory of the process."""
        taken, self._metrics = self._metrics, {}
        return taken

    def _num_unmapped(self) -> int:
        return sum(count() for count in _living(self._unmapped))


MEMORY = MemoryRecorder(SPANS)
"""The one instance for this process."""


def process_bytes() -> int:
    """Returns the resident memory of this process in bytes; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def _living(methods: list[WeakMethod[Callable[[], T]]]) -> list[Callable[[], T]]:
    """Returns the methods whose objects live, and removes the others from the list."""
    found = [(reference, reference()) for reference in methods]
    methods[:] = [reference for reference, method in found if method is not None]
    return [method for _, method in found if method is not None]
