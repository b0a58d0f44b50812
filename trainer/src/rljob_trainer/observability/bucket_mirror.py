"""Copies the files of a run folder into a bucket in the background: metrics, samples, timelines, logs and others.

Every file is an object with the file's own name, so that it can be read with any program. A file that has changed is
uploaded again as a whole. To limit the bandwidth for files that grow, a file of n bytes is uploaded at most every
max(INTERVAL_SECONDS, n / BYTES_PER_SECOND) seconds. A crash loses what was written since the last upload.
Checkpoints do not depend on these files, and everything is uploaded before a checkpoint is committed and at the end.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rljob_bucket import bucket
from rljob_bucket.errors import BucketError
from rljob_bucket.paths import BucketPath
from rljob_trainer.errors import TrainerError
from rljob_trainer.observability.timing import Clock

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 30.0
BYTES_PER_SECOND = 1_000_000
UPLOADS_AT_ONCE = 4
_UNFINISHED_PREFIXES, _UNFINISHED_SUFFIXES = (".", "unfinished-"), (".tmp", ".unfinished")
"""Names of files that are not complete yet, or that only this machine needs."""
_NOT_COPIED = {"checkpoints", "export", "export-best", "initial-models"}
"""Folders of a run folder that are not copied: checkpoints and exports are written into the bucket directly, and the
models that a run started from are large."""


class BucketMirror:
    """Copies one run folder. No method raises an error: a failure is logged, and the next pass tries again."""

    def __init__(
        self,
        run_folder: Path,
        target: BucketPath,
        may_write: Callable[[], bool],
        clock: Clock,
        more_files: Mapping[str, Path] | None = None,
    ) -> None:
        """`may_write`: called before each file; returns False if a later start of the job exists. It may raise
        TrainerError. `more_files`: files outside of the run folder, by their name in the bucket."""
        self._run_folder = run_folder
        self._target = target
        self._may_write = may_write
        self._clock = clock
        self._more_files = more_files or {}
        self._uploaded: dict[str, tuple[tuple[int, int], float]] = {}
        """Size and modification time of each file when it was uploaded, and when that was."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bucket-mirror", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def upload_now(self) -> None:
        """Uploads every file that has changed, and returns afterwards."""
        self._pass(is_paced=False)

    def upload_due(self) -> None:
        """Uploads the files that have changed and were not uploaded recently, as the thread does."""
        self._pass(is_paced=True)

    def close(self) -> None:
        """Ends the thread and uploads what has changed, if `start` was called."""
        if not self._thread.ident:
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.upload_now()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self.upload_due()

    def _pass(self, *, is_paced: bool) -> None:
        with self._lock:
            try:
                if not self._may_write():
                    return
                files = dict(self._files())
                changed = [each for each in files.items() if self._is_due(*each, is_paced=is_paced)]
                small = [each for each in changed if _size(each[1]) <= bucket.PART_BYTES]
                with ThreadPoolExecutor(UPLOADS_AT_ONCE, thread_name_prefix="bucket-mirror") as pool:
                    for _ in pool.map(lambda each: self._upload(*each), small):
                        pass
                # Several parts of a large file are in memory at a time, so these files are uploaded one by one.
                for each in changed:
                    if each not in small:
                        self._upload(*each)
                self._remove([name for name in self._uploaded if name not in files])
            except (OSError, BucketError, TrainerError) as error:
                log.warning("the run's files are not copied to the bucket at the moment: %s", error)

    def _files(self) -> Iterator[tuple[str, Path]]:
        for folder, folders, names in os.walk(self._run_folder):
            relative = Path(folder).relative_to(self._run_folder)
            if not relative.parts:
                folders[:] = [each for each in folders if each not in _NOT_COPIED]
            for name in names:
                if not name.startswith(_UNFINISHED_PREFIXES) and not name.endswith(_UNFINISHED_SUFFIXES):
                    yield str(relative / name), Path(folder) / name
        yield from self._more_files.items()

    def _is_due(self, name: str, path: Path, *, is_paced: bool) -> bool:
        state = _state(path)
        before, uploaded_at = self._uploaded.get(name, (None, 0.0))
        if state is None or state == before:
            return False
        return before is None or not is_paced or self._clock() - uploaded_at >= state[0] / BYTES_PER_SECOND

    def _upload(self, name: str, path: Path) -> None:
        # Asked before each file, because a pass may take minutes.
        if not self._may_write():
            return
        try:
            file = path.open("rb")
        except FileNotFoundError:
            # It was removed since the files were listed.
            return
        with file:
            state = _state_of(os.fstat(file.fileno()))
            with bucket.writer(self._target / name, state[0]) as write:
                while part := file.read(bucket.PART_BYTES):
                    write(part)
        self._uploaded[name] = (state, self._clock())

    def _remove(self, names: Sequence[str]) -> None:
        """Removes the copies of files that were removed here, as far as this start has written them."""
        if names and self._may_write():
            bucket.remove([self._target / name for name in names])
            for name in names:
                del self._uploaded[name]


def _size(path: Path) -> int:
    state = _state(path)
    return 0 if state is None else state[0]


def _state(path: Path) -> tuple[int, int] | None:
    """Size and modification time; None if the file was removed."""
    try:
        return _state_of(path.stat())
    except FileNotFoundError:
        return None


def _state_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def download(source: BucketPath, run_folder: Path, skips: Callable[[str], bool]) -> int:
    """Downloads all files of a mirror except those for which `skips` is true, and replaces local files. Returns the
    number of downloaded files. Raises BucketError and OSError."""
    names = [name for name in bucket.all_files(source) if name.split("/")[0] not in _NOT_COPIED and not skips(name)]

    def download_one(name: str) -> None:
        target = run_folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(target.name + ".tmp")
        bucket.download(source / name, temporary)
        temporary.replace(target)

    with ThreadPoolExecutor(UPLOADS_AT_ONCE, thread_name_prefix="bucket-mirror") as pool:
        for _ in pool.map(download_one, names):
            pass
    return len(names)
