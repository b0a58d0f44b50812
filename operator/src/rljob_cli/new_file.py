"""Writes files that must not exist yet."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def write_new_file(path: Path, text: str) -> None:
    """Writes a file completely or not at all, so that a second try does not find a part of it.

    Raises:
        FileExistsError: the file exists.
        OSError: it cannot be written.
    """
    with path.open("xb") as file:
        try:
            file.write(text.encode())
            file.flush()
        except OSError:
            path.unlink(missing_ok=True)
            # What is still buffered cannot be written either.
            with suppress(OSError):
                file.close()
            raise
