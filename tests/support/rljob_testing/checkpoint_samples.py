"""Small checkpoints of two ranks with known content."""

from __future__ import annotations

from pathlib import Path

import torch

from rljob_trainer.checkpoints.save import (
    CommittedCheckpoint,
    HostBuffers,
    begin_save,
    commit,
    save_shard,
    save_shard_async,
)
from rljob_trainer.checkpoints.sharding import ShardedTensor


def values_of(step: int) -> torch.Tensor:
    """The whole tensor `weight` that is saved at a step: 5 rows for two ranks."""
    return torch.arange(15, dtype=torch.float32).reshape(5, 3) + step


def shards_of(step: int) -> list[ShardedTensor]:
    """By rank: three rows and two."""
    whole = values_of(step)
    return [
        ShardedTensor("weight", whole[:3], global_shape=(5, 3), offsets=(0, 0)),
        ShardedTensor("weight", whole[3:], global_shape=(5, 3), offsets=(3, 0)),
    ]


def save_step(root: Path, step: int, start_number: int) -> CommittedCheckpoint:
    """A save on two ranks, played one after the other: rank 0 in the foreground, rank 1 in the background."""
    first, second = shards_of(step)
    folder = begin_save(root, step, start_number, num_bytes=values_of(step).nbytes)
    records = [save_shard(folder, 0, [first]), save_shard_async(folder, 1, [second], HostBuffers()).wait()]
    return commit(root, folder, step, start_number, records, {"cursor": step})
