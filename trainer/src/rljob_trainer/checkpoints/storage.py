"""Where the files of checkpoints are: in a folder, or in a bucket. Both have the same operations (`Stored`)."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from rljob_api.contract_documents import TrainerJob
from rljob_bucket.paths import BucketPath, job_folder
from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.local_storage import LocalFile

CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in the job's folder."""
RUN = "run"
"""Name of the folder with the run's files in the job's folder."""

Location = Path | BucketPath
"""Name of a file or folder of checkpoints. It contains no credentials and may be sent to other processes."""


class Stored(Protocol):
    """A file or folder at a location. Methods raise FileNotFoundError and other kinds of OSError for a local file, and
    FileNotFoundError and StorageUnavailableError for a file in a bucket."""

    def writer(self, num_bytes: int) -> AbstractContextManager[Callable[[bytes | memoryview], None]]:
        """Yields a function that writes the next part of the file. `num_bytes`: the expected size. After the block the
        whole file is durable and replaces an earlier one; after an error in the block no part of it remains."""

    def create(self, data: bytes) -> None:
        """Creates the file with this content, atomically. Raises FileExistsError if the file exists with another
        content: of concurrent callers with different contents exactly one succeeds."""

    def read(self) -> bytes:
        """Returns the content of a small file."""

    def read_into(self, start: int, buffer: memoryview) -> int:
        """Fills the buffer with the file's bytes from `start` on. Returns their number, which is smaller than the
        buffer if the file ends before."""

    def size(self) -> int:
        """Returns the size of the file in bytes."""

    def files(self) -> dict[str, int]:
        """Returns the files directly in the folder, with their sizes; empty if the folder does not exist."""

    def folders(self) -> list[str]:
        """Returns the names of the folders directly in the folder; empty if it does not exist."""

    def make_folder(self) -> None:
        """Creates the folder and its parents if they do not exist. Does nothing in a bucket, which has no folders."""

    def remove(self) -> None:
        """Removes the file if it exists."""

    def remove_folder(self, first: str) -> None:
        """Removes the folder and its files if it exists. The file `first` is removed first, if it exists."""

    def free_bytes(self) -> int | None:
        """Returns the bytes that can still be written; None if there is no limit, as in a bucket."""


def job_location(job: TrainerJob) -> BucketPath | None:
    """Returns the folder of a job in its bucket; None if the job uses a local or mounted folder."""
    storage = job.spec.checkpoint.storage
    if storage is None or storage.s3 is None:
        return None
    return job_folder(storage.s3, job.namespace, job.name)


def checkpoint_location(job: TrainerJob, local_folder: Path) -> Location:
    """Returns the folder of a job's checkpoints: in its bucket, or `local_folder`."""
    folder = job_location(job)
    return local_folder if folder is None else folder / CHECKPOINTS


def stored(location: Location) -> Stored:
    """Returns the operations on a location."""
    if isinstance(location, Path):
        return LocalFile(location)
    # Imported only here, so that jobs without a bucket do not load the library for buckets.
    from rljob_trainer.checkpoints.bucket_storage import BucketFile

    return BucketFile(location)


def exists(location: Location) -> bool:
    """Whether the file exists."""
    try:
        stored(location).size()
    except FileNotFoundError:
        return False
    return True


def write_file(location: Location, data: bytes) -> None:
    """Writes a small file, and replaces an earlier one."""
    with stored(location).writer(len(data)) as write:
        write(data)


@contextmanager
def storage_errors(location: Location, doing: str, num_bytes: int = 0) -> Iterator[None]:
    """Converts an OSError of the block into a CheckpointError with the location, and the bytes needed and free."""
    try:
        yield
    except OSError as error:
        needed = f"; {num_bytes:,} bytes needed" if num_bytes else ""
        try:
            num_free = stored(location).free_bytes()
        except OSError:
            num_free = None
        free = "free space unknown" if num_free is None else f"{num_free:,} bytes free"
        raise CheckpointError(
            f"{location}: {doing} failed: {error.strerror or error}{needed}, {free}; {_advice(error.errno)}"
        ) from error


def _advice(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some space or raise the quota; earlier checkpoints are unchanged"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "make the storage writable for this process; earlier checkpoints are unchanged"
    return "check the storage; earlier checkpoints are unchanged"
