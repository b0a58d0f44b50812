"""Replaces the file that a user named."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes, *, follows_links: bool = True) -> None:
    """Writes a file, or replaces it atomically. Raises OSError.

    Args:
        path: What is not a regular file, such as a pipe or a device, is written to and never replaced. The same is true
            for paths such as /dev/stdout, which may stand for a regular file.
        follows_links: Whether a symbolic link stays and the file that it names is replaced: for paths that the user
            named. Otherwise whatever has this path is replaced.
    """
    target = Path(os.path.realpath(path)) if follows_links else path
    is_stream = path.absolute().is_relative_to("/dev") or path.absolute().is_relative_to("/proc")
    if follows_links and path.exists() and (is_stream or not target.is_file()):
        with path.open("ab") as file:
            file.write(content)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
