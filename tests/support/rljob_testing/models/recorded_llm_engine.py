"""A stand-in for vLLM's `LLMEngine` without a model. It records its calls, and refuses those that come too early or too
late, with an AssertionError."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

TOKEN = 5
"""The only token of each response."""

SEGMENTS = {"weights": (20, 12), "kv_cache": (64, 64), "runtime": (2, 1)}
"""By tag: the bytes of a segment, and of the tensors in it."""


class RecordedAllocator:
    """Stands for vLLM's `CuMemAllocator`, with one segment for each tag. It is awake."""

    def __init__(self) -> None:
        from vllm.device_allocator import AllocationData

        self.pointer_to_data = {
            pointer: AllocationData((0, size, pointer, 0), tag)
            for pointer, (tag, (size, _)) in enumerate(SEGMENTS.items())
        }
        self.allocator_and_pools = {
            tag: [(SimpleNamespace(snapshot=partial(_snapshot, pointer, num_bytes)), None)]
            for pointer, (tag, (_, num_bytes)) in enumerate(SEGMENTS.items())
        }

    def set_asleep(self, tags: set[str]) -> None:
        """What is asleep from now on."""
        for data in self.pointer_to_data.values():
            data.is_asleep = data.tag in tags


def _snapshot(pointer: int, num_bytes: int) -> list[dict[str, int]]:
    return [{"address": pointer, "allocated_size": num_bytes}]


class RecordedLlmEngine:
    """Starts awake, with random weights."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.allocator = RecordedAllocator()
        self.asleep: set[str] = set()
        self.has_weights = False
        """Whether weights were loaded and not lost."""
        self.is_cache_clear = True
        self.requests: dict[str, list[int]] = {}
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))

    def collective_rpc(
        self, method: str | Callable[..., object], kwargs: Mapping[str, Iterable[object]] | None = None
    ) -> list[object]:
        """See LLMEngine. A function gets no worker and returns nothing."""
        if callable(method):
            return [[]]
        assert method == "reload_weights"
        assert kwargs is not None
        self._check_weights(are_loaded=False)
        assert list(kwargs["weights_iterator"]), "no weights"
        self.has_weights = True
        self.calls.append("reload")
        return [None]

    def apply_model(self, function: Callable[[torch.nn.Module], object]) -> list[object]:
        """See LLMEngine. The model has no layers."""
        return [function(torch.nn.Module())]

    def add_lora(self, _request: LoRARequest) -> bool:
        """See LLMEngine."""
        self._check_weights(are_loaded=True)
        self.calls.append("adapter")
        return True

    def sleep(self, level: int) -> None:
        """See LLMEngine."""
        assert not self.asleep, "the engine sleeps already"
        assert not self.requests, "responses are being decoded"
        self.asleep = {"weights", "kv_cache"}
        self.allocator.set_asleep(set(SEGMENTS))
        self.has_weights = self.has_weights and level == 1
        self.is_cache_clear = True
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: Sequence[str]) -> None:
        """See LLMEngine."""
        assert set(tags) <= self.asleep, "this is awake"
        assert "kv_cache" not in tags or "weights" not in self.asleep, "the KV cache wakes before the weights"
        self.asleep -= set(tags)
        # All tags except these two wake with any of them.
        self.allocator.set_asleep(self.asleep)
        self.calls.append(f"wake {' '.join(tags)}")

    def is_sleeping(self) -> bool:
        """See LLMEngine."""
        return bool(self.asleep)

    def reset_prefix_cache(self) -> bool:
        """See LLMEngine."""
        self.is_cache_clear = not self.requests
        return self.is_cache_clear

    def add_request(
        self,
        request_id: str,
        prompt: Mapping[str, list[int]],
        _parameters: SamplingParams,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """See LLMEngine."""
        del lora_request
        assert self.requests or self.is_cache_clear, "prefixes of an earlier rollout are cached"
        self.requests[request_id] = prompt["prompt_token_ids"]

    def has_unfinished_requests(self) -> bool:
        """See LLMEngine."""
        return bool(self.requests)

    def step(self) -> list[SimpleNamespace]:
        """See LLMEngine. All requests finish, with one token."""
        assert not self.asleep, f"asleep: {self.asleep}"
        assert self.has_weights, "the weights are random or lost"
        logprobs = SimpleNamespace(token_ids=(TOKEN,), logprobs=(-1.0,))
        response = SimpleNamespace(token_ids=(TOKEN,), logprobs=logprobs, finish_reason="length")
        finished = [
            SimpleNamespace(request_id=request_id, prompt_token_ids=prompt, finished=True, outputs=[response])
            for request_id, prompt in self.requests.items()
        ]
        self.requests = {}
        self.is_cache_clear = False
        self.calls.append("generate")
        return finished

    def _check_weights(self, *, are_loaded: bool) -> None:
        assert "weights" not in self.asleep, "the weights are asleep"
        assert not self.requests, "responses are being decoded"
        assert self.has_weights or not are_loaded, "the weights are random or lost"
