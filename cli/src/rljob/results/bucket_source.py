"""Reads the files of a job from its bucket, with the credentials in the environment."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob.errors import ResultsError
from rljob.results.connection import BrokenConnectionError
from rljob.results.file_source import Begin, End, Failed, Listing, RemoteFile, Wanted
from rljob_api.constants import ExitCode
from rljob_bucket.errors import TEMPORARY, BucketError, BucketFault
from rljob_bucket.paths import BucketPath

_PIECE_BYTES = 1 << 23


class BucketSource:
    """See `FileSource`."""

    def __init__(self, folder: BucketPath) -> None:
        """`folder`: the job's folder. Raises ResultsError if the library for buckets is not installed."""
        try:
            from rljob_bucket import bucket
        except ImportError:
            raise ResultsError(
                f"{folder}: reading a bucket needs the package obstore; run `pip install 'rljob[bucket]'`"
            ) from None
        self._bucket = bucket
        self._folder = folder

    def close(self) -> None:
        """Does nothing."""

    def files(self, folders: Sequence[str], skip: Sequence[str]) -> Listing:
        """See `FileSource.files`."""
        found: list[RemoteFile] = []
        for folder in folders:
            try:
                infos = self._bucket.all_files(self._folder / folder)
            except BucketError as error:
                raise self._error(error) from None
            paths = {f"{folder}/{name}": info for name, info in infos.items()}
            found += [
                RemoteFile(path, info.size, info.mtime_ns)
                for path, info in paths.items()
                if not any(path == each or path.startswith(f"{each}/") for each in skip)
            ]
        return Listing(found)

    def read(self, wanted: Sequence[Wanted]) -> Iterator[Begin | bytes | End | Failed]:
        """See `FileSource.read`. A file is always sent from its first byte that is needed."""
        for each in wanted:
            try:
                yield from self._file(each)
            except FileNotFoundError:
                yield Failed("was deleted", "gone")
            except BucketError as error:
                raise self._error(error) from None

    def download(self, path: str, target: Path) -> None:
        """Copies one file. Raises FileNotFoundError, ResultsError, BrokenConnectionError."""
        try:
            self._bucket.download(self._folder / path, target)
        except BucketError as error:
            raise self._error(error) from None

    def _file(self, wanted: Wanted) -> Iterator[Begin | bytes | End | Failed]:
        path, digest = self._folder / wanted.path, hashlib.sha256()
        info = self._bucket.info(path)
        yield Begin(info.size, wanted.start, info.mtime_ns)
        for start in range(wanted.start, info.size, _PIECE_BYTES):
            piece = bytearray(min(_PIECE_BYTES, info.size - start))
            try:
                count = self._bucket.read_into(path, start, memoryview(piece), info.version)
            except BucketError as error:
                if error.fault is not BucketFault.CHANGED:
                    raise
                yield Failed(error.fault.value, "changed")
                return
            digest.update(piece[:count])
            yield bytes(piece[:count])
        yield End(digest.hexdigest())

    def _error(self, error: BucketError) -> Exception:
        if error.fault in TEMPORARY:
            return BrokenConnectionError(str(error))
        return ResultsError(f"the job's bucket: {error}", ExitCode.CONFIGURATION)
