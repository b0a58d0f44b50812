"""Which checkpoints are removed, and which never are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rljob_testing.training import small_checkpoints
from rljob_trainer.checkpoints.fencing import accept_up_to, announce_start
from rljob_trainer.checkpoints.load import find_newest_complete
from rljob_trainer.checkpoints.retention import prune
from rljob_trainer.checkpoints.save import begin_save, save_shard


def steps_left(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("step-*"))


def shard_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}.start-0001" / "rank-00000.safetensors"


def cut_short(root: Path, step: int) -> None:
    """Damage that shows without reading."""
    path = shard_of(root, step)
    path.write_bytes(path.read_bytes()[:-1])


def flip(root: Path, step: int) -> None:
    """Damage that only reading shows."""
    path = shard_of(root, step)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def begin_start(root: Path, start_number: int) -> None:
    found = find_newest_complete(root, start_number)
    announce_start(root, start_number)
    accept_up_to(root, start_number, found.checkpoint if found else None)


def test_the_newest_are_kept_also_across_a_restart(tmp_path: Path) -> None:
    begin_start(tmp_path, 1)
    for step in (10, 20, 30):
        small_checkpoints.save_step(tmp_path, step, 1)
    begin_start(tmp_path, 2)
    small_checkpoints.save_step(tmp_path, 40, 2)
    removed = prune(tmp_path, 2, keep=2)
    assert [path.name for path in removed] == ["step-00000020.start-0001", "step-00000010.start-0001"]
    assert steps_left(tmp_path) == ["step-00000030.start-0001", "step-00000040.start-0002"]
    assert prune(tmp_path, 2, keep=2) == []


def test_damaged_ones_are_not_counted_and_the_last_good_one_stays(tmp_path: Path) -> None:
    begin_start(tmp_path, 1)
    for step in (10, 20, 30, 40):
        small_checkpoints.save_step(tmp_path, step, 1)
    cut_short(tmp_path, 40)
    shard_of(tmp_path, 30).unlink()
    assert [path.name for path in prune(tmp_path, 1, keep=1)] == ["step-00000010.start-0001"]
    found = find_newest_complete(tmp_path, start_number=1)
    assert found is not None
    assert found.manifest.step == 20
    small_checkpoints.save_step(tmp_path, 50, 1)
    prune(tmp_path, 1, keep=1)
    assert steps_left(tmp_path) == ["step-00000050.start-0001"]


def test_nothing_is_removed_if_all_are_damaged(tmp_path: Path) -> None:
    begin_start(tmp_path, 1)
    for step in (10, 20):
        small_checkpoints.save_step(tmp_path, step, 1)
        cut_short(tmp_path, step)
    assert prune(tmp_path, 1, keep=1) == []


def test_the_last_good_one_outlives_damaged_newer_ones_that_only_reading_shows(tmp_path: Path) -> None:
    """A start reads the checkpoint that it resumes from, and so skips a damaged one."""
    begin_start(tmp_path, 1)
    for step in (10, 20, 30, 40):
        small_checkpoints.save_step(tmp_path, step, 1)
    flip(tmp_path, 40)
    flip(tmp_path, 30)
    begin_start(tmp_path, 2)
    prune(tmp_path, 2, keep=1)
    assert steps_left(tmp_path) == ["step-00000020.start-0001"]


def test_nothing_is_removed_in_favour_of_an_unread_checkpoint(tmp_path: Path) -> None:
    """Start 2 has resumed from step 30, which is then deleted; whether step 20 is good was never checked."""
    begin_start(tmp_path, 1)
    for step in (10, 20, 30):
        small_checkpoints.save_step(tmp_path, step, 1)
    flip(tmp_path, 20)
    begin_start(tmp_path, 2)
    cut_short(tmp_path, 30)
    assert prune(tmp_path, 2, keep=1) == []
    # Checkpoints that it writes itself are known to be good.
    small_checkpoints.save_step(tmp_path, 40, 2)
    prune(tmp_path, 2, keep=1)
    assert steps_left(tmp_path) == ["step-00000040.start-0002"]


def test_leftovers_are_removed_but_not_a_running_save(tmp_path: Path) -> None:
    begin_start(tmp_path, 1)
    small_checkpoints.save_step(tmp_path, 20, 1)
    save_shard(begin_save(tmp_path, 40, 1), 0, small_checkpoints.shards_of(40)[:1])
    begin_start(tmp_path, 2)
    save_shard(begin_save(tmp_path, 25, 2), 0, small_checkpoints.shards_of(25)[:1])
    small_checkpoints.save_step(tmp_path, 30, 2)
    running = begin_save(tmp_path, 35, 2)
    save_shard(running, 0, small_checkpoints.shards_of(35)[:1])
    removed = prune(tmp_path, 2, keep=3)
    assert sorted(path.name for path in removed) == ["step-00000025.start-0002", "step-00000040.start-0001"]
    assert steps_left(tmp_path) == ["step-00000020.start-0001", "step-00000030.start-0002", running.name]


def test_the_first_save_of_a_start_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    """Start 2 resumed at step 20 because 40 was damaged; its running save is of a lower step than 40."""
    begin_start(tmp_path, 1)
    small_checkpoints.save_step(tmp_path, 20, 1)
    small_checkpoints.save_step(tmp_path, 40, 1)
    flip(tmp_path, 40)
    begin_start(tmp_path, 2)
    running = begin_save(tmp_path, 30, 2)
    assert [path.name for path in prune(tmp_path, 2, keep=3)] == ["step-00000040.start-0001"]
    assert running.exists()


def test_files_that_are_not_checkpoints_are_kept(tmp_path: Path) -> None:
    begin_start(tmp_path, 1)
    for name in ("notes", "step-1", "step-00000010.start-0001.copy"):
        (tmp_path / name).mkdir()
    small_checkpoints.save_step(tmp_path, 20, 1)
    small_checkpoints.save_step(tmp_path, 40, 1)
    prune(tmp_path, 1, keep=1)
    expected = ["notes", "starts", "step-00000010.start-0001.copy", "step-00000040.start-0001", "step-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected


def test_the_manifest_is_removed_first_and_durably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that is interrupted after any of these steps leaves a folder that does not look complete."""
    begin_start(tmp_path, 1)
    small_checkpoints.save_step(tmp_path, 20, 1)
    small_checkpoints.save_step(tmp_path, 40, 1)
    trace: list[str] = []
    unlink, fsync = os.unlink, os.fsync

    def traced_unlink(path: Path) -> None:
        trace.append(path.name)
        unlink(path)

    def traced_fsync(descriptor: int) -> None:
        trace.append("fsync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "unlink", traced_unlink)
    monkeypatch.setattr(os, "fsync", traced_fsync)
    prune(tmp_path, 1, keep=1)
    assert trace[:2] == ["manifest.json", "fsync step-00000020.start-0001"]
    assert sorted(trace[2:4]) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert trace[4:] == [f"fsync {tmp_path.name}"]
