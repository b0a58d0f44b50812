"""Durable changes to a folder: what these functions have returned from survives a crash of the process and of the node.

The order is always the same: write a temporary file, fsync it, give it its name, fsync the folder.
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


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes every byte; one call of write may take fewer."""
    view = memoryview(data)
    written = 0
    while written < len(view):
        written += os.write(descriptor, view[written : written + _MAX_WRITE_BYTES])


@contextmanager
def durable_file(path: Path, publish: Callable[[Path, Path], None] | None = None) -> Iterator[int]:
    """A descriptor to write the file's content to; after the block the file is durable and has its name.

    `publish(temporary, path)` gives the name; without it, a file that has the name is replaced. Whatever fails, nothing
    is left of the temporary file.
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
    """Creates the file with this content, all of it or none.

    Raises FileExistsError where the file exists, whoever wrote it: of two callers exactly one succeeds.
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
        # SMB and most object-store mounts have no hard links. The empty file claims the name; readers take an empty
        # file as absent, and the rename replaces it in one step.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        os.replace(temporary, path)


def sync_folder(folder: Path) -> None:
    """Makes the names in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do this on their own and refuse the call.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Creates the folder, and its parents, where absent; the names are durable afterwards."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):
        os.mkdir(folder)
    sync_folder(folder.parent)


def remove_folder(folder: Path) -> None:
    """Removes a checkpoint's folder, complete or not; cut short at any point, what is left does not look complete."""
    manifest = folder / MANIFEST_FILE
    if manifest.exists():
        os.unlink(manifest)
        sync_folder(folder)
    for path in folder.iterdir():
        os.unlink(path)
    os.rmdir(folder)
    sync_folder(folder.parent)


def free_bytes(folder: Path) -> int:
    """What an ordinary user may still write in the file system of the nearest existing folder."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextmanager
def storage_errors(folder: Path, doing: str, num_bytes: int = 0) -> Iterator[None]:
    """Turns an OSError of the block into a CheckpointError that names the folder, the bytes needed and those free."""
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
        return "make room or raise the limit; earlier checkpoints are untouched"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "make the storage writable for this process; earlier checkpoints are untouched"
    return "check the storage; earlier checkpoints are untouched"
