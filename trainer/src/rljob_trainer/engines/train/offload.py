"""Offloads state (parameters, gradients, moments) from the device to host memory while it is not needed. After the copy
back, it is identical to the last bit.

Storages are copied byte for byte. Tensors that use a storage (DTensors, the flat views of FSDP2, tied tensors) are not
changed: the storage itself is emptied and filled again, as FSDP2 does with gathered parameters.

On GPUs the host memory is pinned and used again, and copies run on a separate stream: they overlap with computation
until `wait`. On CPUs host memory is device memory. There, offloading saves nothing, but the same code runs as on a GPU.
FSDP2's `CPUOffloadPolicy` cannot be used: the optimizer would run on the host, and FSDP2 would decide when shards move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn

from rljob_trainer.engines.device_memory import distinct_storages, local_part
from rljob_trainer.engines.host_ledger import buffer_bytes

CurrentTensors = Callable[[], Iterable[Tensor]]
"""Returns the tensors of a set that may grow."""


@dataclass(frozen=True)
class OffloadSettings:
    """Which state of an engine is offloaded. (A frozen model has only parameters.)"""

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False
    """The optimizer's moments."""


NO_OFFLOAD = OffloadSettings()


class HostedStorages:
    """The storages of a set of tensors. Either all of them are on the device, or all are on the host."""

    def __init__(
        self,
        device: torch.device,
        tensors: CurrentTensors,
        version: Callable[[], object],
        constant: Iterable[Tensor] = (),
    ) -> None:
        """`tensors` returns the current tensors; new tensors may be added only while all are on the device. `version`
        returns another value whenever their values have changed: only then kept copies are made again, except those of
        `constant` tensors, which never change and are on the device now."""
        self._device = device
        self._tensors = tensors
        self._version = version
        self._constant = frozenset(storage._cdata for storage in distinct_storages(constant))
        self._kept_version: object = None
        """The version of the copies in `_hosts`."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.keeps_hosts = self._stream is not None
        self._hosts: dict[int, Tensor] = {}
        """The pinned host memory of each storage, which is used again for later moves; empty on CPUs."""
        self._on_host: list[tuple[UntypedStorage, Tensor]] = []
        """The storages that are on the host, each with its copy."""
        self._has_arrived = True
        """Whether the current stream has waited for the last copies to the device."""

    @property
    def num_host_bytes(self) -> int:
        """The bytes of pinned host memory that are allocated; 0 on CPUs."""
        return buffer_bytes((len(host) for host in self._hosts.values()), is_pinned=True)

    def move_to_host(self) -> None:
        """Moves the storages to the host, if they are on the device."""
        if self._on_host:
            return
        self.wait()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        version = self._version()
        for storage in distinct_storages(self._tensors()):
            key = storage._cdata
            host = self._hosts.get(key)
            if host is None or (version != self._kept_version and key not in self._constant):
                host = self._copied_to_host(storage, host)
            if self.keeps_hosts:
                self._hosts[key] = host
            self._on_host.append((storage, host))
            storage.resize_(0)
        self._kept_version = version

    def fetch(self) -> None:
        """Starts to copy the storages back, if they are on the host; call `wait` before they are used."""
        if not self._on_host:
            return
        for storage, host in self._on_host:
            storage.resize_(host.numel())
        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                # The newly allocated memory may still be in use by earlier work of the current stream.
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            for storage, host in self._on_host:
                _bytes_of(storage, self._device).copy_(host, non_blocking=True)
        self._on_host = []
        self._has_arrived = False

    def wait(self) -> None:
        """Copies the storages back, if they are on the host, and makes the current stream wait for the copies."""
        self.fetch()
        if not self._has_arrived and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._has_arrived = True

    def _copied_to_host(self, storage: UntypedStorage, host: Tensor | None) -> Tensor:
        on_device = _bytes_of(storage, self._device)
        if host is None:
            host = torch.empty(len(on_device), dtype=torch.uint8, pin_memory=self._stream is not None)
        with torch.cuda.stream(self._stream):
            host.copy_(on_device, non_blocking=True)
        if self._stream is not None:
            # The allocator must not reuse the memory before the copy has finished.
            on_device.record_stream(self._stream)
        return host


class HostedGradients:
    """Accumulates gradients on the host between micro-batches."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [each for each in parameters if each.requires_grad]
        self._hosts: dict[nn.Parameter, Tensor] = {}
        """The host memory for each parameter's sum of gradients."""
        self._on_host: set[nn.Parameter] = set()
        """The parameters whose sum, over this update's earlier micro-batches, is on the host."""

    @torch.no_grad()
    def after_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Adds the sums of earlier micro-batches to the gradients of this one. Moves the new sums to the host, unless
        this was the last micro-batch of the update."""
        if is_first:
            self._on_host.clear()
        for parameter in self._parameters:
            is_on_host = parameter in self._on_host
            if parameter.grad is None:
                # This micro-batch did not use the parameter.
                if not (is_on_host and is_last):
                    continue
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_part(parameter.grad)
            if is_on_host:
                # One commutative addition, so the result has the same bits as on the device.
                gradient.add_(self._hosts[parameter].to(gradient.device, non_blocking=True))
                self._on_host.discard(parameter)
            if not is_last:
                self._on_host.add(parameter)
                host = self._hosts.get(parameter)
                if host is None:
                    host = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=gradient.is_cuda)
                    self._hosts[parameter] = host
                host.copy_(gradient, non_blocking=True)
                parameter.grad = None
        # Pinned memory is used again, because it is slow to allocate.
        if is_last and not any(host.is_pinned() for host in self._hosts.values()):
            self._hosts.clear()


class Offloading:
    """The offloading of one engine's state. Attributes for state that the settings do not offload are None."""

    def __init__(
        self,
        settings: OffloadSettings,
        device: torch.device,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        version: Callable[[], object],
    ) -> None:
        """The model's parameters must be shards now, not gathered. `version` returns another value whenever parameters
        or moments have changed. Parameters that need no gradient, such as LoRA's base, must not change."""
        shards = list(model.parameters())
        frozen = [each for each in shards if not each.requires_grad]
        self.parameters = HostedStorages(device, lambda: shards, version, frozen) if settings.parameters else None
        self.moments = HostedStorages(device, lambda: moments_of(optimizer), version) if settings.optimizer else None
        self.gradients = HostedGradients(shards) if settings.gradients else None

    @contextmanager
    def optimizer_step(self) -> Iterator[Callable[[], None]]:
        """When this block begins, the moments start to be copied to the device; at its end they move to the host. Call
        the yielded function before the moments are used."""
        if self.moments is None:
            yield lambda: None
            return
        self.moments.fetch()
        try:
            yield self.moments.wait
        finally:
            self.moments.move_to_host()


def moments_of(optimizer: torch.optim.Optimizer | None) -> Iterator[Tensor]:
    """The optimizer's existing moments, without step counters (which are single numbers)."""
    states = () if optimizer is None else optimizer.state.values()
    yield from (each for state in states for each in state.values() if isinstance(each, Tensor) and each.dim())


def _bytes_of(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
