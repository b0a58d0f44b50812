"""JSON Lines files that grow during a run. A crash in the middle of a line does not damage the lines before it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

log = logging.getLogger(__name__)


class JsonlWriter:
    """Appends rows. `append` flushes each row to the operating system, without fsync."""

    def __init__(self, path: Path) -> None:
        """Opens `path` for appending and creates its folder.

        Raises:
            OSError: the file cannot be created or opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open(
            "a", encoding="utf-8", errors="backslashreplace"
        )  # a lone surrogate becomes its JSON escape

    def append(self, row: Mapping[str, object]) -> None:
        """Writes one row.

        Raises:
            OSError: the row could not be written, for example because the disk is full.
            ValueError: a value is NaN or infinite, which JSON does not support.
        """
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file. May be called repeatedly."""
        self._file.close()


def read_rows(path: Path) -> Iterator[dict[str, object]]:
    """Yields the complete rows of a file, in order. An incomplete last line is skipped; a missing file has no rows.

    Raises:
        ValueError: a line is not a JSON object, and is not an incomplete last line; the message names file and line.
    """
    for row in _rows(path):
        if isinstance(row, ValueError):
            raise ValueError(f"{row}; remove the line or the file")
        yield row


def _rows(path: Path) -> Iterator[dict[str, object] | ValueError]:
    """As `read_rows`, but instead of a damaged line yields its error. Keeps one line in memory."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith("\n"):
                    return
                yield ValueError(f"{path}:{number}: not a line of JSON ({error})")
                continue
            if isinstance(row, dict):
                yield row
            else:
                yield ValueError(f"{path}:{number}: not a JSON object ({line[:40]!r})")


def remove_rows_after(path: Path, last_step: int) -> int:
    """Removes the rows of steps after `last_step`, which a resumed run repeats. Returns the number of removed rows.

    The file is replaced atomically, so a crash leaves the old or the new file. Damaged lines are removed, too, because
    they must not prevent a run from resuming; all but an incomplete last line with a warning.

    Raises:
        OSError: the new file cannot be written.
    """
    if not path.exists():
        return 0
    num_removed = 0
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in _rows(path):
            if isinstance(row, ValueError):
                log.warning("a damaged line was removed: %s", row)
                continue
            step = row.get("step")
            if isinstance(step, int) and step > last_step:
                num_removed += 1
                continue
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return num_removed
