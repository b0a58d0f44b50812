"""DataProto: a batch of columns. Results of its operations in cases worked out by hand, and its errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.errors import DataError


def batch(num_rows: int) -> DataProto:
    return DataProto(
        {"number": torch.arange(num_rows), "square": torch.arange(num_rows)[:, None] ** 2},
        {"name": tuple(f"row {row}" for row in range(num_rows))},
        {"step": 3},
    )


def numbers(proto: DataProto) -> list[int]:
    return [int(value) for value in proto["number"].tolist()]


def test_columns_of_different_lengths_are_rejected() -> None:
    with pytest.raises(DataError, match=r"same number of rows \(seen: .*'a': 2.*'b': 3"):
        DataProto({"a": torch.zeros(2)}, {"b": (1, 2, 3)})


def test_a_missing_column_error_names_the_existing_ones() -> None:
    with pytest.raises(DataError, match="no tensor column 'reward' \\(there are: number, square\\)"):
        batch(2)["reward"]


def test_rows_selects_in_the_given_order() -> None:
    picked = batch(4).rows([3, 0, 3])
    assert numbers(picked) == [3, 0, 3]
    assert picked.object_column("name") == ("row 3", "row 0", "row 3")
    assert picked.meta == {"step": 3}
    assert numbers(batch(4).rows(-1)) == [3]
    assert numbers(batch(4).rows(slice(3, 0, -2))) == [3, 1]
    assert numbers(batch(3).rows(torch.tensor([True, False, True]))) == [0, 2]
    assert numbers(batch(3).rows(np.array([-1, 0]))) == [2, 0]
    assert numbers(batch(3).rows([])) == []


def test_missing_rows_are_rejected() -> None:
    for index, seen in (([0, 4], "4"), ([-5], "-5"), (4, "4")):
        with pytest.raises(DataError, match=f"no row {seen}; .*4 rows"):
            batch(4).rows(index)
    with pytest.raises(DataError, match=r"a mask needs one value for each of 4 rows \(seen: 3\)"):
        batch(4).rows([True, False, True])
    with pytest.raises(DataError, match=r"integers or booleans \(seen: float64\)"):
        batch(4).rows([0.5])  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"one dimension \(seen: 2\)"):
        batch(4).rows(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(DataError, match="rows: not an index"):
        batch(4).rows([[0], [1, 2]])  # type: ignore[list-item]


def test_rows_are_repeated_side_by_side_or_batch_after_batch() -> None:
    assert numbers(batch(2).repeat(3)) == [0, 0, 0, 1, 1, 1]
    tiled = batch(2).repeat(3, interleaved=False)
    assert numbers(tiled) == [0, 1, 0, 1, 0, 1]
    assert tiled.object_column("name") == ("row 0", "row 1") * 3
    with pytest.raises(DataError, match=r"0 or more \(seen: -1\)"):
        batch(2).repeat(-1)


def test_reorder_uses_each_row_once() -> None:
    assert numbers(batch(3).reorder([2, 0, 1])) == [2, 0, 1]
    for order in ([0, 1], [0, 1, 1], [0, 1, 2, 2]):
        with pytest.raises(DataError, match="the order must name each of 3 rows once"):
            batch(3).reorder(order)


def test_split_may_end_with_a_shorter_part() -> None:
    assert [numbers(part) for part in batch(5).split(2)] == [[0, 1], [2, 3], [4]]


def test_chunk_rejects_uneven_parts() -> None:
    assert [numbers(part) for part in batch(6).chunk(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(DataError, match="6 rows cannot be split into 4 equal parts"):
        batch(6).chunk(4)
    for call in (lambda: batch(6).chunk(0), lambda: batch(6).split(0)):
        with pytest.raises(DataError, match="must be 1 or more"):
            call()


def test_padding_repeats_the_last_row_and_keeps_the_original() -> None:
    original = batch(2)
    padded, num_added = original.padded_to_multiple(5)
    assert (numbers(padded), num_added) == ([0, 1, 1, 1, 1], 3)
    assert numbers(original) == [0, 1]
    assert numbers(padded.unpadded(3)) == [0, 1]
    assert batch(4).padded_to_multiple(2)[1] == 0
    assert batch(0).padded_to_multiple(2)[1] == 0
    with pytest.raises(DataError, match="padded_to_multiple: size must be 1 or more"):
        original.padded_to_multiple(0)
    with pytest.raises(DataError, match=r"unpadded: number of rows must be 0 to 2 \(seen: 3\)"):
        original.unpadded(3)


def test_union_adds_columns_and_rejects_conflicts() -> None:
    extra = DataProto({"reward": torch.tensor([0.5, 1.0])}, {}, {"version": 7})
    united = batch(2).union(extra)
    assert united["reward"].tolist() == [0.5, 1.0]
    assert united.meta == {"step": 3, "version": 7}
    assert numbers(batch(2).union(batch(2))) == [0, 1]
    with pytest.raises(DataError, match="tensor column 'number' differs"):
        batch(2).union(DataProto({"number": torch.tensor([0, 2])}))
    with pytest.raises(DataError, match=r"meta 'step' differs \(3 and 4\)"):
        batch(2).union(DataProto({}, {}, {"step": 4}))


def test_union_accepts_equal_content_of_any_kind() -> None:
    ragged = {"tokens": RaggedColumn.from_rows([[1, 2], [3]])}
    nan = torch.tensor([float("nan"), 1.0])
    left = DataProto({"x": nan}, {"o": (float("nan"), [torch.zeros(1)])}, {"rate": float("nan")}, ragged)
    equal = DataProto({"x": nan.clone()}, {"o": (float("nan"), [torch.zeros(1)])}, {"rate": float("nan")}, ragged)
    assert left.union(equal).column_names() == ["x", "o", "tokens"]
    with pytest.raises(DataError, match="ragged column 'tokens' differs"):
        left.union(DataProto(ragged={"tokens": RaggedColumn.from_rows([[1], [2, 3]])}))
    with pytest.raises(DataError, match="object column 'o' differs"):
        left.union(DataProto(objects={"o": (1.0, [torch.zeros(1)])}))
    for other in (nan.double(), torch.tensor([1.0, float("nan")]), torch.tensor([[1.0], [2.0]])):
        with pytest.raises(DataError, match="tensor column 'x' differs"):
            left.union(DataProto({"x": other}))
    with pytest.raises(DataError, match="'x' is tensor in one batch and object in another"):
        left.union(DataProto(objects={"x": (1, 2)}))
    with pytest.raises(DataError, match="same number of rows"):
        left.union(DataProto({"y": torch.zeros(3)}))


def test_concat_rejects_other_columns_kinds_and_dtypes() -> None:
    with pytest.raises(DataError, match=r"different columns \(name, square not in all of them\)"):
        DataProto.concat([batch(2), batch(2).only(["number"])])
    with pytest.raises(DataError, match="'x' is tensor in one batch and object in another"):
        DataProto.concat([DataProto({"x": torch.zeros(1)}), DataProto(objects={"x": (1,)})])
    with pytest.raises(DataError, match=r"column 'x': parts differ.*float32 \[\*\] on cpu; torch.int64 \[\*\]"):
        DataProto.concat([DataProto({"x": torch.zeros(1)}), DataProto({"x": torch.zeros(1, dtype=torch.int64)})])
    with pytest.raises(DataError, match=r"meta 'step' differs \(3 and 4\)"):
        DataProto.concat([batch(2), batch(2).with_columns(meta={"step": 4})])
    assert len(DataProto.concat([])) == 0


def test_only_without_and_rename_select_columns() -> None:
    whole = batch(2).with_columns(ragged={"tokens": RaggedColumn.from_rows([[1], [2]])}, meta={"version": 1})
    assert whole.only(["tokens", "number", "name"]).column_names() == ["number", "name", "tokens"]
    assert (whole.only(["name"]).column_names(), whole.only(["name"]).meta) == (["name"], {})
    assert (whole.without(["name", "tokens"]).column_names(), whole.without([]).meta) == (
        ["number", "square"],
        whole.meta,
    )
    swapped = whole.rename({"number": "square", "square": "number", "tokens": "prompt"})
    assert swapped["square"].tolist() == [0, 1]
    assert swapped.ragged_column("prompt").values.tolist() == [1, 2]
    for operation, message in (
        (lambda: whole["name"], "no tensor column 'name' .*; 'name' is of kind object"),
        (lambda: whole.object_column("number"), "no object column 'number' .*; 'number' is of kind tensor"),
        (lambda: whole.only(["else"]), r"no column 'else' \(there are: name, number, square, tokens\)"),
        (lambda: whole.without(["else"]), "no column 'else'"),
        (lambda: whole.rename({"else": "x"}), "no column 'else'"),
        (lambda: whole.rename({"number": "name"}), "two columns would be called 'name'"),
        (lambda: whole.ragged_column("name"), r"no ragged column 'name' \(there are: tokens\); 'name' is of kind obj"),
    ):
        with pytest.raises(DataError, match=message):
            operation()


def test_with_columns_replaces_a_column_of_another_kind() -> None:
    replaced = batch(2).with_columns(objects={"number": ["a", "b"]}, ragged={"name": RaggedColumn.from_rows([[1], []])})
    assert replaced.column_names() == ["square", "number", "name"]
    assert replaced.object_column("number") == ("a", "b")


def test_a_name_belongs_to_one_column_and_a_column_has_rows() -> None:
    with pytest.raises(DataError, match="two columns 'x'"):
        DataProto({"x": torch.zeros(1)}, {"x": (1,)})
    with pytest.raises(DataError, match="'x' is a single number and has no rows; put it into meta"):
        DataProto({"x": torch.tensor(1.0)})


def test_batches_do_not_share_mutable_state() -> None:
    columns, meta = {"x": torch.zeros(2)}, {"step": 1}
    original = DataProto(columns, {}, meta)
    chunk = original.chunk(2)[0]
    columns["y"] = torch.zeros(3)
    meta["step"] = 2
    assert (original.column_names(), original.meta, chunk.meta) == (["x"], {"step": 1}, {"step": 1})
    with pytest.raises(TypeError):
        chunk.meta["step"] = 3  # type: ignore[index]


def test_size_in_bytes_counts_the_columns_that_are_sent() -> None:
    proto = DataProto(
        {"wide": torch.zeros(2, 3, dtype=torch.bfloat16), "view": torch.zeros(8, 100)[:2, :5]},
        {"texts": ("ab", b"c"), "nested": ((1, 2.5), {"key": [3, torch.zeros(2)]})},
        {"step": 1},
        {"tokens": RaggedColumn.from_rows([[1, 2], [3]], torch.int32)},
    )
    sizes = {name: proto.column_bytes(name) for name in proto.column_names()}
    assert sizes == {"wide": 12, "view": 40, "texts": 3, "nested": 2 * 8 + 3 + 8 + 8, "tokens": 3 * 4 + 2 * 8}
    assert proto.num_bytes() == sum(sizes.values())


def test_versions_count_in_place_changes() -> None:
    proto = DataProto({"x": torch.zeros(4)}, ragged={"tokens": RaggedColumn.from_rows([[1.0]] * 4)})
    before = proto.tensor_versions()
    proto.slice(1, 2)["x"].add_(1)
    assert proto.tensor_versions() == {"x": before["x"] + 1, "tokens": before["tokens"]}
    proto.ragged["tokens"].values.mul_(2)
    assert proto.tensor_versions()["tokens"] == before["tokens"] + 1


@given(num_rows=st.integers(1, 20), size=st.integers(1, 7))
def test_padding_chunking_and_concatenating_restores_the_rows(num_rows: int, size: int) -> None:
    padded, num_added = batch(num_rows).padded_to_multiple(size)
    together = DataProto.concat(padded.chunk(size))
    assert numbers(together.slice(0, len(together) - num_added)) == list(range(num_rows))


def test_values_that_are_no_batch_and_cycles_are_rejected_by_name() -> None:
    circular: list[object] = []
    circular.append(circular)
    other: list[object] = []
    other.append(other)
    deep: object = 1
    for _ in range(5000):
        deep = [deep]
    endless = DataProto(objects={"o": (circular,)})
    for operation, message in (
        (
            lambda: DataProto.concat(each for each in [batch(1)]),
            r"concat: takes a list of batches \(seen: a generator\)",
        ),
        (lambda: DataProto.concat(None), r"concat: takes a list of batches \(seen: a NoneType\)"),
        (lambda: DataProto.concat([batch(1), "x"]), r"concat: takes batches, which are DataProto \(seen: a str\)"),
        (lambda: DataProto.from_columns(None), r"from_columns: columns .*mapping.*\(seen: a NoneType\)"),
        (lambda: DataProto.from_columns([1]), r"from_columns: columns .*mapping.*\(seen: a list\)"),
        (lambda: DataProto.from_columns({}, [1]), r"batch: meta .*mapping.*\(seen: a list\)"),
        (lambda: batch(1).union(None), r"union: takes batches, which are DataProto \(seen: a NoneType\)"),
        (endless.num_bytes, "num_bytes: object column 'o' has values that contain themselves"),
        (DataProto(objects={"o": (deep,)}).num_bytes, "num_bytes: object column 'o' has values that"),
        (lambda: endless.union(DataProto(objects={"o": (other,)})), "union: object column 'o' has values that"),
        (lambda: DataProto.from_columns({}, {"m": circular}), r"batch: meta 'm' is \[\[.*; it must be a string"),
        (lambda: DataProto.from_columns({}, {"m": deep}), r"batch: meta 'm' is \[\[.*; it must be a string"),
    ):
        with pytest.raises(DataError, match=message):
            operation()
