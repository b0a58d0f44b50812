"""Files that somebody else makes larger: what gets further is told, what hangs is not."""

from __future__ import annotations

import threading
from pathlib import Path

from rljob_trainer.observability.growth import watched_growth

LOOK_SECONDS = 0.01
PATIENCE_SECONDS = 20.0
A_FEW_LOOKS_SECONDS = 0.2


class Told:
    """What was told, and when."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._came = threading.Event()

    def __call__(self, num_bytes: int) -> None:
        self.sizes.append(num_bytes)
        self._came.set()

    def within(self, seconds: float) -> bool:
        """Whether something comes now."""
        found = self._came.wait(seconds)
        self._came.clear()
        return found


def test_only_what_was_never_there_is_progress(tmp_path: Path) -> None:
    told, file = Told(), tmp_path / "blobs" / "weights.incomplete"
    with watched_growth(tmp_path, told, LOOK_SECONDS):
        assert not told.within(A_FEW_LOOKS_SECONDS)
        file.parent.mkdir()
        file.write_bytes(b"x" * 100_000)
        assert told.within(PATIENCE_SECONDS)
        told.within(A_FEW_LOOKS_SECONDS)
        assert not told.within(A_FEW_LOOKS_SECONDS), "it hangs"
        # A download that begins anew has to get beyond the former one.
        file.unlink()
        file.write_bytes(b"x" * 50_000)
        assert not told.within(A_FEW_LOOKS_SECONDS)
        file.write_bytes(b"x" * 300_000)
        assert told.within(PATIENCE_SECONDS)
    num_told = len(told.sizes)
    file.write_bytes(b"x" * 900_000)
    assert not told.within(A_FEW_LOOKS_SECONDS)
    assert len(told.sizes) == num_told, "it is over"


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    told = Told()
    with watched_growth(tmp_path / "no", told, LOOK_SECONDS):
        assert not told.within(A_FEW_LOOKS_SECONDS)
