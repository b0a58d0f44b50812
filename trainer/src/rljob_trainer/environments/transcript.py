"""A rollout after its end, of an environment's class or of an agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the policy in a row of tokens. Legend: N tokens of the turn."""

    start: int
    """The position of its first token in the row."""
    logprobs: Sequence[float]
    """N."""
    policy_versions: Sequence[int]
    """N: the engine's policy version."""


@dataclass(frozen=True)
class TokenRow:
    """A sequence of tokens that the policy is trained on."""

    token_ids: Sequence[int]
    """The prompt, turns of the policy, and what the template has written between and after them."""
    num_prompt_tokens: int
    turns: tuple[SampledTurn, ...]
    """The turns that are trained in this row. All other tokens are masked."""

    @property
    def num_trained_tokens(self) -> int:
        """The number of tokens of `turns`."""
        return sum(len(turn.logprobs) for turn in self.turns)


@dataclass(frozen=True)
class Transcript:
    """What a rollout leaves: tokens for training, texts and messages for rewards and samples."""

    rows: tuple[TokenRow, ...]
    """At least one. Each sampled turn is in exactly one row. A reward model reads the last row."""
    messages: tuple[Mapping[str, object], ...]
    """The whole conversation, including the policy's turns."""
    prompt_text: str
    """The text before the first turn, for rewards."""
    response_text: str
    """The text after it: all turns and messages with special tokens, without the end of the last turn."""
    last_turn: str
    """The last turn without special tokens, for a reward model."""
    num_turns: int
    is_rewritten: bool = False
    """See `Conversation.is_rewritten`."""
