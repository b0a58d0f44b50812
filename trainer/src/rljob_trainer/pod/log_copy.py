"""A copy of a growing file, with a limited size. After a restart of this program the copy continues without
duplicates."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import BinaryIO

COMPARE_BYTES = 1 << 16
FIRST_BYTES = 1 << 20
"""Size of the beginning that is kept."""
PART_BYTES = (63 << 20) // 2
"""Largest size of the current file and of a part. A copy has at most the current file, one part and the first bytes,
together 64 MiB."""


class LogCopy:
    """Appends to `path` what the copy of `source` does not have yet. The caller reads `source` and passes its whole
    content, from its beginning, to `write`.

    When `path` reaches `PART_BYTES`, it is renamed to `<name>.part-<k>.log` (k from 0), and a new `path` begins. Of
    these parts only the newest is kept. The first FIRST_BYTES of part 0, which show configuration and start, are kept
    as `<name>.first.log`.

    If existing files are not a copy of `source`, they belong to an earlier job of the same name. Then `path` gets
    `.old` in its name, and the other files are removed. A write error is reported once and ends the copy; it raises
    nothing, because the caller's main task is to print the log.
    """

    def __init__(self, path: Path, source: Path) -> None:
        self._path = path
        self._first = path.with_suffix(f".first{path.suffix}")
        self._file: BinaryIO | None = None
        self._num_bytes_to_skip = 0
        """How many of the next bytes of the source the copy already has, from before a restart."""
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
            self._num_bytes_to_skip = self._num_parts * PART_BYTES + self._file.tell()
            self._drop_old_parts()
        except OSError as error:
            self._give_up(error)

    def write(self, data: bytes) -> None:
        """Copies the next bytes of the source; those that the copy already has are skipped."""
        new = data[self._num_bytes_to_skip :]
        self._num_bytes_to_skip = max(0, self._num_bytes_to_skip - len(data))
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
        """Removes all parts except the newest, also parts from before a restart. Keeps the first bytes of part 0."""
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
        """Whether the existing files, if there are any, are a copy of `source`."""
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
        print(f"{self._path}: cannot write the copy of the driver's log ({error})", file=sys.stderr, flush=True)
        self.close()


def _begins_with(source: Path, beginning: Path) -> bool:
    """Whether `source` begins with the whole content of `beginning`."""
    with source.open("rb") as whole, beginning.open("rb") as part:
        while expected := part.read(COMPARE_BYTES):
            if whole.read(len(expected)) != expected:
                return False
    return True
