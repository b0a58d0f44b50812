"""What a commit rejects, and the order in which it makes files durable."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue

from rljob_testing.training import small_checkpoints
from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.load import open_checkpoint
from rljob_trainer.checkpoints.save import begin_save, commit, discard_save, save_shard
from rljob_trainer.checkpoints.sharding import ShardedTensor


def block(values: torch.Tensor, offsets: tuple[int, ...], global_shape: tuple[int, ...] = (4, 4)) -> ShardedTensor:
    return ShardedTensor("weight", values, global_shape, offsets)


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        (
            [block(torch.ones(2, 4), (0, 0))],
            r"tensor weight: the ranks saved 8 of 16 elements, and parts of it are missing",
        ),
        (
            [block(torch.ones(3, 4), (0, 0)), block(torch.ones(2, 4), (2, 0))],
            r"the ranks saved 20 of 16 elements, and rank-00000.safetensors and rank-00001.safetensors overlap",
        ),
        (
            # 16 elements, but one column twice and one never.
            [block(torch.ones(4, 2), (0, 0)), block(torch.ones(4, 2), (0, 1))],
            r"the ranks saved 16 of 16 elements, and rank-00000.safetensors and rank-00001.safetensors overlap",
        ),
        (
            [block(torch.tensor(1.0), (), ()), block(torch.tensor(1.0), (), ())],
            r"the ranks saved 2 of 1 elements, and .* overlap",
        ),
        (
            [block(torch.ones(2, 4), (3, 0))],
            r"the piece at \[3, 0\] .* \[2, 4\] is outside of \[4, 4\]",
        ),
        (
            [block(torch.ones(2, 4), (0, 0)), block(torch.ones(2, 4, dtype=torch.float64), (2, 0))],
            r"tensor weight is F64 \[4, 4\] on rank 1, but F32 \[4, 4\] on another",
        ),
    ],
)
def test_pieces_must_cover_each_tensor_exactly_once(tmp_path: Path, shards: list[ShardedTensor], text: str) -> None:
    folder = begin_save(tmp_path, 20, 1)
    records = [save_shard(folder, rank, [shard]) for rank, shard in enumerate(shards)]
    with pytest.raises(CheckpointError, match=text):
        commit(tmp_path, folder, 20, 1, records, {})
    assert not (folder / "manifest.json").exists()


def test_blocks_of_a_grid_are_merged_and_split_differently(tmp_path: Path) -> None:
    """Four ranks hold quarters (rows and columns); a reader asks for rows 1 to 3 and columns 1 to 4 of 5 x 5."""
    whole = torch.arange(25, dtype=torch.bfloat16).reshape(5, 5)
    folder = begin_save(tmp_path, 20, 1)
    quarters = itertools.product([slice(0, 3), slice(3, 5)], [slice(0, 2), slice(2, 5)])
    records = [
        save_shard(folder, rank, [block(whole[rows, columns], (rows.start, columns.start), (5, 5))])
        for rank, (rows, columns) in enumerate(quarters)
    ]
    commit(tmp_path, folder, 20, 1, records, {})
    reader = open_checkpoint(folder)
    assert torch.equal(reader.read("weight"), whole)
    part = torch.zeros(3, 4, dtype=torch.bfloat16)
    reader.read_into("weight", (1, 1), part)
    assert torch.equal(part, whole[1:4, 1:5])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
        torch.arange(5, dtype=torch.uint8),
        torch.zeros(0, 4),
        torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    ],
    ids=["scalar", "bool", "transposed", "bytes", "empty", "float8"],
)
def test_every_kind_of_tensor_is_restored_equal(tmp_path: Path, tensor: torch.Tensor) -> None:
    folder = begin_save(tmp_path, 20, 1)
    other = ShardedTensor("other", torch.ones(3, dtype=torch.float16), (3,), (0,))
    shape = tuple(tensor.shape)
    records = [save_shard(folder, 0, [other, ShardedTensor("tensor", tensor, shape, (0,) * len(shape))])]
    commit(tmp_path, folder, 20, 1, records, {})
    loaded = open_checkpoint(folder).read("tensor")
    assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(loaded.to(torch.float64), tensor.to(torch.float64))


def test_records_of_every_rank_are_required_and_their_files_must_exist(tmp_path: Path) -> None:
    folder = begin_save(tmp_path, 20, 1)
    first, second = (save_shard(folder, rank, [shard]) for rank, shard in enumerate(small_checkpoints.shards_of(20)))
    for records, text in [
        ([], r"records are from ranks \[\]"),
        ([second], r"records are from ranks \[1\]"),
        ([first, first], r"records are from ranks \[0, 0\]"),
    ]:
        with pytest.raises(CheckpointError, match=text):
            commit(tmp_path, folder, 20, 1, records, {})
    with pytest.raises(CheckpointError, match="is not the folder of step 21 and start 1"):
        commit(tmp_path, folder, 21, 1, [first, second], {})
    (folder / "rank-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be committed: rank-00001.safetensors is missing; save again"):
        commit(tmp_path, folder, 20, 1, [first, second], {})


def test_one_rank_cannot_save_a_name_twice(tmp_path: Path) -> None:
    folder = begin_save(tmp_path, 20, 1)
    tensor = ShardedTensor("weight", torch.ones(1), (1,), (0,))
    with pytest.raises(CheckpointError, match="rank 0 saves two tensors with the same name"):
        save_shard(folder, 0, [tensor, tensor])


def test_a_dtype_that_the_format_lacks_is_rejected(tmp_path: Path) -> None:
    folder = begin_save(tmp_path, 20, 1)
    tensor = ShardedTensor("weight", torch.ones(1, dtype=torch.complex128), (1,), (0,))
    with pytest.raises(CheckpointError, match=r"tensor weight: torch.complex128 cannot be stored"):
        save_shard(folder, 0, [tensor])
    assert list(folder.iterdir()) == []


def test_a_committed_step_is_neither_saved_again_nor_discarded(tmp_path: Path) -> None:
    committed = small_checkpoints.save_step(tmp_path, 20, 1)
    folder = tmp_path / "step-00000020.start-0001"
    assert committed.uri == folder.as_uri()
    with pytest.raises(CheckpointError, match="step 20 is already saved"):
        begin_save(tmp_path, 20, 1)
    discard_save(folder)
    assert torch.equal(open_checkpoint(folder).read("weight"), small_checkpoints.values_of(20))


def test_extra_state_is_restored_unchanged(tmp_path: Path) -> None:
    extra: dict[str, JsonValue] = {
        "none": None,
        "snake_case": [1, 2.5, "ü", True, {"deep": None}],
        "big": 2**70,
        "": {},
    }
    folder = begin_save(tmp_path, 20, 1)
    commit(tmp_path, folder, 20, 1, [save_shard(folder, 0, [])], extra)
    assert open_checkpoint(folder).manifest.extra == extra


def test_the_manifest_is_json_that_lists_what_was_saved(tmp_path: Path) -> None:
    committed = small_checkpoints.save_step(tmp_path, 20, 3)
    sealed = json.loads((tmp_path / "step-00000020.start-0003" / "manifest.json").read_text())
    assert sealed["digest"] == committed.digest
    content = sealed["content"]
    assert (content["contractVersion"], content["step"], content["startNumber"], content["worldSize"]) == (1, 20, 3, 2)
    assert content["savedAt"] == committed.saved_at
    assert content["extra"] == {"cursor": 20}
    assert [file["numBytes"] for file in content["files"]] == [8 + 64 + 36, 8 + 64 + 24]
    (tensor,) = content["tensors"]
    assert (tensor["name"], tensor["dtype"], tensor["globalShape"]) == ("weight", "F32", [5, 3])
    assert [(piece["offsets"], piece["shape"], piece["file"]) for piece in tensor["pieces"]] == [
        ([0, 0], [3, 3], "rank-00000.safetensors"),
        ([3, 0], [2, 3], "rank-00001.safetensors"),
    ]


def test_files_are_durable_before_anything_refers_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content before name, name before the manifest, the manifest's name last."""
    trace = trace_operations(monkeypatch)
    folder = begin_save(tmp_path, 20, 1)
    record = save_shard(folder, 0, [ShardedTensor("weight", torch.ones(3), (3,), (0,))])
    commit(tmp_path, folder, 20, 1, [record], {})
    shard, manifest = "rank-00000.safetensors", "manifest.json"
    assert trace == [
        f"mkdir {folder.name}",
        f"fsync {tmp_path.name}",
        f"write {shard}.tmp",
        f"write {shard}.tmp",
        f"fsync {shard}.tmp",
        f"replace {shard}.tmp {shard}",
        f"fsync {folder.name}",
        f"write {manifest}.tmp",
        f"fsync {manifest}.tmp",
        f"link {manifest}.tmp {manifest}",
        f"unlink {manifest}.tmp",
        f"fsync {folder.name}",
    ]


def trace_operations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    trace: list[str] = []

    def traced(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def operation(*args: object) -> object:
            paths = [argument for argument in args if isinstance(argument, Path)]
            if isinstance(args[0], int):
                paths = [Path(os.readlink(f"/proc/self/fd/{args[0]}"))]
            trace.append(" ".join([name, *(path.name for path in paths)]))
            return original(*args)

        return operation

    for name in ("write", "fsync", "replace", "link", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, traced(name, vars(os)[name]))
    return trace
