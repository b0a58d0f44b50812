"""The text of a response, decoded once at its end, the same for every rollout engine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rljob_trainer.models.assistant_turn import AssistantTurn
from rljob_trainer.models.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
NUM_CONTEXT_TOKENS = 4
"""Of the prompt. Some tokenizers (SentencePiece) leave out a space where a text begins: with a few tokens before it the
response does not begin a text."""
TURN_ENDS = ("<|im_end|>", "<|endoftext|>")
"""Special tokens that end a turn or a document, also where a model's files do not say so."""


class Decoder(Protocol):
    """What is used of a tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens, with the spaces that they have."""
        ...


@dataclass(frozen=True)
class ResponseText:
    """A response as text, without the stop text."""

    text: str
    """With special tokens such as `<think>`, without end and padding tokens. For rewards."""
    plain: str
    """Without any special tokens. For a reward model with another tokenizer."""


@dataclass(frozen=True)
class ResponseDecoder:
    """From the tokens of a response to its text."""

    tokenizer: Decoder
    removed: frozenset[int]
    """End tokens and padding tokens: they are no text, wherever they stand."""
    removed_at_end: frozenset[int]
    """Other tokens that end a turn: at the end of a response they are no text, and elsewhere they stay."""
    special: frozenset[int]
    """All special tokens."""

    def response_text(self, prompt: Sequence[int], response: Sequence[int], stop: Sequence[str] = ()) -> ResponseText:
        """What the response adds to the text of its prompt, without a character that it was cut off in, up to the first
        of the stop texts."""
        kept = [token for token in response if token not in self.removed]
        while kept and kept[-1] in self.removed_at_end:
            kept.pop()
        whole = self._added(prompt, kept)
        text = whole[: min((whole.find(each) for each in stop if each in whole), default=len(whole))]
        if self.special.isdisjoint(kept):
            return ResponseText(text, text)
        if text == whole:
            return ResponseText(text, self._added(prompt, kept, skip_special_tokens=True))
        return ResponseText(text, self._plain_up_to(prompt, kept, text))

    def is_stopped(self, prompt: Sequence[int], response: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the response, all of its special tokens included, has one of the stop texts."""
        text = self._added(prompt, response) if stop else ""
        return any(each in text for each in stop)

    def _plain_up_to(self, prompt: Sequence[int], response: Sequence[int], text: str) -> str:
        """`text`, the beginning of what the response adds, without special tokens. The stop text may have special
        tokens itself, or begin within a token: so the tokens that are part of `text` are found first."""

        def num_characters(num_tokens: int) -> int:
            return len(self._added(prompt, response[:num_tokens]))

        num_whole = bisect_right(range(len(response) + 1), len(text), key=num_characters) - 1
        plain = self._added(prompt, response[:num_whole], skip_special_tokens=True)
        # A stop text may begin within the next token.
        is_special = response[num_whole] in self.special
        return plain if is_special else plain + text[num_characters(num_whole) :]

    def _added(self, prompt: Sequence[int], response: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        context = list(prompt[-NUM_CONTEXT_TOKENS:])
        before = self.tokenizer.decode(context, skip_special_tokens=skip_special_tokens)
        text = self.tokenizer.decode([*context, *response], skip_special_tokens=skip_special_tokens)
        if text.startswith(before):
            text = text[len(before) :]
        else:
            # A character may be divided between the two: then the prompt's end alone decodes to something else.
            text = self.tokenizer.decode(list(response), skip_special_tokens=skip_special_tokens)
        return text.rstrip(REPLACEMENT)


def response_decoder(tokenizer: Tokenizer) -> ResponseDecoder:
    """With the tokenizer of the policy."""
    special, vocabulary = tokenizer.special_token_ids, tokenizer.vocabulary()
    ends = {vocabulary[token] for token in TURN_ENDS if token in vocabulary} & special
    if tokenizer.has_chat_template and (end := AssistantTurn(tokenizer).end_token_id) is not None:
        ends.add(end)
    padding = () if tokenizer.pad_token_id is None else (tokenizer.pad_token_id,)
    return ResponseDecoder(
        tokenizer, frozenset((*tokenizer.eos_token_ids, *padding)), frozenset(ends), frozenset(special)
    )
