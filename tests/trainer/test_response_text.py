"""Responses as text: what they add to their prompt, with special tokens for rewards and without for reward models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from rljob_testing.models import chat_models
from rljob_trainer.engines.rollout.response_text import ResponseDecoder, ResponseText, response_decoder
from rljob_trainer.models.tokenizer import Tokenizer

SPACE = "▁"
"""The space of SentencePiece."""
WORDS = ["<s>", "</s>", f"{SPACE}say", f"{SPACE}two", f"{SPACE}words", ".", f"{SPACE},"]


@pytest.fixture(scope="module")
def sentence_piece() -> PreTrainedTokenizerFast:
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<s>"))
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=True
    )


def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte."""
    letters = sorted(ByteLevel.alphabet())
    backend = Backend(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def text_of(tokenizer: PreTrainedTokenizerFast, prompt: list[int], response: list[int]) -> str:
    """Text from a decoder that knows no end token but the tokenizer's."""
    ends = frozenset(each for each in (tokenizer.eos_token_id,) if each is not None)
    found = ResponseDecoder(Spaces(tokenizer), ends, frozenset(), frozenset()).response_text(prompt, response)
    assert found.text == found.plain
    return found.text


def test_a_leading_space_is_kept(sentence_piece: PreTrainedTokenizerFast) -> None:
    assert text_of(sentence_piece, [0, 2], [3, 4, 5, 1]) == " two words."
    assert text_of(sentence_piece, [], [3, 4]) == "two words"


def test_no_space_is_cleaned_up(sentence_piece: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    sentence_piece.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert response_decoder(Tokenizer(tmp_path)).response_text([2], [3, 6, 4]).text == " two , words"


def test_a_character_split_between_prompt_and_response_is_decoded() -> None:
    tokenizer = byte_level()
    first, second = (tokenizer.convert_tokens_to_ids(letter) for letter in ("Ã", "©"))
    assert tokenizer.decode([first, second]) == "é"
    letter = tokenizer.convert_tokens_to_ids("b")
    assert text_of(tokenizer, [first], [second, letter]).endswith("b")
    assert text_of(tokenizer, [letter], [first, second]) == "é"


def test_a_character_that_the_response_was_truncated_in_is_decoded() -> None:
    tokenizer = byte_level()
    first, letter = (tokenizer.convert_tokens_to_ids(each) for each in ("Ã", "b"))
    assert text_of(tokenizer, [letter], [letter, first]) == "b"


def test_each_token_has_the_text_that_it_adds(sentence_piece: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    letters = byte_level()
    letters.add_special_tokens({"eos_token": "<end>"})
    emoji = ["ð", "Ł", "ĻĤ"[0], "ĻĤ"[1]]
    end, smile, b = letters.eos_token_id, letters.convert_tokens_to_ids(emoji), letters.convert_tokens_to_ids("b")
    assert letters.decode(smile) == "\U0001f642"
    cases = [
        (letters, [b, *smile, b, end], ["b", "", "", "", "\U0001f642", "b", "<end>"]),
        # The response was truncated within a character.
        (letters, [b, *smile[:2]], ["b", "", "\ufffd"]),
        (letters, [], []),
        (sentence_piece, [2, 3, 6, 4, 5, 1], ["say", " two", " ,", " words", ".", "</s>"]),
    ]
    for number, (tokenizer, token_ids, expected) in enumerate(cases):
        tokenizer.save_pretrained(tmp_path / str(number))
        (tmp_path / str(number) / "config.json").write_text('{"model_type": "llama"}')
        read = Tokenizer(tmp_path / str(number))
        assert read.token_texts(token_ids) == expected
        assert "".join(expected) == read.decode(token_ids, skip_special_tokens=False)


def test_a_tokenizer_that_cannot_decode_token_by_token_gives_the_whole_text_to_the_first_token(
    sentence_piece: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence_piece.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    read = Tokenizer(tmp_path)
    monkeypatch.setattr(type(read._backend), "backend_tokenizer", None)
    assert read.token_texts([2, 3, 5]) == ["say two.", "", ""]


@dataclass(frozen=True)
class TextCase:
    """A response and its texts if the tags are special tokens; if they are ordinary added tokens, a reward model sees
    them, too."""

    response: str
    text: str
    plain: str
    plain_with_tags: str
    stop: tuple[str, ...] = ()


THOUGHT = "<think>2+2</think><answer>4</answer>"
SPOKEN = {
    "tags": TextCase(f"{THOUGHT}</s>", THOUGHT, "2+24", THOUGHT),
    "cut off": TextCase("<think>2+", "<think>2+", "2+", "<think>2+"),
    "nothing": TextCase("</s>", "", "", ""),
    "padding": TextCase("4<pad>2</s><pad><pad>", "42", "42", "42"),
    "ends of a turn": TextCase("4<|im_end|><|endoftext|><|im_end|></s>", "4", "4", "4"),
    "an end of a turn within": TextCase("4<|im_end|>5</s>", "4<|im_end|>5", "45", "45"),
    "another special token": TextCase("4<|User|></s>", "4<|User|>", "4", "4"),
    "white space": TextCase(" \n4 \n</s>", " \n4 \n", " \n4 \n", " \n4 \n"),
    "the word of a token": TextCase("a <|User |> b</s>", "a <|User |> b", "a <|User |> b", "a <|User |> b"),
    "stop text": TextCase("a<answer>4</answer>", "a<answer>4", "a4", "a<answer>4", ("</answer>",)),
    "two stop texts at once": TextCase("a<answer>4;5", "a<answer>", "a", "a<answer>", ("5", "4;5")),
    "stop text divided by a special token": TextCase("a<|User|>b</s>", "a<|User|>b", "ab", "ab", ("ab",)),
    "stop text with a special token in it": TextCase("x ends</answer>", "x ", "x ", "x ", ("ends</answer>",)),
    "stop text that begins within a special token": TextCase(
        "<|User|>é</answer>", "<|User|>é</", "é", "é</", ("answer>",)
    ),
    "stop text in front of a special token's": TextCase("<think>ab</think>", "<think>a", "a", "<think>a", ("b</thi",)),
    "stop text that is whole without special tokens only": TextCase(
        "a<think>b</think>ab", "a<think>b</think>", "ab", "a<think>b</think>", ("ab",)
    ),
    "stop text of an end": TextCase("4 <|im_end|>", "4 ", "4 ", "4 ", ("<|im_end|>",)),
    "stop text of padding": TextCase("4 <pad>", "4 ", "4 ", "4 ", ("<pad>",)),
}


@pytest.fixture(scope="module")
def decoders_and_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[ResponseDecoder, Tokenizer]]:
    """Decoders and tokenizers, by whether the tags are special tokens."""
    folders = {each: tmp_path_factory.mktemp("model") for each in (True, False)}
    for are_special, folder in folders.items():
        chat_models.save(folder, chat_models.TEMPLATES["ChatML, thinking"], are_special=are_special)
    tokenizers = {each: Tokenizer(folder) for each, folder in folders.items()}
    return {each: (response_decoder(tokenizer), tokenizer) for each, tokenizer in tokenizers.items()}


@pytest.mark.parametrize("are_special", [True, False])
def test_rewards_see_special_tokens_and_no_end_tokens(
    decoders_and_tokenizers: dict[bool, tuple[ResponseDecoder, Tokenizer]], are_special: bool
) -> None:
    decoder, tokenizer = decoders_and_tokenizers[are_special]
    prompt = tokenizer.encode("<|im_start|>assistant\n<think>\n")
    found, expected = {}, {}
    for name, spoken in SPOKEN.items():
        tokens = tokenizer.encode(spoken.response)
        assert tokenizer.decode(tokens, skip_special_tokens=False) == spoken.response
        found[name] = decoder.response_text(prompt, tokens, spoken.stop)
        expected[name] = ResponseText(spoken.text, spoken.plain if are_special else spoken.plain_with_tags)
        assert decoder.is_stopped(prompt, tokens, spoken.stop) is any(each in spoken.response for each in spoken.stop)
        assert not decoder.is_stopped(prompt, tokens[:-1], spoken.stop)
    assert found == expected


def test_end_tokens_are_those_of_all_files_of_the_model(tmp_path: Path) -> None:
    chat_models.save(tmp_path, chat_models.TEMPLATES["Llama 3"], pad_token=None)
    tokens = Tokenizer(tmp_path).vocabulary()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokens["<|end_header_id|>"]]}))
    decoder = response_decoder(Tokenizer(tmp_path))
    assert decoder.removed == {tokens["<|end_header_id|>"], tokens["</s>"]}
    assert decoder.removed_at_end == {tokens["<|im_end|>"], tokens["<|endoftext|>"], tokens["<|eot_id|>"]}


@dataclass(frozen=True)
class Spaces:
    """A tokenizer of transformers whose tokens contain spaces."""

    tokenizer: PreTrainedTokenizerFast

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(
            self.tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )
