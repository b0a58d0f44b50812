"""How much is read: no tensor data when old checkpoints are removed, every byte once on resume."""

from __future__ import annotations

from pathlib import Path

import torch

from rljob_api.v1alpha1.checkpoint import Checkpoint
from rljob_testing import process_counters
from rljob_testing.training import small_checkpoints
from rljob_trainer.checkpoints.load import check_checkpoint
from rljob_trainer.controller.checkpointing import Checkpointing

NUM_BYTES = 4 * 1024 * 1024
FEW_BYTES = 64 * 1024
"""Enough for manifests, lists of starts and headers."""


def weight() -> torch.Tensor:
    return torch.arange(NUM_BYTES // 4, dtype=torch.float32).reshape(64, -1)


def saved(root: Path, step: int, keep: int, start: Checkpointing | None = None) -> Checkpointing:
    """Saves on two ranks and commits the checkpoint; returns the start that did it."""
    if start is None:
        start = Checkpointing(Checkpoint(keep=keep), root, 1, "job")
        start.choices = small_checkpoints.CHOICES
        assert start.find() is None
    actor = small_checkpoints.LocalActor(weight() + step, num_ranks=2)
    start.begin(step, small_checkpoints.parts_at(step), [actor])
    assert start.finish([actor], wait=True, is_evaluated=True) is not None
    return start


def test_commits_and_removals_read_no_tensors(tmp_path: Path) -> None:
    start = saved(tmp_path, 10, keep=1)
    with process_counters.bytes_read() as read:
        saved(tmp_path, 20, keep=1, start=start)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000020.start-0001"]
    assert read.count < FEW_BYTES
    # A real read of the same file system shows that the counter works.
    with process_counters.bytes_read() as read:
        check_checkpoint(tmp_path / "step-00000020.start-0001")
    assert read.count >= NUM_BYTES


def test_a_resume_reads_every_byte_once(tmp_path: Path) -> None:
    saved(tmp_path, 20, keep=2, start=saved(tmp_path, 10, keep=2))
    start, actor = (
        Checkpointing(Checkpoint(), tmp_path, 2, "job"),
        small_checkpoints.LocalActor(torch.zeros(weight().shape), num_ranks=2),
    )
    with process_counters.bytes_read() as read:
        point = start.find()
        assert point is not None
        start.load(point, [actor], num_workers=2)
    assert torch.equal(actor.weight, weight() + 20)
    assert NUM_BYTES <= read.count < NUM_BYTES + FEW_BYTES
