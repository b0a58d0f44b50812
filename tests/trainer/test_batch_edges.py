"""Edge cases of batches: odd memory layouts, gradients, huge indices, values that must not change, files of all
kinds."""

from __future__ import annotations

import copy
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import ray.cloudpickle
import torch

from rljob_trainer.batch.balancing import balanced_partitions
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import LONG_ROW, RaggedColumn
from rljob_trainer.batch.remote import RemoteBlock
from rljob_trainer.errors import DataError
from rljob_trainer.observability.metrics import reduce_metrics, reduction_of
from rljob_trainer.observability.spans import SpanRecorder


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_single_row_of_a_strided_column_can_be_sent(dtype: torch.dtype) -> None:
    tokens = torch.arange(12).reshape(4, 3).to(dtype)
    batch = DataProto(
        {"first": tokens[:, 0]}, ragged={"r": RaggedColumn(tokens[:, 1], torch.ones(4, dtype=torch.int64))}
    )
    for row, share in enumerate(batch.chunk(4)):
        expected = tokens[row : row + 1]
        for again in (
            ray.cloudpickle.loads(ray.cloudpickle.dumps(share)),
            copy.deepcopy(share),
        ):
            assert torch.equal(again["first"], expected[:, 0])
            assert torch.equal(again.ragged_column("r").values, expected[:, 1])


@pytest.mark.parametrize("length", [2, LONG_ROW + 1], ids=["short rows", "long rows"])
def test_selecting_rows_keeps_the_gradient(length: int) -> None:
    values = torch.ones(3 * length, requires_grad=True)
    lengths = torch.full((3,), length)
    batch = DataProto({"x": values.view(3, length)}, ragged={"r": RaggedColumn(values, lengths)})
    for part in (batch.rows([2, 0]), batch.repeat(2), batch.padded_to_multiple(2)[0], batch.rows([True, False, True])):
        assert part["x"].requires_grad
        assert part.ragged_column("r").values.requires_grad


@pytest.mark.parametrize("index", [2**64 - 1, [2**64 - 2], np.array([2**63], dtype=np.uint64), slice(0, 3, 0)])
def test_rows_that_cannot_be_selected_are_rejected(index: object) -> None:
    with pytest.raises(DataError, match=r"^rows: "):
        DataProto({"x": torch.arange(3)}).rows(index)  # type: ignore[arg-type]


def test_lengths_beyond_64_bits_are_rejected() -> None:
    with pytest.raises(DataError, match=r"below 2\^63"):
        balanced_partitions(np.array([2**63, 1], dtype=np.uint64), 2)
    with pytest.raises(DataError, match=r"lengths must sum to .*\(seen: 0 and 0\)"):
        RaggedColumn(torch.zeros(0), torch.tensor([2**62] * 4))


def test_inputs_can_be_changed_later_without_effect() -> None:
    texts, flags = ["x", "y"], [1, 2]
    batch = DataProto(objects={"a": texts}, meta={"flags": flags})  # type: ignore[dict-item]
    texts.append("z")
    flags.append(3)
    assert len(batch) == 2
    assert batch.meta["flags"] == (1, 2)
    assert batch.only(["a"]).object_column("a") == ("x", "y")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"tensors": {"a": np.arange(3)}}, "tensor column 'a' is a ndarray; .*DataProto.from_columns"),
        ({"objects": {"a": "text"}}, "object column 'a' needs one value per row"),
        ({"ragged": {"a": torch.arange(3)}}, "ragged column 'a' is a Tensor; make it a RaggedColumn"),
        ({"tensors": {1: torch.arange(3)}}, r"column names are strings \(seen: 1\)"),
        ({"meta": {1: "x"}}, r"meta are strings \(seen: 1\)"),
        ({"meta": {"a": {"x": 1}}}, "meta 'a' is {'x': 1}; it must be a string, a number"),
    ],
)
def test_a_batch_holds_what_its_columns_declare(arguments: dict[str, object], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        DataProto(**arguments)  # type: ignore[arg-type]


def test_names_and_counts_of_the_wrong_kind_are_rejected() -> None:
    batch = DataProto({"ab": torch.arange(4), "a": torch.arange(4)})
    assert "a" in batch
    assert "b" not in batch
    with pytest.raises(DataError, match=r"only: .*column names as a list \(seen: the string 'ab'\)"):
        batch.only("ab")
    with pytest.raises(DataError, match=r"column names are strings .*rows\(slice\(0, 2, None\)\)"):
        batch[0:2]  # type: ignore[index]
    with pytest.raises(DataError, match=r"repeat: number of times must be an integer \(seen: 2.5\)"):
        batch.repeat(2.5)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"chunk: number of chunks must be an integer \(seen: 2.0\)"):
        batch.chunk(2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (np.array("abc"), "'x' is a single value and has no rows"),
        (np.array({"a": 1}), "'x' is a single value and has no rows"),
        (np.ma.MaskedArray([1, 2], mask=[True, False]), "'x' is a masked array, whose mask would be lost"),
        ([1e300, 1.0], "'x' cannot become a column of torch.float32: a number is larger than 3.403e"),
    ],
)
def test_no_value_is_lost_silently(column: object, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        DataProto.from_columns({"x": column})


def test_numbers_and_strings_of_all_kinds_become_columns() -> None:
    batch = DataProto.from_columns(
        {"t": np.array(["a", "bc"], dtype=np.dtypes.StringDType()), "f": [float("inf"), 1.0]}
    )
    assert batch.object_column("t") == ("a", "bc")
    assert batch["f"].tolist() == [float("inf"), 1.0]


@dataclass
class Holder:
    values: object


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.float32("nan"),
        lambda: Holder(np.arange(2)),
        lambda: deque([np.arange(2)]),
        lambda: RaggedColumn.from_rows([[1], [2, 3]]),
        lambda: DataProto({"x": torch.arange(2)}),
    ],
    ids=["NaN", "dataclass", "deque", "ragged", "batch"],
)
def test_equal_values_do_not_conflict_in_union(make: object) -> None:
    assert callable(make)
    batch, other = DataProto(objects={"x": (make(),)}), DataProto(objects={"x": (make(),), "y": (1,)})
    assert batch.union(other).column_names() == ["x", "y"]
    with pytest.raises(DataError, match="object column 'x' differs"):
        batch.union(DataProto(objects={"x": (Holder(np.arange(3)),)}))


@pytest.mark.parametrize("rows", [["ab"], [None], [np.arange(2).astype(object)], [np.array(1)]])
def test_invalid_rows_are_rejected(rows: list[object]) -> None:
    with pytest.raises(DataError, match="ragged column: "):
        RaggedColumn.from_rows(rows)  # type: ignore[arg-type]
    backwards = RaggedColumn.from_rows([np.arange(3)[::-1], np.arange(2).astype(">i8")])
    assert backwards.values.tolist() == [2, 1, 0, 0, 1]


def test_a_shard_has_no_row_before_its_first() -> None:
    with pytest.raises(DataError, match=r"a shard has no row -1"):
        RemoteBlock({"x": "x"}, (None,), np.zeros(1, dtype=np.int32), np.full(1, -1, dtype=np.int32))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([float("inf"), float("-inf")], "nan"), ([1e308, 1e308], "inf"), ([float("inf"), 1.0], "inf")],
)
def test_metrics_of_a_diverging_run_are_reported(values: list[float], expected: str) -> None:
    for name in ("loss/mean", "loss/sum"):
        assert str(reduce_metrics([{name: value} for value in values])[name]) == expected


def test_the_suffix_of_a_name_takes_precedence_over_its_prefix() -> None:
    assert reduction_of("perf/total_x_max") == "max"
    assert reduction_of("perf/total_num_tokens") == "sum"


def test_spans_are_taken_once_by_concurrent_threads() -> None:
    recorder = SpanRecorder()
    taken: list[list[object]] = [[] for _ in range(4)]

    def take(number: int) -> None:
        for _ in range(2000):
            with recorder.span("x"):
                pass
            taken[number].extend(recorder.take())

    threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(map(len, taken)) + len(recorder.take()) == 8000
