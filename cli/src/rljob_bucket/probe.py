"""Checks a bucket before a run uses it."""

from __future__ import annotations

import secrets

from rljob_bucket import bucket
from rljob_bucket.errors import BucketError, BucketFault
from rljob_bucket.paths import BucketPath

PROBE_SECONDS = 15
"""How long the requests of a check are retried. It is short, so that a wrong endpoint is reported soon."""


def check_bucket(folder: BucketPath) -> None:
    """Creates, lists and deletes a small file in the folder. Raises BucketError if one of these requests fails, or if
    the store creates a file although it exists: then two starts of a job could overwrite each other's checkpoints."""
    with bucket.retries(PROBE_SECONDS):
        probe = folder / f"probe-{secrets.token_hex(8)}"
        try:
            bucket.create(probe, b"first")
        except FileNotFoundError:
            # This is a web server without buckets. A store would report what does not exist.
            raise BucketError(probe.with_endpoint(), "creating", BucketFault.OTHER, "404") from None
        try:
            bucket.entries(folder)
            try:
                bucket.create(probe, b"second")
            except FileExistsError:
                pass
            else:
                raise BucketError(
                    folder.with_endpoint(), "creating a file that exists", BucketFault.NO_CONDITIONAL_WRITES, ""
                )
        finally:
            bucket.remove([probe])
