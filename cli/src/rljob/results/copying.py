"""Copies results of a job into a folder: the pod, the connection, and the folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rljob.cluster import Cluster
from rljob.errors import ResultsError
from rljob.job_state import storage_uri
from rljob.polling import Clock
from rljob.results.fetching import Fetch, Fetched, FetchProgress
from rljob.results.pod import ResultsPod
from rljob.results.run_state import run_state
from rljob.results.selection import MARKER_FILE, Selection
from rljob.stored_job import StoredJob
from rljob_api.constants import RUN_STATE_FILE_NAME


class NoProgress:
    """Ignores the progress of a copy."""

    def plan(self, _num_files: int, _num_bytes: int) -> None:
        """Ignores it."""

    def advance(self, _num_bytes: int) -> None:
        """Ignores it."""

    def note(self, _text: str) -> None:
        """Ignores it."""


@contextmanager
def copying(
    cluster: Cluster,
    job: StoredJob,
    folder: Path,
    selection: Selection,
    progress: FetchProgress,
    image: str | None,
    clock: Clock,
) -> Iterator[Callable[[], Fetched]]:
    """Yields a function that copies what is new. The pod is deleted at the end.

    Args:
        image: Image of the pod; None for the image of the job.

    Raises:
        RLJobError: nothing can be copied, for example because the pod does not start.
    """
    _claim_folder(folder, job)
    with ResultsPod(cluster, job, progress.note, image, clock) as pod:
        fetch = Fetch(pod.connect, selection, folder, progress, clock.sleep)

        def copy() -> Fetched:
            fetched = fetch.run()
            if not fetched.written and not fetched.num_unchanged and not fetched.problems:
                raise ResultsError(f"{job.where}: its folder {storage_uri(job)} has none of these files yet")
            return fetched

        try:
            yield copy
        finally:
            fetch.close()


def write_run_state(job: StoredJob, folder: Path) -> None:
    """Writes the state of the run, which is not among the files of the claim."""
    state = run_state(job)
    if state is not None:
        temporary = folder / f"{RUN_STATE_FILE_NAME}.tmp"
        temporary.write_text(json.dumps(state, indent=1), encoding="utf-8")
        temporary.replace(folder / RUN_STATE_FILE_NAME)


def _claim_folder(folder: Path, job: StoredJob) -> None:
    """Writes the file that names the job. Raises ResultsError if the folder has other files: those of a run on this
    machine or of another job would be overwritten."""
    marker = folder / MARKER_FILE
    content = json.dumps({"job": f"{job.metadata.namespace}/{job.metadata.name}", "storage": storage_uri(job)})
    try:
        if marker.is_file():
            is_ours = marker.read_text(encoding="utf-8") == content
        else:
            is_ours = not folder.exists() or not any(folder.iterdir())
        if not is_ours:
            raise ResultsError(
                f"{folder}: has files of something else than {job.where}; choose an empty or a new folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from None
