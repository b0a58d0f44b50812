"""Prompts of large datasets that are accepted by their number of bytes, without tokenizing them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors

from rljob_api.v1alpha1.dataset import Dataset
from rljob_testing.models import chat_models
from rljob_trainer.datasets import short_prompts
from rljob_trainer.datasets.filter_processes import FilteredRows, FilterPass, RowFilter
from rljob_trainer.datasets.filters import FilterName, HeldOut
from rljob_trainer.datasets.parquet_files import ParquetFiles
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.datasets.rows import RawRow
from rljob_trainer.errors import DatasetError
from rljob_trainer.models.token_bounds import token_bound

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MAX_TOKENS = 12


def byte_level_bpe(
    letters: Sequence[str] = LETTERS,
    normalizer: normalizers.Normalizer | None = None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
) -> Backend:
    """A tokenizer with a token for each byte and for `ab`, that adds `<s>` to each text."""
    tokens = [*letters, "ab", "<s>"]
    backend = Backend(models.BPE({token: number for number, token in enumerate(tokens)}, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", len(tokens) - 1)])
    return backend


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.Sequence([normalizers.NFC()])])
def test_no_text_has_more_tokens_than_the_bound(normalizer: normalizers.Normalizer | None) -> None:
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    # Like some tokenizers, without control characters and the first bytes of some characters.
    letters = [each for each in LETTERS if each not in "\u0100\u0109\xf3\xe9"]
    backend = byte_level_bpe(letters, normalizer, pre_tokenizers.Sequence(steps))
    bound = token_bound(backend)
    assert bound is not None
    # NFC writes U+1D160 with three times as many bytes, and U+0958 with twice as many.
    characters = "ab 1\n\té\u0301\u0958\U0001d160\U000f0000漢\x00<s>"
    generator = random.Random(0)
    texts = ["".join(generator.choices(characters, k=generator.randint(1, 30))) for _ in range(2000)]
    texts += ["\U0001d160" * 9, "ab" * 20, "a" * 40]
    for text, encoded in zip(texts, backend.encode_batch(texts), strict=True):
        growth = 1 if text.isascii() else bound.non_ascii_growth
        assert len(encoded.ids) <= growth * len(text.encode()) + bound.num_special, repr(text)
        assert len(encoded.ids) > bound.num_special or not re.search(short_prompts.TEXT, text), repr(text)
        assert max(encoded.ids) <= bound.largest_token


@pytest.mark.parametrize(
    "backend",
    [
        byte_level_bpe([each for each in LETTERS if each != "z"]),
        byte_level_bpe(normalizer=normalizers.NFKC()),
        byte_level_bpe(normalizer=normalizers.Prepend("x")),
        byte_level_bpe(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        byte_level_bpe(pre_tokenizer=pre_tokenizers.Metaspace()),
        byte_level_bpe(pre_tokenizer=pre_tokenizers.Whitespace()),
        byte_level_bpe(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        ),
        Backend(models.WordLevel({"a": 0}, unk_token="a")),
    ],
    ids=["no token for a byte", "NFKC", "prefix", "space", "SentencePiece", "words", "removes spaces", "word level"],
)
def test_other_tokenizers_have_no_bound(backend: Backend) -> None:
    assert token_bound(backend) is None


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tokenizer with one token per byte, and a model with all of its tokens."""
    folder = chat_models.save(tmp_path / "model", chat_models.CHATML)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    return folder


def row_filter(folder: Path, model: Path, columns: dict[str, object], **fields: object) -> RowFilter:
    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=16)
    limits = {"maxPromptTokens": MAX_TOKENS, "overlongPrompt": "Drop", "promptTemplate": "-{prompt}-"}
    dataset = Dataset.from_wire({"type": "File", "file": {"path": str(path)}, **limits, **fields})
    held_out = HeldOut.of(["held out"])
    return RowFilter(FilterPass((path,), dataset, "spec", model, held_out, finds_duplicates=True))


def filtered(each: RowFilter) -> FilteredRows:
    return each.filter(each._files.groups)


def with_tokens(make: Callable[[], RowFilter], monkeypatch: pytest.MonkeyPatch) -> RowFilter:
    """A filter that tokenizes all rows."""
    with monkeypatch.context() as patch:
        patch.setattr(short_prompts, "_usable_bound", lambda *_: None)
        return make()


def test_the_same_rows_are_kept_as_with_tokens(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(1)
    prompts = ["".join(generator.choices("ab é漢\n", k=generator.randint(1, 14))) for _ in range(100)]
    prompts[3], prompts[40], prompts[41], prompts[60] = "held  out", "a" * 10, "a" * 11, prompts[0] + "\n"
    answers = [None if number % 9 == 0 else str(number) for number in range(100)]

    def make() -> RowFilter:
        return row_filter(tmp_path, model, {"prompt": prompts, "answer": answers})

    quick = make()
    made = list[RawRow]()
    of_maker = quick._maker.make_prompts

    def counted(rows: Sequence[RawRow], numbers: Sequence[int]) -> list[PromptRow | None]:
        made.extend(rows)
        return of_maker(rows, numbers)

    monkeypatch.setattr(quick._maker, "make_prompts", counted)
    found, expected = filtered(quick), filtered(with_tokens(make, monkeypatch))
    assert found.numbers.tolist() == expected.numbers.tolist()
    assert found.hashes.tolist() == expected.hashes.tolist()
    assert (found.counts.num_rows, found.counts.examples) == (expected.counts.num_rows, expected.counts.examples)
    assert (found.num_unanswered, found.unanswered) == (expected.num_unanswered, expected.unanswered)
    assert len(found.counts.num_rows) == 2
    assert expected.longest <= found.longest <= MAX_TOKENS
    assert expected.largest_token <= found.largest_token < 1000
    # Only prompts that are too long, or only white space, were tokenized: with one token per byte, the bound is exact.
    num_white = sum(not prompt.strip() for prompt in prompts)
    assert len(made) == found.counts.num_rows[FilterName.OVERLONG] + num_white
    assert 40 in found.numbers
    assert 41 not in found.numbers


@pytest.mark.parametrize("kind", ["number", "text in a dictionary", "chat", "template of chats", "no configuration"])
def test_what_needs_tokens_is_tokenized(
    tmp_path: Path, model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[object] = ["short", "much too long for this"] * 10
    answers: list[object] = [str(number) for number in range(20)]
    fields: dict[str, object] = {"promptTemplate": "{prompt}"}
    match kind:
        case "number":
            answers = list(range(20))
        case "text in a dictionary":
            answers, fields["answerField"] = [{"text": str(number)} for number in range(20)], "answer.text"
        case "chat":
            prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
            fields["maxPromptTokens"] = 20
        case "template of chats":
            fields["applyChatTemplate"] = True
        case _:
            (model / "config.json").unlink()

    def make() -> RowFilter:
        return row_filter(tmp_path, model, {"prompt": prompts, "answer": answers}, **fields)

    found, expected = filtered(make()), filtered(with_tokens(make, monkeypatch))
    assert found.numbers.tolist() == expected.numbers.tolist()
    assert found.counts.num_rows == expected.counts.num_rows
    assert len(expected.counts.num_rows) == 1


def test_a_tokenizer_with_more_tokens_than_the_model_is_found(tmp_path: Path, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"vocab_size": 100}))
    columns: dict[str, object] = {"prompt": ["a"], "answer": ["1"]}
    found = filtered(row_filter(tmp_path, model, columns))
    assert found.largest_token == max(ord(each) for each in "a-") - ord("!")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pyarrow.array(["a", "b", None]), r"row 3: column 'prompt' contains a NoneType"),
        (pyarrow.array(["a", "b", ""]), r"row 3: the prompt is empty"),
        (pyarrow.array(["a", "\n", ""]), r"row 3: the prompt is empty"),
        (
            pyarrow.StringArray.from_buffers(
                3, pyarrow.py_buffer(np.array([0, 1, 2, 3], np.int32)), pyarrow.py_buffer(b"ab\xff")
            ),
            r"row 3: column 'prompt' cannot be read.*utf-8",
        ),
    ],
    ids=["null", "empty", "empty after white space", "not UTF-8"],
)
def test_unusable_prompts_are_errors(tmp_path: Path, model: Path, values: pyarrow.Array, message: str) -> None:
    columns: dict[str, object] = {"prompt": values, "answer": ["1", "2", "3"]}
    with pytest.raises(DatasetError, match=message):
        filtered(row_filter(tmp_path, model, columns, promptTemplate="{prompt}"))


def test_rows_of_several_groups_have_their_numbers(tmp_path: Path, model: Path) -> None:
    columns: dict[str, object] = {"prompt": [f"{number}" for number in range(40)], "answer": ["1"] * 40}
    each = row_filter(tmp_path, model, columns)
    assert len(ParquetFiles(each._settings.paths).groups) == 3
    assert filtered(each).numbers.tolist() == list(range(40))
