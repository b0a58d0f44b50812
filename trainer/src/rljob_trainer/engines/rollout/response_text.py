"""The text of a response, decoded once at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
NUM_CONTEXT_TOKENS = 4
"""Of the prompt. Some tokenizers (SentencePiece) leave out a space where a text begins: with a few tokens before it the
response does not begin a text."""


class Decoder(Protocol):
    """What is used of transformers' tokenizers."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """The text of tokens."""
        ...


def response_text(tokenizer: Decoder, prompt: Sequence[int], response: Sequence[int]) -> str:
    """What the response adds to the text of its prompt, without special tokens, and without a character that it was
    cut off in."""
    context = list(prompt[-NUM_CONTEXT_TOKENS:])
    before, after = _text(tokenizer, context), _text(tokenizer, [*context, *response])
    # A character may be divided between the two: then the prompt's end alone decodes to something else.
    text = after[len(before) :] if after.startswith(before) else _text(tokenizer, list(response))
    return text.rstrip(REPLACEMENT)


def _text(tokenizer: Decoder, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
