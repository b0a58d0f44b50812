"""vLLM's sleep mode on CPUs. vLLM's engine, scheduler and executor do what they do on GPUs. Only `sleep` and
`wake_up` of the worker are replaced, which do nothing on CPUs.

Lost weights become NaN, lost keys and values large numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from vllm.v1.worker.worker_base import WorkerBase

from rljob_trainer.engines.rollout.vllm_engine import VllmEngine

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""vLLM's tags."""


def add_sleep_mode(vllm: VllmEngine, *, keeps_weights: bool) -> SleepingMemory:
    """From now on the engine sleeps as on a GPU, at level 1 if it keeps weights, otherwise at level 2. Returns the
    memory that it gives up."""
    vllm.has_sleep_mode = True
    vllm.keeps_weights_asleep = keeps_weights

    def replace_sleep(worker: WorkerBase) -> SleepingMemory:
        memory = SleepingMemory(worker.get_model(), vllm.kv_cache)
        worker.sleep = memory.sleep
        worker.wake_up = memory.wake_up
        return memory

    [memory] = vllm.engine.collective_rpc(replace_sleep)
    assert isinstance(memory, SleepingMemory)
    return memory


class SleepingMemory:
    """The memory that the worker on a GPU takes from the allocator with sleep mode."""

    def __init__(self, model: torch.nn.Module, kv_cache: list[torch.UntypedStorage]) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.saved: dict[str, torch.Tensor] = {}
        self.packed: dict[torch.nn.Module, object] = {}
        """The products of the layers whose weights only exist in packed form, as `cpu_linear`."""
        self.awake = {WEIGHTS, KV_CACHE}
        """The tags of what is in memory now."""

    def num_bytes(self, num_weight_bytes: int) -> int:
        """Bytes in memory now. Packed weights cannot be measured, so their number is given."""
        weights = num_weight_bytes if WEIGHTS in self.awake else 0
        cache = sum(storage.nbytes() for storage in self.kv_cache) if KV_CACHE in self.awake else 0
        return weights + cache

    def sleep(self, level: int = 1) -> None:
        """Level 1 saves weights and buffers, level 2 only buffers."""
        self.awake = set()
        kept = self._named() if level == 1 else self.model.named_buffers()
        self.saved = {name: tensor.detach().clone() for name, tensor in kept}
        for _, tensor in self._named():
            if tensor.is_floating_point():
                tensor.detach().fill_(float("nan"))
        for layer in self.model.modules():
            if callable(product := getattr(layer, "cpu_linear", None)):
                if level == 1:
                    self.packed[layer] = product
                layer.cpu_linear = _lost(product)  # type: ignore[assignment]
        for storage in self.kv_cache:
            # 1.3e7 in float32 and bfloat16. Not NaN, because attention on CPUs multiplies what it masks by 0.
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x4B)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restores what `sleep` saved, with the weights."""
        self.awake |= {WEIGHTS, KV_CACHE} if tags is None else set(tags)
        if tags is not None and WEIGHTS not in tags:
            return
        for name, tensor in self._named():
            if name in self.saved:
                tensor.detach().copy_(self.saved[name])
        for layer, product in self.packed.items():
            layer.cpu_linear = product  # type: ignore[assignment]
        self.saved, self.packed = {}, {}

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()


def _lost(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The product with weights that are NaN."""
    return lambda *arguments: product(*arguments) * float("nan")
