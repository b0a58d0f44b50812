"""What is known of a rollout after its end, whoever talked with the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenRow:
    """A sequence of tokens that the policy is trained on. Legend: P tokens of the prompt, R tokens after it."""

    token_ids: Sequence[int]
    """P + R."""
    num_prompt_tokens: int
    """P."""
    mask: Sequence[bool]
    """R: whether the token was sampled, and is trained in this row."""
    logprobs: Sequence[float]
    """R: log-probabilities of the sampled tokens; 0 for other tokens."""
    policy_versions: Sequence[int]
    """R: the engine's policy version for the sampled tokens; -1 for other tokens."""


@dataclass(frozen=True)
class Transcript:
    """A rollout."""

    rows: tuple[TokenRow, ...]
    """At least one. Each sampled token is True in the mask of exactly one row. A reward model reads the last row."""
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
