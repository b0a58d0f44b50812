"""A rollout engine whose responses a test chooses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from rljob_trainer.engines.rollout.base import (
    FinishedSequence,
    FinishReason,
    GenerationRequest,
    RolloutEngine,
    RolloutMemory,
)
from rljob_trainer.engines.rollout.response_text import response_decoder
from rljob_trainer.models.tokenizer import Tokenizer

NEVER = "never"
"""A response that does not end before it is aborted."""
BROKEN = "broken"
"""A response that the engine cannot complete."""
POLICY_VERSION = 3


@dataclass(frozen=True)
class Prompt:
    """A request, as the script sees it."""

    request: GenerationRequest
    text: str
    """The prompt with special tokens."""
    turn: int
    """The number of the turn, from 0."""


Script = Callable[[Prompt], str]
"""Returns the text of a response, with special tokens, or NEVER or BROKEN."""


class ScriptedEngine(RolloutEngine):
    """Each step ends all requests except those that never end. Records what it got."""

    def __init__(self, model_folder: Path, script: Script) -> None:
        self.tokenizer = Tokenizer(model_folder)
        self.decoder = response_decoder(self.tokenizer)
        self.script = script
        self.policy_version = POLICY_VERSION
        self.open: dict[str, tuple[GenerationRequest, str]] = {}
        self.requests: list[GenerationRequest] = []
        self.sequences: dict[str, FinishedSequence] = {}
        """The last complete response for each request id."""
        self.aborted: list[str] = []
        self.has_request = threading.Event()
        self.step_error: Exception | None = None

    def add(self, request: GenerationRequest) -> None:
        """Asks the script."""
        text = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        turn = int(request.request_id.partition("/")[2] or 0)
        self.requests.append(request)
        self.open[request.request_id] = (request, self.script(Prompt(request, text, turn)))
        self.has_request.set()

    def step(self) -> list[FinishedSequence]:
        """Ends all requests that end."""
        if self.step_error is not None:
            raise self.step_error
        ended = [request_id for request_id, (_, text) in self.open.items() if text != NEVER]
        if not ended:
            time.sleep(0.001)
        return [self._sequence(*self.open.pop(request_id)) for request_id in ended]

    def has_unfinished(self) -> bool:
        """Whether requests are open."""
        return bool(self.open)

    def abort(self, request_ids: Iterable[str]) -> list[FinishedSequence]:
        """Returns responses without tokens."""
        found = [request_id for request_id in request_ids if self.open.pop(request_id, None)]
        self.aborted += found
        return [FinishedSequence(each, (), (), (), "", "", FinishReason.ABORTED) for each in found]

    def _sequence(self, request: GenerationRequest, text: str) -> FinishedSequence:
        if text == BROKEN:
            return FinishedSequence(request.request_id, (), (), (), "", "", FinishReason.ERROR)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        limit = request.sampling.max_new_tokens
        is_stopped = len(tokens) <= limit and tokens[-1] in self.tokenizer.eos_token_ids
        tokens = tokens[:limit]
        assert is_stopped or len(tokens) == limit, f"the script's response has no end: {text!r}"
        written = self.decoder.response_text(request.prompt_token_ids, tokens, request.sampling.stop)
        sequence = FinishedSequence(
            request.request_id,
            tuple(tokens),
            tuple(-1.0 - place for place in range(len(tokens))),
            (POLICY_VERSION,) * len(tokens),
            written.text,
            written.plain,
            FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        )
        self.sequences[request.request_id] = sequence
        return sequence

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Only keeps the version."""
        del weights
        self.policy_version = policy_version

    @property
    def takes_hub_names(self) -> bool:
        """No weights are read."""
        return False

    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """Never sleeps."""

    def sleep(self) -> None:
        """Never sleeps."""

    @property
    def forgets_weights_asleep(self) -> bool:
        """Never sleeps."""
        return False

    @property
    def memory(self) -> RolloutMemory:
        """Nothing."""
        return RolloutMemory(0, 0)

    def clear_cache(self) -> None:
        """Has no cache."""
