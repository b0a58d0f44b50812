"""Remote columns: rows are selected without fetching, and fetching copies no more than necessary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pytest
import torch

from rljob_testing.training import data_protos
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.batch.remote import RemoteBlock, ShardReference
from rljob_trainer.errors import DataError


@dataclass(frozen=True)
class Nowhere(ShardReference):
    """A shard that cannot be fetched."""

    number: int

    @classmethod
    def fetch_all(cls, references: Sequence[Self]) -> list[DataProto]:
        """Always fails the test."""
        raise AssertionError(f"fetched {references}")


def part(start: int, stop: int) -> DataProto:
    """Rows start..stop-1 of an endless batch."""
    numbers = range(start, stop)
    return DataProto(
        {"id": torch.arange(start, stop), "wide": torch.arange(2 * start, 2 * stop).reshape(-1, 2)},
        {"text": tuple(f"text {number}" for number in numbers)},
        ragged={"tokens": RaggedColumn.from_rows([list(range(number)) for number in numbers], torch.int64)},
    )


def block_of(number: int, num_rows: int) -> DataProto:
    return DataProto(remote=(RemoteBlock.of_shard(Nowhere(number), ["a", "b"], num_rows),))


def two_shards() -> DataProto:
    return DataProto.concat([data_protos.remote_batch(part(0, 4)), data_protos.remote_batch(part(4, 7))])


def test_no_operation_on_rows_or_columns_fetches() -> None:
    batch = DataProto.concat([block_of(1, 4), block_of(2, 4)]).with_columns({"score": torch.arange(8)})
    batch = (
        batch.reorder(list(range(8))[::-1]).repeat(2).padded_to_multiple(5)[0].rows(batch_mask(20)).rename({"a": "x"})
    )
    batch = DataProto.concat([*batch.split(3)]).union(batch.only(["x"])).without(["b"]).only(["x"])
    assert batch.column_names() == ["x"]
    assert len(batch) == 10
    assert batch.column_bytes("x") == 0
    assert batch.num_bytes() == 10 * 8


def batch_mask(num_rows: int) -> list[bool]:
    return [row % 2 == 0 for row in range(num_rows)]


def test_shards_that_no_row_needs_are_released() -> None:
    batch = DataProto.concat([block_of(number, 2) for number in range(4)])
    assert [shard.number for shard in shards(batch)] == [0, 1, 2, 3]
    assert [shard.number for shard in shards(batch.slice(2, 6))] == [1, 2]
    assert [shard.number for shard in shards(batch.rows([7, 0]))] == [0, 3]
    (block,) = batch.rows([7, 0]).remote
    assert (block.shard_of_row.tolist(), block.row_in_shard.tolist()) == ([1, 0], [1, 0])
    assert block.shard_of_row.dtype == block.row_in_shard.dtype == np.int32
    assert len(shards(batch.slice(3, 3))) == 1


def shards(batch: DataProto) -> list[Nowhere]:
    return [shard for block in batch.remote for shard in block.shards if isinstance(shard, Nowhere)]


def test_a_shard_that_occurs_twice_is_merged() -> None:
    batch = two_shards()
    together = DataProto.concat([part.slice(0, 1) for part in (batch, batch.slice(4, 7), batch)])
    assert len(together.remote[0].shards) == 2
    assert together.fetched()["id"].tolist() == [0, 4, 0]


def test_consecutive_rows_of_one_shard_are_views_of_it() -> None:
    shard = part(0, 8)
    fetched = data_protos.remote_batch(shard).slice(2, 6).fetched()
    assert fetched["wide"].data_ptr() == shard["wide"][2:].data_ptr()
    assert fetched.ragged["tokens"].values.data_ptr() == shard.ragged["tokens"].values[1:].data_ptr()
    assert data_protos.rows_of(fetched) == data_protos.rows_of(part(2, 6))


def test_rows_of_several_shards_keep_their_order() -> None:
    assert data_protos.rows_of(two_shards()) == data_protos.rows_of(part(0, 7))
    shuffled = two_shards().rows([6, 0, 5, 1, 4, 2, 3, 3])
    assert data_protos.rows_of(shuffled) == data_protos.rows_of(part(0, 7).rows([6, 0, 5, 1, 4, 2, 3, 3]))
    assert data_protos.rows_of(two_shards().slice(3, 6)) == data_protos.rows_of(part(3, 6))


def test_only_requested_rows_and_columns_are_fetched() -> None:
    batch = data_protos.remote_batch(part(0, 3)).with_remote([RemoteBlock.of_shard(Nowhere(0), ["far"], 3)])
    fetched = batch.fetched(["id", "tokens"])
    assert fetched["id"].tolist() == [0, 1, 2]
    assert [name for name in fetched.column_names() if fetched.is_remote(name)] == ["wide", "text", "far"]
    assert fetched.fetched(["id"]).has_remote
    with pytest.raises(DataError, match="no column 'else'"):
        batch.fetched(["else"])


def test_an_empty_selection_has_columns_of_the_right_kinds() -> None:
    empty = two_shards().slice(0, 0).fetched()
    assert empty["wide"].shape == (0, 2)
    assert empty.object_column("text") == ()
    assert len(empty.ragged_column("tokens")) == 0
    assert data_protos.rows_of(DataProto.concat([two_shards().slice(0, 0), two_shards()])) == data_protos.rows_of(
        part(0, 7)
    )


def test_reading_a_remote_column_says_that_it_must_be_fetched() -> None:
    batch = two_shards()
    assert batch.is_remote("id")
    with pytest.raises(DataError, match=r"column 'id' is remote; get it with fetched\(\['id'\]\) first"):
        batch["id"]
    with pytest.raises(DataError, match="column 'text' is remote"):
        batch.object_column("text")
    with pytest.raises(DataError, match="no column 'else'"):
        batch.is_remote("else")


def test_union_accepts_a_remote_column_of_both_only_for_the_same_rows() -> None:
    batch = two_shards()
    chosen = batch.rows([5, 1])
    same = DataProto.concat([batch.rows([5]), batch.rows([1])])
    assert chosen.remote[0].shards != same.remote[0].shards
    assert data_protos.rows_of(chosen.union(same)) == data_protos.rows_of(part(0, 7).rows([5, 1]))
    for other in (batch.rows([5, 2]), batch.rows([1, 5]), chosen.rename({"id": "wide", "wide": "id"})):
        with pytest.raises(
            DataError, match=r"union: remote column '.*' refers to different rows or shards.*; fetch it in both"
        ):
            chosen.union(other)
    with pytest.raises(DataError, match="'id' is remote in one batch and tensor in another; fetch it first"):
        chosen.union(chosen.fetched(["id"]))


def test_concat_rejects_a_mixture_of_remote_and_local() -> None:
    batch = two_shards()
    with pytest.raises(
        DataError, match="concat: column 'wide' is remote in one batch and tensor in another; fetch it first"
    ):
        DataProto.concat([batch, batch.fetched(["wide"])])
    with pytest.raises(
        DataError, match=r"remote column 'id' is called 'id' in .* one batch and 'wide' in .* another; fetch it first"
    ):
        DataProto.concat([batch, batch.rename({"id": "wide", "wide": "id"})])


def test_concat_finds_columns_in_any_blocks() -> None:
    def apart(shard: DataProto) -> DataProto:
        return data_protos.remote_batch(shard.only(["id", "text"])).with_remote(
            data_protos.remote_batch(shard.only(["wide", "tokens"])).remote
        )

    together = DataProto.concat([apart(part(0, 3)), data_protos.remote_batch(part(3, 5)), apart(part(5, 6))])
    assert data_protos.rows_of(together) == data_protos.rows_of(part(0, 6))


def test_incompatible_shards_are_rejected() -> None:
    narrow = data_protos.remote_batch(part(0, 2))
    wide = data_protos.remote_batch(part(2, 4).with_columns({"wide": torch.zeros(2, 3, dtype=torch.int64)}))
    with pytest.raises(DataError, match=r"remote column 'wide': parts differ.*\[\*, 2\] on cpu; torch.int64 \[\*, 3\]"):
        DataProto.concat([narrow, wide]).fetched()
    lacking = DataProto(remote=(RemoteBlock.of_shard(data_protos.MemoryReference.to(part(0, 2)), ["id", "else"], 2),))
    with pytest.raises(DataError, match="'else': not every shard has a column 'else' of one kind"):
        lacking.fetched()
    short = DataProto(remote=(RemoteBlock.of_shard(data_protos.MemoryReference.to(part(0, 2)), ["id"], 3),))
    for batch in (short, short.rows([2, 1, 0])):
        with pytest.raises(DataError, match=r"'id': .*no row 2; .*2 rows"):
            batch.fetched()


def test_inconsistent_blocks_are_rejected() -> None:
    none = np.zeros(0, dtype=np.int32)
    with pytest.raises(DataError, match="there must be at least one shard"):
        RemoteBlock({"a": "a"}, (), none, none)
    with pytest.raises(DataError, match=r"must both be \[B\] \(seen: \(2,\) and \(1,\)\)"):
        RemoteBlock({"a": "a"}, (Nowhere(0),), np.zeros(2, dtype=np.int32), np.zeros(1, dtype=np.int32))
    with pytest.raises(DataError, match=r"shard_of_row must be from 0 to 0 \(seen: 0 to 1\)"):
        RemoteBlock({"a": "a"}, (Nowhere(0),), np.array([0, 1], dtype=np.int32), np.array([0, 0], dtype=np.int32))
    with pytest.raises(DataError, match="there are two columns 'a'"):
        block_of(0, 2).with_remote(block_of(1, 2).remote)
    with pytest.raises(DataError, match="same number of rows"):
        block_of(0, 2).with_columns({"x": torch.zeros(3)})
