"""A background save blocks only for the copy, writes the values of that moment, and reports its errors."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from rljob_trainer.checkpoints import tensor_file
from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.load import find_newest_complete, open_checkpoint
from rljob_trainer.checkpoints.save import HostBuffers, begin_save, commit, save_shard, save_shard_async
from rljob_trainer.checkpoints.sharding import ShardedTensor
from rljob_trainer.observability.activity import Activity


class SlowStorage:
    """A storage whose writes wait until they are released, however long that takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        write = os.write

        def wait_and_write(descriptor: int, data: bytes) -> int:
            assert self.released.wait(timeout=60)
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", wait_and_write)


def test_training_continues_while_storage_hangs_and_the_copied_values_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begin_save(tmp_path, 20, 1)
    weight, step = torch.arange(6.0), torch.tensor(20)
    storage = SlowStorage(monkeypatch)
    buffers = HostBuffers()
    tensors = [ShardedTensor("weight", weight, (6,), (0,)), ShardedTensor("step", step, (), ())]
    pending = save_shard_async(folder, 0, tensors, buffers)  # returns although nothing can be written
    weight.fill_(-1)
    step += 1
    assert not pending.done()
    with pytest.raises(TimeoutError):
        pending.wait(timeout_seconds=0.01)
    with pytest.raises(CheckpointError, match="the previous checkpoint of rank 0 is still being written"):
        save_shard_async(folder, 0, tensors, buffers)
    assert find_newest_complete(tmp_path, start_number=1) is None
    storage.released.set()
    commit(tmp_path, folder, 20, 1, [pending.wait()], {})
    reader = open_checkpoint(folder)
    assert torch.equal(reader.read("weight"), torch.arange(6.0))
    assert reader.read("step").item() == 20


def test_a_worker_reports_progress_of_its_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    activity = Activity(lambda: now[0])
    activity.write_beside(tmp_path / "worker-0.log")
    monkeypatch.setattr(tensor_file, "ACTIVITY", activity)
    now[0] += 100
    tensors = [ShardedTensor(name, torch.zeros(2), (2,), (0,)) for name in ("a", "b")]
    save_shard(begin_save(tmp_path, 20, 1), 0, tensors)
    assert (tmp_path / "worker-0.activity").read_text() == "1 of 2 tensors of a checkpoint written"


def test_buffers_are_reused_and_follow_a_change_of_shape(tmp_path: Path) -> None:
    buffers = HostBuffers()
    addresses = []
    for step, num_rows in ((10, 4), (20, 4), (30, 5)):
        weight = torch.full((num_rows,), float(step))
        tensor = ShardedTensor("weight", weight, (num_rows,), (0,))
        addresses.append(buffers.copy([tensor])[0].local.data_ptr())
        folder = begin_save(tmp_path, step, 1)
        commit(tmp_path, folder, step, 1, [save_shard_async(folder, 0, [tensor], buffers).wait()], {})
        assert torch.equal(open_checkpoint(folder).read("weight"), weight)
    assert addresses[0] == addresses[1]


def test_an_error_in_the_background_is_raised_by_wait(tmp_path: Path) -> None:
    buffers = HostBuffers()
    tensor = ShardedTensor("weight", torch.ones(3), (3,), (0,))
    pending = save_shard_async(tmp_path / "absent", 0, [tensor], buffers)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        pending.wait()
    # The buffers are free again.
    folder = begin_save(tmp_path, 20, 1)
    assert save_shard_async(folder, 0, [tensor], buffers).wait().rank == 0
