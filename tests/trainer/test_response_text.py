"""Responses as texts: what they add to their prompt."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from rljob_trainer.engines.rollout.response_text import response_text

SPACE = "▁"
"""Of SentencePiece."""
WORDS = ["<s>", "</s>", f"{SPACE}say", f"{SPACE}two", f"{SPACE}words", ".", f"{SPACE},"]


@pytest.fixture(scope="module")
def sentence_piece() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<s>"))
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=True
    )


def byte_level() -> PreTrainedTokenizerFast:
    """A token per byte."""
    letters = sorted(ByteLevel.alphabet())
    backend = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_space_at_the_beginning_is_kept(sentence_piece: PreTrainedTokenizerFast) -> None:
    assert response_text(sentence_piece, [0, 2], [3, 4, 5, 1]) == " two words."
    assert response_text(sentence_piece, [], [3, 4]) == "two words"


def test_no_space_is_cleaned_away(sentence_piece: PreTrainedTokenizerFast) -> None:
    assert response_text(sentence_piece, [2], [3, 6, 4]) == " two , words"


def test_a_character_divided_between_prompt_and_response() -> None:
    tokenizer = byte_level()
    first, second = (tokenizer.convert_tokens_to_ids(letter) for letter in ("Ã", "©"))
    assert tokenizer.decode([first, second]) == "é"
    letter = tokenizer.convert_tokens_to_ids("b")
    assert response_text(tokenizer, [first], [second, letter]).endswith("b")
    assert response_text(tokenizer, [letter], [first, second]) == "é"


def test_a_character_that_the_response_was_cut_off_in() -> None:
    tokenizer = byte_level()
    first, letter = (tokenizer.convert_tokens_to_ids(each) for each in ("Ã", "b"))
    assert response_text(tokenizer, [letter], [letter, first]) == "b"
