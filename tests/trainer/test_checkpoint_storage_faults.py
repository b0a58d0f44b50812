"""Full, read-only and failing storage: a clear error, nothing left of the failed save, and the previous checkpoint
intact."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rljob_testing.training import small_checkpoints
from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.layout import ShardRecord
from rljob_trainer.checkpoints.load import find_newest_complete
from rljob_trainer.checkpoints.save import (
    HostBuffers,
    begin_save,
    commit,
    discard_save,
    num_shard_bytes,
    save_shard,
    save_shard_async,
)
from rljob_trainer.checkpoints.sharding import ShardedTensor

MEBIBYTE = 1024 * 1024


def tensor_of(num_bytes: int) -> ShardedTensor:
    num_elements = num_bytes // 4
    return ShardedTensor("weight", torch.ones(num_elements), (num_elements,), (0,))


def save_in_background(folder: Path, rank: int, tensors: Sequence[ShardedTensor]) -> ShardRecord:
    return save_shard_async(folder, rank, tensors, HostBuffers()).wait()


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A tmpfs, or the same folder again; skips the test where this process may not mount."""
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_storage(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        yield folder


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The kernel rejects writes beyond this size. Needs no privileges."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def assert_only_step_20_is_left(root: Path, folder: Path) -> None:
    assert list(folder.iterdir()) == []
    discard_save(folder)
    found = find_newest_complete(root, start_number=1)
    assert found is not None
    assert (found.manifest.step, found.rejected) == (20, ())
    assert [path.name for path in root.iterdir()] == ["step-00000020.start-0001"]


@pytest.mark.parametrize("background", [False, True])
def test_full_storage_during_a_save_is_reported(small_storage: Path, background: bool) -> None:
    small_checkpoints.save_step(small_storage, 20, 1)
    folder = begin_save(small_storage, 40, 1)
    tensor = tensor_of(2 * MEBIBYTE)
    save = save_in_background if background else save_shard
    with pytest.raises(CheckpointError) as caught:
        save(folder, 0, [tensor])
    text = str(caught.value)
    assert text.startswith(f"{folder}: writing rank-00000.safetensors failed: No space left on device")
    assert "2,097,152 bytes needed" in text
    assert "bytes free; free some space" in text
    assert_only_step_20_is_left(small_storage, folder)


def test_too_small_storage_is_noticed_before_anything_is_written(small_storage: Path) -> None:
    small_checkpoints.save_step(small_storage, 20, 1)
    num_bytes = num_shard_bytes([tensor_of(2 * MEBIBYTE)])
    with pytest.raises(
        CheckpointError, match=r"not enough free space for the checkpoint: 2,097,152 bytes needed, [\d,]+ bytes free"
    ):
        begin_save(small_storage, 40, 1, num_bytes=num_bytes)
    assert [path.name for path in small_storage.iterdir()] == ["step-00000020.start-0001"]


def test_a_manifest_that_does_not_fit_leaves_no_checkpoint(small_storage: Path) -> None:
    small_checkpoints.save_step(small_storage, 20, 1)
    folder = begin_save(small_storage, 40, 1)
    records = [save_shard(folder, rank, [shard]) for rank, shard in enumerate(small_checkpoints.shards_of(40))]
    with pytest.raises(CheckpointError, match=r"writing manifest.json failed: No space left on device"):
        commit(small_storage, folder, 40, 1, records, {"text": "x" * 2 * MEBIBYTE})
    assert sorted(path.name for path in folder.iterdir()) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    found = find_newest_complete(small_storage, start_number=1)
    assert found is not None
    assert found.manifest.step == 20
    # The same files can still be committed once there is free space.
    commit(small_storage, folder, 40, 1, records, {})
    found = find_newest_complete(small_storage, start_number=1)
    assert found is not None
    assert found.manifest.step == 40


def test_a_limit_on_file_sizes_is_reported_like_full_storage(tmp_path: Path) -> None:
    small_checkpoints.save_step(tmp_path, 20, 1)
    folder = begin_save(tmp_path, 40, 1)
    with largest_file(64 * 1024), pytest.raises(CheckpointError, match=r"File too large; 1,048,576 bytes needed"):
        save_shard(folder, 0, [tensor_of(MEBIBYTE)])
    assert_only_step_20_is_left(tmp_path, folder)


def test_read_only_storage_is_reported(tmp_path: Path) -> None:
    root = tmp_path / "root"
    small_checkpoints.save_step(root, 20, 1)
    folder = begin_save(root, 40, 1)
    with mounted(root, "--bind", str(root)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(root)], check=True)
        with pytest.raises(CheckpointError, match=r"Read-only file system; .* make the storage writable"):
            save_shard(folder, 0, [tensor_of(64)])
        with pytest.raises(CheckpointError, match=r"creating the checkpoint's folder failed: Read-only file system"):
            begin_save(root, 60, 1)
    assert_only_step_20_is_left(root, folder)


@pytest.mark.parametrize("operation", ["write", "fsync", "replace"])
def test_input_output_errors_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    small_checkpoints.save_step(tmp_path, 20, 1)
    folder = begin_save(tmp_path, 40, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, operation, fail)
        with pytest.raises(
            CheckpointError, match=r"Input/output error; 64 bytes needed, [\d,]+ bytes free; check the st"
        ):
            save_shard(folder, 0, [tensor_of(64)])
    assert_only_step_20_is_left(tmp_path, folder)


def test_a_missing_folder_is_a_checkpoint_error(tmp_path: Path) -> None:
    folder = begin_save(tmp_path / "root", 40, 1)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        save_shard(folder, 0, [tensor_of(64)])
