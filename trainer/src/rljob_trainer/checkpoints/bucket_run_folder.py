"""The run folder of a job whose checkpoints are in a bucket: it is on the local disk of this machine, and its files are
copied to the bucket. A start on another machine first downloads them."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api.constants import ENV_START_NUMBER, RUN_STATE_FILE_NAME
from rljob_api.contract_documents import TrainerJob
from rljob_bucket.errors import TEMPORARY, BucketError, BucketFault
from rljob_bucket.paths import BucketPath
from rljob_trainer.checkpoints.errors import FencedError
from rljob_trainer.checkpoints.fencing import newest_start, refuse_if_fenced
from rljob_trainer.checkpoints.storage import CHECKPOINTS, RUN, job_location
from rljob_trainer.errors import ConfigurationError, ResourceError
from rljob_trainer.settings import Settings

if TYPE_CHECKING:
    from rljob_trainer.observability.bucket_mirror import BucketMirror

log = logging.getLogger(__name__)

_START_FILE = ".start"
"""File in the run folder with the number of the start that used it last."""
FIELD = "spec.checkpoint.storage.s3"
_FIELDS = {
    BucketFault.NO_BUCKET: ".bucket",
    BucketFault.CREDENTIALS: ".secret",
    BucketFault.CERTIFICATE: ".endpoint",
    BucketFault.UNREACHABLE: ".endpoint",
}
"""The field below FIELD that an error names. An error with another fault names FIELD."""
_OF_THIS_MACHINE = {RUN_STATE_FILE_NAME, "attempts.jsonl", "job.yaml", "view.html"}
"""Files that are not downloaded, because `rljob run` or this start writes them on this machine."""


class BucketRunFolder:
    """The copy of the run folder. Does nothing for a job without a bucket, and until `prepare` is called."""

    def __init__(self) -> None:
        self._folder: BucketPath | None = None
        self._mirror: BucketMirror | None = None

    def prepare(self, job: TrainerJob, settings: Settings) -> Settings:
        """Checks that the bucket can be used. Returns the settings; if the start has no number from the operator, with
        the number after that of the newest start in the bucket, which was perhaps on another machine or a cluster.
        Raises ConfigurationError, ResourceError, StorageUnavailableError."""
        folder = job_location(job)
        if folder is None:
            return settings
        # Only here, so that jobs without a bucket do not load the library for buckets.
        from rljob_trainer.observability.bucket_mirror import BucketMirror

        refuse_unusable_bucket(folder)
        self._folder = folder
        root = folder / CHECKPOINTS
        if ENV_START_NUMBER not in settings.environment:
            settings = replace(settings, start_number=newest_start(root) + 1)
        start_number = settings.start_number

        def may_write() -> bool:
            try:
                refuse_if_fenced(root, start_number)
            except FencedError:
                return False
            return True

        state = {RUN_STATE_FILE_NAME: settings.run_state_file}
        self._mirror = BucketMirror(settings.run_folder, folder / RUN, may_write, time.monotonic, state)
        return settings

    def begin(self, settings: Settings) -> None:
        """Downloads the run's files if an earlier start on another machine has written them, and starts the thread
        that copies files. Call it after `announce_start`: from then on earlier starts copy nothing more. Raises
        ResourceError, StorageUnavailableError."""
        if self._folder is None or self._mirror is None:
            return
        earlier = newest_start(self._folder / CHECKPOINTS, before=settings.start_number)
        if earlier > 0 and earlier != _start_of(settings.run_folder):
            self._download(self._folder / RUN, settings.run_folder)
        (settings.run_folder / _START_FILE).write_text(str(settings.start_number))
        self._mirror.start()

    def _download(self, source: BucketPath, run_folder: Path) -> None:
        from rljob_trainer.checkpoints.bucket_storage import unavailable_errors
        from rljob_trainer.observability.bucket_mirror import download

        try:
            with unavailable_errors():
                num_files = download(source, run_folder, lambda name: name in _OF_THIS_MACHINE)
        except OSError as error:
            raise ResourceError(
                f"{run_folder}: the files of earlier attempts cannot be written ({error.strerror}); free disk space"
            ) from error
        log.info("run folder: %d files of earlier attempts were downloaded from %s", num_files, source)

    def copy_now(self) -> None:
        """Copies all files that have changed, and returns afterwards."""
        if self._mirror is not None:
            self._mirror.upload_now()

    def end(self) -> None:
        """Ends the thread, and copies the files that have changed since their last copy."""
        if self._mirror is not None:
            self._mirror.close()


def refuse_unusable_bucket(folder: BucketPath) -> None:
    """Raises ConfigurationError if the job's folder in the bucket cannot be used, ResourceError if the store does not
    respond, or fails at the moment."""
    from rljob_bucket.probe import check_bucket

    try:
        check_bucket(folder)
    except BucketError as error:
        message = f"{FIELD}{_FIELDS.get(error.fault, '')}: {error}"
        if error.fault in TEMPORARY:
            raise ResourceError(message) from None
        raise ConfigurationError(message) from None


def _start_of(run_folder: Path) -> int:
    try:
        return int((run_folder / _START_FILE).read_text())
    except (OSError, ValueError):
        return 0
