"""What every rollout engine offers: requests go in one by one, finished sequences come out, weights can be replaced.

An engine lives in one process. Where several ranks hold one copy of the model together (tensor parallel), all of them
make the same calls in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

import torch

from rljob_api.v1alpha1.model import Lora
from rljob_trainer.observability.activity import ACTIVITY


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """End-of-sequence token or stop text."""
    LENGTH = "length"
    """The limit of new tokens."""


@dataclass(frozen=True)
class SamplingSettings:
    """How one response is sampled. Temperature 0 is greedy; `top_k` 0 means all tokens."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop: tuple[str, ...]


@dataclass(frozen=True)
class GenerationRequest:
    """One response to one prompt. Equal seed, weights and batch give the equal response."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingSettings
    seed: int | None
    """None: torch's own generator of the device, which all such requests share."""


@dataclass(frozen=True)
class FinishedSequence:
    """A response. `logprobs[i]` and `policy_versions[i]` belong to `token_ids[i]`; `text` and `plain_text` are those of
    ResponseText."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    text: str
    plain_text: str
    finish_reason: FinishReason


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes of a rollout engine."""

    weights: int
    kv_cache: int


class RolloutEngine(ABC):
    """A generator of responses with replaceable weights."""

    @abstractmethod
    def add(self, request: GenerationRequest) -> None:
        """Takes a request in; it is worked on from the next `step` on."""

    @abstractmethod
    def step(self) -> list[FinishedSequence]:
        """One decoding step for all requests in hand; the sequences that it finished."""

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Whether `step` has work."""

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets requests; unknown ids are ignored."""

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Replaces all weights (whole tensors, under the names that `takes_hub_names` says) and drops what was cached
        from the old ones. Tokens generated from now on carry `policy_version`.

        Not while sequences are under way: they would go on from keys and values of the old weights. Requests that no
        `step` has begun may wait."""

    @property
    @abstractmethod
    def takes_hub_names(self) -> bool:
        """Whether `update_weights` wants names and forms of the model's files on the hub, or else those of the model
        in transformers: experts are one tensor each there, here one for all."""

    @abstractmethod
    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """Gives memory back to the parts that `sleep` took it from. Where nothing sleeps, nothing happens."""

    @abstractmethod
    def sleep(self) -> None:
        """Frees the memory of weights and KV cache where the device can."""

    @property
    @abstractmethod
    def forgets_weights_asleep(self) -> bool:
        """Whether `sleep` drops the weights, so that they must be handed over again after it."""

    @property
    @abstractmethod
    def memory(self) -> RolloutMemory:
        """What is on the device now."""

    @abstractmethod
    def clear_cache(self) -> None:
        """Drops cached prefixes. Equal calls then give equal results, whatever was generated before."""

    def generate(self, requests: Iterable[GenerationRequest]) -> dict[str, FinishedSequence]:
        """Runs requests to their end: request id -> sequence."""
        for request in requests:
            self.add(request)
        finished: dict[str, FinishedSequence] = {}
        for number in count(1):
            if not self.has_unfinished():
                break
            finished.update({sequence.request_id: sequence for sequence in self.step()})
            ACTIVITY.tell(f"steps of the engine, {len(finished)} responses are complete", number)
        return finished


class AdapterEngine(RolloutEngine):
    """An engine that can have an adapter (LoRA) beside its weights."""

    @abstractmethod
    def update_adapter(self, tensors: Mapping[str, torch.Tensor], lora: Lora, policy_version: int) -> None:
        """Replaces the adapter (whole tensors, under the names of peft's files) and drops what was cached with the old
        one. `update_weights` drops the adapter; else as there."""
