"""Progress that a worker reports while its controller waits for it, and when the controller reads it."""

from __future__ import annotations

import os
from pathlib import Path

from rljob_trainer.observability.activity import Activity, ActivityWatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_worker_writes_at_intervals(tmp_path: Path) -> None:
    clock = Clock()
    activity = Activity(clock)
    clock.now += 100
    # No path was configured.
    activity.report_activity("micro-batches", 1, 8)
    activity.write_beside(tmp_path / "worker-3.log")
    file = tmp_path / "worker-3.activity"
    activity.report_activity("micro-batches", 2, 8)
    assert file.read_text() == "2 of 8 micro-batches"
    clock.now += 29
    activity.report_activity("micro-batches", 3, 8)
    assert file.read_text() == "2 of 8 micro-batches"
    clock.now += 1
    activity.report_activity("steps of the engine", 400)
    assert file.read_text() == "400 steps of the engine"
    file.unlink()
    file.mkdir()
    clock.now += 30
    activity.report_activity("micro-batches", 4, 8)


def test_the_controller_reports_new_progress(tmp_path: Path) -> None:
    clock = Clock()
    reported: list[str] = []

    def written(name: str, text: str, at: int) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (at, at))

    def reported_after(seconds: float) -> list[str]:
        clock.now += seconds
        watch.poll_files()
        return reported

    written("worker-0.activity", "of a former attempt", 1000)
    watch = ActivityWatch(tmp_path, reported.append, clock)
    assert reported_after(10) == []
    written("worker-1.activity", "1 of 8 micro-batches", 1001)
    written("judges/worker-0.activity", "7 of 9 responses have scores", 1002)
    assert reported_after(9) == []
    assert reported_after(1) == ["worker-0: 7 of 9 responses have scores"]
    assert reported_after(10) == ["worker-0: 7 of 9 responses have scores"]
    written("worker-1.activity", "3 of 8 micro-batches", 1003)
    assert reported_after(10)[1:] == ["worker-1: 3 of 8 micro-batches"]


def test_without_logs_there_is_nothing_to_report(tmp_path: Path) -> None:
    clock = Clock()
    watch = ActivityWatch(tmp_path / "none", lambda _: None, clock)
    clock.now += 10
    watch.poll_files()
