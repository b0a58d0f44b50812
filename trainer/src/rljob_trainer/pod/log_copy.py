"""A copy of a file that still grows. It is made anew after a restart without writing anything twice."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import BinaryIO

COMPARE_BYTES = 1 << 16


class LogCopy:
    """Takes the whole content of `source` from its beginning on, and adds to `path` what is not there yet.

    A file at `path` that is not the beginning of `source` is another job's of the same name; it is kept with `.old` in
    its name. Where the copy cannot be written, that is said once, and the copy ends there: printing matters more.
    """

    def __init__(self, path: Path, source: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._num_bytes_there = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not _begins_with(source, path):
                os.replace(path, path.with_suffix(f".old{path.suffix}"))
            self._file = path.open("ab", buffering=0)
            self._num_bytes_there = self._file.tell()
        except OSError as error:
            self._give_up(error)

    def write(self, data: bytes) -> None:
        """The next bytes of the source."""
        new = data[self._num_bytes_there :]
        self._num_bytes_there = max(0, self._num_bytes_there - len(data))
        try:
            while self._file and new:
                new = new[self._file.write(new) :]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Ends the copy."""
        if self._file:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        print(f"{self._path}: no copy of the driver's log can be written ({error})", file=sys.stderr, flush=True)
        self.close()


def _begins_with(source: Path, beginning: Path) -> bool:
    """Whether the content of `beginning` is that of `source`, as far as it goes."""
    with source.open("rb") as whole, beginning.open("rb") as part:
        while expected := part.read(COMPARE_BYTES):
            if whole.read(len(expected)) != expected:
                return False
    return True
