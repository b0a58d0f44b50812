"""Decodes the text of a finished response in the same way for every rollout engine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from rljob_trainer.models.assistant_turn import AssistantTurn
from rljob_trainer.models.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
NUM_CONTEXT_TOKENS = 4
"""A response is decoded together with this many tokens before it, the end of its prompt, because some tokenizers
(SentencePiece) drop a space at the beginning of a text."""
TURN_ENDS = ("<|im_end|>", "<|endoftext|>")
"""Special tokens that end a turn or a document, even if a model's files do not declare them as end tokens."""


class Decoder(Protocol):
    """The part of a tokenizer that is used here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of these tokens, including spaces."""
        ...


@dataclass(frozen=True)
class ResponseText:
    """A response as text, without the stop text."""

    text: str
    """With special tokens such as `<think>`, without end and padding tokens; for rewards."""
    plain: str
    """Without any special tokens; for a reward model with another tokenizer."""


@dataclass(frozen=True)
class ResponseDecoder:
    """Decodes the tokens of a response to text."""

    tokenizer: Decoder
    removed: frozenset[int]
    """End and padding tokens, which are removed everywhere."""
    removed_at_end: frozenset[int]
    """Other tokens that end a turn; they are removed only at the end of a response."""
    special: frozenset[int]
    """All special tokens."""

    def response_text(self, prompt: Sequence[int], response: Sequence[int], stop: Sequence[str] = ()) -> ResponseText:
        """The text that the response adds to its prompt, up to (without) the first stop text. An incomplete character
        at the end is removed."""
        kept = [token for token in response if token not in self.removed]
        while kept and kept[-1] in self.removed_at_end:
            kept.pop()
        whole = self.added(prompt, kept)
        text = whole[: min((whole.find(each) for each in stop if each in whole), default=len(whole))]
        if self.special.isdisjoint(kept):
            return ResponseText(text, text)
        if text == whole:
            return ResponseText(text, self.added(prompt, kept, skip_special_tokens=True))
        return ResponseText(text, self._plain_up_to(prompt, kept, text))

    def is_stopped(self, prompt: Sequence[int], response: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the response, including its special tokens, contains one of the stop texts."""
        text = self.added(prompt, response) if stop else ""
        return any(each in text for each in stop)

    def added(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        keeps_incomplete: bool = False,
    ) -> str:
        """The text that the tokens of the response add to the text of the prompt, including end tokens and stop texts.
        An incomplete character at the end is removed, or stays as U+FFFD."""
        context = list(prompt[-NUM_CONTEXT_TOKENS:])
        before = self.tokenizer.decode(context, skip_special_tokens=skip_special_tokens)
        text = self.tokenizer.decode([*context, *response], skip_special_tokens=skip_special_tokens)
        if text.startswith(before):
            text = text[len(before) :]
        else:
            # A character is split between prompt and response, so the prompt's tokens alone decode to another text.
            # Then the response is decoded alone.
            text = self.tokenizer.decode(list(response), skip_special_tokens=skip_special_tokens)
        return text if keeps_incomplete else text.rstrip(REPLACEMENT)

    def _plain_up_to(self, prompt: Sequence[int], response: Sequence[int], text: str) -> str:
        """Returns `text` without special tokens. `text` is the response's text before a stop text.

        First finds the tokens that lie completely within `text`, and decodes them without special tokens. Then appends
        the rest of `text`, which is the beginning of the next token, unless this token is special."""

        def num_characters(num_tokens: int) -> int:
            return len(self.added(prompt, response[:num_tokens]))

        num_whole = bisect_right(range(len(response) + 1), len(text), key=num_characters) - 1
        plain = self.added(prompt, response[:num_whole], skip_special_tokens=True)
        is_special = response[num_whole] in self.special
        return plain if is_special else plain + text[num_characters(num_whole) :]


@lru_cache(maxsize=1)
def response_decoder(tokenizer: Tokenizer) -> ResponseDecoder:
    """The decoder of responses for the policy's tokenizer. It is kept, because reading the vocabulary takes time."""
    special, vocabulary = tokenizer.special_token_ids, tokenizer.vocabulary()
    ends = {vocabulary[token] for token in TURN_ENDS if token in vocabulary} & special
    if tokenizer.has_chat_template and (end := AssistantTurn(tokenizer).turn_end_token_id) is not None:
        ends.add(end)
    padding = () if tokenizer.pad_token_id is None else (tokenizer.pad_token_id,)
    return ResponseDecoder(
        tokenizer, frozenset((*tokenizer.eos_token_ids, *padding)), frozenset(ends), frozenset(special)
    )
