"""Files of checkpoints in a folder: once a change returns, it survives a crash of the process or the node.

The order is always the same: write a temporary file, fsync it, rename it, fsync the folder.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"

_MAX_WRITE_BYTES = 64 * 1024 * 1024
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
"""Error numbers of link(2) on file systems without hard links."""


class LocalFile:
    """A file or folder of checkpoints on a local or mounted file system (see `storage.Stored`)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def writer(self, num_bytes: int) -> Iterator[Callable[[bytes | memoryview], None]]:
        """See `Stored.writer`."""
        del num_bytes
        with durable_file(self.path) as descriptor:
            yield lambda data: write_all(descriptor, data)

    def create(self, data: bytes) -> None:
        """See `Stored.create`."""
        create_absent(self.path, data)

    def read(self) -> bytes:
        """See `Stored.read`."""
        return self.path.read_bytes()

    def read_into(self, start: int, buffer: memoryview) -> int:
        """See `Stored.read_into`."""
        count = 0
        with self.path.open("rb", buffering=0) as file:
            file.seek(start)
            while count < len(buffer) and (read := file.readinto(buffer[count:])):
                count += read
        return count

    def size(self) -> int:
        """See `Stored.size`."""
        return self.path.stat().st_size

    def files(self) -> dict[str, int]:
        """See `Stored.files`."""
        paths = self.path.iterdir() if self.path.is_dir() else ()
        return {path.name: path.stat().st_size for path in paths if path.is_file()}

    def folders(self) -> list[str]:
        """See `Stored.folders`."""
        return [path.name for path in self.path.iterdir() if path.is_dir()] if self.path.is_dir() else []

    def make_folder(self) -> None:
        """See `Stored.make_folder`."""
        make_folder(self.path)

    def remove(self) -> None:
        """See `Stored.remove`."""
        self.path.unlink(missing_ok=True)

    def remove_folder(self, first: str) -> None:
        """See `Stored.remove_folder`."""
        if not self.path.exists():
            return
        if (self.path / first).exists():
            os.unlink(self.path / first)
            sync_folder(self.path)
        for path in self.path.iterdir():
            os.unlink(path)
        os.rmdir(self.path)
        sync_folder(self.path.parent)

    def free_bytes(self) -> int | None:
        """See `Stored.free_bytes`."""
        return free_bytes(self.path)


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


def free_bytes(folder: Path) -> int:
    """Returns the bytes that an ordinary user can still write in the file system of `folder` (or of its nearest
    existing parent)."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
