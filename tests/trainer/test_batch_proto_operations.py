"""Operations of a batch match the same operations on a list of rows, wherever columns are stored, and leave the batch
unchanged."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_testing.training import data_protos
from rljob_trainer.batch.proto import DataProto

Rows = list[data_protos.Row]
Operation = tuple[str, Callable[[DataProto], DataProto], Callable[[Rows], Rows]]
"""Its name, the operation on the batch, and the expected rows of the result."""

ANY_BATCH = settings(max_examples=200)


@st.composite
def row_operations(draw: st.DrawFn, num_rows: int) -> Operation:
    """A random operation that changes which rows there are."""
    start, stop = draw(st.integers(-8, 8)), draw(st.integers(-8, 8))
    step = draw(st.sampled_from([None, 1, 2, -1]))
    picked = draw(st.lists(st.integers(-num_rows, num_rows - 1), max_size=8)) if num_rows else []
    mask = draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    order = list(draw(st.permutations(range(num_rows))))
    times, size = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    choices: list[Operation] = [
        (f"slice {start} {stop} {step}", lambda b: b.rows(slice(start, stop, step)), lambda r: r[start:stop:step]),
        (f"rows {picked}", lambda b: b.rows(picked), lambda r: [r[i] for i in picked]),
        (f"mask {mask}", lambda b: b.rows(mask), lambda r: [row for row, is_in in zip(r, mask, strict=True) if is_in]),
        (f"repeat {times}", lambda b: b.repeat(times), lambda r: [row for row in r for _ in range(times)]),
        (f"tile {times}", lambda b: b.repeat(times, interleaved=False), lambda r: r * times),
        (f"reorder {order}", lambda b: b.reorder(order), lambda r: [r[i] for i in order]),
        (f"pad {size}", lambda b: b.padded_to_multiple(size)[0], lambda r: r + r[-1:] * (-len(r) % size)),
        (f"split {size} and concat", lambda b: DataProto.concat([*b.split(size)] or [b]), lambda r: r),
        (
            "concat with itself backwards",
            lambda b: DataProto.concat([b, b.rows(slice(None, None, -1))]),
            lambda r: r + r[::-1],
        ),
    ]
    return draw(st.sampled_from(choices))


@st.composite
def column_operations(draw: st.DrawFn, names: list[str]) -> Operation:
    """A random operation that changes which columns there are, or where they are stored."""
    some = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    new_names = {name: f"new {name}" for name in some}
    turned = dict(zip(some, some[1:] + some[:1], strict=True))
    choices: list[Operation] = [
        (
            f"only {some}",
            lambda b: b.only(some),
            lambda r: [{n: row[n] for n in some} for row in r] if some else [],
        ),
        (
            f"without {some}",
            lambda b: b.without(some),
            lambda r: [{n: v for n, v in row.items() if n not in some} for row in r] if set(some) != set(names) else [],
        ),
        (f"rename {new_names}", lambda b: b.rename(new_names), lambda r: renamed(r, new_names)),
        (f"rename {turned}", lambda b: b.rename(turned), lambda r: renamed(r, turned)),
        (f"fetch {some}", lambda b: b.fetched(some), lambda r: r),
        ("pickle", lambda b: pickle.loads(pickle.dumps(b)), lambda r: r),
        ("union with some of it", lambda b: b.union(b.only(some)), lambda r: r),
    ]
    return draw(st.sampled_from(choices))


def renamed(rows: Rows, names: dict[str, str]) -> Rows:
    return [{names.get(name, name): value for name, value in row.items()} for row in rows]


@ANY_BATCH
@given(data=st.data(), batch=data_protos.any_batches())
def test_any_sequence_of_operations_matches_the_list(data: st.DataObject, batch: DataProto) -> None:
    expected = data_protos.rows_of(batch)
    before = data_protos.rows_of(batch)
    result = batch
    for _ in range(data.draw(st.integers(1, 4))):
        operations = st.one_of(row_operations(len(result)), column_operations(result.column_names()))
        _, operate, expect = data.draw(operations)
        result, expected = operate(result), expect(expected)
        assert data_protos.rows_of(result) == expected
        assert len(result) == len(expected)
    assert data_protos.rows_of(batch) == before


@ANY_BATCH
@given(batch=data_protos.any_batches(), num_chunks=st.integers(1, 4), times=st.integers(1, 2))
def test_chunks_of_a_padded_batch_are_equal_and_restore_it(batch: DataProto, num_chunks: int, times: int) -> None:
    padded, num_added = batch.repeat(times).padded_to_multiple(num_chunks)
    chunks = padded.chunk(num_chunks)
    assert [len(chunk) for chunk in chunks] == [len(padded) // num_chunks] * num_chunks
    together = DataProto.concat(chunks)
    assert data_protos.rows_of(together.unpadded(num_added)) == data_protos.rows_of(batch.repeat(times))
    assert together.meta == batch.meta


@ANY_BATCH
@given(left=data_protos.any_local_batches(), right=data_protos.any_local_batches())
def test_batches_of_other_content_are_concatenated_row_by_row(left: DataProto, right: DataProto) -> None:
    together = DataProto.concat([left, replace(right, meta=left.meta)])
    assert data_protos.rows_of(together) == data_protos.rows_of(left) + data_protos.rows_of(right)
