"""An upper bound of the number of tokens of a text, which is much faster to compute than the tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

NFC_GROWTH = 3
"""Largest factor by which Unicode's normalization form C makes a text longer, in bytes of UTF-8
(https://www.unicode.org/faq/normalization). Texts of ASCII characters are not changed."""
TEXT_BYTES = frozenset((*range(0x21, 0x7F), *range(0x80, 0xC0)))
"""Bytes that must have a token: the visible characters of ASCII, and the continuation bytes of UTF-8, of which each
character outside of ASCII has at least one. Control characters are not included, because some tokenizers have no tokens
for them and drop them."""


@dataclass(frozen=True)
class TokenBound:
    """A text has at most one token for each byte, plus the special tokens. It has at least one token if it has a
    character that is neither a control character nor a space."""

    num_special: int
    """Tokens that are added to each text, such as BOS."""
    non_ascii_growth: int
    """Factor by which the tokenizer's normalization may make a text longer that is not pure ASCII."""
    largest_token: int
    """The highest id in the tokenizer's vocabulary."""


def token_bound(tokenizer: RustTokenizer) -> TokenBound | None:
    """Returns the bound; None unless it is certain: for byte-level BPE that has a token for each byte of TEXT_BYTES,
    and neither removes nor adds characters."""
    settings = json.loads(tokenizer.to_str())
    model, vocabulary = settings["model"], tokenizer.get_vocab()
    normalizers = [step["type"] for step in _steps(settings["normalizer"], "normalizers")]
    is_byte_level = (
        model["type"] == "BPE"
        and not any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and _is_byte_level(settings["pre_tokenizer"])
        and TEXT_BYTES.issubset(_bytes_with_token(vocabulary))
    )
    if not is_byte_level or any(each != "NFC" for each in normalizers):
        return None
    return TokenBound(
        num_special=tokenizer.num_special_tokens_to_add(is_pair=False),
        non_ascii_growth=NFC_GROWTH if normalizers else 1,
        largest_token=max(vocabulary.values()),
    )


def _steps(part: object, parts: str) -> list[dict[str, object]]:
    """Returns the steps of a normalizer or pre-tokenizer. Sequences may contain sequences."""
    if not isinstance(part, dict):
        return []
    inner = part.get(parts)
    return [step for each in inner for step in _steps(each, parts)] if isinstance(inner, list) else [part]


def _is_byte_level(pre_tokenizer: object) -> bool:
    """Whether the text is split without removing or adding characters, and its bytes are the characters of the BPE."""
    steps = _steps(pre_tokenizer, "pretokenizers")
    harmless = all(
        step["type"] == "Digits"
        or (step["type"] == "Split" and step.get("behavior") != "Removed")
        or (step["type"] == "ByteLevel" and step.get("add_prefix_space") is False)
        for step in steps
    )
    return harmless and bool(steps) and steps[-1]["type"] == "ByteLevel"


def _bytes_with_token(vocabulary: Mapping[str, int]) -> set[int]:
    """Returns the bytes that have a token. Byte-level BPE writes each byte as a character: the printable ones of
    Latin-1 as they are, the others as the next ones from U+0100 on."""
    others = iter(range(256, 512))
    characters = {byte: chr(byte if _is_printable(byte) else next(others)) for byte in range(256)}
    return {byte for byte, character in characters.items() if character in vocabulary}


def _is_printable(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE
