"""State that leaves the device for the host's memory while nothing needs it, and comes back the same to the last bit.

What moves are storages, byte for byte. Whatever looks at a storage (DTensors, the flat views of FSDP2, tied tensors)
stays as it is: the storage itself is emptied and filled again, as FSDP2 does with gathered parameters.

On GPUs the host's memory is pinned and kept, and copies run on a stream of their own: one to the host goes on while the
next thing begins, one back while others compute, until `wait`. On CPUs the host's memory is the device's: copies are
ordinary, and nothing is gained but that everything else runs as on a GPU. FSDP2's own `CPUOffloadPolicy` does not
serve: under it the optimizer runs on the host, and nothing says when shards are where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn

from rljob_trainer.engines.device_memory import distinct_storages, local_part

Tensors = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True)
class OffloadSettings:
    """Which state of an engine leaves the device. Of a frozen model there are only parameters."""

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False


NO_OFFLOAD = OffloadSettings()


class HostedStorages:
    """The storages of some tensors: all on the device, or all on the host."""

    def __init__(self, device: torch.device, tensors: Tensors, *, is_constant: bool = False) -> None:
        """`tensors` gives those that there are now; new ones may come while all are on the device. `is_constant`: what
        was copied once need not be copied to the host again."""
        self._device = device
        self._tensors = tensors
        self._is_constant = is_constant
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._hosts: dict[int, Tensor] = {}
        """By storage; on CPUs only while the storages are empty."""
        self._away: list[tuple[UntypedStorage, Tensor]] = []
        self._has_arrived = True

    @property
    def is_away(self) -> bool:
        """Whether the storages are empty."""
        return bool(self._away)

    def leave(self) -> None:
        """To the host, if they are on the device."""
        if self._away:
            return
        self.wait()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for storage in distinct_storages(self._tensors()):
            key = storage._cdata
            host = self._hosts.get(key)
            if host is None or not self._is_constant:
                host = self._copied_to_host(storage, host)
            if self._stream is not None:
                self._hosts[key] = host
            self._away.append((storage, host))
            storage.resize_(0)

    def fetch(self) -> None:
        """Begins to bring them back, if they are away; `wait` before they are used."""
        if not self._away:
            return
        for storage, host in self._away:
            storage.resize_(host.numel())
        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                # Memory that was just given may have been somebody else's until now.
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            for storage, host in self._away:
                _bytes_of(storage, self._device).copy_(host, non_blocking=True)
        self._away = []
        self._has_arrived = False

    def wait(self) -> None:
        """What the current stream does from now on sees them on the device."""
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
            # The allocator gives the memory to nobody before the copy has ended.
            on_device.record_stream(self._stream)
        return host


class HostedGradients:
    """Sums of gradients on the host between micro-batches."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [each for each in parameters if each.requires_grad]
        self._hosts: dict[nn.Parameter, Tensor] = {}
        self._away: set[nn.Parameter] = set()
        """Whose sum of this update is on the host."""

    @torch.no_grad()
    def after_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Adds what the micro-batches before have left here to the gradients; these leave unless it was the last."""
        if is_first:
            self._away.clear()
        for parameter in self._parameters:
            is_away = parameter in self._away
            if parameter.grad is None:
                # A layer that this micro-batch did not pass.
                if not (is_away and is_last):
                    continue
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_part(parameter.grad)
            if is_away:
                # One addition, whose terms may change places: the same bits as on the device.
                gradient.add_(self._hosts[parameter].to(gradient.device, non_blocking=True))
                self._away.discard(parameter)
            if not is_last:
                self._away.add(parameter)
                host = self._hosts.get(parameter)
                if host is None:
                    host = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=gradient.is_cuda)
                    self._hosts[parameter] = host
                host.copy_(gradient, non_blocking=True)
                parameter.grad = None
        if is_last and not any(host.is_pinned() for host in self._hosts.values()):
            self._hosts.clear()


class Offloading:
    """What of one engine's state is away when; parts that the settings do not name are None, and stay on the device."""

    def __init__(
        self,
        settings: OffloadSettings,
        device: torch.device,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """The model's parameters must all be shards."""
        shards = list(model.parameters())
        self.parameters = (
            HostedStorages(device, lambda: shards, is_constant=optimizer is None) if settings.parameters else None
        )
        self.moments = HostedStorages(device, lambda: moments_of(optimizer)) if settings.optimizer else None
        self.gradients = HostedGradients(shards) if settings.gradients else None

    @contextmanager
    def optimizer_step(self) -> Iterator[Callable[[], None]]:
        """Within it the moments come to the device; they are there once the function that it gives has returned."""
        if self.moments is None:
            yield lambda: None
            return
        self.moments.fetch()
        try:
            yield self.moments.wait
        finally:
            self.moments.leave()


def moments_of(optimizer: torch.optim.Optimizer | None) -> Iterator[Tensor]:
    """Those that exist. Step counters, one number each, are none."""
    states = () if optimizer is None else optimizer.state.values()
    yield from (each for state in states for each in state.values() if isinstance(each, Tensor) and each.dim())


def _bytes_of(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
