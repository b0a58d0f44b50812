"""Requests to a bucket, with retries. Credentials come from the environment (see docs/storage.md).

The library is obstore, which wraps Rust's object_store: https://developmentseed.org/obstore
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from rljob_bucket.errors import BucketError, BucketFault
from rljob_bucket.paths import BucketPath

if TYPE_CHECKING:
    from obstore.store import S3Config

MIB = 2**20
PART_BYTES = 16 * MIB
MAX_PARTS = 9_000
"""A store accepts at most 10,000 parts of a multipart upload."""
UPLOADS_AT_ONCE = 8
"""Parts of one file in flight. A writer needs at most this many times the size of a part as memory, and one more."""
READ_BYTES = 8 * MIB
READS_AT_ONCE = 8
"""Large ranges are read in parallel: one connection to a store transfers some ten MB/s."""
REQUEST_SECONDS = 120
RETRY_SECONDS = 180
"""How long a request is repeated after errors of the network or of the store (5xx, 429)."""
MAX_RETRIES = 20
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 15.0

_STATUS = re.compile(r"\b([45]\d\d) [A-Z][A-Za-z]+")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_CREDENTIAL_CODES = {
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "XAdminUserNotFound",
}
_METADATA_SERVER = "169.254.169.254"
"""The library asks it for credentials if it has found no others."""


@dataclass(frozen=True)
class Entries:
    """What a folder contains directly."""

    files: dict[str, int]
    """Sizes by name."""
    folders: list[str]


def read(path: BucketPath) -> bytes:
    """Returns the content of a file. Raises FileNotFoundError, BucketError."""
    with _errors(path, "reading"):
        return bytes(obstore.get(_store(path), path.key).bytes())


def read_into(path: BucketPath, start: int, buffer: memoryview) -> int:
    """Fills the buffer with the file's bytes from `start` on. Returns their number, which is smaller than the buffer if
    the file ends before. Raises FileNotFoundError, BucketError."""
    if len(buffer) <= READ_BYTES:
        return _read_part(path, start, buffer)
    offsets = range(0, len(buffer), READ_BYTES)
    with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="bucket-read") as pool:
        return sum(pool.map(lambda at: _read_part(path, start + at, buffer[at : at + READ_BYTES]), offsets))


def _read_part(path: BucketPath, start: int, buffer: memoryview) -> int:
    if not len(buffer):
        return 0
    with _errors(path, "reading"):
        try:
            data = memoryview(obstore.get_range(_store(path), path.key, start=start, end=start + len(buffer)))
        except BaseError as error:
            if "416" in _answer(error):
                return 0
            raise
        buffer[: len(data)] = data
        return len(data)


def size(path: BucketPath) -> int:
    """Returns the size of a file in bytes. Raises FileNotFoundError, BucketError."""
    with _errors(path, "reading"):
        return int(obstore.head(_store(path), path.key)["size"])


def entries(folder: BucketPath) -> Entries:
    """Returns the files and folders directly in a folder; empty if it does not exist. Raises BucketError."""
    with _errors(folder, "listing"):
        found = obstore.list_with_delimiter(_store(folder), folder.key or None)
    start = len(folder.key) + 1 if folder.key else 0
    files = {each["path"][start:]: int(each["size"]) for each in found["objects"]}
    return Entries(files, [each.rstrip("/")[start:] for each in found["common_prefixes"]])


def all_files(folder: BucketPath) -> dict[str, int]:
    """Returns the sizes of all files in a folder and in its subfolders, by their path in the folder. Raises
    BucketError."""
    start = len(folder.key) + 1 if folder.key else 0
    with _errors(folder, "listing"):
        pages = obstore.list(_store(folder), folder.key or None)
        return {each["path"][start:]: int(each["size"]) for page in pages for each in page}


def write(path: BucketPath, data: bytes) -> None:
    """Writes a small file, and replaces an earlier one. Raises BucketError."""
    with _errors(path, "writing"):
        obstore.put(_store(path), path.key, data, use_multipart=False)


@contextmanager
def writer(path: BucketPath, num_bytes: int) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Yields a function that writes the next part of a file of about `num_bytes` bytes. The file appears at the end of
    the block, and replaces an earlier one; after an error in the block it does not. Raises BucketError."""
    part_bytes = max(PART_BYTES, -(-num_bytes // MAX_PARTS))
    with _errors(path, "writing"):
        file = obstore.open_writer(_store(path), path.key, buffer_size=part_bytes, max_concurrency=UPLOADS_AT_ONCE)

    def write_next(data: bytes | memoryview) -> None:
        with _errors(path, "writing"):
            for start in range(0, len(data), part_bytes):
                file.write(data[start : start + part_bytes])

    try:
        yield write_next
    except BaseException as error:
        # The library aborts the upload.
        with suppress(BaseError, OSError):
            file.__exit__(type(error), error, error.__traceback__)
        raise
    with _errors(path, "writing"):
        file.close()


def create(path: BucketPath, data: bytes) -> None:
    """Creates a small file, atomically. Raises FileExistsError if the file exists with another content, BucketError.

    If the store's answer is lost, the request is repeated and finds the file that the first one has created. So after
    every error the file is read back, and this call has succeeded if the content is its own. Writers that must not take
    each other's file for their own need different contents, for example a random token.
    """
    try:
        with _errors(path, "creating"):
            obstore.put(_store(path), path.key, data, mode="create", use_multipart=False)
        return
    except FileExistsError:
        found = read(path)
    except BucketError as error:
        try:
            found = read(path)
        except (FileNotFoundError, BucketError):
            raise error from None
    if found != data:
        raise FileExistsError(f"{path} exists")


def remove(paths: Sequence[BucketPath]) -> None:
    """Removes files of one bucket, if they exist. Raises BucketError."""
    with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="bucket-remove") as pool:
        for _ in pool.map(_remove, paths):
            pass


def _remove(path: BucketPath) -> None:
    with suppress(FileNotFoundError), _errors(path, "removing"):
        obstore.delete(_store(path), path.key)


def forget_stores() -> None:
    """Closes the connections. Later requests read the credentials from the environment again."""
    _opened.cache_clear()


def _store(path: BucketPath) -> S3Store:
    return _opened(path.bucket, path.endpoint, path.region)


@cache
def _opened(bucket: str, endpoint: str | None, region: str | None) -> S3Store:
    # Several stores do not have the request that deletes several objects.
    config: S3Config = {"disable_bulk_delete": True}
    if endpoint is not None:
        config["endpoint"] = endpoint
    if region is not None:
        config["region"] = region
    return S3Store(
        bucket,
        config=config,
        client_options={
            "allow_http": True,
            "timeout": timedelta(seconds=REQUEST_SECONDS),
            "connect_timeout": timedelta(seconds=10),
        },
        retry_config={
            "max_retries": MAX_RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_SECONDS),
            "backoff": {
                "init_backoff": timedelta(seconds=FIRST_BACKOFF_SECONDS),
                "max_backoff": timedelta(seconds=MAX_BACKOFF_SECONDS),
                "base": 2,
            },
        },
    )


@contextmanager
def _errors(path: BucketPath, doing: str) -> Iterator[None]:
    """Converts the library's errors. Their text is not used, because the answer of a store can contain parts of the
    credentials; `from None` keeps it out of tracebacks."""
    try:
        yield
    except AlreadyExistsError:
        raise FileExistsError(f"{path} exists") from None
    except FileNotFoundError as error:
        answer = _answer(error)
        # The answer to a HEAD request has no code.
        if answer.endswith(("NoSuchKey", "404")):
            raise FileNotFoundError(errno.ENOENT, "does not exist", str(path)) from None
        raise BucketError(str(path), doing, _fault(error), answer) from None
    except (BaseError, OSError) as error:
        # A writer raises OSError.
        raise BucketError(str(path), doing, _fault(error), _answer(error)) from None


def _answer(error: Exception) -> str:
    """Status and code of the store's answer, such as `403 SignatureDoesNotMatch`; empty without an answer."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    return " ".join(found[1] for found in (status, code) if found)


def _fault(error: Exception) -> BucketFault:
    answer = _answer(error)
    if any(code in answer for code in _CREDENTIAL_CODES) or _METADATA_SERVER in str(error):
        return BucketFault.CREDENTIALS
    if "NoSuchBucket" in answer:
        return BucketFault.NO_BUCKET
    if "403" in answer or "401" in answer:
        return BucketFault.PERMISSION
    return BucketFault.OTHER if answer else BucketFault.UNREACHABLE
