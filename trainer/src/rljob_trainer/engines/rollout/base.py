"""The interface of rollout engines: add requests, get finished responses, replace the weights.

An engine runs in one process. If several ranks share one copy of the model (tensor parallelism), all of them must make
the same calls in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from rljob_api.v1alpha1.model import Lora

if TYPE_CHECKING:
    # Programs without transformers import this module, too.
    from rljob_trainer.models.tokenizer import Tokenizer


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """End-of-sequence token or stop text."""
    LENGTH = "length"
    """The response has `max_new_tokens` tokens."""
    ABORTED = "abort"
    """The request was aborted; the response has the tokens until then."""
    ERROR = "error"
    """The engine could not complete this response."""

    @property
    def is_complete(self) -> bool:
        """Whether the response has its regular end: an end token, a stop text, or the largest length. Training on any
        other response would teach the policy to stop where the engine stopped."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


class Outcome(StrEnum):
    """How a rollout ended: a single response, or a conversation with an environment."""

    COMPLETED = "COMPLETED"
    """With an end token or a stop string; a conversation: the policy or the environment ended it."""
    MAX_TOKENS = "MAX_TOKENS"
    """Truncated at rollout.maxNewTokens or environment.maxTurnTokens."""
    CONTEXT_FULL = "CONTEXT_FULL"
    """The next turn or message does not fit into environment.maxContextTokens."""
    MAX_TURNS = "MAX_TURNS"
    """The conversation has environment.maxTurns turns of the policy."""
    PARSE_ERROR = "PARSE_ERROR"
    """The last turn has a tool call that cannot be read, and no turn is left in which the policy could correct it."""
    TIME_LIMIT = "TIME_LIMIT"
    """The conversation reached environment.maxSeconds, or a call of the environment before `get_reward` reached
    timeoutSeconds."""
    INFRASTRUCTURE = "INFRASTRUCTURE"
    """The rollout engine or the environment's process failed, also in further attempts. It is excluded."""
    ERROR = "ERROR"
    """The code of the environment or agent failed after a turn of the policy: it raised an exception, returned a value
    that cannot be used, or ended its process twice. It is excluded, unless a policy of the reward gives it a score."""

    @property
    def is_truncated(self) -> bool:
        """Whether the last turn was truncated at a limit of tokens, or there was no room for it."""
        return self in (Outcome.MAX_TOKENS, Outcome.CONTEXT_FULL)

    @staticmethod
    def of(reason: FinishReason) -> Outcome:
        """The outcome of a rollout that is a single response."""
        if not reason.is_complete:
            return Outcome.INFRASTRUCTURE
        return Outcome.MAX_TOKENS if reason is FinishReason.LENGTH else Outcome.COMPLETED


@dataclass(frozen=True)
class SamplingSettings:
    """How one response is sampled."""

    temperature: float
    """0 means greedy."""
    top_p: float
    top_k: int
    """0 means all tokens."""
    max_new_tokens: int
    stop: tuple[str, ...]
    """A response ends when it contains one of these texts."""


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one response to one prompt. On CPUs the same seed, weights and other requests in the same batch
    give the same response."""

    request_id: str
    """Different from the ids of all other unfinished requests of the engine."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingSettings
    seed: int


@dataclass(frozen=True)
class FinishedSequence:
    """A response that has ended; see `finish_reason` for how."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-probability of each token in the distribution that the token was sampled from."""
    policy_versions: tuple[int, ...]
    """The engine's `policy_version` when it sampled each token."""
    text: str
    """See `ResponseText.text`."""
    plain_text: str
    """See `ResponseText.plain`."""
    finish_reason: FinishReason


@dataclass(frozen=True)
class RolloutMemory:
    """The memory that a rollout engine uses on the device, in bytes."""

    weights: int
    kv_cache: int
    unmapped: int = 0
    """Bytes that torch's allocator counts as allocated, but that are not on the device, because they sleep."""


class RolloutEngine(ABC):
    """A generator of responses with replaceable weights."""

    takes_whole_experts: bool = False
    """For an engine that takes hub names. True: all experts of a layer are two tensors, as in transformers, at the
    experts' path in the files: `model.layers.0.mlp.experts.gate_up_proj` and `...down_proj`. False: each expert has its
    own tensors, as in the files."""
    tokenizer: Tokenizer
    """The policy's tokenizer."""
    policy_version: int
    """The version of the policy's weights, which is recorded for each generated token (`policy_versions`).
    `update_weights` sets it. The worker also sets it when a later version of the policy has the same weights."""

    @abstractmethod
    def add(self, request: GenerationRequest) -> None:
        """Adds a request; its decoding starts with one of the next `step` calls."""

    @abstractmethod
    def step(self) -> list[FinishedSequence]:
        """Makes one decoding step and returns the responses that ended in it. A response that the engine could not
        complete has the finish reason ERROR; the others are not affected."""

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Whether there are unfinished requests."""

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> list[FinishedSequence]:
        """Drops requests. Returns their responses so far, with the finish reason ABORTED. Unknown ids are ignored."""

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Replaces all weights and clears caches that were computed with the old ones. Tokens that are generated from
        now on have this `policy_version`. `weights`: names and whole tensors; see `takes_hub_names` for the names.

        Must not be called while sequences are being decoded, because they would continue with keys and values of the
        old weights. Requests that no `step` has started yet are allowed."""

    @property
    @abstractmethod
    def takes_hub_names(self) -> bool:
        """True: `update_weights` expects the names and shapes of the model's files on the Hugging Face hub. False: it
        expects the names and shapes of the model in transformers, which stacks all experts of a layer in one tensor."""

    @abstractmethod
    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """Allocates again the memory that `sleep` has freed, for the requested parts. Does nothing for a part that is
        awake."""

    @abstractmethod
    def sleep(self) -> None:
        """Frees the memory of weights and KV cache if the device supports it."""

    @property
    @abstractmethod
    def forgets_weights_asleep(self) -> bool:
        """Whether `sleep` discards the weights, so that `update_weights` must be called after `wake`."""

    @property
    @abstractmethod
    def memory(self) -> RolloutMemory:
        """The memory that the engine uses on the device now."""

    @property
    def kept_buffers(self) -> list[int]:
        """The sizes in bytes of the pinned buffers in host memory that keep the engine's state while it sleeps: its
        weights, unless it forgets them, and its runtime's. Empty if they stay on the device."""
        return []

    @abstractmethod
    def clear_cache(self) -> None:
        """Clears cached prefixes, so that results do not depend on what was generated before."""

    def generate(self, requests: Iterable[GenerationRequest]) -> dict[str, FinishedSequence]:
        """Adds requests and runs in this thread until all requests are finished, including earlier ones. Returns the
        finished responses by request id. Workers use EngineLoop, which makes the same calls."""
        for request in requests:
            self.add(request)
        finished: dict[str, FinishedSequence] = {}
        while self.has_unfinished():
            finished.update({sequence.request_id: sequence for sequence in self.step()})
        return finished


class AdapterEngine(RolloutEngine):
    """An engine that can apply a LoRA adapter to its weights."""

    @abstractmethod
    def update_adapter(self, tensors: Mapping[str, torch.Tensor], lora: Lora, policy_version: int) -> None:
        """Replaces the adapter and clears caches that were computed with the old one. `tensors`: whole tensors by their
        names in peft's files. The rules of `update_weights` apply. `update_weights` removes the adapter."""
