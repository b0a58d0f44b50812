"""Which logs of attempts are kept, and which are removed."""

from __future__ import annotations

import os
from pathlib import Path

from rljob_trainer.attempt_logs import attempt_folder, keep_tail, newest_attempt, prune_attempts


def made(run_folder: Path, number: int, written_at: int) -> Path:
    folder = attempt_folder(run_folder, number)
    folder.mkdir(parents=True)
    (folder / "driver.log").write_text("x")
    os.utime(folder, (written_at, written_at))
    return folder


def test_ten_attempts_are_kept(tmp_path: Path) -> None:
    prune_attempts(tmp_path, 1)
    assert newest_attempt(tmp_path) is None
    for number in range(1, 13):
        made(tmp_path, number, 1000 + number)
    (tmp_path / "logs" / "worker-0.log").write_text("")
    assert newest_attempt(tmp_path) == 12
    # The attempt that begins has no folder yet, and is one of the ten.
    prune_attempts(tmp_path, 13)
    left = {path.name for path in (tmp_path / "logs").iterdir()}
    assert left == {"worker-0.log", *(f"attempt-{number}" for number in range(4, 13))}


def test_former_attempts_of_a_recreated_job_are_removed_first(tmp_path: Path) -> None:
    for number in range(5, 16):
        made(tmp_path, number, 1000)
    made(tmp_path, 1, 2000)
    made(tmp_path, 2, 500)
    assert newest_attempt(tmp_path) == 1
    prune_attempts(tmp_path, 2)
    left = {path.name for path in (tmp_path / "logs").iterdir()}
    assert len(left) == 10
    assert {"attempt-1", "attempt-2"} < left


def test_the_end_of_a_log_is_kept(tmp_path: Path) -> None:
    log_file = tmp_path / "worker-1.log"
    log_file.write_bytes(b"a" * 100 + b"b" * (1 << 20))
    kept = keep_tail(log_file, attempt_folder(tmp_path, 3), "reward, actor", 1)
    assert kept == tmp_path / "logs" / "attempt-3" / "worker-reward+actor-rank1.log"
    assert kept.read_bytes() == b"b" * (1 << 20)
