"""Durable changes to a folder: once these functions return, the change survives a crash of the process or the node.

The order is always the same: write a temporary file, fsync it, rename it, fsync the folder.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.layout import MANIFEST_FILE, TEMPORARY_SUFFIX

_MAX_WRITE_BYTES = 64 * 1024 * 1024
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
"""Error numbers of link(2) on file systems without hard links."""


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all bytes, with several write calls if necessary."""
    view = memoryview(data)
    written = 0
    while written < len(view):
        written += os.write(descriptor, view[written : written + _MAX_WRITE_BYTES])


@contextmanager
def durable_file(path: Path, publish: Callable[[Path, Path], None] | None = None) -> Iterator[int]:
    """Yields a descriptor to write the file's content. After the block the file is durable and has its final name.

    `publish(temporary, path)` renames the file; without it, an existing file is replaced. After an error the temporary
    file is removed.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if publish:
            publish(temporary, path)
        else:
            os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def create_absent(path: Path, data: bytes) -> None:
    """Creates the file with this content, atomically.

    Raises FileExistsError if the file exists: of two concurrent callers exactly one succeeds.
    """
    with durable_file(path, _publish_absent) as descriptor:
        write_all(descriptor, data)


def _publish_absent(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
        os.unlink(temporary)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # SMB and most object-store mounts have no hard links. An empty file reserves the name, and the rename replaces
        # it atomically. Readers treat an empty file as absent.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        os.replace(temporary, path)


def sync_folder(folder: Path) -> None:
    """Makes the names in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems reject the call, because they always sync folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Creates the folder and its parents if they do not exist; their names are durable afterwards."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):
        os.mkdir(folder)
    sync_folder(folder.parent)


def remove_folder(folder: Path) -> None:
    """Removes a checkpoint's folder. The manifest is removed first, so that after an interruption the rest does not
    look like a complete checkpoint."""
    manifest = folder / MANIFEST_FILE
    if manifest.exists():
        os.unlink(manifest)
        sync_folder(folder)
    for path in folder.iterdir():
        os.unlink(path)
    os.rmdir(folder)
    sync_folder(folder.parent)


def free_bytes(folder: Path) -> int:
    """Returns the bytes that an ordinary user can still write in the file system of `folder` (or of its nearest
    existing parent)."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextmanager
def storage_errors(folder: Path, doing: str, num_bytes: int = 0) -> Iterator[None]:
    """Converts an OSError of the block into a CheckpointError with the folder, and the bytes needed and free."""
    try:
        yield
    except OSError as error:
        needed = f"; {num_bytes:,} bytes needed" if num_bytes else ""
        try:
            free = f"{free_bytes(folder):,} bytes free"
        except OSError:
            free = "free space unknown"
        raise CheckpointError(
            f"{folder}: {doing} failed: {error.strerror or error}{needed}, {free}; {_advice(error.errno)}"
        ) from error


def _advice(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some space or raise the quota; earlier checkpoints are unchanged"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "make the storage writable for this process; earlier checkpoints are unchanged"
    return "check the storage; earlier checkpoints are unchanged"
