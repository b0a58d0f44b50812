"""Writes files that must not exist yet."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def write_new_file(path: Path, text: str) -> None:
    """Writes a new file. If it cannot be written completely, it is deleted, so that the user can try again.

    Raises:
        FileExistsError: the file exists.
        OSError: the file cannot be written.
    """
    with path.open("xb") as file:
        try:
            file.write(text.encode())
            file.flush()
        except OSError:
            path.unlink(missing_ok=True)
            # Closing tries to write the rest of the buffer, and fails for the same reason.
            with suppress(OSError):
                file.close()
            raise
