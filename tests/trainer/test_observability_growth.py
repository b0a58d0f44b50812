"""Files that another program enlarges: growth is reported as progress, a hang is not."""

from __future__ import annotations

import threading
from pathlib import Path

from rljob_trainer.observability.growth import watched_growth

POLL_SECONDS = 0.01
PATIENCE_SECONDS = 20.0
A_FEW_POLLS_SECONDS = 0.2


class ProgressLog:
    """The progress reports, and when they came."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._came = threading.Event()

    def __call__(self, num_bytes: int) -> None:
        self.sizes.append(num_bytes)
        self._came.set()

    def within(self, seconds: float) -> bool:
        """Whether a report comes within this time."""
        found = self._came.wait(seconds)
        self._came.clear()
        return found


def test_only_bytes_beyond_the_former_maximum_are_progress(tmp_path: Path) -> None:
    log, file = ProgressLog(), tmp_path / "blobs" / "weights.incomplete"
    with watched_growth(tmp_path, log, POLL_SECONDS):
        assert not log.within(A_FEW_POLLS_SECONDS)
        file.parent.mkdir()
        file.write_bytes(b"x" * 100_000)
        assert log.within(PATIENCE_SECONDS)
        log.within(A_FEW_POLLS_SECONDS)
        assert not log.within(A_FEW_POLLS_SECONDS), "it hangs"
        # A download that starts again has to exceed the size of the former one.
        file.unlink()
        file.write_bytes(b"x" * 50_000)
        assert not log.within(A_FEW_POLLS_SECONDS)
        file.write_bytes(b"x" * 300_000)
        assert log.within(PATIENCE_SECONDS)
    num_reports = len(log.sizes)
    file.write_bytes(b"x" * 900_000)
    assert not log.within(A_FEW_POLLS_SECONDS)
    assert len(log.sizes) == num_reports, "a report came after the end"


def test_a_missing_folder_is_empty(tmp_path: Path) -> None:
    log = ProgressLog()
    with watched_growth(tmp_path / "no", log, POLL_SECONDS):
        assert not log.within(A_FEW_POLLS_SECONDS)
