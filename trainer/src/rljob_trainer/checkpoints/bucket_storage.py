"""Files of checkpoints in a bucket.

A bucket cannot rename files. This is not needed, because an object appears completely or not at all. Only `create` uses
a conditional request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rljob_bucket import bucket
from rljob_bucket.errors import BucketError
from rljob_bucket.paths import BucketPath
from rljob_trainer.checkpoints.errors import StorageUnavailableError


class BucketFile:
    """A file or folder of checkpoints in a bucket (see `storage.Stored`)."""

    def __init__(self, path: BucketPath) -> None:
        self.path = path

    @contextmanager
    def writer(self, num_bytes: int) -> Iterator[Callable[[bytes | memoryview], None]]:
        """See `Stored.writer`."""
        with unavailable_errors(), bucket.writer(self.path, num_bytes) as write:
            yield write

    def create(self, data: bytes) -> None:
        """See `Stored.create`."""
        with unavailable_errors():
            bucket.create(self.path, data)

    def read(self) -> bytes:
        """See `Stored.read`."""
        with unavailable_errors():
            return bucket.read(self.path)

    def read_into(self, start: int, buffer: memoryview) -> int:
        """See `Stored.read_into`."""
        with unavailable_errors():
            return bucket.read_into(self.path, start, buffer)

    def size(self) -> int:
        """See `Stored.size`."""
        with unavailable_errors():
            return bucket.size(self.path)

    def files(self) -> dict[str, int]:
        """See `Stored.files`."""
        with unavailable_errors():
            return bucket.entries(self.path).files

    def folders(self) -> list[str]:
        """See `Stored.folders`."""
        with unavailable_errors():
            return bucket.entries(self.path).folders

    def make_folder(self) -> None:
        """Does nothing."""

    def remove(self) -> None:
        """See `Stored.remove`."""
        with unavailable_errors():
            bucket.remove([self.path])

    def remove_folder(self, first: str) -> None:
        """See `Stored.remove_folder`."""
        with unavailable_errors():
            names = bucket.entries(self.path).files
            if first in names:
                bucket.remove([self.path / first])
            bucket.remove([self.path / name for name in names if name != first])

    def free_bytes(self) -> int | None:
        """Returns None, because a store does not report the free space of a bucket."""
        return None


@contextmanager
def unavailable_errors() -> Iterator[None]:
    """Converts a BucketError of the block into a StorageUnavailableError."""
    try:
        yield
    except BucketError as error:
        raise StorageUnavailableError(str(error)) from None
