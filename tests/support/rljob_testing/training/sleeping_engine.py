"""Generation with transformers that sleeps as vLLM does on a GPU, and a device with too little memory for training and
generation at the same time. Both run on CPUs, where vLLM has no sleep mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from rljob_trainer.engines.device_memory import DeviceMemory
from rljob_trainer.engines.rollout.base import FinishedSequence, GenerationRequest, RolloutMemory
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.engines.train.engine import TrainEngine

KEEPS, FORGETS = 1, 2
"""vLLM's levels of sleep: the weights go to host memory, or are lost. The KV cache is lost at both levels."""


class SmallDevice(DeviceMemory):
    """A device without room for an awake generator beside what a pass needs, or beside parameters or memory that
    the trainer has freed but not returned. All sizes follow from the size of one copy of the weights."""

    def __init__(self, trainers: Sequence[TrainEngine], copy_bytes: int) -> None:
        self.trainers = trainers
        self.kv_cache_bytes, self.pass_bytes = int(5.5 * copy_bytes), int(6.5 * copy_bytes)
        self.num_bytes = 7 * copy_bytes
        self.generator_bytes = 0
        self.reserved_bytes = 0
        """What the trainer holds, and what it has freed but not returned."""
        self.room = 0
        """For which size of a KV cache room was made."""
        for engine in trainers:
            engine.model.register_forward_hook(lambda *_: self.reserve(self.pass_bytes))

    def held_bytes(self) -> int:
        """Bytes of all state of the trainers that is on the device."""
        found = (engine.memory for engine in self.trainers)
        return sum(each.parameters + each.gathered + each.gradients + each.moments for each in found)

    def reserve(self, num_bytes: int = 0) -> None:
        """Fails if the trainer's memory does not fit beside the generator's."""
        self.reserved_bytes = max(self.reserved_bytes, self.held_bytes(), num_bytes)
        used = self.reserved_bytes + self.generator_bytes
        assert used <= self.num_bytes, f"out of memory: trainer {self.reserved_bytes}, generator {self.generator_bytes}"

    def allocate(self, num_bytes: int) -> None:
        """Memory for the generator, which cannot use what the trainer has freed but not returned."""
        self.generator_bytes += num_bytes
        self.reserve()

    def return_free_memory(self) -> None:
        """See DeviceMemory."""
        self.reserved_bytes = self.held_bytes()

    def make_room_for_cache(self, num_bytes: int) -> None:
        """See DeviceMemory."""
        self.room = num_bytes


class SleepingHfEngine(HfEngine):
    """While it sleeps, its weights and buffers are NaN. They stay NaN when it wakes, except for buffers, and for
    weights at level KEEPS. It does not use or replace what is asleep, and counts its calls.

    It also has cached prefixes after each rollout, whose keys and values do not survive sleep or new weights. So the
    next rollout must not begin before they are cleared."""

    def __init__(self, settings: HfSettings, level: int, device: SmallDevice | None = None) -> None:
        super().__init__(settings)
        self.level = level
        self.device = device
        self.has_weights, self.has_kv_cache, self.has_prefixes = True, True, False
        self.saved: dict[str, torch.Tensor] = {}
        self.num_syncs, self.num_sleeps, self.num_wakes = 0, 0, 0
        """Calls of `update_weights` and `sleep`; how often the KV cache has woken."""
        if device is not None:
            device.allocate(super().memory.weights + device.kv_cache_bytes)

    def add(self, request: GenerationRequest) -> None:
        """See HfEngine."""
        assert self.has_unfinished() or not self.has_prefixes, "the prefixes of an earlier rollout are still cached"
        super().add(request)

    def step(self) -> list[FinishedSequence]:
        """See HfEngine."""
        assert self.has_weights, "the weights are asleep"
        assert self.has_kv_cache, "the KV cache is asleep"
        self.has_prefixes = True
        return super().step()

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """See HfEngine."""
        assert self.has_weights, "weights that are asleep cannot be replaced"
        super().update_weights(weights, policy_version)
        self.num_syncs += 1
        self.has_prefixes = False

    def clear_cache(self) -> None:
        """See HfEngine."""
        self.has_prefixes = False

    def sleep(self) -> None:
        """See HfEngine."""
        assert self.has_weights, "the engine is asleep"
        assert not self.has_unfinished(), "requests are running"
        if self.device is not None:
            self.device.generator_bytes = 0
        kept = self._named() if self.level == KEEPS else self.model.named_buffers()
        self.saved = {name: tensor.detach().clone() for name, tensor in kept}
        self._fill_with_nan()
        self.has_weights, self.has_kv_cache = False, False
        self.num_sleeps += 1

    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """See HfEngine."""
        if weights and not self.has_weights:
            self._allocate(super().memory.weights)
            for name, tensor in self._named():
                if name in self.saved:
                    tensor.detach().copy_(self.saved[name])
            self.has_weights = True
        if kv_cache and not self.has_kv_cache:
            if self.device is not None:
                assert self.device.room == self.device.kv_cache_bytes, "no room was made for the KV cache"
                self.device.room = 0
                self._allocate(self.device.kv_cache_bytes)
            self.has_kv_cache = True
            self.num_wakes += 1

    @property
    def forgets_weights_asleep(self) -> bool:
        """See HfEngine."""
        return self.level == FORGETS

    @property
    def memory(self) -> RolloutMemory:
        """See HfEngine."""
        kv_cache = 0 if self.device is None or not self.has_kv_cache else self.device.kv_cache_bytes
        return RolloutMemory(super().memory.weights if self.has_weights else 0, kv_cache)

    def _fill_with_nan(self) -> None:
        for _, tensor in self._named():
            if tensor.is_floating_point():
                tensor.detach().fill_(float("nan"))

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def _allocate(self, num_bytes: int) -> None:
        if self.device is not None:
            self.device.allocate(num_bytes)

    def _check_decoding(self) -> None:
        """This check of HfEngine decodes without the KV cache of the engine that this one stands for."""
        awake, self.has_kv_cache = self.has_kv_cache, True
        super()._check_decoding()
        self.has_kv_cache = awake
