"""The actor's part in checkpoints, played in this process: one rank or several with real files, and no training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from pydantic import JsonValue

from rljob_trainer.checkpoints.layout import ShardRecord
from rljob_trainer.checkpoints.load import open_checkpoint
from rljob_trainer.checkpoints.save import HostBuffers, num_shard_bytes, save_shard_async
from rljob_trainer.checkpoints.sharding import ShardedTensor
from rljob_trainer.datasets.cursor import CursorState


def nothing() -> None:
    """What happens at a call unless a test says otherwise."""


def cursor_at(position: int) -> CursorState:
    """A place in a data set of 100 rows."""
    return CursorState(epoch=0, position=position, num_rows=100, seed=0, shuffle=False)


class LocalActor:
    """Holds the tensor `weight`, [rows, columns] float32, cut by rows over `num_ranks` ranks.

    `on_copy` and `on_finish` run within `begin_checkpoint` and `finish_checkpoint`; `is_written` is what the ranks
    answer when they are asked. `seen` is what ranks of other machines see of a folder, where that differs.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        num_ranks: int = 1,
        on_copy: Callable[[], None] = nothing,
        on_finish: Callable[[], None] = nothing,
        seen: Callable[[Path], Path] = lambda folder: folder,
    ) -> None:
        self.weight = weight
        self.num_ranks = num_ranks
        self.on_copy = on_copy
        self.on_finish = on_finish
        self.seen = seen
        self.is_written = True
        self.loaded: list[str] = []
        self._buffers = [HostBuffers() for _ in range(num_ranks)]

    def num_checkpoint_bytes(self) -> list[int]:
        return [num_shard_bytes([shard]) for shard in self._shards()]

    def begin_checkpoint(self, folder: Path, first_writer: int = 0) -> list[None]:
        self.on_copy()
        for rank, shard in enumerate(self._shards()):
            save_shard_async(folder, first_writer + rank, [shard], self._buffers[rank])
        return [None] * self.num_ranks

    def is_checkpoint_written(self) -> list[bool]:
        return [self.is_written] * self.num_ranks

    def finish_checkpoint(self) -> list[ShardRecord]:
        self.on_finish()
        pending = [buffers.pending for buffers in self._buffers]
        return [each.wait() for each in pending if each is not None]

    def load_checkpoint(self, folder: Path, policy_version: int) -> list[None]:
        self.loaded.append(f"{folder.name}, version {policy_version}")
        for shard in self._shards():
            open_checkpoint(self.seen(folder)).read_into("weight", shard.offsets, shard.local)
        return [None] * self.num_ranks

    def random_state(self) -> list[JsonValue]:
        return ["random"] * self.num_ranks

    def restore_random_state(self, state: list[JsonValue]) -> list[None]:
        return [None for _ in state]

    def _shards(self) -> Sequence[ShardedTensor]:
        shape = tuple(self.weight.shape)
        shards, row = [], 0
        for rows in self.weight.chunk(self.num_ranks):
            shards.append(ShardedTensor("weight", rows, shape, (row, 0)))
            row += len(rows)
        return shards
