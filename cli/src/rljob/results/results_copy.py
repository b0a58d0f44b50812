"""Copies results of a job: starts the pod, locks the local folder, copies the files, and deletes the pod."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rljob.cluster import Cluster
from rljob.errors import ResultsError, RLJobError
from rljob.job_attempts import storage_uri
from rljob.polling import Clock
from rljob.results.bucket_source import BucketSource
from rljob.results.download import Download, Downloaded, DownloadProgress
from rljob.results.file_source import FileSource
from rljob.results.pod import ResultsPod
from rljob.results.pod_client import PodClient
from rljob.results.run_state_of_status import run_state_of_status
from rljob.results.selection import MARKER_FILE, Selection
from rljob.stored_job import StoredJob
from rljob_api.constants import RUN_STATE_FILE_NAME
from rljob_bucket.paths import job_folder

LOCK_SECONDS = 1.0
"""Between two attempts to lock a folder that another process has locked."""


class NoProgress:
    """Ignores the progress of a copy."""

    def plan(self, _num_files: int, _num_bytes: int) -> None:
        """Ignores it."""

    def advance(self, _num_bytes: int) -> None:
        """Ignores it."""

    def note(self, _text: str) -> None:
        """Ignores it."""


@dataclass(frozen=True)
class ResultsCopy:
    """A copy of the results of one job into one folder, which can run several times."""

    run: Callable[[], Downloaded]
    """Copies what is new. Raises RLJobError."""
    release: Callable[[], None]
    """Deletes the pod, because a running pod keeps the volume on its node. The next copy creates another one."""


@contextmanager
def results_copy(
    cluster: Cluster,
    job: StoredJob,
    folder: Path,
    selection: Selection,
    progress: DownloadProgress,
    image: str | None,
    clock: Clock,
) -> Iterator[ResultsCopy]:
    """Prepares a copy. The pod is deleted at the end.

    Args:
        image: Image of the pod; None for the image of the job.

    Raises:
        RLJobError: nothing can be copied, for example because the pod does not start.
    """
    with _errors_of(folder):
        _check_folder(folder, job)
    with _source(cluster, job, progress.note, image, clock) as (open_source, release_source):
        download = Download(open_source, selection, folder, progress, clock.sleep)

        def run() -> Downloaded:
            with _claimed(folder, job, progress.note, clock):
                downloaded = download.run()
            if not downloaded.written and not downloaded.num_unchanged and not downloaded.problems:
                raise ResultsError(f"{job.where}: its folder {storage_uri(job)} has none of these files yet")
            return downloaded

        def release() -> None:
            download.close()
            release_source()

        try:
            yield ResultsCopy(run, release)
        finally:
            download.close()


@contextmanager
def _source(
    cluster: Cluster, job: StoredJob, note: Callable[[str], None], image: str | None, clock: Clock
) -> Iterator[tuple[Callable[[], FileSource], Callable[[], None]]]:
    """A function that opens the source of the job's files, and a function that releases it until the next use."""
    if job.storage is not None and job.storage.s3 is not None:
        folder = job_folder(job.storage.s3, job.metadata.namespace, job.name)
        yield (lambda: BucketSource(folder)), (lambda: None)
        return
    with ResultsPod(cluster, job, note, image, clock) as pod:
        yield (lambda: PodClient(pod.connect())), (lambda: pod.delete())


def write_run_state(job: StoredJob, folder: Path) -> None:
    """Writes the state of the run, which is not among the files of the claim. Raises ResultsError."""
    state = run_state_of_status(job)
    if state is None:
        return
    temporary = folder / f".{RUN_STATE_FILE_NAME}.{os.getpid()}.tmp"
    with _errors_of(folder):
        temporary.write_text(json.dumps(state, indent=1), encoding="utf-8")
        temporary.replace(folder / RUN_STATE_FILE_NAME)


def newest_state(cluster: Cluster, job: StoredJob) -> StoredJob:
    """The job as it is now, because a copy may have taken long; as it was, if this cannot be read."""
    try:
        found = cluster.job(job.name)
    except RLJobError:
        return job
    return found if found.metadata.uid == job.metadata.uid else job


@contextmanager
def _claimed(folder: Path, job: StoredJob, note: Callable[[str], None], clock: Clock) -> Iterator[None]:
    """Writes the file that names the job, and locks it: only one process at a time copies into the folder. If nothing
    was copied, the folder is removed.

    Raises:
        ResultsError: the folder has other files, or cannot be written.
    """
    marker, has_noted = folder / MARKER_FILE, False
    while True:
        with _errors_of(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = marker.open("ab")
        if _lock(file.fileno()) and _is_file(marker, file.fileno()):
            break
        file.close()
        if not has_noted:
            note(f"waiting: another process copies into {folder}")
            has_noted = True
        clock.sleep(LOCK_SECONDS)
    try:
        with _errors_of(folder):
            _check_folder(folder, job)
            if marker.read_bytes() != _owner(job):
                marker.write_bytes(_owner(job))
            # `rljob view` deletes copies that were not used for a week, by this time.
            os.utime(marker)
        yield
    finally:
        with suppress(OSError):
            if [entry.name for entry in folder.iterdir()] == [MARKER_FILE]:
                marker.unlink()
                folder.rmdir()
        file.close()


def _lock(file: int) -> bool:
    """Locks a file until it is closed. Returns False if another process has locked it."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            # Some network file systems have no locks.
            return True
    return True


def _is_file(path: Path, file: int) -> bool:
    """Whether the open file still has this path: the process that had locked it may have removed it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except OSError:
        return False


def _check_folder(folder: Path, job: StoredJob) -> None:
    """Raises ResultsError if the folder has other files: those of a run on this machine, of another job, or of an
    earlier job with the same name would be mixed with those of the job."""
    if not folder.exists():
        return
    marker = folder / MARKER_FILE
    owner = marker.read_bytes() if marker.is_file() else b""
    if owner != _owner(job) and (owner or any(entry.name != MARKER_FILE for entry in folder.iterdir())):
        raise ResultsError(
            f"{folder}: has files that do not belong to {job.where}, such as those of an earlier job of this name;"
            " choose an empty or a new folder"
        )


def _owner(job: StoredJob) -> bytes:
    """The content of the file that names the job."""
    return json.dumps({"job": f"{job.metadata.namespace}/{job.name}", "uid": job.metadata.uid}).encode()


@contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResultsError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from None
