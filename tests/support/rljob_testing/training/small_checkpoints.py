"""Small checkpoints with known content. A fake actor in this process saves and loads them, without training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from pydantic import JsonValue

from rljob_api.v1alpha1.model import Dtype
from rljob_api.v1alpha1.rollout import Compile, RolloutEngine
from rljob_api.v1alpha1.status import CheckpointStatus
from rljob_trainer.checkpoints.fencing import accept_up_to, announce_start
from rljob_trainer.checkpoints.layout import ShardRecord
from rljob_trainer.checkpoints.load import find_newest_complete, open_checkpoint
from rljob_trainer.checkpoints.retention import prune
from rljob_trainer.checkpoints.save import (
    HostBuffers,
    begin_save,
    commit,
    num_shard_bytes,
    save_shard,
    save_shard_async,
)
from rljob_trainer.checkpoints.sharding import ShardedTensor
from rljob_trainer.checkpoints.storage import Location
from rljob_trainer.controller.auto_settings import AutoSettings
from rljob_trainer.controller.checkpointing import StateParts
from rljob_trainer.datasets.cursor import CursorState


def values_of(step: int) -> torch.Tensor:
    """The tensor `weight` that is saved at a step: 5 rows, for two ranks."""
    return torch.arange(15, dtype=torch.float32).reshape(5, 3) + step


def shards_of(step: int) -> list[ShardedTensor]:
    """The shards of the two ranks: three rows and two rows."""
    whole = values_of(step)
    return [
        ShardedTensor("weight", whole[:3], global_shape=(5, 3), offsets=(0, 0)),
        ShardedTensor("weight", whole[3:], global_shape=(5, 3), offsets=(3, 0)),
    ]


def save_step(root: Location, step: int, start_number: int, **extra: JsonValue) -> CheckpointStatus:
    """Saves a checkpoint of two ranks, one after the other: rank 0 in the foreground, rank 1 in the background."""
    first, second = shards_of(step)
    folder = begin_save(root, step, start_number, num_bytes=values_of(step).nbytes)
    records = [save_shard(folder, 0, [first]), save_shard_async(folder, 1, [second], HostBuffers()).wait()]
    return commit(root, folder, step, start_number, records, {"cursor": step, **extra})


def second_start(root: Location, on_commit: Callable[[int], None] = lambda _: None) -> None:
    """A second start that resumes, saves steps 30 and 40, and removes old checkpoints after each."""
    found = find_newest_complete(root, start_number=2)
    assert found is not None
    announce_start(root, 2)
    accept_up_to(root, 2, found.checkpoint)
    for step in (30, 40):
        save_step(root, step, 2)
        on_commit(step)
        prune(root, 2, keep=2)


def third_start(root: Location) -> tuple[int, bool, list[str]]:
    """A third start that resumes, saves step 50 and removes old checkpoints. Returns the resumed step, whether its
    tensors are those that were saved, and the newer checkpoints that were skipped."""
    found = find_newest_complete(root, start_number=3)
    assert found is not None
    read = open_checkpoint(found.folder).read("weight")
    announce_start(root, 3)
    accept_up_to(root, 3, found.checkpoint)
    save_step(root, 50, 3)
    prune(root, 3, keep=2)
    rejected = [str(rejection) for rejection in found.rejected]
    return found.manifest.step, torch.equal(read, values_of(found.manifest.step)), rejected


def nothing() -> None:
    """The default hook: does nothing."""


CHOICES = AutoSettings(dtype=Dtype.BFLOAT16, rollout_engine=RolloutEngine.HUGGING_FACE, rollout_compile=Compile.NEVER)


def parts_at(ordinal: int) -> StateParts:
    """The controller's parts at a position in a dataset of 100 rows."""
    return StateParts(cursor=CursorState(ordinal=ordinal, num_rows=100, seed=0, shuffle=False, digest="any"))


class LocalActor:
    """Holds the tensor `weight`, [rows, columns] float32, sharded by rows over `num_ranks` ranks.

    `on_copy` and `on_finish` run within `begin_checkpoint` and `finish_checkpoint`. `is_written` is what the ranks
    report. `seen` maps a folder to what ranks on other machines see there, if that differs.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        num_ranks: int = 1,
        on_copy: Callable[[], None] = nothing,
        on_finish: Callable[[], None] = nothing,
        seen: Callable[[Location], Location] = lambda folder: folder,
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

    def begin_checkpoint(self, folder: Location, first_writer: int = 0) -> list[None]:
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

    def load_checkpoint(self, folder: Location, policy_version: int) -> list[None]:
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
