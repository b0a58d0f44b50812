"""An earlier start that continues can neither commit nor remove checkpoints, and its leftovers do not count."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rljob_testing.training import small_checkpoints
from rljob_trainer.checkpoints.errors import CheckpointError, FencedError
from rljob_trainer.checkpoints.fencing import accept_up_to, announce_start, newest_of_job
from rljob_trainer.checkpoints.load import Found, find_newest_complete, open_checkpoint
from rljob_trainer.checkpoints.retention import prune
from rljob_trainer.checkpoints.save import begin_save, commit, save_shard


def resume(root: Path, start_number: int) -> Found | None:
    found = find_newest_complete(root, start_number)
    announce_start(root, start_number)
    accept_up_to(root, start_number, found.checkpoint if found else None)
    return found


def test_a_paused_start_cannot_commit_once_a_later_one_has_started(tmp_path: Path) -> None:
    resume(tmp_path, 1)
    small_checkpoints.save_step(tmp_path, 20, 1)
    folder = begin_save(tmp_path, 40, 1)
    records = [save_shard(folder, rank, [shard]) for rank, shard in enumerate(small_checkpoints.shards_of(40))]
    resume(tmp_path, 2)
    with pytest.raises(FencedError, match=r"\(start 2\), .*\(start 1\) may no longer change the checkpoints"):
        commit(tmp_path, folder, 40, 1, records, {})
    with pytest.raises(FencedError):
        begin_save(tmp_path, 60, 1)
    with pytest.raises(FencedError):
        prune(tmp_path, 1, keep=1)
    with pytest.raises(FencedError):
        find_newest_complete(tmp_path, start_number=1)
    found = find_newest_complete(tmp_path, start_number=2)
    assert found is not None
    assert found.manifest.step == 20


def test_a_commit_that_passed_the_check_too_early_is_ignored_by_all_later_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start 1 is stopped between its check and its manifest; start 2 starts meanwhile."""
    resume(tmp_path, 1)
    small_checkpoints.save_step(tmp_path, 20, 1)
    folder = begin_save(tmp_path, 40, 1)
    records = [save_shard(folder, rank, [shard]) for rank, shard in enumerate(small_checkpoints.shards_of(40))]
    link = os.link

    def start_start_2_first(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        resume(tmp_path, 2)
        link(source, target)

    monkeypatch.setattr(os, "link", start_start_2_first)
    with pytest.raises(FencedError):
        commit(tmp_path, folder, 40, 1, records, {})
    assert (folder / "manifest.json").exists()
    for start_number in (2, 3):
        found = find_newest_complete(tmp_path, start_number)
        assert found is not None
        assert (found.manifest.step, found.manifest.start_number) == (20, 1)
    assert prune(tmp_path, 2, keep=3) == [folder]


def test_a_rejected_checkpoint_does_not_come_back_when_its_storage_does(tmp_path: Path) -> None:
    """Start 2 could not read step 40 and continued from step 20; for start 3 step 40 belongs to an abandoned branch."""
    small_checkpoints.save_step(tmp_path, 20, 1)
    small_checkpoints.save_step(tmp_path, 40, 1)
    shard = tmp_path / "step-00000040.start-0001" / "rank-00000.safetensors"
    shard.rename(tmp_path / "elsewhere")
    assert resume(tmp_path, 2) is not None
    small_checkpoints.save_step(tmp_path, 30, 2)
    (tmp_path / "elsewhere").rename(shard)
    found = find_newest_complete(tmp_path, start_number=3)
    assert found is not None
    assert (found.manifest.step, found.manifest.start_number) == (30, 2)


def test_two_starts_may_save_the_same_step(tmp_path: Path) -> None:
    small_checkpoints.save_step(tmp_path, 20, 1)
    small_checkpoints.save_step(tmp_path, 40, 1)
    (tmp_path / "step-00000040.start-0001" / "manifest.json").unlink()
    resume(tmp_path, 2)
    small_checkpoints.save_step(tmp_path, 40, 2)
    found = find_newest_complete(tmp_path, start_number=3)
    assert found is not None
    assert found.folder.name == "step-00000040.start-0002"
    assert open_checkpoint(found.folder).read("weight").equal(small_checkpoints.values_of(40))


def test_a_start_knows_its_resume_step_before_it_announces_itself(tmp_path: Path) -> None:
    assert newest_of_job(tmp_path, 1, "sort") is None
    resume(tmp_path, 1)
    for step in (20, 40):
        small_checkpoints.save_step(tmp_path, step, 1, jobName="sort")
    newest = newest_of_job(tmp_path, 2, "sort")
    assert newest is not None
    assert (newest.step, newest.uri) == (40, (tmp_path / "step-00000040.start-0001").as_uri())
    assert newest_of_job(tmp_path, 2, "of another name") is None
    (tmp_path / "step-00000040.start-0001" / "manifest.json").write_text("{}")
    before = newest_of_job(tmp_path, 2, "sort")
    assert before is not None
    assert before.step == 20
    resume(tmp_path, 2)
    assert newest_of_job(tmp_path, 1, "sort") is None, "a later start has begun"


def test_a_start_number_is_used_once(tmp_path: Path) -> None:
    resume(tmp_path, 1)
    with pytest.raises(FencedError, match=r"start 1 was already announced; give each start .* a different number"):
        resume(tmp_path, 1)
    resume(tmp_path, 12)
    with pytest.raises(FencedError, match=r"\(start 12\), .*\(start 2\) may no longer"):
        resume(tmp_path, 2)


def test_a_start_that_died_while_announcing_itself_changes_nothing(tmp_path: Path) -> None:
    """Without hard links that leaves an empty file."""
    small_checkpoints.save_step(tmp_path, 20, 1)
    (tmp_path / "starts").mkdir()
    (tmp_path / "starts" / "0002.json").touch()
    found = resume(tmp_path, 3)
    assert found is not None
    assert found.manifest.step == 20


def test_a_damaged_start_file_is_an_error_with_advice(tmp_path: Path) -> None:
    resume(tmp_path, 1)
    (tmp_path / "starts" / "0001.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"0001.json is truncated .* Delete it"):
        find_newest_complete(tmp_path, start_number=2)


def test_without_hard_links_only_one_of_two_starts_with_the_same_number_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    resume(tmp_path, 1)
    small_checkpoints.save_step(tmp_path, 20, 1)
    with pytest.raises(FencedError):
        resume(tmp_path, 1)
    found = resume(tmp_path, 2)
    assert found is not None
    assert found.manifest.step == 20
    assert not list(tmp_path.rglob("*.tmp"))
