"""A batch in a file: everything comes back as it was, and a file that is not sound is found out."""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rljob_testing.batches import local_batches, remote_batch, rows_of
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.proto_file import load_batch, save_batch
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.errors import DataError


class Color(IntEnum):
    RED = 1


def batch() -> DataProto:
    return DataProto(
        {"x": torch.arange(6).reshape(2, 3)},
        {"object": ("text", {"dict": {"tuple": [1, (2, "a")]}, "": None})},
        {"step": 3, "rate": -0.0, "names": ("a", "b"), "none": None, "yes": True},
        {"a/b": RaggedColumn.from_rows([[1.5], [2.5, 3.5]])},
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(original=local_batches())
def test_any_batch_comes_back_exactly(original: DataProto, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "batch"
    save_batch(original, path)
    loaded = load_batch(path)
    assert sorted(loaded.column_names()) == sorted(original.column_names())
    assert rows_of(loaded) == rows_of(original)
    assert repr(sorted(loaded.meta.items())) == repr(sorted(original.meta.items()))


def test_objects_and_meta_keep_their_types(tmp_path: Path) -> None:
    save_batch(batch(), tmp_path / "batch")
    loaded = load_batch(tmp_path / "batch")
    assert repr(loaded.objects) == repr(batch().objects)
    assert repr(loaded.meta) == repr(batch().meta)
    assert loaded.ragged["a/b"].same_as(batch().ragged["a/b"])


@pytest.mark.parametrize("value", [2**64 - 1, -(2**64) + 1, 1e-320, 0.1, "\ud800 \0 ü", [], (), {}, [[()]], False])
def test_a_value_comes_back_as_it_is(tmp_path: Path, value: object) -> None:
    save_batch(DataProto(objects={"x": (value,)}), tmp_path / "batch")
    assert repr(load_batch(tmp_path / "batch").objects["x"]) == repr((value,))


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (b"x", "b'x' \\(bytes\\)"),
        (float("nan"), "nan \\(float\\)"),
        (float("inf"), "inf \\(float\\)"),
        (np.float64(1.5), "\\(float64\\)"),
        (Color.RED, "\\(Color\\)"),
        ({1: "a"}, "\\{1: 'a'\\} \\(dict\\)"),
        ([{"a": {1}}], "\\{1\\} \\(set\\)"),
        (2**64, "18446744073709551616 \\(int\\)"),
        (torch.zeros(1), "\\(Tensor\\)"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_the_name_of_its_column(tmp_path: Path, value: object, seen: str) -> None:
    with pytest.raises(DataError, match=f"column 'odd' holds .*{seen}, which JSON cannot hold"):
        save_batch(DataProto(objects={"odd": (1, value)}), tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_remote_columns_and_dtypes_without_a_place_in_the_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column 'object' is remote and cannot be saved; fetch it first"):
        save_batch(remote_batch(batch().only(["x", "object"])), tmp_path / "batch")
    with pytest.raises(DataError, match=r"x' of torch\.complex128 cannot be saved; convert it"):
        save_batch(DataProto({"x": torch.zeros(1, dtype=torch.complex128)}), tmp_path / "batch")
    with pytest.raises(DataError, match="meta 'loss' holds nan"):
        save_batch(DataProto(meta={"loss": float("nan")}), tmp_path / "batch")


def test_columns_may_share_memory(tmp_path: Path) -> None:
    whole = torch.arange(8)
    save_batch(DataProto({"a": whole, "b": whole, "c": whole.view(8, 1)}), tmp_path / "batch")
    loaded = load_batch(tmp_path / "batch")
    assert loaded["a"].tolist() == loaded["b"].tolist() == loaded["c"].flatten().tolist() == list(range(8))


def test_other_readers_find_the_tensors(tmp_path: Path) -> None:
    save_batch(batch(), tmp_path / "batch")
    assert load_file(tmp_path / "batch")["tensor/x"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_saving_replaces_a_file_as_a_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    save_batch(batch(), path)
    save_batch(batch().slice(0, 1), path)
    assert len(load_batch(path)) == 1
    with pytest.raises(DataError):
        save_batch(DataProto(objects={"x": (b"",)}), path)
    assert len(load_batch(path)) == 1
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="missing"):
        save_batch(batch(), tmp_path / "missing" / "batch")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError, match="folder"):
        save_batch(batch(), folder)
    assert sorted(tmp_path.iterdir()) == [path, folder]


def problem_of(path: Path) -> str | None:
    """What loading says; None where the batch comes back as it was."""
    try:
        loaded = load_batch(path)
    except DataError as error:
        return str(error)
    assert rows_of(loaded) == rows_of(batch())
    return None


def test_a_flipped_bit_in_any_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    save_batch(batch(), path)
    sound = path.read_bytes()
    unnoticed = 0
    for position in range(len(sound)):
        path.write_bytes(sound[:position] + bytes([sound[position] ^ 1]) + sound[position + 1 :])
        # A changed blank after the header is a bit that no reader looks at.
        problem = problem_of(path)
        assert problem is None or str(path) in problem, position
        unnoticed += problem is None
    assert unnoticed < 8
    path.write_bytes(sound)
    assert rows_of(load_batch(path)) == rows_of(batch())


def test_a_file_that_is_cut_short_is_found(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    save_batch(batch(), path)
    sound = path.read_bytes()
    for length in range(0, len(sound), 7):
        path.write_bytes(sound[:length])
        with pytest.raises(DataError, match="batch: damaged, or no file of a batch"):
            load_batch(path)


def test_files_of_others_are_named_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(DataError, match="file: cannot be read: No such file"):
        load_batch(path)
    with pytest.raises(DataError, match="cannot be read"):
        load_batch(tmp_path)
    path.write_text("{}")
    with pytest.raises(DataError, match="file: damaged, or no file of a batch"):
        load_batch(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(DataError, match=r"file: no file of a batch, or of another version \(format: None\)"):
        load_batch(path)
    save_file({"x": torch.zeros(2)}, path, {"format": "rljob-batch-1", "digest": "0"})
    with pytest.raises(DataError, match="file: damaged: its content does not have the digest"):
        load_batch(path)


def test_another_dtype_in_the_header_is_found(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    save_batch(batch(), path)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["tensor/x"]["dtype"] = "F64"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with safe_open(path, framework="pt") as reader:
        assert reader.get_tensor("tensor/x").dtype == torch.float64
    with pytest.raises(DataError, match="does not have the digest"):
        load_batch(path)
