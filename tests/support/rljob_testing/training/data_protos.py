"""Batches for tests: a store in memory, hypothesis strategies for batches, and the rows of a batch as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Self

import numpy as np
import torch
from hypothesis import strategies as st

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.batch.remote import RemoteBlock, ShardReference

Row = dict[str, object]
"""One row of a batch: the content of each column in a form that `==` compares bit by bit."""

_STORE: dict[int, DataProto] = {}
_NUMBERS = count()


@dataclass(frozen=True)
class MemoryReference(ShardReference):
    """A shard in the memory of this process."""

    number: int

    @staticmethod
    def to(shard: DataProto) -> MemoryReference:
        """Puts a shard into the store."""
        reference = MemoryReference(next(_NUMBERS))
        _STORE[reference.number] = shard
        return reference

    @classmethod
    def fetch_all(cls, references: Sequence[Self]) -> list[DataProto]:
        """Raises AssertionError if a call requests a shard twice."""
        assert len(set(references)) == len(references)
        return [_STORE[reference.number] for reference in references]


def remote_batch(shard: DataProto) -> DataProto:
    """The batch with all columns remote, in one shard and in order."""
    return DataProto(remote=(RemoteBlock.of_shard(MemoryReference.to(shard), shard.column_names(), len(shard)),))


def rows_of(batch: DataProto) -> list[Row]:
    """All rows; remote columns are fetched."""
    local = batch.fetched()
    rows: list[Row] = [{} for _ in range(len(local))]
    for name, tensor in local.tensors.items():
        for row, value in zip(rows, tensor, strict=True):
            row[name] = ("tensor", _content(value))
    for name, ragged in local.ragged.items():
        start = 0
        for row, length in zip(rows, ragged.lengths.tolist(), strict=True):
            row[name] = ("ragged", _content(ragged.values[start : start + length]))
            start += length
    for name, values in local.objects.items():
        for row, item in zip(rows, values, strict=True):
            row[name] = ("object", repr(item))
    return rows


def _content(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    # Text distinguishes 0.0 from -0.0, and makes NaN equal to NaN.
    return str(tensor.dtype), tuple(tensor.shape), repr(tensor.tolist())


FLOATS = st.sampled_from([0.0, -0.0, 1.5, -2.25, float("nan"), float("inf")])
OBJECTS = st.sampled_from([None, "", "text", 3, 1.5, (1, 2), [1, "a"], {"a": [1]}, True])


@st.composite
def any_local_batches(draw: st.DrawFn, min_rows: int = 0, max_rows: int = 6) -> DataProto:
    """Batches with local columns of all kinds. Column `id` holds the row number."""
    num_rows = draw(st.integers(min_rows, max_rows))

    def values(elements: st.SearchStrategy[float], count: int) -> list[float]:
        return draw(st.lists(elements, min_size=count, max_size=count))

    lengths = torch.tensor(values(st.integers(0, 3), num_rows), dtype=torch.int64)
    num_values = int(lengths.sum())
    # The columns [:, ::2] of a wider tensor: rows that are not contiguous in memory.
    wide = torch.tensor(values(FLOATS, num_rows * 4), dtype=torch.bfloat16).reshape(num_rows, 4)
    return DataProto(
        {
            "id": torch.arange(num_rows),
            "half": wide[:, ::2],
            "flag": torch.tensor(values(st.booleans(), num_rows), dtype=torch.bool),
            "none": torch.zeros(num_rows, 0, dtype=torch.int16),
        },
        {"object": tuple(draw(st.lists(OBJECTS, min_size=num_rows, max_size=num_rows)))},
        draw(st.sampled_from([{}, {"step": 3}, {"names": ("a", "b"), "rate": 0.5}])),
        {
            "tokens": RaggedColumn(torch.tensor(values(st.integers(0, 9), num_values), dtype=torch.int32), lengths),
            "pairs": RaggedColumn(torch.tensor(values(FLOATS, 2 * num_values)).reshape(num_values, 2), lengths),
        },
    )


@st.composite
def any_batches(draw: st.DrawFn, min_rows: int = 0, max_rows: int = 6) -> DataProto:
    """As `any_local_batches`, with some remote columns: in one or two blocks, with rows spread over shards in any
    order."""
    local = draw(any_local_batches(min_rows, max_rows))
    for names in draw(st.sampled_from([[], [["half", "tokens", "object"]], [["id", "object"], ["flag", "pairs"]]])):
        num_shards = draw(st.integers(1, 3))
        shard_of_row = draw(st.lists(st.integers(0, num_shards - 1), min_size=len(local), max_size=len(local)))
        order = draw(st.permutations(range(len(local))))
        members = [[row for row in order if shard_of_row[row] == shard] for shard in range(num_shards)]
        place = {row: place for rows in members for place, row in enumerate(rows)}
        shards = [MemoryReference.to(local.only(names).rows(rows).rename({names[0]: "there"})) for rows in members]
        block = RemoteBlock(
            {name: "there" if name == names[0] else name for name in names},
            tuple(shards),
            np.array(shard_of_row, dtype=np.int32),
            np.array([place[row] for row in range(len(local))], dtype=np.int32),
        )
        local = local.without(names).with_remote([block])
    return local
