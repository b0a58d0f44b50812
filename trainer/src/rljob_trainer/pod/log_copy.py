"""A bounded copy of a file that still grows. It is made anew after a restart without writing anything twice."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import BinaryIO

COMPARE_BYTES = 1 << 16
FIRST_BYTES = 1 << 20
PART_BYTES = (63 << 20) // 2
"""Two parts and the first bytes are 64 MiB."""


class LogCopy:
    """Takes the whole content of `source` from its beginning on, and adds to `path` what is not there yet.

    When `path` has `PART_BYTES`, it becomes `<name>.part-<k>.log`, k from 0, and a new one begins. Of the parts only
    the newest stays, and of the first one `<name>.first.log`, where the configuration and the start are.

    Files that are not of `source` are of another job of the same name: `path` is kept with `.old` in its name. Where
    the copy cannot be written, that is said once, and the copy ends there: printing matters more.
    """

    def __init__(self, path: Path, source: Path) -> None:
        self._path = path
        self._first = path.with_suffix(f".first{path.suffix}")
        self._file: BinaryIO | None = None
        self._num_bytes_there = 0
        self._num_parts = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self._is_of(source):
                for part in (self._first, *self._parts().values()):
                    part.unlink(missing_ok=True)
                if path.exists():
                    os.replace(path, path.with_suffix(f".old{path.suffix}"))
            self._num_parts = max(self._parts(), default=-1) + 1
            self._file = path.open("ab", buffering=0)
            self._num_bytes_there = self._num_parts * PART_BYTES + self._file.tell()
            self._drop_old_parts()
        except OSError as error:
            self._give_up(error)

    def write(self, data: bytes) -> None:
        """The next bytes of the source."""
        new = data[self._num_bytes_there :]
        self._num_bytes_there = max(0, self._num_bytes_there - len(data))
        try:
            while self._file and new:
                new = new[self._file.write(new[: PART_BYTES - self._file.tell()]) :]
                if self._file.tell() >= PART_BYTES:
                    self._begin_part()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Ends the copy."""
        if self._file:
            self._file.close()
            self._file = None

    def _begin_part(self) -> None:
        self.close()
        os.replace(self._path, self._part(self._num_parts))
        self._num_parts += 1
        self._drop_old_parts()
        self._file = self._path.open("ab", buffering=0)

    def _drop_old_parts(self) -> None:
        """Also what a restart has left in between."""
        for number, part in self._parts().items():
            if number == self._num_parts - 1:
                continue
            if number == 0:
                temporary = self._first.with_suffix(".tmp")
                with part.open("rb") as content:
                    temporary.write_bytes(content.read(FIRST_BYTES))
                os.replace(temporary, self._first)
            part.unlink()

    def _is_of(self, source: Path) -> bool:
        parts = self._parts()
        beginning = next((file for file in (self._first, parts.get(0), self._path) if file and file.exists()), None)
        return beginning is None or _begins_with(source, beginning)

    def _parts(self) -> dict[int, Path]:
        pattern = re.compile(re.escape(self._path.stem) + r"\.part-(\d+)" + re.escape(self._path.suffix))
        found = ((pattern.fullmatch(file.name), file) for file in self._path.parent.iterdir())
        return {int(match[1]): file for match, file in found if match}

    def _part(self, number: int) -> Path:
        return self._path.with_suffix(f".part-{number}{self._path.suffix}")

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
