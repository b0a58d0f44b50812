"""Filters of training rows, and the report of what they drop.

The filters, in this order: prompts that are too long (`PromptMaker`), held-out prompts, contamination (prompts that
share a long sequence of words with a held-out prompt), duplicates.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import Count

NUM_EXAMPLES = 5
"""Rows that the report names for each filter."""
HASH_BYTES = 8
"""Bytes of a prompt's hash. With 20 million different prompts, the probability that any two have the same hash is 1 in
90,000; one of the two would be dropped as a duplicate."""
WORD = re.compile(r"\w+")


class FilterName(StrEnum):
    """Why a row is dropped."""

    OVERLONG = "overlongPrompt"
    HELD_OUT = "heldOut"
    CONTAMINATION = "contamination"
    DUPLICATE = "duplicates"


HELD_OUT_FILTERS = (FilterName.HELD_OUT, FilterName.CONTAMINATION)
"""Filters that compare with held-out prompts."""


class Dropped(WireModel):
    """The rows that one filter has dropped."""

    filter: FilterName
    num_rows: Count
    examples: Annotated[tuple[str, ...], Field(max_length=NUM_EXAMPLES)] = ()
    """Locations of the first dropped rows: file and line, or dataset and row number."""


class FilterReport(WireModel):
    """What the filters of one dataset have dropped."""

    dataset: str
    """Field path of the dataset."""
    num_rows: Count
    """Rows before the filters."""
    num_kept: Count
    dropped: tuple[Dropped, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yields one line for each filter that has dropped rows, for the log."""
        for each in self.dropped:
            examples = ", ".join(each.examples)
            yield (
                f"{self.dataset}: {each.filter} dropped {each.num_rows} of {self.num_rows} rows (the first: {examples})"
            )


class DropCounts:
    """Counts dropped rows by filter, and keeps the first examples."""

    def __init__(self) -> None:
        self.num_rows: dict[FilterName, int] = {}
        self.examples: dict[FilterName, list[str]] = {}

    def add(self, name: FilterName, locations: Sequence[str], num_rows: int | None = None) -> None:
        """Counts `num_rows` dropped rows, by default one for each location."""
        count = len(locations) if num_rows is None else num_rows
        if count:
            self.num_rows[name] = self.num_rows.get(name, 0) + count
            kept = self.examples.setdefault(name, [])
            kept += locations[: NUM_EXAMPLES - len(kept)]

    def add_all(self, other: DropCounts) -> None:
        """Adds the counts of other rows of the same dataset, which come after these."""
        for name, count in other.num_rows.items():
            self.add(name, other.examples[name], count)

    def dropped(self) -> tuple[Dropped, ...]:
        """Returns the counts in the order of the filters."""
        return tuple(
            Dropped(filter=name, num_rows=self.num_rows[name], examples=tuple(self.examples[name]))
            for name in FilterName
            if name in self.num_rows
        )


@dataclass(frozen=True)
class HeldOut:
    """The held-out prompts, to which training rows are compared."""

    prompts: frozenset[str] = frozenset()
    """In the form of `comparable`."""
    ngrams: frozenset[str] = frozenset()
    """All sequences of `ngram_words` words of these prompts, in the form of `ngrams_of`."""
    ngram_words: int | None = None
    """None: only equal prompts are dropped."""

    @staticmethod
    def of(prompts: Iterable[str], ngram_words: int | None = None) -> HeldOut:
        """`prompts`: the original prompts in the data. `ngram_words`: see the field; None: no n-grams are compared."""
        texts = list(prompts)
        ngrams = (ngram for text in texts for ngram in ngrams_of(text, ngram_words)) if ngram_words else ()
        return HeldOut(frozenset(map(comparable, texts)), frozenset(ngrams), ngram_words)

    def reason(self, prompt: str, text: str | None = None) -> FilterName | None:
        """Returns the filter that drops a training row with this original prompt; None if it is kept. `text`: the
        prompt in the form of `comparable`, if it is known."""
        if (comparable(prompt) if text is None else text) in self.prompts:
            return FilterName.HELD_OUT
        if self.ngram_words and any(each in self.ngrams for each in ngrams_of(prompt, self.ngram_words)):
            return FilterName.CONTAMINATION
        return None


def comparable(prompt: str) -> str:
    """Returns the prompt with a single space for each run of white space."""
    return " ".join(prompt.split())


def ngrams_of(text: str, num_words: int) -> Iterator[str]:
    """Yields each sequence of `num_words` words of the text, in lower case and without punctuation."""
    words = WORD.findall(text.lower())
    for first in range(len(words) - num_words + 1):
        yield " ".join(words[first : first + num_words])


def hash_of(text: str) -> bytes:
    """Returns the hash by which duplicates are found, of HASH_BYTES bytes. `text`: a prompt in the form of
    `comparable`."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=HASH_BYTES).digest()


def are_first(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Returns for each hash whether it is the first one with its value."""
    order = np.argsort(hashes, kind="stable")
    repeats = np.zeros(len(hashes), dtype=np.bool_)
    in_order = hashes[order]
    repeats[order[1:]] = in_order[1:] == in_order[:-1]
    return ~repeats
