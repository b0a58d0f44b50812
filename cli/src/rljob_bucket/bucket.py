"""Requests to a bucket, with retries. Credentials come from the environment (see docs/storage.md).

The library is obstore, which wraps Rust's object_store: https://developmentseed.org/obstore
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from rljob_bucket.errors import BucketError, BucketFault
from rljob_bucket.paths import BucketPath

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import S3Config

MIB = 2**20
PART_BYTES = 16 * MIB
MAX_PARTS = 9_000
"""A store accepts at most 10,000 parts of a multipart upload."""
UPLOADS_AT_ONCE = 8
"""Parts of one file that are uploaded at the same time. The library does not copy the data of a part; it keeps a
reference until the part is sent."""
READ_BYTES = 8 * MIB
READS_AT_ONCE = 8
"""Large ranges are read in parallel, because one connection to a store transfers only a few tens of MB/s."""
MAX_DOWNLOADS = 3
MIN_REQUEST_SECONDS, REQUEST_SECONDS = 10, 120
"""The smallest and the largest time limit of one request. Between them, the limit is the time for which requests are
retried. A connection must be opened within the smallest limit."""
RETRY_SECONDS = 180
"""How long a request is retried after errors of the network or of the store (5xx, 429)."""
MAX_RETRIES = 20
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 15.0

ResultT = TypeVar("ResultT")

_retry_seconds: ContextVar[float | None] = ContextVar("retry_seconds", default=None)
_STATUS = re.compile(r"\b([45]\d\d) [A-Z][A-Za-z]+")
_OVERLOADED = ("429", "500", "502", "503", "504")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_CREDENTIAL_CODES = {
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "XAdminUserNotFound",
}
_METADATA_SERVER = re.compile(r"/latest/(api/token|meta-data)")
"""Path on the metadata server of a cloud. The library asks this server for credentials if it has found no others, so an
error with this path means that there are no credentials."""
_BAD_CERTIFICATE = "InvalidCertificate("
"""Part of an error of the library's TLS (rustls), which then sends no request."""


@dataclass(frozen=True)
class FileInfo:
    """A file in a listing."""

    size: int
    """In bytes."""
    mtime_ns: int
    """When it was written, in ns since 1970."""
    version: str | None
    """The store's tag of this content (ETag); None if it has none."""


@dataclass(frozen=True)
class Entries:
    """What a folder contains directly."""

    files: dict[str, int]
    """Sizes by name."""
    folders: list[str]


def read(path: BucketPath) -> bytes:
    """Returns the content of a file. Raises FileNotFoundError, BucketError."""
    return _request(path, "reading", lambda store: bytes(obstore.get(store, path.key).bytes()))


def read_into(path: BucketPath, start: int, buffer: memoryview, version: str | None = None) -> int:
    """Fills the buffer with the file's bytes from `start` on. Returns their number, which is smaller than the buffer if
    the file ends before. With `version`, raises BucketError (CHANGED) if the file has another content now. Also raises
    FileNotFoundError, BucketError."""
    if len(buffer) <= READ_BYTES:
        return _read_part(path, start, buffer, version)
    offsets = range(0, len(buffer), READ_BYTES)
    with _threads(READS_AT_ONCE, "bucket-read") as pool:
        return sum(pool.map(lambda at: _read_part(path, start + at, buffer[at : at + READ_BYTES], version), offsets))


def _read_part(path: BucketPath, start: int, buffer: memoryview, version: str | None) -> int:
    if not len(buffer):
        return 0
    options: GetOptions = {"range": (start, start + len(buffer))}
    if version is not None:
        options["if_match"] = version
    try:
        data = memoryview(
            _request(path, "reading", lambda store: obstore.get(store, path.key, options=options).bytes())
        )
    except BucketError as error:
        if error.code.startswith("416"):
            return 0
        raise
    buffer[: len(data)] = data
    return len(data)


def download(path: BucketPath, target: Path) -> None:
    """Downloads a file of any size. Begins again if the file is replaced meanwhile, at most MAX_DOWNLOADS times. Raises
    FileNotFoundError, BucketError, and OSError of the local file."""
    for attempt in range(1, MAX_DOWNLOADS + 1):
        found, start = info(path), 0
        buffer = memoryview(bytearray(min(found.size, READ_BYTES)))
        try:
            with target.open("wb") as file:
                while count := _read_part(path, start, buffer, found.version):
                    file.write(buffer[:count])
                    start += count
            return
        except BucketError as error:
            if error.fault is not BucketFault.CHANGED or attempt == MAX_DOWNLOADS:
                raise


def size(path: BucketPath) -> int:
    """Returns the size of a file in bytes. Raises FileNotFoundError, BucketError."""
    return info(path).size


def info(path: BucketPath) -> FileInfo:
    """Returns size and time of a file. Raises FileNotFoundError, BucketError."""
    return _request(path, "reading", lambda store: _info(obstore.head(store, path.key)))


def _info(meta: ObjectMeta) -> FileInfo:
    return FileInfo(int(meta["size"]), int(meta["last_modified"].timestamp()) * 10**9, meta["e_tag"])


def entries(folder: BucketPath) -> Entries:
    """Returns the files and folders directly in a folder; empty if it does not exist. Raises BucketError."""
    found = _request(folder, "listing", lambda store: obstore.list_with_delimiter(store, folder.key or None))
    start = len(folder.key) + 1 if folder.key else 0
    files = {each["path"][start:]: int(each["size"]) for each in found["objects"]}
    return Entries(files, [each.rstrip("/")[start:] for each in found["common_prefixes"]])


def all_files(folder: BucketPath) -> dict[str, FileInfo]:
    """Returns all files in a folder and in its subfolders, by their path in the folder. Raises BucketError."""
    start = len(folder.key) + 1 if folder.key else 0
    found = _request(folder, "listing", lambda store: obstore.list(store, folder.key or None).collect())
    return {each["path"][start:]: _info(each) for each in found}


def write(path: BucketPath, data: bytes) -> None:
    """Writes a small file, and replaces an earlier one. Raises BucketError."""
    _request(path, "writing", lambda store: obstore.put(store, path.key, data, use_multipart=False))


@contextmanager
def writer(path: BucketPath, num_bytes: int) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Yields a function that writes the next part of a file of `num_bytes` bytes. The file appears at the end of the
    block, and replaces an earlier one; after an error in the block it does not. Raises BucketError."""
    if num_bytes <= PART_BYTES:
        parts: list[bytes] = []
        yield lambda data: parts.append(bytes(data))
        write(path, b"".join(parts))
        return
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
    try:
        with _errors(path, "writing"):
            file.close()
    except BucketError:
        # If only the answer to the last request was lost, the file is complete.
        if not _has_size(path, num_bytes):
            raise


def _has_size(path: BucketPath, num_bytes: int) -> bool:
    try:
        return size(path) == num_bytes
    except (FileNotFoundError, BucketError):
        return False


def create(path: BucketPath, data: bytes) -> None:
    """Creates a small file, atomically. Raises FileExistsError if the file exists with another content, BucketError.

    If the store's answer is lost, the request is repeated, and finds the file that the first request has created. So
    after every error the file is read back, and this call has succeeded if the file has the content of this call. If
    several writers must know which of them has created the file, their contents must differ, for example by a random
    token.
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
    with _threads(READS_AT_ONCE, "bucket-remove") as pool:
        for _ in pool.map(_remove, paths):
            pass


def _remove(path: BucketPath) -> None:
    with suppress(FileNotFoundError):
        _request(path, "removing", lambda store: obstore.delete(store, path.key))


@contextmanager
def retries(seconds: float) -> Iterator[None]:
    """Within the context, requests of this thread are retried for at most `seconds` (at most RETRY_SECONDS). This is
    also the time limit of one request (but at least MIN_REQUEST_SECONDS)."""
    token = _retry_seconds.set(min(seconds, RETRY_SECONDS))
    try:
        yield
    finally:
        _retry_seconds.reset(token)


def forget_stores() -> None:
    """Closes the connections. Later requests read the credentials from the environment again."""
    _opened.cache_clear()


def _threads(number: int, name: str) -> ThreadPoolExecutor:
    """Threads whose requests are repeated as long as those of this thread."""
    initializer, seconds = _retry_seconds.set, _retry_seconds.get()
    return ThreadPoolExecutor(number, thread_name_prefix=name, initializer=initializer, initargs=(seconds,))


def _request(path: BucketPath, doing: str, send: Callable[[S3Store], ResultT]) -> ResultT:
    """Sends a request that may be repeated. The library retries requests, too, but not if the connection breaks in the
    middle of an answer (obstore 0.12.1; `tests/trainer/buckets/test_crashes` shows it)."""
    started = time.monotonic()
    while True:
        try:
            with _errors(path, doing):
                return send(_store(path))
        except BucketError as error:
            if error.fault is not BucketFault.UNREACHABLE or time.monotonic() - started > _seconds() / 2:
                raise
            time.sleep(FIRST_BACKOFF_SECONDS)


def _seconds() -> float:
    return _retry_seconds.get() or RETRY_SECONDS


def _store(path: BucketPath) -> S3Store:
    return _opened(path.bucket, path.endpoint, path.region, _seconds())


@cache
def _opened(bucket: str, endpoint: str | None, region: str | None, retry_seconds: float) -> S3Store:
    # Some stores do not support the request that deletes several objects.
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
            "timeout": timedelta(seconds=min(REQUEST_SECONDS, max(MIN_REQUEST_SECONDS, retry_seconds))),
            "connect_timeout": timedelta(seconds=MIN_REQUEST_SECONDS),
        },
        retry_config={
            "max_retries": MAX_RETRIES,
            "retry_timeout": timedelta(seconds=retry_seconds),
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
    except PreconditionError:
        raise BucketError(path.with_endpoint(), doing, BucketFault.CHANGED, "") from None
    except FileNotFoundError as error:
        answer = _answer(error)
        # The answer to a HEAD request has no code.
        if answer.endswith(("NoSuchKey", "404")):
            raise FileNotFoundError(errno.ENOENT, "does not exist", str(path)) from None
        raise BucketError(path.with_endpoint(), doing, _fault(error), answer) from None
    except (BaseError, OSError) as error:
        # A writer raises OSError.
        raise BucketError(path.with_endpoint(), doing, _fault(error), _answer(error)) from None


def _answer(error: Exception) -> str:
    """Status and code of the store's answer, such as `403 SignatureDoesNotMatch`; empty without an answer."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    return " ".join(found[1] for found in (status, code) if found)


def _fault(error: Exception) -> BucketFault:
    answer = _answer(error)
    if _BAD_CERTIFICATE in str(error):
        return BucketFault.CERTIFICATE
    if any(code in answer for code in _CREDENTIAL_CODES) or _METADATA_SERVER.search(str(error)):
        return BucketFault.CREDENTIALS
    if "NoSuchBucket" in answer:
        return BucketFault.NO_BUCKET
    if "403" in answer or "401" in answer:
        return BucketFault.PERMISSION
    if answer.startswith(_OVERLOADED):
        return BucketFault.OVERLOADED
    return BucketFault.OTHER if answer else BucketFault.UNREACHABLE
