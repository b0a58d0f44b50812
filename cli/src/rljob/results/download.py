"""Copies files from a pod or a bucket into a local folder, and continues after a broken connection.

Bytes go into a file in `.partial/` first. A file gets its name and its time only when its SHA-256 is that of the file
in the source. To continue, this side sends the number of bytes that it has and their SHA-256; if the file in the pod
begins differently, the copy starts again from its first byte. So versions of a file are never mixed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from rljob.errors import ResultsError
from rljob.plain_text import bytes_text, one_line
from rljob.results.connection import BrokenConnectionError
from rljob.results.file_source import Begin, End, Failed, FileSource, Listing, RemoteFile, Wanted
from rljob.results.selection import (
    PARTIAL_FOLDER,
    Selection,
    complete_checkpoints,
    is_withheld,
    local_path,
    manifest_of,
)
from rljob_api.constants import ExitCode

ResultT = TypeVar("ResultT")

FILES_PER_REQUEST = 500
MAX_FAILURES = 8
"""How many connections in a row may break without a new byte before the copy gives up."""
MAX_CHANGES = 5
"""How often a file that changes while it is read is read again, before it is left out."""
MAX_LISTINGS = 3
"""How often the files are listed, if some were deleted or replaced after they had been listed."""
_PIECE_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_THE_DISK = (*_FULL, errno.EROFS, errno.EACCES, errno.EIO)
"""Errors of the whole disk, not of the name of one file."""
_TAKEN = (errno.EISDIR, errno.EEXIST, errno.ENOTDIR)
"""Errors about something else that has the name of a file or of one of its folders."""


class DownloadProgress(Protocol):
    """Is notified of the progress of a copy."""

    def plan(self, num_files: int, num_bytes: int) -> None:
        """The copy has this many files and bytes, including bytes that an earlier copy has left."""

    def advance(self, num_bytes: int) -> None:
        """More bytes are there; negative if bytes were discarded."""

    def note(self, text: str) -> None:
        """Something that users should know, such as a broken connection."""


@dataclass
class Downloaded:
    """What a copy has done."""

    written: list[Path] = field(default_factory=list)
    """Files that are new or have changed."""
    num_unchanged: int = 0
    """Files that were there already."""
    num_bytes: int = 0
    """Bytes that were received."""
    ignored: list[str] = field(default_factory=list)
    """What is never copied, such as links."""
    problems: list[str] = field(default_factory=list)
    """Files that were not copied, with the reason."""


class _Partial:
    """The bytes of one file that were received so far, on the disk."""

    def __init__(self, path: Path, target: Path, start: int) -> None:
        """`start`: the first byte that is needed. The bytes before it are not copied (a sparse file)."""
        self._path = path
        self._target = target
        self._start = start
        self.size = start
        self.digest = hashlib.sha256()

    def load(self, remote_size: int) -> None:
        """Finds the bytes that are there: of a broken copy or, for a file that has grown, of the finished copy."""
        if not self._path.exists() and self._target.is_file() and self._target.stat().st_size < remote_size:
            with self._target.open("rb") as old, self._path.open("wb") as new:
                old.seek(self._start)
                new.seek(self._start)
                shutil.copyfileobj(old, new, _PIECE_BYTES)
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._start)
                while piece := file.read(_PIECE_BYTES):
                    self.digest.update(piece)
                    self.size += len(piece)

    def wanted(self, path: str) -> Wanted:
        """The request for the rest of the file."""
        return Wanted(path, self.size, self.digest.hexdigest(), self._start)

    def receive(self, events: Iterator[Begin | bytes | End | Failed], progress: _Counted) -> Failed | None:
        """Writes the bytes of one file. Returns why it failed, or None if it is complete and has its name."""
        begin = next(events)
        if isinstance(begin, Failed):
            return begin
        if not isinstance(begin, Begin) or begin.offset not in (self._start, self.size):
            raise BrokenConnectionError("the pod sent an unexpected response")
        if begin.offset == self._start:
            self.size, self.digest = self._start, hashlib.sha256()
        # The file may have grown, and the pod may announce anything.
        _check_disk(self._path.parent.parent, begin.size - self.size)
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.truncate(self.size)
            file.seek(self.size)
            progress.begin(self.size, begin.size)
            for event in events:
                if not isinstance(event, bytes):
                    break
                if self.size + len(event) > begin.size:
                    raise BrokenConnectionError("the pod sent more bytes than it announced")
                file.write(event)
                self.digest.update(event)
                self.size += len(event)
                progress.add(len(event))
        failed = event if isinstance(event, Failed) else Failed("its SHA-256 differs after the copy", "changed")
        if isinstance(event, End) and event.digest == self.digest.hexdigest() and self.size == begin.size:
            try:
                self._finish(begin.mtime_ns)
                return None
            except OSError as error:
                if error.errno in _OF_THE_DISK:
                    raise
                advice = "; delete what has its name" if error.errno in _TAKEN else ""
                failed = Failed(f"cannot be written here ({error.strerror}){advice}", "error")
        self._path.unlink()
        progress.discard()
        return failed

    def _finish(self, mtime_ns: int) -> None:
        """Gives the file its name. A folder that has the name, and a file that has the name of one of its folders, may
        be the user's; then this fails."""
        self._target.parent.mkdir(parents=True, exist_ok=True)
        os.utime(self._path, ns=(mtime_ns, mtime_ns))
        self._path.replace(self._target)


class _Counted:
    """Adds up what a copy has received, and reports it."""

    def __init__(self, progress: DownloadProgress) -> None:
        self._progress = progress
        self._num_files = 0
        self._num_bytes = 0
        self._listed = 0
        self._of_file = 0
        self.has_advanced = False
        self.received = 0

    def plan(self, files: Mapping[Path, RemoteFile]) -> None:
        self._num_files += len(files)
        self._num_bytes += sum(file.size for file in files.values())
        self._progress.plan(self._num_files, self._num_bytes)

    def next_file(self, listed_bytes: int) -> None:
        """A file follows. `listed_bytes`: its size in the plan."""
        self._listed, self._of_file = listed_bytes, 0

    def begin(self, there: int, size: int) -> None:
        """Adapts the totals to the size that the file has now, and counts the bytes that are there already."""
        if size != self._listed:
            self._num_bytes += size - self._listed
            self._listed = size
            self._progress.plan(self._num_files, self._num_bytes)
        self._advance(there)

    def add(self, num_bytes: int) -> None:
        """Bytes of the file were received."""
        self.has_advanced = True
        self.received += num_bytes
        self._advance(num_bytes)

    def discard(self) -> None:
        """Subtracts the bytes of the file, because they were deleted, or will be counted again."""
        self._advance(-self._of_file)

    def _advance(self, num_bytes: int) -> None:
        self._of_file += num_bytes
        self._progress.advance(num_bytes)


class Download:
    """Copies a job's files, and can be run again for what is new; the connection stays open."""

    def __init__(
        self,
        open_source: Callable[[], FileSource],
        selection: Selection,
        folder: Path,
        progress: DownloadProgress,
        sleep: Callable[[float], None],
    ) -> None:
        self._open_source = open_source
        self._selection = selection
        self._folder = folder
        self._partial_folder = folder / PARTIAL_FOLDER
        self._progress = progress
        self._counted = _Counted(progress)
        self._sleep = sleep
        self._source: FileSource | None = None
        self._changes: dict[Path, int] = {}
        self._incomplete: set[str | None] = set()
        self._gone: list[str] = []

    def run(self) -> Downloaded:
        """Copies all selected files that are not there yet.

        Raises:
            ResultsError: the connection breaks again and again, or a file cannot be written.
        """
        result = Downloaded()
        self._changes, self._incomplete = {}, set()
        try:
            self._counted = _Counted(self._progress)
            for _ in range(MAX_LISTINGS):
                self._gone = []
                self._copy(result)
                if not self._gone:
                    break
            result.problems += [f"{one_line(path)}: was deleted in the meantime" for path in self._gone]
            result.num_bytes = self._counted.received
            shutil.rmtree(self._partial_folder, ignore_errors=True)
        except OSError as error:
            full = "; free space, or choose another folder" if error.errno in _FULL else ""
            raise ResultsError(
                f"{error.filename or self._folder}: cannot be written ({error.strerror}){full}"
            ) from error
        return result

    def _copy(self, result: Downloaded) -> None:
        waiting = self._with_retries(lambda: self._list(result))
        needed = sum(file.size - self._selection.start_of(file.path, file.size) for file in waiting.values())
        _check_disk(self._folder, needed - _num_bytes_of(self._partial_folder))
        self._partial_folder.mkdir(parents=True, exist_ok=True)
        self._counted.plan(waiting)
        while waiting:
            self._with_retries(lambda: self._read(waiting, result))

    def close(self) -> None:
        """Closes the connection."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _with_retries(self, action: Callable[[], ResultT]) -> ResultT:
        failures = 0
        while True:
            self._counted.has_advanced = False
            try:
                return action()
            except BrokenConnectionError as error:
                self.close()
                failures = 1 if self._counted.has_advanced else failures + 1
                if failures > MAX_FAILURES:
                    raise ResultsError(
                        f"the connection broke {failures} times in a row ({one_line(error)}); run the"
                        " command again: it continues where it stopped",
                        ExitCode.INFRASTRUCTURE,
                    ) from error
                self._progress.note(f"the connection broke ({one_line(error)}); connecting again")
                self._sleep(min(2.0 ** (failures - 1), 15.0))

    def _open(self) -> FileSource:
        if self._source is None:
            self._source = self._open_source()
        return self._source

    def _list(self, result: Downloaded) -> dict[Path, RemoteFile]:
        """The selected files that are not there yet, by their local path."""
        found = self._open().files(self._selection.folders, self._selection.skipped_folders)
        result.ignored, result.problems, result.num_unchanged = _ignored_text(found), [], 0
        files = {file.path: file for file in found.files if self._selection.wants(file.path)}
        wanted: dict[Path, RemoteFile] = {}
        for path, reason in found.unreadable.items():
            if path in self._selection.folders or self._selection.wants(f"{path}/"):
                result.problems.append(f"{one_line(path)}: {one_line(reason)}")
                self._incomplete.add(manifest_of(path))
        written = set(result.written)
        for path in complete_checkpoints(files):
            target = local_path(path, self._folder)
            if target is None or not _can_exist(target):
                result.problems.append(f"'{one_line(path)}': this name is not possible here")
                self._incomplete.add(manifest_of(path))
            elif is_withheld(path, self._incomplete) and not _is_same(target, files[path]):
                if target.is_file():
                    target.unlink()
                result.problems.append(
                    f"{one_line(path)}: left out, because other files of the checkpoints are missing"
                )
            elif not _is_same(target, files[path]):
                wanted[target] = files[path]
            elif target not in written:
                result.num_unchanged += 1
        return wanted

    def _read(self, waiting: dict[Path, RemoteFile], result: Downloaded) -> None:
        """Copies some of the waiting files, and removes each from `waiting` when it is complete."""
        batch = dict(list(waiting.items())[:FILES_PER_REQUEST])
        partials = {target: self._partial(target, file) for target, file in batch.items()}
        wanted = [partials[target].wanted(file.path) for target, file in batch.items()]
        events = self._open().read(wanted)
        for target, file in batch.items():
            self._counted.next_file(file.size)
            try:
                failed = partials[target].receive(events, self._counted)
            except BrokenConnectionError:
                # What is there is found and counted again.
                self._counted.discard()
                raise
            if failed is None:
                del waiting[target]
                result.written.append(target)
                self._changes.pop(target, None)
            elif not self._may_retry(target, failed):
                del waiting[target]
                if failed.kind == "gone":
                    self._gone.append(file.path)
                else:
                    result.problems.append(f"{one_line(file.path)}: {one_line(failed.reason)}")
                self._incomplete.add(manifest_of(file.path))
            if is_withheld(file.path, self._incomplete) and target.is_file():
                # A checkpoint that lacks a file must not look complete.
                target.unlink()

    def _partial(self, target: Path, file: RemoteFile) -> _Partial:
        name = hashlib.sha256(os.fsencode(file.path)).hexdigest()
        partial = _Partial(self._partial_folder / name, target, self._selection.start_of(file.path, file.size))
        partial.load(file.size)
        return partial

    def _may_retry(self, target: Path, failed: Failed) -> bool:
        self._changes[target] = self._changes.get(target, 0) + 1
        return failed.kind == "changed" and self._changes[target] <= MAX_CHANGES


def _is_same(target: Path, file: RemoteFile) -> bool:
    """Whether an earlier copy has copied this version of the file, judged by its size and its time."""
    try:
        found = target.stat()
    except OSError:
        return False
    return target.is_file() and (found.st_size, found.st_mtime_ns) == (file.size, file.mtime_ns)


def _can_exist(target: Path) -> bool:
    """Whether the file system accepts the name."""
    try:
        target.lstat()
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return True


def _num_bytes_of(folder: Path) -> int:
    """The bytes of the files in a folder, which may not exist."""
    return sum(file.stat().st_size for file in folder.iterdir()) if folder.is_dir() else 0


def _check_disk(folder: Path, needed: int) -> None:
    """Raises ResultsError if so many more bytes do not fit on the disk."""
    existing = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ResultsError(
            f"{folder}: the files need {bytes_text(needed)}, and the disk has {bytes_text(free)} free; free space,"
            " choose another folder, or copy less with --only"
        )


def _ignored_text(listing: Listing) -> list[str]:
    """A line about paths that are no regular files; empty if there are none."""
    if not listing.num_ignored:
        return []
    names = ", ".join(f"'{one_line(name)}'" for name in listing.ignored)
    more = ", ..." if listing.num_ignored > len(listing.ignored) else ""
    return [f"{listing.num_ignored} links or devices: {names}{more}"]
