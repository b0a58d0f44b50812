"""Replaces the file that a user named."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file, or replaces it atomically. A symbolic link stays, and the file that it names is replaced. What is
    not a regular file, such as a pipe or a device, is written to and never replaced. Raises OSError."""
    target = Path(os.path.realpath(path))
    if path.exists() and not target.is_file():
        path.write_bytes(content)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
