"""An upper bound of the number of tokens of a text, which is much faster to compute than the tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

NFC_GROWTH = 3
"""Largest factor by which Unicode's normalization form C makes a text longer, in bytes of UTF-8
(https://www.unicode.org/faq/normalization). Texts of ASCII characters are not changed."""


@dataclass(frozen=True)
class TokenBound:
    """A text has at least one token if it is not empty, and at most one for each byte, plus the special tokens."""

    num_special: int
    """Tokens that are added to each text, such as BOS."""
    non_ascii_growth: int
    """Factor by which a text with other than ASCII characters may be longer when its tokens are made."""
    largest_token: int
    """The highest id in the tokenizer's vocabulary."""


def token_bound(tokenizer: RustTokenizer) -> TokenBound | None:
    """Returns the bound; None unless it is certain: for byte-level BPE that has a token for each byte, and neither
    removes nor adds characters. Among these are the tokenizers of Llama 3, Qwen, DeepSeek, SmolLM and GPT-2."""
    settings = json.loads(tokenizer.to_str())
    model, vocabulary = settings["model"], tokenizer.get_vocab()
    growths = [{"NFC": NFC_GROWTH}.get(kind) for kind in _kinds(settings["normalizer"], "normalizers")]
    is_byte_level = (
        model["type"] == "BPE"
        and not any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and _is_byte_level(settings["pre_tokenizer"])
        and _byte_characters() <= vocabulary.keys()
    )
    if not is_byte_level or None in growths:
        return None
    return TokenBound(
        num_special=tokenizer.num_special_tokens_to_add(is_pair=False),
        non_ascii_growth=NFC_GROWTH if growths else 1,
        largest_token=max(vocabulary.values()),
    )


def _kinds(part: dict[str, object] | None, parts: str) -> list[object]:
    """Returns the types of the steps of a normalizer."""
    return [each["type"] for each in _steps(part, parts)]


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


def _byte_characters() -> set[str]:
    """The characters that stand for the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return set(ByteLevel.alphabet())
